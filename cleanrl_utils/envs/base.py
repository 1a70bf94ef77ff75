"""The environment boundary: what training loops, wrappers and back ends agree on.

A training loop carries a `VectorEnv` and its last `TimeStep` through `jax.lax.scan`, like any other state:

    def step(carry, _):
        env, timestep, key = carry
        key, action_key = jax.random.split(key)
        action = policy(timestep.obs, action_key)
        valid = env.valid(timestep)  # False: this step only resets, its transition is no experience
        env, next_timestep = env.step(action)
        return (env, next_timestep, key), (timestep.obs, action, next_timestep, valid)

    env = make(..., num_envs=64, seed=1)  # of a back end: envpool_xla, gymnasium_callback, jax_envs
    env, timestep = env.reset()
    carry, rollout = jax.lax.scan(step, (env, timestep, jax.random.key(1)), length=128)

What a step means does not depend on the back end:

- `terminated` and `truncated` are apart and never both True. Where an environment reports both, the back end says
  which one stays.
- autoreset="next_step" (EnvPool's, and Gymnasium's NEXT_STEP): at the end of an episode `obs` is its last
  observation. The step that follows ignores the action of that environment and returns the first observation of a new
  episode with reward 0 and neither flag set.
- autoreset="same_step": the step that ends an episode returns its last reward, its flags and the first observation
  of the next episode; `info["final_obs"]` is the last observation of the episode that ended, and `obs` itself in the
  environments where none did.
- `reset` starts new episodes everywhere, with reward 0 and neither flag set. It returns the types (structure, shapes
  and dtypes) that `step` does, so that both can be carried.
- Floats are float32. Integers are what they are, 32 bits at most. The spaces tell: they are Gymnasium's, with the
  dtypes that arrays have here.

A new back end is a subclass of `Backend`; `new_env(backend, state)` does the rest. The smallest one is
`CountBackend` in tests/envs_toys.py; one more entry in tests/test_envs_conformance.py holds it to the above.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from cleanrl_utils.envs.spaces import batch_type, flat_space, flatten, unflatten

AUTORESETS = ("next_step", "same_step")


@flax.struct.dataclass
class TimeStep:
    """What the environments return, shapes [num_envs, ...]; `reset`, `recv` and `step` return the same type."""

    obs: Any  # an array, or a dict or tuple of them
    reward: jax.Array  # float32
    terminated: jax.Array  # bool
    truncated: jax.Array  # bool
    info: dict[str, Any]

    @property
    def done(self) -> jax.Array:
        return self.terminated | self.truncated

    @property
    def next_obs(self):
        """What the action led to, by either autoreset: at an episode's end its last observation, else `obs`.

        This is the one to bootstrap from where `truncated`.
        """
        return self.info.get("final_obs", self.obs)


@flax.struct.dataclass
class EnvWrapper:
    """Three pure functions: each returns the wrapper (its state may have changed) and what it passes on.

    Override the ones that change something, and the space that they change. The wrapper that is returned has the
    types of `self`, and `reset` and `recv` pass on the same types, or `lax.scan` could not carry them. What changes
    observations changes `info["final_obs"]` alike, where there is one.
    """

    def reset(self, timestep: TimeStep):
        return self, timestep

    def send(self, action):
        return self, action

    def recv(self, timestep: TimeStep):
        return self, timestep

    def observation_space(self, space: gym.Space) -> gym.Space:
        """The space of one environment's observations outside of the wrapper, given that inside of it."""
        return space

    def action_space(self, space: gym.Space) -> gym.Space:
        return space


def outwards(wrappers: Sequence[EnvWrapper], method: str, timestep: TimeStep):
    """The wrappers, listed from the environment outwards, after their `reset` or `recv`, and what they pass on."""
    passed = []
    for wrapper in wrappers:
        wrapper, timestep = getattr(wrapper, method)(timestep)
        passed.append(wrapper)
    return tuple(passed), timestep


def inwards(wrappers: Sequence[EnvWrapper], action):
    """The same of `send`: the action comes to the outermost first."""
    passed = []
    for wrapper in reversed(wrappers):
        wrapper, action = wrapper.send(action)
        passed.append(wrapper)
    return tuple(reversed(passed)), action


class Backend:
    """The kind of environments: sizes, spaces and pure functions of their state, a pytree with any leaves.

    Two that are not the same object are different for `jax.jit`. `reset` and `step` are to be overridden, or `reset`,
    `send` and `recv` where something can be done between the two.
    """

    num_envs: int
    single_observation_space: gym.Space  # one environment's, with outward dtypes, see `spaces.outward_space`
    single_action_space: gym.Space
    autoreset: str  # one of AUTORESETS
    can_render: bool = False
    render_fps: float = 30.0

    def reset(self, state, seed) -> tuple[Any, TimeStep]:
        """New episodes; with a seed (an int) they and all that follow are those of that seed, with None they go on."""
        raise NotImplementedError

    def step(self, state, action) -> tuple[Any, TimeStep]:
        raise NotImplementedError

    def send(self, state, action):
        return state, action

    def recv(self, state) -> tuple[Any, TimeStep]:
        return self.step(*state)

    def render(self, state, i: int) -> np.ndarray:
        """A picture of environment i, uint8 [height, width, 3]."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the environments hold outside of their state, like processes and windows."""


@flax.struct.dataclass
class Fresh:
    """The state of environments before their first `reset`."""

    state: Any


@flax.struct.dataclass
class Sent:
    """The state of environments between `send` and `recv`."""

    state: Any


@flax.struct.dataclass
class VectorEnv:
    """The environments as a pytree, as TrainState is for the agent: functions are static, state is leaves."""

    backend: Backend = flax.struct.field(pytree_node=False)
    state: Any  # the back end's: a token, or all of the environments
    wrappers: tuple[EnvWrapper, ...] = ()  # listed from the environment outwards

    @property
    def num_envs(self) -> int:
        return self.backend.num_envs

    @property
    def autoreset(self) -> str:
        return self.backend.autoreset

    @property
    def single_observation_space(self) -> gym.Space:
        """Of one environment, as it is outside of the wrappers."""
        space = self.backend.single_observation_space
        for wrapper in self.wrappers:
            space = wrapper.observation_space(space)
        return space

    @property
    def single_action_space(self) -> gym.Space:
        space = self.backend.single_action_space
        for wrapper in self.wrappers:
            space = wrapper.action_space(space)
        return space

    def with_wrappers(self, *wrappers: EnvWrapper):
        """The same environments with more wrappers around them, listed from the environment outwards."""
        return self.replace(wrappers=(*self.wrappers, *wrappers))

    def reset(self, seed=None):
        """Starts new episodes everywhere, with a seed those of that seed; the wrappers keep their statistics."""
        if isinstance(self.state, Sent):
            raise ValueError("these environments were sent actions: recv is next")
        state = self.state.state if isinstance(self.state, Fresh) else self.state
        state, timestep = self.backend.reset(state, seed)
        check_timestep(self.backend, timestep)
        wrappers, timestep = outwards(self.wrappers, "reset", timestep)
        return self.replace(state=strong(state), wrappers=wrappers), strong(timestep)

    def send(self, action):
        """Hands the actions, [num_envs, ...], over; `recv` is to follow. What is between may run beside the steps."""
        if isinstance(self.state, Sent):
            raise ValueError("these environments were sent actions already: recv is next")
        if isinstance(self.state, Fresh):
            raise ValueError("these environments have no episodes yet: reset is next")
        wrappers, action = inwards(self.wrappers, action)
        state = self.backend.send(self.state, check_action(self.backend, action))
        return self.replace(state=Sent(state), wrappers=wrappers)

    def recv(self):
        if not isinstance(self.state, Sent):
            raise ValueError("these environments were sent no actions: send is next")
        state, timestep = self.backend.recv(self.state.state)
        check_timestep(self.backend, timestep)
        wrappers, timestep = outwards(self.wrappers, "recv", timestep)
        return self.replace(state=strong(state), wrappers=wrappers), strong(timestep)

    def step(self, action):
        return self.send(action).recv()

    def close(self) -> None:
        self.backend.close()

    def valid(self, timestep: TimeStep) -> jax.Array:
        """Where the step after this one is experience, [num_envs]: False where it only resets, whatever the action."""
        return jnp.ones_like(timestep.done) if self.autoreset == "same_step" else ~timestep.done


class FlattenedBackend(Backend):
    """Another back end with its observations, or its actions, as float32 vectors, see `spaces.flatten`."""

    def __init__(self, backend: Backend, obs: bool, action: bool):
        self.backend, self.num_envs, self.autoreset = backend, backend.num_envs, backend.autoreset
        obs_space, action_space = backend.single_observation_space, backend.single_action_space
        self.single_observation_space = flat_space(obs_space) if obs else obs_space
        self.single_action_space = flat_space(action_space) if action else action_space
        self.flatten_obs = (lambda x: flatten(obs_space, x)) if obs else lambda x: x
        self.unflatten_action = (lambda x: unflatten(action_space, x)) if action else lambda x: x

    def flatten_timestep(self, timestep: TimeStep) -> TimeStep:
        info = dict(timestep.info)
        if "final_obs" in info:
            info["final_obs"] = self.flatten_obs(info["final_obs"])
        return timestep.replace(obs=self.flatten_obs(timestep.obs), info=info)

    def reset(self, state, seed):
        state, timestep = self.backend.reset(state, seed)
        return state, self.flatten_timestep(timestep)

    def send(self, state, action):
        return self.backend.send(state, self.unflatten_action(action))

    def recv(self, state):
        state, timestep = self.backend.recv(state)
        return state, self.flatten_timestep(timestep)

    def close(self):
        self.backend.close()


def new_env(backend: Backend, state, flatten_obs: bool = False, flatten_action: bool = False) -> VectorEnv:
    """The environments before their first `reset`, with observations and actions as vectors if asked for."""
    if flatten_obs or flatten_action:
        backend = FlattenedBackend(backend, flatten_obs, flatten_action)
    return VectorEnv(backend, Fresh(state))


def check_name(name: str, names: Iterable[str], library: str) -> None:
    """Raises ValueError, with the closest ones, for a name that is none of the library's."""
    names = list(names)
    if name not in names:
        close = difflib.get_close_matches(name, names) or names[:20] + ["..."] * (len(names) > 20)
        raise ValueError(f"{library} has no environment {name!r}: did you mean {', '.join(close)}?")


def check_seed(seed):
    """The seed, or an array of them, as uint32; raises ValueError for other numbers, of traced ones for floats only.

    JAX would take them modulo 2**32, so that different ones would be the same.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(seed)):
        seeds = jnp.asarray(seed)
        fits = jnp.issubdtype(seeds.dtype, jnp.integer)
    else:
        seeds = np.asarray(seed, object)
        fits = all(isinstance(x, int | np.integer) and 0 <= x < 2**32 for x in seeds.flat)
    if not fits:
        raise ValueError(f"seed={seed}: pass an integer from 0 to {2**32 - 1}, or several")
    return seeds.astype(np.uint32)


def independent_seeds(seeds: Sequence[int], n: int) -> np.ndarray:
    """n seeds for environments of each seed, [num_seeds, n], of 31 bits, such that no two seeds share a stream.

    EnvPool and Gymnasium give environment i the seed `seed + i`, by which seeds 1 and 2 share all streams but one.
    """
    return np.array([np.random.SeedSequence(seed).generate_state(n) >> 1 for seed in seeds])


def for_one_seed(function: Callable, num_seeds: int) -> Callable:
    """`function(token, x)` of all seeds, x [num_seeds * num_envs, ...], as one of a seed, [num_envs, ...], to vmap.

    For environments that are not arrays and that the token stands for: JAX has no rule to vmap a call to them. The
    rule here is one call for the environments of all seeds.
    """

    def call(token, x):
        token, y = function(token, jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), x))
        return token, jax.tree.map(lambda y: y.reshape(num_seeds, y.shape[0] // num_seeds, *y.shape[1:]), y)

    @jax.custom_batching.custom_vmap
    def alone(token, x):  # traced for its types before each vmap
        token, y = call(token, jax.tree.map(lambda x: jnp.broadcast_to(x, (num_seeds, *x.shape)), x))
        return token, jax.tree.map(lambda y: y[0], y)

    @alone.def_vmap
    def together(axis_size, in_batched, token, x):
        if axis_size != num_seeds or not all(jax.tree.leaves(in_batched)):
            wanted = "give make a tuple of seeds" if num_seeds == 1 else "vmap over the env and the actions of all"
            raise ValueError(f"vmap, but these are the environments of {num_seeds} seed(s): {wanted}")
        token, y = call(token[0], x)
        outputs = jnp.broadcast_to(token, (num_seeds, *token.shape)), y
        return outputs, jax.tree.map(lambda _: True, outputs)

    return alone


def check_action(backend: Backend, action):
    """The actions with the dtypes of their space; raises ValueError for other shapes or kinds of numbers.

    At trace time: compiled code would read another shape or type as other numbers. Integers may be of any size.
    """
    expected = batch_type(backend.single_action_space, backend.num_envs)

    def fits(x, expected):
        both_integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (x.dtype, expected.dtype))
        return x.shape == expected.shape and (x.dtype == expected.dtype or both_integers)

    action = jax.tree.map(jnp.asarray, action)
    same_structure = jax.tree.structure(action) == jax.tree.structure(expected)
    if not same_structure or not all(jax.tree.leaves(jax.tree.map(fits, action, expected))):
        raise ValueError(f"actions are {describe(action)}, the environment takes {describe(expected)}")
    return jax.tree.map(lambda x, expected: x.astype(expected.dtype), action, expected)


def check_timestep(backend: Backend, timestep: TimeStep) -> None:
    """Raises TypeError, at trace time, if a back end returns something else than it declares."""
    obs = batch_type(backend.single_observation_space, backend.num_envs)
    n = (backend.num_envs,)
    reward, flag = jax.ShapeDtypeStruct(n, np.dtype(np.float32)), jax.ShapeDtypeStruct(n, np.dtype(bool))
    expected = {"obs": obs, "reward": reward, "terminated": flag, "truncated": flag}
    returned = {name: getattr(timestep, name) for name in expected}
    if backend.autoreset == "same_step":
        expected["info['final_obs']"], returned["info['final_obs']"] = obs, timestep.info.get("final_obs")
    for name in expected:
        if describe(returned[name]) != describe(expected[name]):
            kind = type(backend).__name__
            raise TypeError(f"{kind} returns {name} {describe(returned[name])} instead of {describe(expected[name])}")


def describe(tree) -> str:
    """The types of arrays in one line: float32(4, 3) for one, {a: float32(4, 3)} for a dict of it."""
    names = jax.tree.map(lambda x: f"{x.dtype}{x.shape}" if hasattr(x, "dtype") else type(x).__name__, tree)
    return str(names).replace("'", "")


def strong(tree):
    """The arrays without weak types, which would make a second call of a compiled function compile anew."""

    def convert(x):
        return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x

    return jax.tree.map(convert, tree)

"""Environments written in JAX: Brax, MuJoCo Playground, gymnax, Gymnasium's functional ones and one's own.

    env = jax_envs.make(jax_envs.BraxEnv("hopper", backend="spring"), num_envs=1024, seed=1, autoreset="same_step")
    env, timestep = jax.jit(lambda env: env.reset())(env)
    env, timestep = jax.jit(lambda env, action: env.step(action))(env, action)

They live on the device, thousands of them, and are plain arrays: copy, save and restore `env.state` as one likes.

- Each episode starts anew, from a state that its environment's own stream of random numbers decides. It does not
  depend on how many other environments there are, nor on when they end their episodes.
- Resets cost what they must: the environments whose episodes ended are gathered, and reset `reset_batch_size` at a
  time until none is left (`jax.lax.while_loop`), where `jnp.where(done, reset(...), step(...))` would reset all of them
  at every step; docs/envs/index.md has the measurements. Through the loop there are forward-mode derivatives only.
- A step that both reaches a terminal state and is the last one allowed is terminated, not truncated.

Many seeds: `make(..., seed=(1, 2, 3))` is one `env` with the leading axis [num_seeds], for `jax.vmap`; a seed traced
by it, `jax.vmap(env.reset)(seeds)`, does the same. Many devices: inside `jax.shard_map` reset with a seed of the
device's own, say `env.reset(seed + jax.lax.axis_index("devices"))`; `num_envs` is a device's.
"""

import os
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import flax
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from cleanrl_utils.envs.base import AUTORESETS, Backend, TimeStep, VectorEnv, check_name, check_seed, new_env, strong
from cleanrl_utils.envs.spaces import batch_type, check_dtype, outward_space


class JaxEnv:
    """One environment as pure functions, which `make` vectorises. States are pytrees of any kind.

    `step` needs to know nothing of time limits and autoreset, and is fed terminal states too: what it then returns
    is not used.
    """

    observation_space: gym.Space
    action_space: gym.Space
    max_episode_steps: int | None = None  # the usual limit; `make` can set another
    render_fps: float = 30.0

    def reset(self, key: jax.Array):
        """The state and the observation that an episode starts with."""
        raise NotImplementedError

    def step(self, state, action, key: jax.Array) -> tuple[Any, TimeStep]:
        """The next state, and the time step with the shapes of one environment: reward, flags and Discrete are ()."""
        raise NotImplementedError

    def render(self, state) -> np.ndarray:
        """A picture of the state, uint8 [height, width, 3]."""
        raise ValueError(f"{type(self).__name__} has no pictures: leave render_mode out")

    def close(self) -> None:
        """Frees what `render` took."""


def make(
    env: JaxEnv,
    num_envs: int,
    seed: int | Sequence[int] = 0,
    autoreset: str = "next_step",
    *,
    max_episode_steps: int | None = None,
    flatten_obs: bool = False,
    flatten_action: bool = False,
    info_keys: Sequence[str] = (),
    reset_batch_size: int | None = None,
) -> VectorEnv:
    """num_envs environments of each seed.

    `max_episode_steps` truncates episodes; None: as is usual for the environment, 0: never. `info_keys` names entries
    of the environment's info (Brax's and Playground's metrics) that `timestep.info` is to hold, zeros where an
    environment is reset. `reset_batch_size` is the number of environments that are reset together, by default a
    sixteenth of all. Raises ValueError for names and sizes that don't fit.
    """
    if not isinstance(env, JaxEnv):
        kinds = ", ".join(f"{kind.__name__}(env)" for kind in (BraxEnv, PlaygroundEnv, GymnaxEnv, FunctionalEnv))
        raise ValueError(f"{type(env).__name__} is no JaxEnv: pass one of {kinds}")
    backend = JaxBackend(env, num_envs, autoreset, max_episode_steps, info_keys, reset_batch_size)
    seed = check_seed(seed)
    keys = jax.vmap(backend.keys)(seed) if seed.ndim else backend.keys(seed)
    return new_env(backend, Episodes(None, keys, None, None, None), flatten_obs, flatten_action)


@flax.struct.dataclass
class Episodes:
    """The environments in the midst of their episodes, leaves [num_envs, ...]; before the first reset but keys."""

    env: Any
    key: jax.Array  # decides the episodes to come
    step_key: jax.Array  # decides this episode's steps
    num_steps: jax.Array
    done: jax.Array  # True where the next step is to reset


class JaxBackend(Backend):
    def __init__(
        self, env, num_envs, autoreset="next_step", max_episode_steps=None, info_keys=(), reset_batch_size=None
    ):
        if autoreset not in AUTORESETS:
            raise ValueError(f"autoreset={autoreset!r}: pass one of {', '.join(map(repr, AUTORESETS))}")
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: pass 1 or more")
        max_episode_steps = env.max_episode_steps if max_episode_steps is None else max_episode_steps
        if (max_episode_steps or 0) < 0:
            raise ValueError(f"max_episode_steps={max_episode_steps}: pass 1 or more, or 0 for no limit")
        reset_batch_size = max(1, num_envs // 16) if reset_batch_size is None else reset_batch_size
        if not 1 <= reset_batch_size <= num_envs:
            raise ValueError(f"reset_batch_size={reset_batch_size}: pass 1 to num_envs={num_envs}")
        self.env, self.num_envs, self.autoreset = env, num_envs, autoreset
        self.max_episode_steps, self.reset_batch_size = max_episode_steps or None, reset_batch_size
        self.single_observation_space = outward_space(env.observation_space)
        self.single_action_space = outward_space(env.action_space)
        self.batch_obs_type = batch_type(self.single_observation_space, num_envs)
        self.batch_action_type = batch_type(self.single_action_space, num_envs)
        self.info_keys = tuple(info_keys)
        self.can_render = type(env).render is not JaxEnv.render
        # Compiled even where the caller does not compile: physics op by op would take minutes.
        self._reset, self._step = jax.jit(self.reset_all), jax.jit(self.step_all)
        self.info_types  # noqa: B018 (raises for unknown names)

    @cached_property
    def step_types(self):
        """The types of one environment's state and info, as `step` returns them.

        What `reset` returns may differ, Python's numbers for arrays say. Raises TypeError if each step changes them.
        """
        key = jax.ShapeDtypeStruct((2,), np.uint32)
        action = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.batch_action_type)
        first = without_weak_types(jax.eval_shape(self.env.reset, key)[0])
        second, timestep = jax.eval_shape(self.env.step, first, action, key)
        second = without_weak_types(second)
        if jax.tree.leaves(second) != jax.tree.leaves(first):
            third = without_weak_types(jax.eval_shape(self.env.step, second, action, key)[0])
            if jax.tree.leaves(third) != jax.tree.leaves(second):
                raise TypeError(f"each step changes the types of the state, which can't be carried: {third}")
        return second, timestep.info

    @cached_property
    def info_types(self) -> dict[str, Any]:
        """Those of the entries that are kept, of one environment."""
        if not self.info_keys:
            return {}
        types = self.step_types[1]
        for name in self.info_keys:
            if name not in types:
                raise ValueError(f"info_keys={name!r}: the info of this environment has {', '.join(types)}")
        return {name: without_weak_types(types[name]) for name in self.info_keys}

    def keys(self, seed) -> jax.Array:
        """A key for each environment, [num_envs, 2], whatever their number."""
        if np.ndim(seed):
            return jax.vmap(jax.random.PRNGKey)(seed)
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(seed), jnp.arange(self.num_envs))

    def start(self, key):
        """A new episode of one environment: its state and observation."""
        key, reset_key, step_key = jax.random.split(key, 3)
        env, obs = self.env.reset(reset_key)
        zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        return Episodes(fit(env, self.step_types[0]), key, step_key, zero, no), self.outward_obs(obs)

    def outward_obs(self, obs):
        """With the dtypes that the space declares."""

        def cast(x, like):
            check_dtype(jnp.result_type(x), like.dtype)
            return jnp.asarray(x, like.dtype)

        return jax.tree.map(cast, obs, self.batch_obs_type)

    def move(self, env, action, key):
        """A step of one environment."""
        env, timestep = self.env.step(env, action, key)
        return fit(env, self.step_types[0]), TimeStep(
            obs=self.outward_obs(timestep.obs),
            reward=jnp.asarray(timestep.reward, jnp.float32).reshape(()),
            terminated=jnp.asarray(timestep.terminated, bool).reshape(()),
            truncated=jnp.asarray(timestep.truncated, bool).reshape(()),
            info=fit({name: timestep.info[name] for name in self.info_keys}, self.info_types),
        )

    def reset(self, state, seed):
        """With a seed for all, or with [num_envs] of them, one for each environment."""
        state = self._checked(state)
        keys = state.key if seed is None else self.keys(check_seed(seed))
        if len(keys) != self.num_envs:
            raise ValueError(f"{len(keys)} seeds for {self.num_envs} environments: pass one for each, or one for all")
        return self._reset(keys)

    def step(self, state, action):
        return self._step(self._checked(state), action)

    def _checked(self, state):
        if state.key.ndim != 2:
            raise ValueError(f"env has the leading axes {state.key.shape[:-2]}: use it under vmap over the seeds")
        return state

    def reset_all(self, keys):
        state, obs = jax.vmap(self.start)(keys)
        no = jnp.zeros(self.num_envs, bool)
        info = jax.tree.map(lambda x: jnp.zeros((self.num_envs, *x.shape), x.dtype), self.info_types)
        if self.autoreset == "same_step":
            info["final_obs"] = obs
        return vary_like(keys, (state, TimeStep(obs, jnp.zeros(self.num_envs, jnp.float32), no, no, info)))

    def step_all(self, state, action):
        keys = jax.vmap(jax.random.fold_in)(state.step_key, state.num_steps)
        env, timestep = jax.vmap(self.move)(state.env, action, keys)
        num_steps = state.num_steps + 1
        truncated = timestep.truncated
        if self.max_episode_steps is not None:
            truncated |= num_steps >= self.max_episode_steps
        timestep = timestep.replace(truncated=truncated & ~timestep.terminated)
        if self.autoreset == "same_step":
            ended = timestep.done
            timestep = timestep.replace(info={**timestep.info, "final_obs": timestep.obs})
        else:
            ended = state.done
            obs, rest = timestep.obs, timestep.replace(obs=())  # the obs of an episode that starts will take its place
            rest = jax.tree.map(lambda x: jnp.where(expand(ended, x), jnp.zeros_like(x), x), rest)
            timestep = rest.replace(obs=obs)
        state = Episodes(env, state.key, state.step_key, num_steps, timestep.done)
        state, obs = self.restart(state, timestep.obs, ended)
        return state, timestep.replace(obs=obs)

    def restart(self, state: Episodes, obs, ended):
        """New episodes where the old ones ended, [num_envs], a batch of them at a time."""

        def restart_batch(carry):
            state, obs, ended = carry
            (i,) = jnp.nonzero(ended, size=self.reset_batch_size, fill_value=self.num_envs)
            new = jax.vmap(self.start)(state.key.at[i].get(mode="clip"))
            put = lambda x, new: x.at[i].set(new, mode="drop")  # noqa: E731
            return *jax.tree.map(put, (state, obs), new), ended.at[i].set(False, mode="drop")

        return jax.lax.while_loop(lambda carry: carry[-1].any(), restart_batch, (state, obs, ended))[:2]

    def render(self, state: Episodes, i: int) -> np.ndarray:
        return self.env.render(jax.tree.map(lambda x: x[i], state.env))

    @property
    def render_fps(self) -> float:
        return self.env.render_fps

    def close(self) -> None:
        self.env.close()


def without_weak_types(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def fit(tree, types):
    """The arrays with these types; raises TypeError if they are not the same ones.

    The structures are those of `types` and not only equal to it: MJX's hold NumPy arrays, which JAX can't compare.
    """
    leaves, wanted = jax.tree_util.tree_leaves_with_path(tree), jax.tree_util.tree_leaves_with_path(types)
    differing = {jax.tree_util.keystr(path) for path, _ in leaves} ^ {jax.tree_util.keystr(path) for path, _ in wanted}
    if differing:
        raise TypeError(
            f"the states of reset and step differ in {', '.join(sorted(differing))}: return the same in both"
        )

    def fit_leaf(x, like):
        x = jnp.broadcast_to(x, like.shape)
        return x if x.dtype == like.dtype else x.astype(like.dtype)

    fitted = [fit_leaf(x, like) for (_, x), (_, like) in zip(leaves, wanted, strict=True)]
    return strong(jax.tree.unflatten(jax.tree.structure(types), fitted))


def vary_like(x, tree):
    """The arrays, as different from device to device as x: in `jax.shard_map` zeros count as the same on all."""
    any_flag = x.ravel()[0] > 0
    return jax.tree.map(lambda leaf: jnp.where(any_flag, leaf, leaf), tree)


def expand(mask, x):
    """The mask, [n], with axes to broadcast with x, [n, ...]."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))


# ---------------------------------------------------------------- the libraries
class BraxEnv(JaxEnv):
    """Brax's environment of that name, or that object; `kwargs` are its own (backend="spring", ...).

    Backends: generalized, positional, spring, mjx. It ends truncated after 1000 steps, the length in Brax's training.
    Raises ValueError for an unknown name and for an environment inside of Brax's training wrappers.
    """

    max_episode_steps = 1000

    def __init__(self, env, **kwargs):
        choose_renderer()
        from brax import envs

        if isinstance(env, str):
            check_name(env, envs._envs, "Brax")
            env = envs.get_environment(env, **kwargs)
        if env.unwrapped is not env:
            raise ValueError(
                f"{type(env).__name__} is a wrapper of Brax's, whose resets replay the first state: pass env.unwrapped"
            )
        self.env = env
        self.action_space = gym.spaces.Box(-1.0, 1.0, (env.action_size,))
        self.observation_space = unbounded_space(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
        self.renderer = None

    @property
    def render_fps(self) -> float:
        return round(1 / float(getattr(self.env, "dt", 1 / super().render_fps)))  # "fast" has none

    def reset(self, key):
        state = self.env.reset(key)
        return state, state.obs

    def step(self, state, action, key):
        state = self.env.step(state, action)
        return state, TimeStep(state.obs, state.reward, state.done > 0, truncated=False, info=dict(state.metrics))

    def render(self, state):
        physics = state.pipeline_state
        return self.draw(self.env.sys.mj_model, physics.q, physics.qd)

    def draw(self, model, qpos, qvel) -> np.ndarray:
        """By MuJoCo, which needs EGL, OSMesa (MUJOCO_GL=osmesa) or a display."""
        import mujoco

        if self.renderer is None:
            self.renderer = mujoco.Renderer(model, height=480, width=640)
        data = mujoco.MjData(model)
        data.qpos, data.qvel = qpos, qvel
        mujoco.mj_forward(model, data)
        self.renderer.update_scene(data, camera=0 if model.ncam else -1)
        return self.renderer.render()

    def close(self):
        if self.renderer is not None:
            self.renderer.close()
            self.renderer = None


class PlaygroundEnv(BraxEnv):
    """MuJoCo Playground's environment of that name, or that object; `kwargs` are its registry's (config_overrides=...).

    By name it ends truncated after its configuration's `episode_length`, else after 1000 steps. The robots of its
    locomotion and manipulation suites are downloaded by Playground at first use.
    """

    def __init__(self, env, **kwargs):
        choose_renderer()
        if isinstance(env, str):
            from mujoco_playground import registry

            check_name(env, registry.ALL_ENVS, "MuJoCo Playground")
            self.max_episode_steps = registry.get_default_config(env).episode_length
            env = registry.load(env, **kwargs)
        self.env = env
        self.action_space = gym.spaces.Box(-1.0, 1.0, (env.action_size,))
        self.observation_space = unbounded_space(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
        self.renderer = None

    def render(self, state):
        return self.draw(self.env.mj_model, state.data.qpos, state.data.qvel)


class GymnaxEnv(JaxEnv):
    """gymnax's environment of that name, or that object, with its default parameters if none are given.

    It brings its time limit along, `params.max_steps_in_episode`. gymnax is not asked to reset: its own `step` does so
    in the same step.
    """

    def __init__(self, env, params=None, **kwargs):
        if isinstance(env, str):
            import gymnax

            check_name(env, gymnax.registered_envs, "gymnax")
            env, _ = gymnax.make(env, **kwargs)
        if not hasattr(env, "is_truncated"):
            raise ValueError("this gymnax counts time limits as terminations: install gymnax>=1.0")
        from gymnax.environments.spaces import gymnax_space_to_gym_space

        self.env, self.params = env, env.default_params if params is None else params
        self.action_space = gymnax_space_to_gym_space(env.action_space(self.params))
        self.observation_space = gymnax_space_to_gym_space(env.observation_space(self.params))

    def reset(self, key):
        obs, state = self.env.reset_env(key, self.params)
        return state, obs

    def step(self, state, action, key):
        obs, state, reward, terminated, info = self.env.step_env(key, state, action, self.params)
        return state, TimeStep(obs, reward, terminated, self.env.is_truncated(state, self.params), info)

    def render(self, state):
        from gymnax.visualize.vis_gym import SUPPORTED_GYM_ENVS, render_gym_frame

        if self.env.name not in SUPPORTED_GYM_ENVS:
            raise ValueError(f"gymnax has no pictures of {self.env.name}: leave render_mode out")
        return render_gym_frame(self.env.name, state, self.params)


class FunctionalEnv(JaxEnv):
    """Gymnasium's functional environment (`gymnasium.experimental.functional.FuncEnv`), or the one behind an id.

    Ids with one: phys2d/CartPole-v1, phys2d/Pendulum-v0, tabular/Blackjack-v0, tabular/CliffWalking-v0; `kwargs` are
    theirs. By id it ends truncated after the steps that are registered.
    """

    def __init__(self, env, **kwargs):
        if isinstance(env, str):
            spec = gym.spec(env)
            self.max_episode_steps = spec.max_episode_steps
            unwrapped = gym.make(env, **kwargs).unwrapped
            if not hasattr(unwrapped, "func_env"):
                raise ValueError(
                    f"{env} is no functional environment of Gymnasium's: pass it to gymnasium_callback.make"
                )
            env = unwrapped.func_env
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.render_state = None

    def reset(self, key):
        key, obs_key = jax.random.split(key)
        state = self.env.initial(key)
        return state, self.env.observation(state, obs_key)

    def step(self, state, action, key):
        key, obs_key, reward_key, terminal_key = jax.random.split(key, 4)
        next_state = self.env.transition(state, action, key)
        return next_state, TimeStep(
            obs=self.env.observation(next_state, obs_key),
            reward=self.env.reward(state, action, next_state, reward_key),
            terminated=self.env.terminal(next_state, terminal_key),
            truncated=False,
            info=self.env.transition_info(state, action, next_state),
        )

    def render(self, state):
        if self.render_state is None:
            self.render_state = self.env.render_init()
        self.render_state, frame = self.env.render_image(state, self.render_state)
        return np.array(frame)

    def close(self):
        if self.render_state is not None:
            self.env.render_close(self.render_state)
            self.render_state = None


def unbounded_space(obs) -> gym.Space:
    """The space of observations of these types, a pytree of dicts."""
    if isinstance(obs, dict):
        return gym.spaces.Dict({name: unbounded_space(entry) for name, entry in obs.items()})
    return gym.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)


def choose_renderer() -> None:
    """MuJoCo decides when it is imported how to draw, and would take a display for granted."""
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")

"""One meaning of reset and step on every back end: environments made by hand against tables worked out by hand.

A back end joins by one more entry in `BACKENDS`: (length, ends, autoreset) -> VectorEnv of two of `envs_toys`'
environments.
"""

from functools import partial
from importlib.util import find_spec

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from envs_toys import (
    ACTIONS,
    TABLES,
    CountBackend,
    CountBrax,
    CountEnv,
    CountFunctional,
    CountGymnax,
    CountJaxEnv,
    CountPool,
    CountVectorEnv,
)
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cleanrl_utils.envs import envpool_xla, gymnasium_callback, jax_envs
from cleanrl_utils.envs.base import EnvWrapper, TimeStep, VectorEnv, new_env
from cleanrl_utils.envs.wrappers import RecordEpisodeStatistics

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def gymnasium_env(make_envs, mode, length, ends, autoreset):
    return gymnasium_callback.make(make_envs(mode, length, ends), num_envs=2, autoreset=autoreset)


def sync(mode, length, ends):
    return SyncVectorEnv([partial(CountEnv, length, ends)] * 2, autoreset_mode=mode)


def asynchronous(mode, length, ends):
    return AsyncVectorEnv([partial(CountEnv, length, ends)] * 2, autoreset_mode=mode)


def custom(mode, length, ends):
    return CountVectorEnv(2, length, ends, mode)


def pool(length, ends, autoreset):
    """EnvPool has no such environment: this one answers as a pool does. Real pools: test_envs_envpool.py."""
    count_pool = CountPool(2, length, ends, batch_size=1 if autoreset == "same_step" else 2)
    backend = envpool_xla.EnvPoolXla([count_pool], autoreset, info_keys=(), num_seeds=1)
    return new_env(backend, backend.token)


def brax(env):
    adapted = jax_envs.BraxEnv(CountBrax(env))
    adapted.action_space = env.action_space
    return adapted


def gymnax(env):
    return jax_envs.GymnaxEnv(CountGymnax(env))


def functional(env):
    return jax_envs.FunctionalEnv(CountFunctional(env.length))


def jax_env(adapt, length, ends, autoreset):
    env = CountJaxEnv(length, ends)
    return jax_envs.make(adapt(env), 2, autoreset=autoreset, max_episode_steps=env.max_episode_steps or 0)


BACKENDS = {
    f"{make_envs.__name__}-{mode.name}": partial(gymnasium_env, make_envs, mode)
    for make_envs, modes in [
        (sync, AutoresetMode),
        (asynchronous, AutoresetMode),
        (custom, AutoresetMode),
    ]
    for mode in modes
}
BACKENDS["smallest"] = lambda *case: new_env(CountBackend(2, *case), None)
BACKENDS["jax"] = partial(jax_env, lambda env: env)
BACKENDS |= {"pool": pool, "brax": partial(jax_env, brax), "functional": partial(jax_env, functional)}
if find_spec("gymnax"):
    BACKENDS["gymnax"] = partial(jax_env, gymnax)
CASES = [
    (backend, *case)
    for backend in BACKENDS
    for case in TABLES
    if case[2] == "same_step" or not backend.endswith(("SAME_STEP", "DISABLED"))  # these can't wait for the next step
]


def check_table(table, autoreset, first, timesteps):
    """The time step that reset returned, and those of all steps, leaves [8, 2, ...], against the table."""
    np.testing.assert_array_equal(first.obs, np.zeros((2, 2)))
    np.testing.assert_array_equal([first.reward, first.terminated, first.truncated], np.zeros((3, 2)))
    for name in ("obs", "reward", "terminated", "truncated"):
        expected = np.swapaxes(np.array(getattr(table, name), np.float32), 0, 1)
        np.testing.assert_array_equal(getattr(timesteps, name), expected, err_msg=name)
    np.testing.assert_array_equal(timesteps.next_obs, np.swapaxes(table.final_obs(), 0, 1))
    assert ("final_obs" in timesteps.info) == (autoreset == "same_step")
    for i, episodes in enumerate(table.episodes):
        ended = np.flatnonzero(timesteps.info["_episode"][:, i])
        returns, lengths = (np.asarray(timesteps.info["episode"][key])[ended, i] for key in "rl")
        assert dict(zip(ended.tolist(), zip(returns, lengths, strict=True), strict=True)) == episodes


def start(env):
    return env.reset() if isinstance(env.backend, envpool_xla.EnvPoolXla) else env.reset(seed=1)


@pytest.mark.parametrize("backend, length, ends, autoreset", CASES)
def test_a_compiled_rollout_is_the_table(backend, length, ends, autoreset):
    env = BACKENDS[backend](length, ends, autoreset).with_wrappers(RecordEpisodeStatistics())
    assert env.autoreset == autoreset
    first_env, first = start(env)

    @jax.jit
    def rollout(env, timestep, actions):
        def step(carry, action):
            env, timestep = carry
            valid = env.valid(timestep)
            env, timestep = env.step(action)
            return (env, timestep), (timestep, valid)

        return jax.lax.scan(step, (env, timestep), actions)

    (env, last), (timesteps, valid) = rollout(first_env, first, ACTIONS)
    check_table(TABLES[length, ends, autoreset], autoreset, first, timesteps)
    resets = np.zeros((8, 2), bool) if autoreset == "same_step" else np.asarray(timesteps.reward) == 0
    np.testing.assert_array_equal(valid, ~resets)

    (_, _), (again, _) = rollout(*env.reset(), ACTIONS)  # goes on: a second rollout is like the first
    check_table(TABLES[length, ends, autoreset], autoreset, first, again)
    assert rollout._cache_size() == 1, "the second call compiled anew"
    env.close()


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if not backend.startswith("async")])
def test_steps_outside_of_compiled_code_are_the_table_too(backend):
    case = 3, "terminated", "same_step"
    env = BACKENDS[backend](*case).with_wrappers(RecordEpisodeStatistics())
    env, first = start(env)
    timesteps = []
    for action in ACTIONS:
        env, timestep = env.send(jnp.asarray(action)).recv()
        timesteps.append(timestep)
    check_table(TABLES[case], case[2], first, jax.tree.map(lambda *x: np.stack(x), *timesteps))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_types_are_those_of_the_spaces(backend):
    env = BACKENDS[backend](3, "terminated", "same_step")
    with pytest.raises(ValueError, match="no episodes yet: reset is next"):
        jax.jit(lambda env, action: env.step(action))(env, ACTIONS[0])
    env, first = start(env)
    next_env, timestep = env.step(ACTIONS[0])
    types = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (env, first))
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (next_env, timestep))
    assert timestep.obs.dtype == env.single_observation_space.dtype == timestep.reward.dtype == jnp.float32
    assert timestep.terminated.dtype == timestep.truncated.dtype == bool
    with pytest.raises(ValueError, match=r"actions are float32\(3,\), the environment takes float32\(2,\)"):
        env.step(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"actions are int32\(2,\), the environment takes float32\(2,\)"):
        jax.jit(lambda env, action: env.step(action))(env, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="recv is next"):
        env.send(ACTIONS[0]).send(ACTIONS[0])
    with pytest.raises(ValueError, match="recv is next"):
        env.send(ACTIONS[0]).reset()
    with pytest.raises(ValueError, match="send is next"):
        env.recv()


@pytest.mark.parametrize("backend", ["jax", "brax", "functional", "custom-DISABLED", "pool"])
def test_under_64_bits_a_step_is_the_same(backend):
    case = 3, "terminated", "same_step"
    with jax.enable_x64(True):
        env, first = start(BACKENDS[backend](*case).with_wrappers(RecordEpisodeStatistics()))
        env, timesteps = jax.lax.scan(lambda env, action: env.step(action), env, jnp.asarray(ACTIONS))
        check_table(TABLES[case], case[2], first, jax.device_get(timesteps))
    assert timesteps.obs.dtype == timesteps.reward.dtype == first.reward.dtype == np.float32


MAKE = {
    "envpool": partial(envpool_xla.make, "CartPole-v1", 2),
    "gymnasium": partial(gymnasium_callback.make, "CartPole-v1", 2),
    "jax": partial(jax_envs.make, CountJaxEnv(3, "terminated"), 2),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("seed", [-1, 2**32 + 1, 1.7, "1", (1, 2**32), (1, 2.0), np.array([-1, 1])], ids=str)
def test_seeds_that_would_be_the_same_as_others_are_refused(kind, seed):
    calls = [lambda: MAKE[kind](seed=seed)]
    if kind != "envpool":
        calls += [lambda: MAKE[kind]().reset(seed), lambda: jax.jit(lambda env: env.reset(seed))(MAKE[kind]())]
    if kind != "envpool" and isinstance(seed, float):
        calls.append(lambda: jax.jit(lambda env, seed: env.reset(seed))(MAKE[kind](), seed))
    for call in calls:
        with pytest.raises(ValueError, match="seed=.*: pass an integer from 0 to 4294967295") as raised:
            call()
        assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- what VectorEnv does for all of them
def test_a_back_end_that_returns_something_else_than_it_declares_is_told_so():
    backend = CountBackend(2, 3, "terminated", "same_step")

    def returning(**changes):
        return lambda *args: TimeStep(*args[:1], *args[2:], info={"final_obs": args[0]}).replace(**changes)

    for changes, message in [
        ({"reward": jnp.zeros(2, int)}, r"returns reward int32\(2,\) instead of float32\(2,\)"),
        ({"obs": {"a": jnp.zeros((2, 2))}}, r"returns obs {a: float32\(2, 2\)} instead of float32\(2, 2\)"),
        ({"truncated": jnp.zeros((2, 1), bool)}, r"returns truncated bool\(2, 1\) instead of bool\(2,\)"),
        ({"info": {}}, r"returns info\['final_obs'\] None instead of float32\(2, 2\)"),
    ]:
        backend.time_step = returning(**changes)
        with pytest.raises(TypeError, match="CountBackend " + message) as raised:
            VectorEnv(backend, None).reset()
        assert "\n" not in str(raised.value)


@flax.struct.dataclass
class Affine(EnvWrapper):
    """Multiplies and adds, so that the order shows in the result; counts its calls, so that lost state shows."""

    calls: jax.Array
    factor: float = flax.struct.field(pytree_node=False)
    offset: float = flax.struct.field(pytree_node=False)

    def reset(self, timestep):
        wrapper, timestep = self.recv(timestep)
        return wrapper.replace(calls=self.calls + 10_000), timestep

    def send(self, action):
        return self.replace(calls=self.calls + 1), action * self.factor + self.offset

    def recv(self, timestep):
        obs = timestep.obs * self.factor + self.offset
        return self.replace(calls=self.calls + 100), timestep.replace(obs=obs)

    def observation_space(self, space):
        return Box(space.low * self.factor + self.offset, space.high * self.factor + self.offset)


def test_reset_and_recv_run_from_the_environment_outwards_and_send_inwards():
    inner, outer = Affine(jnp.array(0), factor=2.0, offset=0.0), Affine(jnp.array(0), factor=1.0, offset=1.0)
    env = BACKENDS["smallest"](5, "truncated", "next_step").with_wrappers(inner).with_wrappers(outer)
    env, timestep = env.reset()
    np.testing.assert_array_equal(timestep.obs, np.ones((2, 2)))  # the other way round it would be (0 + 1) * 2
    env, timestep = env.step(jnp.array([5.0, 6.0]))
    sent = np.array([(5 + 1) * 2, (6 + 1) * 2])  # the outer wrapper is the first to see the action
    np.testing.assert_array_equal(timestep.obs, np.stack([np.ones(2), sent], axis=1) * 2 + 1)
    assert [int(wrapper.calls) for wrapper in env.wrappers] == [10_101, 10_101]
    assert env.single_observation_space == Box(-199, 201, (2,))

"""One meaning of reset and step on every back end: environments made by hand against tables worked out by hand.

A back end joins by one more entry in `BACKENDS`: (length, ends, autoreset) -> VectorEnv of two of `envs_toys`'
environments.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from envs_toys import ACTIONS, TABLES, CountEnv, CountJaxEnv, CountVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cleanrl_utils.envs import gymnasium_callback, jax_envs
from cleanrl_utils.envs.wrappers import RecordEpisodeStatistics

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

NATIVE_MODES = {"next_step": [AutoresetMode.NEXT_STEP], "same_step": list(AutoresetMode)}


def gymnasium_env(make_envs, mode, length, ends, autoreset):
    return gymnasium_callback.make(make_envs(mode, length, ends), num_envs=2, autoreset=autoreset)


def sync(mode, length, ends):
    return SyncVectorEnv([partial(CountEnv, length, ends)] * 2, autoreset_mode=mode)


def asynchronous(mode, length, ends):
    return AsyncVectorEnv([partial(CountEnv, length, ends)] * 2, autoreset_mode=mode)


def custom(mode, length, ends):
    return CountVectorEnv(2, length, ends, mode)


BACKENDS = {
    f"{make_envs.__name__}-{mode.name}": partial(gymnasium_env, make_envs, mode)
    for make_envs, modes in [
        (sync, AutoresetMode),
        (asynchronous, AutoresetMode),
        (custom, [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]),
    ]
    for mode in modes
}
BACKENDS["jax"] = lambda length, ends, autoreset: jax_envs.make(CountJaxEnv(length, ends), 2, autoreset=autoreset)
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


@pytest.mark.parametrize("backend, length, ends, autoreset", CASES)
def test_a_compiled_rollout_is_the_table(backend, length, ends, autoreset):
    env = BACKENDS[backend](length, ends, autoreset).with_wrappers(RecordEpisodeStatistics())
    assert env.autoreset == autoreset
    first_env, first = env.reset(seed=1)

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
    env, first = env.reset(seed=1)
    timesteps = []
    for action in ACTIONS:
        env, timestep = env.send(jnp.asarray(action)).recv()
        timesteps.append(timestep)
    check_table(TABLES[case], case[2], first, jax.tree.map(lambda *x: np.stack(x), *timesteps))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_types_are_those_of_the_spaces(backend):
    env = BACKENDS[backend](3, "terminated", "same_step")
    env, first = env.reset(seed=1)
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

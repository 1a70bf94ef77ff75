"""Gymnasium's environments called from compiled code; what steps mean is in test_envs_conformance.py."""

import os
import runpy
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import envpool
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from envs_toys import ACTIONS, CountEnv, CountVectorEnv, EchoEnv, FaultyEnv, FaultyEnvError, HalvingEnv, InfoEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cleanrl_utils.envs import envpool_xla, gymnasium_callback
from cleanrl_utils.envs.base import VectorEnv
from cleanrl_utils.envs.gymnasium_callback import make, original_errors
from cleanrl_utils.envs.spaces import outward_space
from cleanrl_utils.envs.wrappers import RecordEpisodeStatistics

pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(Received the following error|Traceback|Raising the last):UserWarning"),
]


def count_envs(*modes, kind=CountEnv, **kwargs):
    return SyncVectorEnv([kind] * 2, autoreset_mode=modes[0] if modes else AutoresetMode.SAME_STEP, **kwargs)


@jax.jit
def scan_steps(env, actions):
    return jax.lax.scan(lambda env, action: env.step(action), env, actions)


def rollout(env, actions, **kwargs):
    env, first = env.reset(**kwargs)
    env, timesteps = scan_steps(env, actions)
    return env, jax.tree.map(lambda x, xs: np.concatenate([x[None], xs]), first, timesteps)


# ---------------------------------------------------------------- spaces
SPACES = {
    "box": (Box(-1, 1, (2, 3), np.float64), np.full((2, 3), 0.5)),
    "image": (Box(0, 255, (4, 4, 3), np.uint8), np.full((4, 4, 3), 200, np.uint8)),
    "int64": (Box(-9, 9, (2,), np.int64), np.array([-3, 7])),
    "bool": (Box(0, 1, (3,), np.bool_), np.array([True, False, True])),
    "empty": (Dict(a=Box(0, 1, (0,), np.float32), b=MultiBinary(3)), {"a": np.zeros(0), "b": np.ones(3, np.int8)}),
    "discrete": (Discrete(3), 2),
    "discrete_start": (Discrete(3, start=-1), -1),
    "multi_discrete": (MultiDiscrete([2, 3], start=[1, 0]), np.array([2, 1])),
    "multi_binary": (MultiBinary(3), np.array([1, 0, 1], np.int8)),
    "dict": (Dict(z=Discrete(3, start=2), a=Box(0, 1, (2,), np.float32)), {"z": 3, "a": np.full(2, 0.25, np.float32)}),
    "tuple": (Tuple([Discrete(2), Dict(b=MultiBinary(2))]), (1, {"b": np.array([0, 1], np.int8)})),
}


@pytest.mark.parametrize("name", SPACES)
def test_values_of_any_space_come_and_go(name):
    space, first = SPACES[name]
    space.seed(1)
    actions = [space.sample() for _ in range(8)]
    stacked = gym.vector.utils.concatenate(space, actions, gym.vector.utils.create_empty_array(space, n=8))
    as_pytree = jax.tree.map(
        lambda x: x.reshape(4, 2, *x.shape[1:]), gymnasium_callback.map_space(cast, space, stacked)
    )

    env = make(SyncVectorEnv([partial(EchoEnv, space, first)] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    assert env.single_action_space == outward_space(space)
    _, timesteps = rollout(env, as_pytree)
    returned = jax.tree.map(lambda x: x[1:], timesteps.next_obs)  # it is the action even where an episode ends
    jax.tree.map(np.testing.assert_array_equal, returned, as_pytree)
    for obs in (jax.tree.map(lambda x: x[0, 1], timesteps.obs), jax.tree.map(lambda x: x[3, 0], timesteps.obs)):
        jax.tree.map(np.testing.assert_array_equal, obs, as_first(first))
    types = jax.tree.leaves(
        gymnasium_callback.map_space(lambda leaf: np.dtype(leaf.dtype), env.single_observation_space)
    )
    assert types == [x.dtype for x in jax.tree.leaves(timesteps.obs)]
    assert all(dtype.itemsize <= 4 for dtype in types)

    flat_env = make(env.backend.envs, flatten_obs=True, flatten_action=True)
    flat_actions = np.array([gym.spaces.flatten(space, action) for action in actions], np.float32).reshape(4, 2, -1)
    assert flat_env.single_action_space.shape == flat_env.single_observation_space.shape == flat_actions.shape[2:]
    _, timesteps = rollout(flat_env, flat_actions)
    np.testing.assert_array_equal(timesteps.next_obs[1:], flat_actions)
    np.testing.assert_array_equal(timesteps.obs[0], [gym.spaces.flatten(space, first)] * 2)


def cast(leaf, x):
    return np.asarray(x, outward_space(leaf).dtype)


def as_first(first):
    return tuple(first) if isinstance(first, tuple) else first


def test_other_spaces_are_refused():
    envs = SyncVectorEnv([partial(EchoEnv, gym.spaces.Text(3), "a")], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(TypeError, match=r"Text\(.*\) is no array for JAX: Box, Discrete, "):
        make(envs)


def test_observations_of_another_shape_than_the_spaces_are_refused():
    class Wrong(CountEnv):
        observation_space = Box(-100, 100, (3,), np.float64)

    envs = CountVectorEnv(2, 3, "terminated", AutoresetMode.NEXT_STEP)
    envs.single_observation_space = Wrong.observation_space
    with pytest.raises(ValueError, match=r"observations are \(2, 2\), their space says \(2, 3\)"):
        make(envs).reset()


class Whole(CountEnv):
    """Its observations are floats, which its space denies."""

    observation_space = Box(-100, 100, (2,), np.int64)


def test_observations_that_would_be_other_numbers_are_refused():
    envs = CountVectorEnv(2, 3, "terminated", AutoresetMode.NEXT_STEP)
    envs.single_observation_space = Whole.observation_space
    with pytest.raises(TypeError, match="observations are float64, their space says int32: make both the same"):
        make(envs).reset()
    envs = AsyncVectorEnv([Whole] * 2, autoreset_mode="SameStep")  # which hides it until an episode ends
    with pytest.raises(TypeError, match="observations are float64, their space says int32"), original_errors():
        rollout(make(envs), ACTIONS)
    envs.close()
    large = partial(EchoEnv, Box(0, 2**40, (2,), np.int64), np.array([1, 2**31]))
    with pytest.raises(ValueError, match="observations of 1 to 2147483648 don't fit int32, which their space says"):
        make(SyncVectorEnv([large], autoreset_mode=AutoresetMode.SAME_STEP)).reset()


def test_an_environment_may_write_to_its_action():
    envs = SyncVectorEnv(
        [partial(HalvingEnv, Box(-1, 1, (2,)), np.zeros(2, np.float32))] * 2, autoreset_mode="SameStep"
    )
    env, first = make(envs).reset()
    actions = np.ones((1, 2, 2), np.float32)
    env, timesteps = scan_steps(env, actions)
    np.testing.assert_array_equal(timesteps.obs, actions / 2)
    np.testing.assert_array_equal(env.step(actions[0])[1].obs, actions[0] / 2)


# ---------------------------------------------------------------- what steps return
def test_a_termination_wins_over_a_truncation_in_the_same_step():
    envs = SyncVectorEnv([partial(CountEnv, 3, "both")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    _, timesteps = rollout(make(envs), ACTIONS[:3] * 0 + 1)
    np.testing.assert_array_equal(timesteps.terminated[3], [True, True])
    np.testing.assert_array_equal(timesteps.truncated[3], [False, False])


@pytest.mark.parametrize("mode", AutoresetMode)
def test_info_is_kept_by_name_and_is_that_of_the_step_taken(mode):
    nan = np.nan
    info_keys = {name: jax.ShapeDtypeStruct((), np.float32) for name in ("steps", "odd", "absent")}
    info_keys["position"] = jax.ShapeDtypeStruct((2,), np.int32)
    env = make(count_envs(mode, kind=InfoEnv), autoreset="same_step", info_keys=info_keys)
    _, timesteps = rollout(env, ACTIONS[:4] * 0 + 1)
    assert timesteps.info.keys() == {*info_keys, "final_obs"}
    np.testing.assert_array_equal(timesteps.info["steps"], np.repeat([[-1], [1], [2], [3], [1]], 2, axis=1))
    np.testing.assert_array_equal(timesteps.info["odd"], np.repeat([[nan], [1], [nan], [3], [1]], 2, axis=1))
    np.testing.assert_array_equal(timesteps.info["absent"], np.full((5, 2), nan))
    np.testing.assert_array_equal(timesteps.info["position"][:, 1], [[0, 0], [1, 2], [2, 4], [3, 6], [1, 2]])
    assert timesteps.info["position"].dtype == np.int32 and timesteps.info["steps"].dtype == np.float32


def test_info_by_names_alone_is_of_numbers():
    _, timesteps = rollout(make(count_envs(), info_keys=["steps"]), ACTIONS[:2])
    assert timesteps.info["steps"].dtype == np.float32 and timesteps.info["steps"].shape == (3, 2)
    with pytest.raises(ValueError, match="could not convert string to float"):
        rollout(make(count_envs(kind=InfoEnv), info_keys=["name"]), ACTIONS[:0])[0].step(ACTIONS[0])


@pytest.mark.parametrize("mode", AutoresetMode)
def test_info_inside_of_a_dict_has_a_path(mode):
    """The dict is Gymnasium's, and there where an episode has ended."""
    envs = count_envs(mode, kind=lambda: gym.wrappers.RecordEpisodeStatistics(CountEnv(3)))
    env = make(envs, autoreset="same_step", info_keys=["episode/r", "episode/l", "episode/x", "steps/x"])
    _, timesteps = rollout(env, ACTIONS[:4] * 0 + 1)
    nan = np.nan
    for name, value in (("episode/r", 63), ("episode/l", 3), ("episode/x", nan), ("steps/x", nan)):
        np.testing.assert_array_equal(timesteps.info[name], np.repeat([[nan], [nan], [nan], [value], [nan]], 2, axis=1))
    with pytest.raises(ValueError, match="info_keys='episode': this entry is a dict, pass 'episode/r', 'episode/l', "):
        with original_errors():
            rollout(make(envs, autoreset="same_step", info_keys=["episode"]), ACTIONS[:4] * 0 + 1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_compiled_rollout_is_a_plain_loop_over_the_same_environments(env_id, autoreset):
    rng, n = np.random.default_rng(1), 3
    space = gym.make(env_id).action_space
    actions = rng.uniform(-2, 2, (60, n, 1)).astype(np.float32)
    if isinstance(space, Discrete):
        actions = rng.integers(0, 2, (60, n))
    env = make(env_id, n, seed=5, autoreset=autoreset, max_episode_steps=25)
    _, timesteps = rollout(env, actions)

    singles = [gym.make(env_id, max_episode_steps=25) for _ in range(n)]
    seeds = np.random.SeedSequence(5).generate_state(n) >> 1
    for i, single in enumerate(singles):
        obs, done = single.reset(seed=int(seeds[i]))[0], False
        np.testing.assert_array_equal(timesteps.obs[0, i], obs)
        for action, k in zip(actions[:, i], range(1, 61), strict=True):
            reward, terminated, truncated = 0, False, False
            if done and autoreset == "next_step":
                obs, done = single.reset()[0], False
            else:
                obs, reward, terminated, truncated, _ = single.step(action)
                np.testing.assert_array_equal(timesteps.next_obs[k, i], obs.astype(np.float32))
                done = terminated or truncated
                if done and autoreset == "same_step":
                    obs = single.reset()[0]
            np.testing.assert_array_equal(timesteps.obs[k, i], obs.astype(np.float32))
            assert timesteps.reward[k, i] == np.float32(reward)
            assert (timesteps.terminated[k, i], timesteps.truncated[k, i]) == (terminated, truncated and not terminated)
    assert timesteps.terminated.any() or timesteps.truncated.any()


def test_envpools_own_environments_are_stepped_as_in_compiled_code():
    """By EnvPool's reset of single environments, on its next-step autoreset."""
    seeds = (np.random.SeedSequence(2).generate_state(3) >> 1).tolist()
    actions = np.ones((40, 3), np.int32)
    for autoreset in ("next_step", "same_step"):
        pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, env_seed=seeds)
        env = make(pool, autoreset=autoreset, info_keys=["elapsed_step"])
        _, timesteps = rollout(env, actions)
        xla_env = envpool_xla.make("CartPole-v1", 3, seed=2, autoreset=autoreset, info_keys=["elapsed_step"])
        _, expected = rollout(xla_env, actions)
        assert expected.terminated.any()
        jax.tree.map(np.testing.assert_array_equal, timesteps, expected)
    with pytest.raises(ValueError, match="CartPoleGymnasiumEnvPool takes its seed when it is made, not at reset"):
        env.reset(seed=3)


# ---------------------------------------------------------------- seeds
def first_obs(env, **kwargs):
    return np.asarray(env.reset(**kwargs)[1].obs)


def test_seeds_decide_the_episodes_and_share_no_stream():
    cartpole = partial(make, "CartPole-v1", 4)
    np.testing.assert_array_equal(first_obs(cartpole(seed=1)), first_obs(cartpole(seed=1)))
    np.testing.assert_array_equal(first_obs(cartpole(seed=1)), first_obs(cartpole(seed=2), seed=1))
    all_obs = np.concatenate([first_obs(cartpole(seed=seed)) for seed in (1, 2, 3)])
    assert len(np.unique(all_obs, axis=0)) == 12
    assert not np.array_equal(first_obs(cartpole(seed=None)), first_obs(cartpole(seed=None)))
    env, first = cartpole(seed=1).reset()
    env, second = env.reset()
    assert not np.array_equal(first.obs, second.obs), "without a seed the streams go on"


def test_reset_in_compiled_code_takes_a_traced_seed_or_one_for_each_environment():
    env = make("CartPole-v1", 2)
    reset = jax.jit(lambda env, seed: env.reset(seed))
    np.testing.assert_array_equal(reset(env, 7)[1].obs, first_obs(env, seed=7))
    expected = [gym.make("CartPole-v1").reset(seed=seed)[0] for seed in (11, 12)]
    np.testing.assert_array_equal(reset(env, jnp.array([11, 12]))[1].obs, expected)
    np.testing.assert_array_equal(first_obs(env, seed=np.array([11, 12])), expected)


def test_an_environment_vectorised_by_itself_gets_one_seed():
    env = make(gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"))
    assert env.autoreset == "next_step"
    np.testing.assert_array_equal(first_obs(env, seed=1), first_obs(env, seed=1))
    assert not np.array_equal(first_obs(env, seed=1), first_obs(env, seed=2))
    with pytest.raises(ValueError, match="CartPoleVectorEnv takes its seed for all of its environments at once"):
        env.reset(seed=np.array([1, 2]))


def test_vmap_over_seeds_steps_the_environments_of_each():
    actions = np.random.default_rng(1).integers(0, 2, (2, 30, 3))
    both = make("CartPole-v1", 3, seed=(5, 6))
    env, first = jax.vmap(VectorEnv.reset)(both)
    _, timesteps = jax.vmap(scan_steps)(env, actions)
    again = jax.vmap(lambda env, seed: env.reset(seed)[1].obs)(env, jnp.array([6, 5]))
    for i, seed in enumerate((5, 6)):
        _, expected = rollout(make("CartPole-v1", 3, seed=seed), actions[i])
        np.testing.assert_array_equal(first.obs[i], expected.obs[0])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y[1:]), timesteps, expected)
        np.testing.assert_array_equal(again[1 - i], expected.obs[0])


def test_vmap_over_seeds_takes_empty_arrays_too():
    space, first = SPACES["empty"]
    env = make(SyncVectorEnv([partial(EchoEnv, space, first)] * 4, autoreset_mode="SameStep"), seed=(1, 2))
    env, _ = jax.vmap(VectorEnv.reset)(env)
    action = {"a": jnp.zeros((2, 2, 0)), "b": jnp.ones((2, 2, 3), jnp.int8)}
    _, timestep = jax.vmap(VectorEnv.step)(env, action)
    jax.tree.map(np.testing.assert_array_equal, timestep.obs, action)


def test_other_vmaps_are_refused():
    env, _ = make("CartPole-v1", 3).reset()
    with pytest.raises(ValueError, match="these are the environments of 1 seed.*: give make a tuple of seeds"):
        jax.vmap(lambda action: env.step(action))(jnp.zeros((2, 3), int))
    env = make("CartPole-v1", 3, seed=(1, 2))
    with pytest.raises(ValueError, match=r"env has the leading axis \(2,\): use it under vmap over the seeds"):
        env.reset()
    with pytest.raises(ValueError, match="CountVectorEnv can't seed each environment apart: pass one seed, or an id"):
        make(CountVectorEnv(4, 3, "terminated", AutoresetMode.DISABLED), seed=(1, 2))


# ---------------------------------------------------------------- Gymnasium's own wrappers
def wrapped(mode):
    """Episodes of 3 and of 7 steps, counted."""
    envs = SyncVectorEnv([partial(CountEnv, 3), partial(CountEnv, 7)], autoreset_mode=mode)
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


@pytest.mark.parametrize("mode, lengths", [("SameStep", [3, 3, 7, 3, 3, 7]), ("NextStep", [3, 3, 7, 3])])
def test_gymnasiums_wrappers_stay_right_around_environments_that_reset_themselves(mode, lengths):
    envs = wrapped(mode)
    rollout(make(envs), np.ones((14, 2), np.float32))
    assert sorted(envs.length_queue) == sorted(lengths)
    assert sorted(envs.return_queue) == sorted({3: 63, 7: 287}[length] for length in lengths)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_wrappers_of_ones_own_are_right_in_any_mode(mode):
    env = make(wrapped(mode).unwrapped, autoreset="same_step").with_wrappers(RecordEpisodeStatistics(buffer_length=6))
    env, _ = rollout(env, np.ones((14, 2), np.float32))
    assert sorted(env.wrappers[0].length_queue.tolist()) == [3, 3, 3, 3, 7, 7]
    assert sorted(env.wrappers[0].return_queue.tolist()) == [63, 63, 63, 63, 287, 287]


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: make(count_envs(), num_envs=3), ValueError, r"2 environments, but num_envs=3 .*: pass .*num_envs=3\)"),
        (lambda: make(CountEnv(), num_envs=4), ValueError, r"one environment, not vectorised, .*: pass gym.make_vec"),
        (lambda: make(count_envs(), seed=(1, 2, 3)), ValueError, "2 environments, but num_envs=None for 3 seed"),
        (lambda: make(object()), TypeError, "object: pass an id, a gymnasium.vector.VectorEnv or a gymnasium.Env"),
        (lambda: make("CartPole-v1"), ValueError, "num_envs=None: pass the number of environments"),
        (lambda: make("CartPole-v1", 2, autoreset="never"), ValueError, "autoreset='never': pass one of 'next_step', "),
        (lambda: make("CartPole-v1", 2, vectorization_mode="x"), ValueError, "vectorization_mode='x': pass 'sync' or"),
        (lambda: make(count_envs(), render_mode="rgb_array"), TypeError, "render_mode: these are for an id"),
        (
            lambda: make(count_envs(AutoresetMode.SAME_STEP), autoreset="next_step"),
            ValueError,
            "SAME_STEP can't wait for the next step to be reset: pass autoreset='same_step'",
        ),
        (
            lambda: make(AsyncVectorEnv([CountEnv] * 2, shared_memory=False), autoreset="same_step"),
            ValueError,
            "shared_memory=False.* resets twice",
        ),
        *[
            (
                lambda case=case: make(wrapped(case[0]), autoreset=case[1]),
                ValueError,
                "RecordEpisode.* takes the reset of",
            )
            for case in [("NextStep", "same_step"), ("Disabled", "same_step"), ("Disabled", None)]
        ],
        (
            lambda: make(count_envs(), info_keys="steps"),
            ValueError,
            r"info_keys='steps': pass several names, \['steps'\]",
        ),
        (lambda: make("CartPole-v1", 2, seed=(1, None)), ValueError, "pass an integer from 0"),
        (
            lambda: make(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, batch_size=2)),
            ValueError,
            "this EnvPool steps but a part of its environments: make it without batch_size",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_pass(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_environments_that_do_not_tell_how_they_reset_are_refused():
    envs = CountVectorEnv(2, 3, "terminated", AutoresetMode.DISABLED)
    envs.metadata = {}
    with pytest.raises(ValueError, match=r"set envs.metadata\['autoreset_mode'\]"):
        make(envs)


def test_environments_that_reset_all_when_asked_for_some_are_refused_at_the_first_end():
    env = make(gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"), autoreset="same_step")
    with pytest.raises(ValueError, match="CartPoleVectorEnv can't reset single environments: pass autoreset='next_st"):
        with original_errors():
            rollout(env, np.tile([0, 1], (60, 1)) * np.arange(60)[:, None] % 2)


def test_one_environment_for_evaluation():
    single = CountEnv(3)
    env, timesteps = rollout(make(single, num_envs=1, seed=4), ACTIONS[:, :1])
    assert env.num_envs == 1 and timesteps.obs.shape == (9, 1, 2)
    np.testing.assert_array_equal(timesteps.reward[1:4, 0], [11, 22, 33])
    assert single.seeds[0] == np.random.SeedSequence(4).generate_state(1)[0] >> 1


# ---------------------------------------------------------------- errors inside of the environments
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_what_an_environment_raises_is_raised_and_the_program_goes_on(kind, caplog):
    envs = kind([FaultyEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env, _ = make(envs).reset()
    with pytest.raises(FaultyEnvError, match="the action is 4") as raised:
        with original_errors():
            scan_steps(env, ACTIONS)
    if kind == SyncVectorEnv:
        frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert frames[-1] == "step" and "envs_toys.py" in traceback.extract_tb(raised.value.__traceback__)[-1].filename
        assert not caplog.records, "JAX would print the traceback once more"
        with pytest.raises(RuntimeError, match="to be reset before they are stepped"):
            env.step(ACTIONS[0])
        env, timesteps = rollout(env, ACTIONS[:3])
    else:  # Gymnasium ends the process of such an environment
        envs.close(terminate=True)
        env, timesteps = rollout(make(kind([FaultyEnv] * 2, autoreset_mode="SameStep")), ACTIONS[:3])
        env.close()
    np.testing.assert_array_equal(timesteps.reward[:, 0], [0, 11, 22, 33])


def test_outside_of_compiled_code_errors_are_the_environments_own_at_once():
    env, _ = make(count_envs(kind=FaultyEnv)).reset()
    with pytest.raises(FaultyEnvError):
        env.step(ACTIONS[3])


def test_original_errors_decorates_a_function_and_lets_other_errors_pass():
    env, _ = make(count_envs(kind=FaultyEnv)).reset()
    with pytest.raises(FaultyEnvError):
        original_errors()(lambda: scan_steps(env, ACTIONS))()

    def fail(x):
        raise ZeroDivisionError

    def other():
        return jax.jit(lambda: jax.experimental.io_callback(fail, jax.ShapeDtypeStruct((), np.float32), 0.0))()

    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError"):
        original_errors()(other)()


def test_an_env_that_was_stepped_before_is_not_stepped_again():
    env, _ = make(count_envs()).reset()
    next_env, _ = env.step(ACTIONS[0])
    with pytest.raises(RuntimeError, match="this env was stepped before"):
        env.step(ACTIONS[0])
    with pytest.raises(RuntimeError, match="this env was stepped before"), original_errors():
        scan_steps(env, ACTIONS)
    env, timestep = next_env.step(ACTIONS[1])  # the environments are where they were
    np.testing.assert_array_equal(timestep.reward, [22, 18])


# ---------------------------------------------------------------- one CPU
ONE_CPU = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, numpy as np
from functools import partial
from envs_toys import EchoEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from cleanrl_utils.envs import gymnasium_callback
space = Box(0, 1, (64, 64, 3), np.float32)
envs = SyncVectorEnv([partial(EchoEnv, space, np.zeros(space.shape, np.float32))] * 8, autoreset_mode="SameStep")
env, timestep = gymnasium_callback.make(envs).reset()
@jax.jit
def rollout(env, timestep):
    def step(carry, _):
        env, timestep = carry
        return env.step((timestep.obs @ np.ones((3, 3), np.float32) + 0.5) % 1), None
    return jax.lax.scan(step, (env, timestep), length=30)
for _ in range(3):
    (env, timestep), _ = rollout(env, timestep)
print(float(timestep.next_obs.mean()))
"""


def test_large_arrays_come_and_go_on_one_cpu():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    result = subprocess.run([sys.executable, "-c", ONE_CPU], env=environ, timeout=300, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0 <= float(result.stdout) <= 1


def test_the_example_of_the_docs_runs(capsys):
    runpy.run_path(str(Path(__file__).parents[1] / "docs/envs/examples/gymnasium_in_scan.py"))
    assert capsys.readouterr().out.startswith("(400, 8) rewards, mean return -")

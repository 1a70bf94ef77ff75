"""The library's wrappers against Gymnasium's, in NumPy, JAX and torch, on streams with every kind of episode end."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import flax
import gymnasium as gym
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation as GymFrameStackObservation
from gymnasium.wrappers import vector as gym_vector
from gymnasium.wrappers.utils import RunningMeanStd as GymRunningMeanStd
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils.envs.base import Backend, EnvWrapper, TimeStep, VectorEnv
from cleanrl_utils.envs.wrappers import (
    ClipAction,
    Compose,
    FrameStackObservation,
    GrayscaleObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    RescaleAction,
    ResizeObservation,
    RunningMeanStd,
    TransformObservation,
    TransformReward,
    array_namespace,
)

pytestmark = pytest.mark.usefixtures("compile_fast")
NUM_STEPS, NUM_ENVS = 10, 3
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
autoresets = pytest.mark.parametrize("autoreset", MODES)
no_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
no_cv2 = pytest.mark.skipif(find_spec("cv2") is None, reason="opencv-python-headless is not installed")
kinds = pytest.mark.parametrize("kind", ["numpy", "jax", pytest.param("torch", marks=no_torch)])
quick = settings(max_examples=15, deadline=None, derandomize=True)


# ---------------------------------------------------------------- recorded streams
@dataclass
class Stream:
    """What environments returned: row 0 from reset, then one row a step, [NUM_STEPS + 1, NUM_ENVS, ...]."""

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: np.ndarray | None  # under same-step

    @property
    def done(self):
        return self.terminated | self.truncated

    @property
    def num_envs(self):
        return self.obs.shape[1]

    @property
    def autoreset(self):
        return "next_step" if self.final_obs is None else "same_step"

    def timestep(self, t, convert=np.array):
        info = {} if self.final_obs is None else {"final_obs": convert(self.final_obs[t])}
        fields = (convert(x[t]) for x in (self.obs, self.reward, self.terminated, self.truncated))
        return TimeStep(*fields, info)


def make_stream(autoreset, terminated, truncated, seed=0, offset=0.0, scale=1.0, shape=(2,)):
    """Random observations and rewards around episode ends, of which impossible ones are dropped."""
    rng = np.random.default_rng(seed)
    terminated, truncated = terminated.copy(), truncated & ~terminated
    terminated[0] = truncated[0] = False
    if autoreset == "next_step":
        for t in range(1, len(terminated)):  # a reset step ends nothing
            terminated[t] &= ~(terminated | truncated)[t - 1]
            truncated[t] &= ~(terminated | truncated)[t - 1]

    def random_obs():
        if len(shape) > 1:
            return rng.integers(0, 256, (*terminated.shape, *shape), np.uint8)
        return (offset + scale * rng.normal(size=(*terminated.shape, *shape))).astype(np.float32)

    obs, final_obs = random_obs(), random_obs()
    done = (terminated | truncated).reshape(*terminated.shape, *[1] * len(shape))
    reward = (offset + scale * rng.normal(size=terminated.shape)).astype(np.float32)
    reward[0] = 0.0
    if autoreset == "next_step":
        reward[1:][(terminated | truncated)[:-1]] = 0.0
    final_obs = None if autoreset == "next_step" else np.where(done, final_obs, obs)
    return Stream(obs, reward, terminated, truncated, final_obs)


flags = hnp.arrays(bool, (NUM_STEPS + 1, NUM_ENVS))
parts = st.tuples(
    flags, flags, st.integers(0, 2**32 - 1), st.sampled_from([0.0, -3.0, 50.0]), st.sampled_from([0.01, 1.0, 100.0])
)


def example_stream(autoreset, shape=(2,)):
    """Ends of both kinds, two in a row in one environment, and none in another."""
    terminated, truncated = np.zeros((2, NUM_STEPS + 1, NUM_ENVS), bool)
    terminated[[3, 4, 8], 0] = truncated[[2, 6], 1] = terminated[10, 1] = True
    return make_stream(autoreset, terminated, truncated, shape=shape)


def converter(kind):
    if kind == "torch":
        import torch

        return lambda x: torch.tensor(x)
    return {"numpy": np.array, "jax": jnp.asarray}[kind]


def play(wrapper, stream, kind="numpy"):
    """The time steps that come out of the wrapper, as NumPy arrays, one for reset and one for each step."""
    if kind == "jax":
        inputs = jax.tree.map(jnp.asarray, (stream.timestep(0), stream.timestep(slice(1, None))))
        wrapper, first, rest = jax.tree.map(np.asarray, scan(wrapper, *inputs))
        return wrapper, [first, *(jax.tree.map(lambda x, t=t: x[t], rest) for t in range(len(rest.reward)))]
    constants = jax.tree.leaves(wrapper)
    wrapper, timestep = wrapper.reset(stream.timestep(0, converter(kind)))
    timesteps = [timestep]
    for t in range(1, len(stream.obs)):
        wrapper, timestep = wrapper.recv(stream.timestep(t, converter(kind)))
        timesteps.append(timestep)
    for x in jax.tree.leaves((wrapper, timesteps)):
        assert type(x).__module__ == kind or any(x is y for y in constants), f"{type(x)} among arrays of {kind}"
    return wrapper, jax.tree.map(np.asarray, timesteps)


@jax.jit
def scan(wrapper, first, rest):
    """The wrapper after reset and steps inside jit and scan, and both's time steps."""
    wrapper, first = wrapper.reset(first)
    wrapper, rest = jax.lax.scan(lambda wrapper, timestep: wrapper.recv(timestep), wrapper, rest)
    return wrapper, first, rest


class Replay(gym.vector.VectorEnv):
    """A stream as one of Gymnasium's vector environments; `actions` are those that reached it."""

    def __init__(self, stream, action_space=None):
        self.stream, self.num_envs, self.actions = stream, stream.num_envs, []
        self.metadata = {"autoreset_mode": MODES[stream.autoreset]}
        shape, dtype = stream.obs.shape[2:], stream.obs.dtype
        image = dtype == np.uint8
        self.single_observation_space = Box(0 if image else -np.inf, 255 if image else np.inf, shape, dtype)
        self.single_action_space = action_space or Box(-1, 1, (1,))
        self.observation_space, self.action_space = (
            gym.vector.utils.batch_space(space, self.num_envs)
            for space in (self.single_observation_space, self.single_action_space)
        )

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.stream.obs[0].copy(), {}

    def step(self, actions):
        self.t += 1
        self.actions.append(np.array(actions))
        timestep, info = self.stream.timestep(self.t), {}
        if self.stream.autoreset == "same_step" and timestep.done.any():
            final_obs = np.full(self.num_envs, None)
            for i in np.flatnonzero(timestep.done):
                final_obs[i] = timestep.info["final_obs"][i]
            info = {"final_obs": final_obs, "_final_obs": timestep.done}
        return timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, info


class ReplayOne(gym.Env):
    """One environment of a stream, for Gymnasium's wrappers of single ones: SyncVectorEnv resets it."""

    def __init__(self, stream, i):
        self.stream, self.i, self.t = stream, i, None
        self.observation_space = Replay(stream).single_observation_space
        self.action_space = Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        if self.t is None:
            self.t = 0
        elif self.stream.autoreset == "next_step":
            self.t += 1
        return self.stream.obs[self.t, self.i], {}

    def step(self, action):
        self.t += 1
        timestep = self.stream.timestep((self.t, self.i), convert=lambda x: x)
        return timestep.next_obs, timestep.reward, timestep.terminated, timestep.truncated, {}


def play_gym(env, num_steps=NUM_STEPS):
    """obs, reward and info of Gymnasium's environment, one for reset and one for each step."""
    obs, info = env.reset()
    rows = [(np.array(obs), np.zeros(env.num_envs), info)]
    for _ in range(num_steps):
        obs, reward, _, _, info = env.step(np.zeros((env.num_envs, 1), np.float32))
        rows.append((np.array(obs), np.array(reward), info))
    return rows


# ---------------------------------------------------------------- parity with Gymnasium
def affine(x):
    return 2 * x - 1


def sync(wrap):
    """Gymnasium's wrapper of single environments around each: those of observations refuse same-step for vectors."""

    def make(stream):
        envs = [lambda i=i: wrap(ReplayOne(stream, i)) for i in range(stream.num_envs)]
        return gym.vector.SyncVectorEnv(envs, autoreset_mode=MODES[stream.autoreset])

    return make


PADDING = np.array([1.0, -2.0], np.float32)
PARITY = {
    "RecordEpisodeStatistics": (
        RecordEpisodeStatistics(buffer_length=4),
        lambda stream: gym_vector.RecordEpisodeStatistics(Replay(stream), buffer_length=4),
    ),
    "NormalizeObservation": (NormalizeObservation(), lambda stream: gym_vector.NormalizeObservation(Replay(stream))),
    "NormalizeReward": (
        NormalizeReward(gamma=0.9),
        lambda stream: gym_vector.NormalizeReward(Replay(stream), gamma=0.9),
    ),
    "TransformReward": (TransformReward(affine), lambda stream: gym_vector.TransformReward(Replay(stream), affine)),
    "TransformObservation": (
        TransformObservation(affine),
        sync(partial(gym.wrappers.TransformObservation, func=affine, observation_space=None)),
    ),
    "FrameStackObservation": (FrameStackObservation(3), sync(partial(GymFrameStackObservation, stack_size=3))),
    "FrameStackObservation-zero": (
        FrameStackObservation(2, padding_type="zero"),
        sync(partial(GymFrameStackObservation, stack_size=2, padding_type="zero")),
    ),
    "FrameStackObservation-padding": (
        FrameStackObservation(3, padding=PADDING),
        sync(partial(GymFrameStackObservation, stack_size=3, padding_type=PADDING)),
    ),
    "FrameStackObservation-one": (FrameStackObservation(1), sync(partial(GymFrameStackObservation, stack_size=1))),
}
UNSUPPORTED = [("NormalizeObservation", "same_step")]  # by Gymnasium


@kinds
@pytest.mark.parametrize(
    ("name", "autoreset"), [(name, mode) for name in PARITY for mode in MODES if (name, mode) not in UNSUPPORTED]
)
@quick
@given(parts=parts)
def test_a_wrapper_does_what_gymnasiums_does(kind, name, autoreset, parts):
    stream = make_stream(autoreset, *parts)
    wrapper, make_gym = PARITY[name]
    env = make_gym(stream)
    _, timesteps = play(wrapper, stream, kind)
    for t, (timestep, (obs, reward, info)) in enumerate(zip(timesteps, play_gym(env), strict=True)):
        np.testing.assert_allclose(timestep.obs, obs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(timestep.reward, reward, rtol=1e-4, atol=1e-5)
        assert timestep.obs.dtype == obs.dtype and timestep.reward.dtype == np.float32
        np.testing.assert_array_equal(timestep.done, stream.done[t])
        np.testing.assert_array_equal(
            info.get("_final_obs", np.zeros(NUM_ENVS)), stream.done[t] & ("final_obs" in info)
        )
        for i in np.flatnonzero(info.get("_final_obs", [])):
            np.testing.assert_allclose(timestep.info["final_obs"][i], info["final_obs"][i], rtol=1e-4, atol=1e-4)


def record_cart_pole(autoreset, num_steps):
    """Episodes of CartPole that end either way."""
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": MODES[autoreset]}}
    envs = gym.make_vec("CartPole-v1", NUM_ENVS, max_episode_steps=20, **kwargs)
    envs.action_space.seed(1)
    no = np.zeros(NUM_ENVS, bool)
    rows = [(envs.reset(seed=1)[0], np.zeros(NUM_ENVS), no, no, {})]
    rows += [envs.step(envs.action_space.sample()) for _ in range(num_steps)]
    obs, reward, terminated, truncated, infos = zip(*rows, strict=True)
    final_obs = None
    if autoreset == "same_step":
        final_obs = np.array(obs)
        for t, info in enumerate(infos):
            for i in np.flatnonzero(info.get("_final_obs", no)):
                final_obs[t, i] = info["final_obs"][i]
    terminated, truncated = np.array(terminated), np.array(truncated) & ~np.array(terminated)
    return Stream(np.array(obs), np.float32(reward), terminated, truncated, final_obs)


@kinds
@pytest.mark.parametrize(
    ("name", "autoreset"),
    [("NormalizeReward", "next_step"), ("NormalizeReward", "same_step"), ("NormalizeObservation", "next_step")],
)
def test_statistics_stay_gymnasiums_over_hundreds_of_steps(kind, name, autoreset):
    stream = record_cart_pole(autoreset, num_steps=300)
    assert stream.terminated.sum() > 10 and stream.truncated.sum() > 10
    wrapper, make_gym = PARITY[name]
    env = make_gym(stream)
    played, timesteps = play(wrapper, stream, kind)
    for timestep, (obs, reward, _) in zip(timesteps, play_gym(env, num_steps=300), strict=True):
        np.testing.assert_allclose(timestep.obs, obs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(timestep.reward, reward, rtol=1e-4)
    expected = env.return_rms if name == "NormalizeReward" else env.obs_rms
    for field in ("mean", "var", "count"):
        np.testing.assert_allclose(getattr(played.stats, field), getattr(expected, field), rtol=1e-4, atol=1e-6)


@kinds
@autoresets
def test_gray_images_are_gymnasiums(kind, autoreset):
    stream = example_stream(autoreset, shape=(4, 6, 3))
    for keep_dim in (False, True):
        env = sync(partial(gym.wrappers.GrayscaleObservation, keep_dim=keep_dim))(stream)
        _, timesteps = play(GrayscaleObservation(keep_dim), stream, kind)
        for timestep, (obs, _, info) in zip(timesteps, play_gym(env), strict=True):
            np.testing.assert_array_equal(timestep.obs, obs)
            assert timestep.obs.dtype == np.uint8
            for i in np.flatnonzero(info.get("_final_obs", [])):
                np.testing.assert_array_equal(timestep.info["final_obs"][i], info["final_obs"][i])


@kinds
@autoresets
@quick
@given(parts=parts)
def test_recorded_episodes_are_gymnasiums(kind, autoreset, parts):
    stream = make_stream(autoreset, *parts)
    wrapper, make_gym = PARITY["RecordEpisodeStatistics"]
    env = make_gym(stream)
    wrapper, timesteps = play(wrapper, stream, kind)
    for timestep, (_, _, info) in zip(timesteps, play_gym(env), strict=True):
        nothing = {"r": np.zeros(NUM_ENVS), "l": np.zeros(NUM_ENVS)}
        expected = info.get("episode", nothing)
        np.testing.assert_allclose(timestep.info["episode"]["r"], expected["r"], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(timestep.info["episode"]["l"], expected["l"])
        np.testing.assert_array_equal(timestep.info["_episode"], info.get("_episode", np.zeros(NUM_ENVS, bool)))
    assert wrapper.episode_count == env.episode_count
    in_queue = min(env.episode_count, 4)
    np.testing.assert_allclose(wrapper.return_queue[4 - in_queue :], env.return_queue, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(wrapper.length_queue[4 - in_queue :], env.length_queue)


@kinds
@pytest.mark.parametrize("buffer_length", [0, 100])
def test_queues_may_be_empty_or_longer_than_all_episodes(kind, buffer_length):
    stream = example_stream("same_step")
    wrapper, timesteps = play(RecordEpisodeStatistics(buffer_length=buffer_length), stream, kind)
    returns = np.concatenate([timestep.info["episode"]["r"][timestep.info["_episode"]] for timestep in timesteps])
    assert wrapper.episode_count == len(returns) == stream.done.sum()
    filled = np.concatenate([np.zeros(100), returns])[len(returns) :]
    np.testing.assert_array_equal(wrapper.return_queue, filled[:buffer_length])


@kinds
@quick
@given(parts=parts)
def test_observation_statistics_under_same_step_see_final_observations_too(kind, parts):
    stream = make_stream("same_step", *parts)
    wrapper, timesteps = play(NormalizeObservation(), stream, kind)
    expected = GymRunningMeanStd(shape=(2,))
    for t, timestep in enumerate(timesteps):
        final_obs, done = stream.final_obs[t], stream.done[t]
        expected.update(np.concatenate([stream.obs[t], final_obs[done]]).astype(np.float64))
        for x, normalized in ((stream.obs[t], timestep.obs), (final_obs, timestep.info["final_obs"])):
            by_hand = (x - expected.mean) / np.sqrt(expected.var + 1e-8)
            np.testing.assert_allclose(normalized, by_hand, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(wrapper.stats.count, expected.count, rtol=1e-6)
    np.testing.assert_allclose(wrapper.stats.var, expected.var, rtol=1e-4)


# ---------------------------------------------------------------- actions
SPACES = {
    "bounded": Box(np.float32([-2, 0, -1]), np.float32([2, 10, 0.5])),
    "half bounded": Box(np.float32([-2, -np.inf, -np.inf]), np.float32([np.inf, 10, np.inf])),
}
INFINITE = {"min_action": np.float32([-1, -np.inf, -np.inf]), "max_action": np.float32([np.inf, 1, np.inf])}
actions = hnp.arrays(np.float32, (NUM_ENVS, 3), elements=st.floats(-100, 100, width=32))


@kinds
@quick
@given(action=actions)
def test_actions_reach_the_environment_as_in_gymnasium(kind, action):
    bounds = {"min_action": -0.5, "max_action": np.float32([0, 0.5, 0.75])}
    cases = [
        ("bounded", ClipAction.create, gym_vector.ClipAction, {}),
        ("half bounded", ClipAction.create, gym_vector.ClipAction, {}),
        ("bounded", RescaleAction.create, gym_vector.RescaleAction, bounds),
        ("half bounded", RescaleAction.create, gym_vector.RescaleAction, INFINITE),
    ]
    for name, create, gym_wrapper, kwargs in cases:
        env = Replay(example_stream("next_step"), SPACES[name])
        wrapped = gym_wrapper(env, **kwargs)
        wrapped.reset()
        wrapped.step(action.copy())
        wrapper = create(SPACES[name], **kwargs)
        _, sent = wrapper.send(converter(kind)(action))
        np.testing.assert_allclose(sent, env.actions[0], rtol=1e-5, atol=1e-5)
        assert np.asarray(sent).dtype == np.float32 and type(sent) is type(converter(kind)(action))
        assert wrapper.action_space(SPACES[name]) == wrapped.single_action_space


def test_a_nan_action_becomes_zero_if_asked_to():
    action = np.float32([[np.nan, 5.0]])
    np.testing.assert_array_equal(ClipAction(-1.0, 1.0).send(action)[1], [[np.nan, 1.0]])
    np.testing.assert_array_equal(ClipAction(-1.0, 1.0, replace_nan=True).send(action)[1], [[0.0, 1.0]])
    np.testing.assert_array_equal(ClipAction(1.0, 2.0, replace_nan=True).send(action)[1], [[1.0, 2.0]])


def test_actions_that_have_no_bounds_are_refused():
    with pytest.raises(TypeError, match="Discrete"):
        ClipAction.create(gym.spaces.Discrete(3))
    with pytest.raises(TypeError, match="Box of floats"):
        RescaleAction.create(Box(0, 5, (2,), np.int32))
    with pytest.raises(ValueError, match="not below"):
        RescaleAction.create(SPACES["bounded"], 1.0, 1.0)
    with pytest.raises(ValueError, match="infinity"):
        RescaleAction.create(SPACES["half bounded"])


# ---------------------------------------------------------------- images
def area_by_repetition(image, shape):
    """Area interpolation with whole numbers only: every pixel repeated, then the mean of blocks."""
    for axis, new in enumerate(shape):
        old = image.shape[axis]
        repeated = np.repeat(image.astype(np.float64), new, axis=axis)
        blocks = repeated.reshape(*repeated.shape[:axis], new, old, *repeated.shape[axis + 1 :])
        image = blocks.mean(axis + 1)
    return image


def resize(images, shape, kind="numpy"):
    timestep = TimeStep(converter(kind)(images), *(converter(kind)(np.zeros(len(images))),) * 3, {})
    return np.asarray(ResizeObservation(shape).recv(timestep)[1].obs)


SHRINKING = [((12, 12, 3), (6, 6)), ((12, 18), (4, 3)), ((21, 16, 1), (8, 8)), ((7, 5), (7, 2)), ((9, 8), (1, 1))]
GROWING = [((4, 6), (8, 18)), ((5, 7, 3), (9, 8)), ((10, 4), (5, 9)), ((12, 7), (34, 7))]


@kinds
@pytest.mark.parametrize(("old", "new"), SHRINKING)
def test_shrunk_images_are_means_by_area(kind, old, new):
    images = np.random.default_rng(0).integers(0, 256, (2, *old), np.uint8)
    resized = resize(images, new, kind)
    assert resized.dtype == np.uint8 and resized.shape == (2, *new, *old[2:])
    by_hand = np.stack([area_by_repetition(image, new) for image in images])
    assert np.abs(resized - by_hand).max() <= 0.5 + 1e-4  # nothing but the rounding
    if old[:2] == (2 * new[0], 2 * new[1]):
        np.testing.assert_array_equal(resized, np.floor(by_hand + 0.5))
    np.testing.assert_array_equal(resize(images, old[:2]), images)


def test_images_that_grow_by_whole_factors_repeat_their_pixels():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), np.uint8)
    np.testing.assert_array_equal(resize(images, (8, 18)), images.repeat(2, axis=1).repeat(3, axis=2))


@no_cv2
@pytest.mark.parametrize(("old", "new"), SHRINKING + GROWING)
def test_resized_images_are_gymnasiums(old, new):
    stream = example_stream("next_step", shape=old if len(old) > 2 else (*old, 1))
    env = gym_vector.ResizeObservation(Replay(stream), new)
    _, timesteps = play(ResizeObservation(new), stream)
    whole = all(o % n == 0 for o, n in zip(old, new, strict=False))
    for timestep, (obs, *_) in zip(timesteps, play_gym(env), strict=True):
        difference = np.abs(timestep.obs.astype(int) - obs)
        assert difference.max() <= (0 if whole else 1)
    assert ResizeObservation(new).observation_space(env.env.single_observation_space) == env.single_observation_space


def test_gray_is_gymnasiums_but_for_its_rounding_errors():
    colours = np.arange(0, 2**24, 7)  # all of them, which takes 7 times as long, give 63 and 1
    rgb = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=-1).astype(np.uint8)
    gray = GrayscaleObservation().gray(rgb[:, None, None, :])[:, 0, 0]
    gymnasiums = np.sum(np.multiply(rgb, np.array([0.2125, 0.7154, 0.0721])), axis=-1).astype(np.uint8)
    assert ((gray != gymnasiums).sum(), (gray - gymnasiums).max()) == (14, 1)


@pytest.mark.parametrize("wrapper", [GrayscaleObservation(), ResizeObservation((2, 2))], ids=lambda x: type(x).__name__)
def test_what_is_no_image_is_refused(wrapper):
    for shape, dtype in [((4, 4, 3), np.float32), ((4,), np.uint8)]:
        stream = example_stream("next_step")
        timestep = stream.timestep(0).replace(obs=np.zeros((2, *shape), dtype))
        with pytest.raises(TypeError, match="not images"):
            wrapper.recv(timestep)
        with pytest.raises(TypeError, match="not images"):
            wrapper.observation_space(Box(0, 255, shape, dtype))


# ---------------------------------------------------------------- flags
def test_the_return_of_one_episode_starts_anew_after_either_end():
    """Gymnasium's default and the flag, on rewards 1, 2, 4, with gamma 1/2, worked out by hand."""
    done = np.array([[0], [0], [1], [0], [0]], bool)  # the fourth step is the reset step
    reward = np.float32([[0], [1], [2], [0], [4]])
    rows = {
        # end: (Gymnasium's returns, those of the episode), as they enter the statistics
        "terminated": ([1, 2, 4 + 2 / 2], [1, 2 + 1 / 2, 4]),
        "truncated": ([1, 2 + 1 / 2, 4 + 2.5 / 2], [1, 2 + 1 / 2, 4]),
    }
    for end, expected in rows.items():
        flags = {"terminated": done & (end == "terminated"), "truncated": done & (end == "truncated")}
        stream = Stream(np.zeros((5, 1, 1), np.float32), reward, **flags, final_obs=None)
        for per_episode, returns in zip((False, True), expected, strict=True):
            wrapper, _ = play(NormalizeReward(gamma=0.5, per_episode=per_episode), stream)
            by_hand = GymRunningMeanStd()
            for x in returns:
                by_hand.update(np.array([x]))
            np.testing.assert_allclose([wrapper.stats.mean, wrapper.stats.var], [by_hand.mean, by_hand.var], rtol=1e-5)


def test_returns_of_episodes_are_the_same_under_both_autoresets():
    reward = np.float32([0, 1, 2, 4])[:, None]
    truncated = np.array([0, 0, 1, 0], bool)[:, None]
    obs = np.zeros((4, 1, 1), np.float32)
    same = Stream(obs, reward, np.zeros_like(truncated), truncated, final_obs=obs)
    steps = [0, 1, 2, 2, 3]  # with a reset step after the truncation
    following = Stream(obs[steps], reward[steps], same.terminated[steps], truncated[steps], final_obs=None)
    following.reward[3] = following.truncated[3] = 0
    stats = [play(NormalizeReward(per_episode=True), stream)[0].stats for stream in (same, following)]
    assert stats[0] == stats[1]
    stats = [play(NormalizeReward(), stream)[0].stats for stream in (same, following)]
    assert stats[0] != stats[1]  # Gymnasium's are not


def test_the_reset_step_is_no_experience():
    """Its reward, here not the 0 that it should be, is neither counted nor a reason to change the statistics."""
    stream = example_stream("next_step")
    spoiled = example_stream("next_step")
    spoiled.reward[1:][stream.done[:-1]] = 1e6
    for wrapper in (RecordEpisodeStatistics(), NormalizeReward(), NormalizeReward(per_episode=True)):
        jax.tree.map(np.testing.assert_array_equal, play(wrapper, stream)[0], play(wrapper, spoiled)[0])


@kinds
def test_the_reward_of_the_reset_step_stays_zero_if_asked_to(kind):
    stream = example_stream("next_step")
    after_done = np.concatenate([np.zeros((1, NUM_ENVS), bool), stream.done[:-1]])
    for skip in (False, True):
        _, timesteps = play(TransformReward(affine, skip_reset_step=skip), stream, kind)
        reward = np.stack([timestep.reward for timestep in timesteps])
        assert after_done.sum() > 3 and (reward[after_done] == (0 if skip else -1)).all()
        np.testing.assert_allclose(reward[1:][~after_done[1:]], affine(stream.reward)[1:][~after_done[1:]])


@kinds
@autoresets
def test_observations_that_are_not_finite_leave_the_statistics_alone(kind, autoreset):
    broken = example_stream(autoreset)
    rows = np.random.default_rng(0).random((2, NUM_STEPS + 1, NUM_ENVS)) < 0.2
    for x, mask in zip((broken.obs, broken.final_obs), rows, strict=True):
        if x is not None:
            x[mask, 0] = np.nan
            x[mask & rows[::-1][0], 1] = np.inf
    wrapper, timesteps = play(NormalizeObservation(skip_nonfinite=True), broken, kind)
    expected = GymRunningMeanStd(shape=(2,))
    for t in range(NUM_STEPS + 1):
        seen = broken.obs[t]
        if autoreset == "same_step":
            seen = np.concatenate([seen, broken.final_obs[t][broken.done[t]]])
        seen = seen[np.isfinite(seen).all(1)]
        if len(seen):
            expected.update(seen.astype(np.float64))
        bad = ~np.isfinite(broken.obs[t]).all(1)
        assert np.isnan(timesteps[t].obs[bad]).all() and np.isfinite(timesteps[t].obs[~bad]).all()
    np.testing.assert_allclose(wrapper.stats.mean, expected.mean, rtol=1e-4)
    np.testing.assert_allclose(wrapper.stats.var, expected.var, rtol=1e-4)
    with np.errstate(invalid="ignore"):
        lost, _ = play(NormalizeObservation(), broken, kind)  # as Gymnasium's are, for good
    assert np.isnan(np.asarray(lost.stats.mean)).any()


def test_clipped_observations_stay_within():
    stream = example_stream("same_step")
    _, clipped = play(NormalizeObservation(clip=0.5), stream)
    _, free = play(NormalizeObservation(), stream)
    for clipped_step, free_step in zip(clipped, free, strict=True):
        np.testing.assert_array_equal(clipped_step.obs, np.clip(free_step.obs, -0.5, 0.5))
        np.testing.assert_array_equal(clipped_step.next_obs, np.clip(free_step.next_obs, -0.5, 0.5))
    assert NormalizeObservation(clip=0.5).observation_space(Box(0, 255, (2,), np.uint8)) == Box(-0.5, 0.5, (2,))


# ---------------------------------------------------------------- frozen statistics
@kinds
@pytest.mark.parametrize("wrapper", [NormalizeObservation(), NormalizeReward()], ids=lambda x: type(x).__name__)
def test_frozen_statistics_are_restored_and_stay(kind, wrapper):
    stream = example_stream("next_step")
    trained, _ = play(wrapper, stream, kind)
    frozen = type(wrapper)(trained.stats, training=False)
    after, timesteps = play(frozen, stream, kind)
    jax.tree.map(np.testing.assert_array_equal, after.stats, trained.stats)
    mean, std = (np.asarray(x) for x in (trained.stats.mean, trained.stats.std()))
    for t in range(1, NUM_STEPS + 1):
        if isinstance(wrapper, NormalizeObservation):
            np.testing.assert_allclose(timesteps[t].obs, (stream.obs[t] - mean) / std, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_allclose(timesteps[t].reward, stream.reward[t] / std, rtol=1e-5)
    with pytest.raises(ValueError, match="stats"):
        play(type(wrapper)(training=False), stream)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrapper", [NormalizeObservation, NormalizeReward])
@pytest.mark.parametrize("shape", [(3,), (1,)])
def test_statistics_of_other_shapes_are_refused(wrapper, shape, training):
    """They would be broadcast."""
    stats = RunningMeanStd.create(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=rf"the statistics are of .*s \[{shape[0]}\], one .* is \[2?\]: pass its own"):
        play(wrapper(stats, training=training), example_stream("next_step"))


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_wrappers_are_saved_and_restored(kind):
    """By msgpack, into wrappers that were reset: before, there is nothing to tell the types by."""
    stream, wrappers = example_stream("next_step"), Compose(all_wrappers())
    played, _ = play(wrappers, stream, kind)
    like, _ = wrappers.reset(stream.timestep(0, converter(kind)))
    restored = flax.serialization.from_bytes(like, flax.serialization.to_bytes(played))
    assert jax.tree.structure(restored) == jax.tree.structure(played)
    jax.tree.map(np.testing.assert_array_equal, restored, played)
    after, expected = (wrapper.recv(stream.timestep(1, converter(kind))) for wrapper in (restored, played))
    jax.tree.map(np.testing.assert_array_equal, after, expected)


@kinds
def test_a_reset_in_between_keeps_the_statistics_and_starts_new_episodes(kind):
    stream = example_stream("next_step")
    wrappers = Compose((RecordEpisodeStatistics(), NormalizeReward(), NormalizeObservation(), FrameStackObservation(2)))
    played, _ = play(wrappers, stream, kind)
    reset = jax.jit(Compose.reset) if kind == "jax" else Compose.reset
    again, timestep = reset(played, stream.timestep(0, converter(kind)))
    statistics, rewards, observations, frames = again.wrappers
    assert statistics.episode_count == played.wrappers[0].episode_count == stream.done.sum()
    jax.tree.map(np.testing.assert_array_equal, rewards.stats, played.wrappers[1].stats)
    np.testing.assert_allclose(observations.stats.count, (NUM_STEPS + 2) * NUM_ENVS, rtol=1e-5)
    for x in (statistics.returns, statistics.lengths, statistics.reset_due, rewards.returns, rewards.reset_due):
        assert not np.asarray(x).any()
    assert stream.done[-1].any() and not np.asarray(frames.reset_due).any()
    np.testing.assert_array_equal(timestep.obs[:, 0], timestep.obs[:, 1])


# ---------------------------------------------------------------- in JAX
def all_wrappers(reward_func=affine):
    return (
        RecordEpisodeStatistics(),
        TransformReward(reward_func, skip_reset_step=True),
        NormalizeReward(),
        TransformObservation(affine),
        NormalizeObservation(clip=5.0, skip_nonfinite=True),
        FrameStackObservation(3),
        RescaleAction.create(SPACES["bounded"]),
        ClipAction(-1.0, 1.0),
    )


@autoresets
def test_types_stay_so_that_scan_can_carry_them_and_nothing_compiles_twice(autoreset):
    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    stream = example_stream(autoreset)
    first, second = (stream.timestep(t, jnp.asarray) for t in (0, 1))
    wrapper, from_reset = jax.jit(Compose.reset)(Compose(all_wrappers()), first)
    recv = jax.jit(lambda wrapper, timestep: wrapper.recv(timestep))
    after_recv, from_recv = recv(wrapper, second)
    recv(after_recv, second)
    assert recv._cache_size() == 1
    after_reset, _ = jax.jit(Compose.reset)(after_recv, first)
    after_send, _ = jax.jit(Compose.send)(after_recv, jnp.zeros((NUM_ENVS, 3)))
    assert types(wrapper) == types(after_recv) == types(after_reset)
    assert jax.tree.structure(after_send) == jax.tree.structure(after_recv)
    assert types(from_reset) == types(from_recv)
    assert from_recv.obs.shape == (NUM_ENVS, 3, 2)


class ReplayBackend(Backend):
    """A stream as a back end, whose state is the row."""

    def __init__(self, stream):
        self.stream = jax.tree.map(jnp.asarray, stream.timestep(slice(None)))
        self.num_envs, self.autoreset = NUM_ENVS, stream.autoreset
        self.single_observation_space, self.single_action_space = Box(-np.inf, np.inf, (2,)), SPACES["bounded"]

    def reset(self, state, seed):
        return jnp.array(0), jax.tree.map(lambda x: x[0], self.stream)

    def step(self, state, action):
        return state + 1, jax.tree.map(lambda x: x[state + 1], self.stream)


@autoresets
def test_a_vector_env_carries_its_wrappers_through_scan(autoreset):
    stream = example_stream(autoreset)
    env = VectorEnv(ReplayBackend(stream), None).with_wrappers(*all_wrappers())
    env, first = jax.jit(lambda env: env.reset())(env)
    actions = jnp.full((NUM_STEPS, NUM_ENVS, 3), 2.0)
    env, rest = jax.jit(lambda env: jax.lax.scan(lambda env, action: env.step(action), env, actions))(env)
    _, expected = play(Compose(all_wrappers()), stream)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, first, expected[0])
    jax.tree.map(close, rest, jax.tree.map(lambda *x: np.stack(x), *expected[1:]))
    assert env.single_observation_space == Box(-5, 5, (3, 2))
    assert env.single_action_space == Box(-np.inf, np.inf, (3,))


@autoresets
def test_lanes_under_vmap_are_those_alone(autoreset):
    terminated, truncated = np.random.default_rng(0).random((2, 2, NUM_STEPS + 1, NUM_ENVS)) < 0.3
    streams = [make_stream(autoreset, terminated[i], truncated[i], seed=i) for i in (0, 1)]
    wrapper = Compose(all_wrappers())
    inputs = [(stream.timestep(0), stream.timestep(slice(1, None))) for stream in streams]
    lanes = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
    together = jax.vmap(partial(scan, wrapper))(*lanes)
    for i, one in enumerate(inputs):
        alone = scan(wrapper, *jax.tree.map(jnp.asarray, one))
        lane = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), lane, alone)


def check_statistics_of_devices(axis, autoreset):
    """Each device has one of the environments."""
    stream = example_stream(autoreset)
    wrapper = Compose((NormalizeReward(), NormalizeObservation()))
    split = Compose((NormalizeReward(axis_name="devices"), NormalizeObservation(axis_name="devices")))
    together = jax.tree.map(jnp.asarray, (stream.timestep(0), stream.timestep(slice(1, None))))
    expected, _, expected_steps = scan(wrapper, *together)
    first, rest = together
    if axis == "vmap":
        rest = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, None], rest)
        one = jax.vmap(partial(scan, split), axis_name="devices")
        played, _, timesteps = one(jax.tree.map(lambda x: x[:, None], first), rest)
        stats = jax.tree.map(lambda x: x[0], [x.stats for x in played.wrappers])
        obs = timesteps.obs[:, :, 0].swapaxes(0, 1)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), [x.stats for x in played.wrappers])
    else:
        mesh = Mesh(jax.devices(), ("devices",))

        def one(first, rest):
            played, _, timesteps = scan(split, first, rest)
            return [wrapper.stats for wrapper in played.wrappers], timesteps.obs

        specs = (PartitionSpec("devices"), PartitionSpec(None, "devices"))
        stats, obs = jax.jit(
            jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), PartitionSpec(None, "devices")))
        )(first, rest)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, stats, [wrapper.stats for wrapper in expected.wrappers])
    close(obs, expected_steps.obs)


@autoresets
def test_statistics_of_lanes_are_those_of_all_environments(autoreset):
    check_statistics_of_devices("vmap", autoreset)


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 3)
from test_envs_wrappers import MODES, NUM_ENVS, check_statistics_of_devices
assert len(jax.devices()) == NUM_ENVS
for autoreset in MODES:
    check_statistics_of_devices("shard_map", autoreset)
"""


def test_statistics_of_devices_are_those_of_all_environments():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    result = subprocess.run([sys.executable, "-c", DEVICES], env=environ, timeout=300, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- the script's
@quick
@given(parts=parts)
def test_the_scripts_wrappers_do_the_same(parts):
    """Where they mean the same: the script has next-step autoreset, and keeps each environment's last episode."""
    stream = make_stream("next_step", *parts)
    stream.obs[parts[1][: NUM_STEPS + 1]] *= np.float32([1, np.nan])
    scripts = Compose((ppo.VectorEnvEpisodeStats.create(NUM_ENVS), ppo.VectorEnvNormObs(ppo.RunningMeanStd.create(2))))
    ours = Compose((RecordEpisodeStatistics(), NormalizeObservation(clip=10.0, skip_nonfinite=True)))
    scripts, expected = play(scripts, stream, "jax")
    ours, timesteps = play(ours, stream, "jax")
    last_return = last_length = np.full(NUM_ENVS, np.nan)
    for t, (timestep, theirs) in enumerate(zip(timesteps, expected, strict=True)):
        np.testing.assert_allclose(timestep.obs, theirs.obs, rtol=1e-3, atol=1e-3)
        if t > 0:
            episode, ended = timestep.info["episode"], timestep.info["_episode"]
            last_return = np.where(ended, episode["r"], last_return)
            last_length = np.where(ended, episode["l"], last_length)
            np.testing.assert_array_equal(last_return, theirs.info["episodic_return"])
            np.testing.assert_array_equal(last_length, theirs.info["episodic_length"])
    # The script's 1 - share loses digits in the first update: 4e-4 of the variance of 3 observations 50 +- 0.01.
    close = partial(np.testing.assert_allclose, rtol=1e-3)
    for name in ("mean", "var", "count"):
        close(getattr(ours.wrappers[1].stats, name), getattr(scripts.wrappers[1].stats, name))
    close(ours.wrappers[1].stats.std(), scripts.wrappers[1].stats.std)


@quick
@given(action=actions, nan=hnp.arrays(bool, (NUM_ENVS, 3)))
def test_the_scripts_actions_are_the_same(action, nan):
    space = SPACES["bounded"]
    action = jnp.asarray(np.where(nan, np.nan, action / 50).astype(np.float32))
    ours = Compose((RescaleAction.create(space), ClipAction(-1.0, 1.0, replace_nan=True)))
    scripts = ppo.VectorEnvClipAct(jnp.asarray(space.low), jnp.asarray(space.high))
    np.testing.assert_allclose(ours.send(action)[1], scripts.send(action)[1], rtol=1e-5, atol=1e-6)


def test_the_scripts_running_statistics_are_the_same():
    rng = np.random.default_rng(0)
    ours, scripts = RunningMeanStd.create(jnp.zeros(2)), ppo.RunningMeanStd.create(2)
    for scale in (1.0, 100.0, 0.1):
        batch, mask = rng.normal(scale, scale, (50, 2)).astype(np.float32), rng.random(50) < 0.7
        ours, scripts = ours.update(batch, mask), scripts.update(batch, mask)
        for name in ("mean", "var", "count"):
            np.testing.assert_allclose(getattr(ours, name), getattr(scripts, name), rtol=1e-5)
    empty = ours.update(np.full((50, 2), np.nan, np.float32), np.zeros(50, bool))
    jax.tree.map(np.testing.assert_array_equal, empty, ours)
    np.testing.assert_allclose(ours.update(batch).count, ours.count + 50)


# ---------------------------------------------------------------- composition and other arrays
@dataclass
class Tagged:
    """A wrapper's place in a list, so that the order of calls shows."""

    name: str
    calls: list

    def reset(self, timestep):
        self.calls.append(f"reset {self.name}")
        return self, timestep

    def send(self, action):
        self.calls.append(f"send {self.name}")
        return self, action

    def recv(self, timestep):
        self.calls.append(f"recv {self.name}")
        return self, timestep


def test_observations_travel_outwards_and_actions_inwards():
    calls = []
    inner, outer = Tagged("inner", calls), Tagged("outer", calls)
    wrapper, _ = Compose((inner, outer)).reset(None)
    wrapper, _ = wrapper.send(None)
    wrapper, _ = wrapper.recv(None)
    assert calls == ["reset inner", "reset outer", "send outer", "send inner", "recv inner", "recv outer"]
    assert wrapper == Compose((inner, outer))


def test_spaces_outside_of_the_wrappers():
    image = Box(0, 255, (8, 6, 3), np.uint8)
    wrapper = Compose((GrayscaleObservation(), ResizeObservation((4, 3)), FrameStackObservation(2)))
    assert wrapper.observation_space(image) == Box(0, 255, (2, 4, 3), np.uint8)
    assert Compose((GrayscaleObservation(keep_dim=True),)).observation_space(image).shape == (8, 6, 1)
    assert Compose((NormalizeObservation(),)).observation_space(Box(0, 1, (2,))) == Box(-np.inf, np.inf, (2,))
    doubled = TransformObservation(affine, new_space=lambda space: Box(2 * space.low - 1, 2 * space.high - 1))
    assert doubled.observation_space(Box(0, 1, (2,))) == Box(-1, 1, (2,))
    assert TransformObservation(affine).observation_space(image) == image
    actions = Compose((RescaleAction.create(SPACES["bounded"], -3.0, 3.0), ClipAction(-3.0, 3.0)))
    assert actions.action_space(SPACES["bounded"]) == Box(-np.inf, np.inf, (3,))


class Foreign(np.lib.mixins.NDArrayOperatorsMixin):
    """Arrays of a class that array-api-compat doesn't know, with a NumPy array inside."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.ndim, self.dtype = self.array.shape, self.array.ndim, self.array.dtype

    def __getitem__(self, index):
        return Foreign(self.array[index])

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return Foreign(getattr(ufunc, method)(*(opened(x) for x in inputs), **kwargs))


def opened(x):
    return [opened(y) for y in x] if isinstance(x, list) else getattr(x, "array", x)


class ForeignFunctions:
    """NumPy's functions, of Foreign arrays."""

    def __getattr__(self, name):
        attribute = getattr(np, name)
        if isinstance(attribute, type):
            return attribute
        return lambda *args, device=None, **kwargs: Foreign(attribute(*map(opened, args), **kwargs))


def test_another_class_of_arrays_can_be_registered():
    stream = example_stream("same_step")
    wrapper = Compose(all_wrappers())
    with pytest.raises(TypeError, match="array_namespace.register"):
        wrapper.reset(stream.timestep(0, Foreign))
    array_namespace.register(Foreign, lambda x: ForeignFunctions())
    _, expected = play(wrapper, stream)
    wrapper, _ = wrapper.reset(stream.timestep(0, Foreign))
    for t in range(1, NUM_STEPS + 1):
        wrapper, timestep = wrapper.recv(stream.timestep(t, Foreign))
        assert all(isinstance(x, Foreign) for x in jax.tree.leaves(timestep))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.array, y), timestep, expected[t])
    action = np.float32([[-3.0, 0.1, 3.0]])
    np.testing.assert_array_equal(wrapper.send(Foreign(action))[1].array, Compose(all_wrappers()).send(action)[1])


def test_what_can_not_be_done_is_an_error_of_one_line():
    stream = example_stream("next_step")
    timestep = stream.timestep(0)
    with pytest.raises(TypeError, match="flatten dict observations"):
        NormalizeObservation().reset(timestep.replace(obs={"a": timestep.obs}))
    with pytest.raises(ValueError, match="stats_key"):
        play(Compose((RecordEpisodeStatistics(), RecordEpisodeStatistics())), stream)
    play(Compose((RecordEpisodeStatistics(), RecordEpisodeStatistics(stats_key="again"))), stream)
    with pytest.raises(ValueError, match="padding_type"):
        play(FrameStackObservation(2, padding_type="last"), stream)
    dict_obs = TransformObservation(lambda obs: obs["a"], new_space=lambda space: space["a"])
    assert dict_obs.reset(timestep.replace(obs={"a": timestep.obs}))[1].obs is timestep.obs
    assert dict_obs.observation_space(Dict(a=Box(0, 1))) == Box(0, 1)


@pytest.mark.parametrize(
    "wrapper",
    [
        RecordEpisodeStatistics(),
        NormalizeReward(),
        NormalizeReward(RunningMeanStd.create(np.float32(0)), training=False),
        TransformReward(np.sign, skip_reset_step=True),
        FrameStackObservation(2),
        Compose((FrameStackObservation(2),)),
    ],
    ids=lambda wrapper: type(wrapper).__name__,
)
def test_a_step_before_the_first_reset_is_refused(wrapper):
    with pytest.raises(ValueError, match="has seen no reset yet: hand it the first time step by `reset`"):
        wrapper.recv(example_stream("next_step").timestep(1))


# ---------------------------------------------------------------- the page
def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[1] / "docs/envs/wrappers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, "docs/envs/wrappers.md", "exec"), names)
    assert len(blocks) >= 3 and issubclass(names["ActionCost"], EnvWrapper)

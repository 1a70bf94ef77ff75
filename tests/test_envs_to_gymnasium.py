"""Functional environments as Gymnasium's own, and from there to torch, NumPy and TensorFlow."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from envs_toys import ACTIONS, TABLES, CountEnv, CountJaxEnv
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from cleanrl_utils.envs import envpool_xla, gymnasium_callback, jax_envs
from cleanrl_utils.envs.record_html import RecordHTMLVector
from cleanrl_utils.envs.to_gymnasium import GymnasiumEnv, GymnasiumVectorEnv, to_tensorflow
from cleanrl_utils.envs.wrappers import NormalizeObservation, RecordEpisodeStatistics

pytestmark = pytest.mark.usefixtures("compile_fast")
autoresets = pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
no_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
no_tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
EXAMPLES = Path(__file__).parents[1] / "docs/envs/examples"


class DrawnJaxEnv(CountJaxEnv):
    """Starts at random, and can be seen."""

    def reset(self, key):
        steps, obs = super().reset(key)
        return steps, obs.at[1].set(jax.random.uniform(key))

    def render(self, state):
        return np.full((4, 6, 3), int(state), np.uint8)

    def close(self):
        self.is_closed = True


def make_envs(autoreset="next_step", length=3, ends="terminated", env=DrawnJaxEnv, num_envs=2, **kwargs):
    return GymnasiumVectorEnv(jax_envs.make(env(length, ends), num_envs, autoreset=autoreset), **kwargs)


def steps(envs, actions=ACTIONS):
    """What the steps returned, as NumPy's arrays, leaves [num_steps, num_envs, ...]."""
    return jax.tree.map(lambda *x: np.stack([np.asarray(each) for each in x]), *[envs.step(a) for a in actions])


@pytest.mark.parametrize("length, ends, autoreset", TABLES)
def test_vector_env_is_the_table(length, ends, autoreset):
    envs = make_envs(autoreset, length, ends, CountJaxEnv)
    assert isinstance(envs, gym.vector.VectorEnv)
    assert envs.metadata["autoreset_mode"] == getattr(AutoresetMode, autoreset.upper())
    obs, info = envs.reset(seed=1)
    np.testing.assert_array_equal(obs, np.zeros((2, 2)))
    assert info == {}
    table = TABLES[length, ends, autoreset]
    *values, info = steps(envs)
    for name, value in zip(("obs", "reward", "terminated", "truncated"), values, strict=True):
        np.testing.assert_array_equal(value, np.swapaxes(np.array(getattr(table, name), np.float32), 0, 1))
    if autoreset == "same_step":
        np.testing.assert_array_equal(info["final_obs"], np.swapaxes(table.final_obs(), 0, 1))
        np.testing.assert_array_equal(info["_final_obs"], values[2] | values[3])
    assert envs._step._cache_size() == 1


@autoresets
def test_vector_env_is_like_gymnasiums(autoreset):
    """Step by step, with Gymnasium's vectorisation of the same environment, and under a wrapper of Gymnasium's."""
    mode = getattr(AutoresetMode, autoreset.upper())
    theirs = SyncVectorEnv([lambda: CountEnv(3, "terminated")] * 2, autoreset_mode=mode)
    ours = gym.wrappers.vector.JaxToNumpy(make_envs(autoreset, env=CountJaxEnv))
    assert (ours.num_envs, ours.action_space.shape) == (theirs.num_envs, theirs.action_space.shape)
    ours, theirs = (gym.wrappers.vector.RecordEpisodeStatistics(envs) for envs in (ours, theirs))
    ours.reset(seed=1), theirs.reset(seed=1)
    for action in ACTIONS:
        *values, info = ours.step(action)
        *their_values, their_info = theirs.step(action)
        for value, their_value in zip(values, their_values, strict=True):
            np.testing.assert_array_equal(value, their_value)
        for i in np.flatnonzero(their_info.get("_final_obs", [])):
            assert info["_final_obs"][i]
            np.testing.assert_array_equal(info["final_obs"][i], their_info["final_obs"][i])
    assert list(ours.return_queue) == list(theirs.return_queue) != []


def test_arrays_stay_on_the_device():
    envs = make_envs("same_step")
    obs, _ = envs.reset(seed=1)
    returned = obs, *envs.step(jnp.ones(2))
    assert all(isinstance(x, jax.Array) and x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(returned))
    assert envs.metadata["jax"]
    envs.step(envs.action_space.sample())
    assert obs in envs.observation_space


def test_seeds():
    envs = make_envs()
    first, second = (np.asarray(envs.reset(seed=5)[0]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    went_on, _ = envs.reset()
    assert not np.isin(went_on[:, 1], first[:, 1]).any()
    assert not np.isin(envs.reset(seed=6)[0][:, 1], first[:, 1]).any()
    np.testing.assert_array_equal(make_envs().reset()[0], make_envs().reset(seed=0)[0])  # that of jax_envs.make


def test_wrappers_come_along():
    env = jax_envs.make(CountJaxEnv(3, "terminated"), 2)
    envs = GymnasiumVectorEnv(env.with_wrappers(RecordEpisodeStatistics(), NormalizeObservation(clip=2.0)))
    envs.reset(seed=1)
    obs, *_, info = steps(envs)
    assert info["episode"]["r"][info["_episode"]].tolist() == [29, 66, 75, 78]
    assert np.abs(obs).max() <= 2 and obs.std() > 0.1
    envs.reset(seed=1)  # statistics and compiled functions stay
    envs.step(ACTIONS[0])
    assert envs._step._cache_size() == 1


def test_render_and_close():
    envs = make_envs(render_mode="rgb_array")
    with pytest.raises(ValueError, match="no episodes yet: reset is next"):
        envs.render()
    envs.reset(seed=1)
    steps(envs, ACTIONS[:2])
    frames = envs.render()
    assert [frame.shape for frame in frames] == [(4, 6, 3)] * 2 and [frame.max() for frame in frames] == [2, 2]
    assert make_envs().render() is None
    envs.close(), envs.close()
    assert envs.closed and envs.env.backend.env.is_closed
    with pytest.raises(ValueError, match="render_mode='human': pass 'rgb_array' or None"):
        make_envs(render_mode="human")
    assert make_envs(env=CountJaxEnv).metadata["render_modes"] == []
    with pytest.raises(ValueError, match="render_mode='rgb_array': pass None, or environments that draw"):
        make_envs(env=CountJaxEnv, render_mode="rgb_array")


class DrawnEnv(CountEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def render(self):
        return np.full((4, 6, 3), self.steps, np.uint8)


def gymnasium_envs(kind=DrawnEnv, render_mode="rgb_array"):
    envs = SyncVectorEnv([lambda: kind(3, render_mode=render_mode)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    return gymnasium_callback.make(envs)


def test_a_recorder_draws_the_environment_that_it_records(tmp_path):
    envs = make_envs(render_mode="rgb_array")
    drawn = []
    envs.render_one = lambda i: drawn.append(i) or np.zeros((4, 6, 3), np.uint8)
    envs = RecordHTMLVector(envs, str(tmp_path), lambda i: True)
    envs.reset(seed=1)
    steps(envs, ACTIONS[:2])
    envs.close()
    assert drawn == [0, 0, 0] and len(list(tmp_path.iterdir())) == 1


def test_other_back_ends_are_seen():
    envs = GymnasiumVectorEnv(gymnasium_envs(), render_mode="rgb_array")
    envs.reset(seed=1)
    steps(envs, ACTIONS[:1])
    assert [frame.max() for frame in envs.render()] == [1, 1] and envs.metadata["render_fps"] == 12
    envs = envpool_xla.make("CartPole-v1", 2, seed=1, render_mode="rgb_array")
    envs = GymnasiumVectorEnv(envs, render_mode="rgb_array")
    with pytest.raises(ValueError, match="EnvPool takes its seed when it is made"):
        envs.reset(seed=1)
    envs.reset()
    first, second = envs.render()
    assert first.shape == second.shape == (400, 600, 3) and (first != second).any()
    for env in (gymnasium_envs(CountEnv, None), envpool_xla.make("CartPole-v1", 2)):
        with pytest.raises(ValueError, match="pass None, or environments that draw"):
            GymnasiumVectorEnv(env, render_mode="rgb_array")


def test_a_reset_of_some_is_refused():
    with pytest.raises(ValueError, match="reset themselves, and `reset` all of them: leave reset_mask out"):
        make_envs().reset(options={"reset_mask": np.array([True, False])})


def test_other_back_ends_too():
    envs = [lambda: CountEnv(3, "terminated")] * 2
    env = gymnasium_callback.make(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.NEXT_STEP))
    envs = GymnasiumVectorEnv(env)
    envs.reset(seed=1)
    table = TABLES[3, "terminated", "next_step"]
    np.testing.assert_array_equal(steps(envs)[1], np.swapaxes(table.reward, 0, 1))
    envs.close()


# ---------------------------------------------------------------- a single environment
def check(env):
    """Gymnasium's checker, whose warnings are errors but for those about what is so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for so in ("minimum value is -infinity", "maximum value is infinity", "recommend using a symmetric", "a spec"):
            warnings.filterwarnings("ignore", f".*{so}.*")
        check_env(env)


@autoresets
def test_env_passes_gymnasiums_checker(autoreset):
    env = jax_envs.make(DrawnJaxEnv(3, "truncated"), 1, autoreset=autoreset)
    check(GymnasiumEnv(env, render_mode="rgb_array"))
    check(GymnasiumEnv(env.with_wrappers(RecordEpisodeStatistics())))


@pytest.mark.parametrize("env_id", ["phys2d/CartPole-v1", "phys2d/Pendulum-v0"])
def test_libraries_pass_gymnasiums_checker(env_id):
    check(GymnasiumEnv(jax_envs.make(jax_envs.FunctionalEnv(env_id), 1)))


@autoresets
def test_env_ends_with_its_last_observation(autoreset):
    env = GymnasiumEnv(jax_envs.make(CountJaxEnv(2, "terminated"), 1, autoreset=autoreset))
    with pytest.raises(RuntimeError, match="reset is next"):
        env.step(1.0)
    obs, info = env.reset(seed=1)
    assert obs.shape == (2,) and isinstance(obs, jax.Array)
    env.step(np.float32(5))
    obs, reward, terminated, truncated, info = env.step(np.float32(6))
    assert (obs.tolist(), reward, terminated, truncated, info) == ([2, 6], 26.0, True, False, {})
    with pytest.raises(RuntimeError, match="it has ended: reset is next"):
        env.step(np.float32(1))
    assert env.reset()[0].tolist() == [0, 0]
    assert env.step(np.float32(5))[0].tolist() == [1, 5]


def test_env_is_one():
    with pytest.raises(ValueError, match="these are 2 environments: make them with num_envs=1"):
        GymnasiumEnv(jax_envs.make(CountJaxEnv(2, "terminated"), 2))


# ---------------------------------------------------------------- to other libraries
class Keep(gym.vector.VectorWrapper):
    """Remembers what its environments returned."""

    def step(self, actions):
        self.returned = super().step(actions)
        return self.returned


def pointers(tree) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@no_torch
def test_torch_shares_the_memory():
    import torch

    envs = Keep(make_envs("same_step"))
    to_torch = gym.wrappers.vector.JaxToTorch(envs)
    obs, _ = to_torch.reset(seed=1)
    returned = to_torch.step(torch.ones(2))
    tensors = jax.tree.leaves(returned)
    assert len(tensors) == 6 and all(isinstance(x, torch.Tensor) for x in tensors)
    assert [x.data_ptr() for x in tensors] == pointers(envs.returned)
    before = [x.clone() for x in tensors]
    to_torch.step(torch.tensor([2.0, -2.0]))  # later steps do not take the memory
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    env = gym.wrappers.JaxToTorch(GymnasiumEnv(jax_envs.make(CountJaxEnv(3, "terminated"), 1)))
    assert env.reset(seed=1)[0].tolist() == [0, 0]
    assert env.step(torch.tensor(4.0))[:3] == (pytest.approx(torch.tensor([1.0, 4.0])), 14.0, False)


def test_numpy_shares_the_memory():
    envs = Keep(make_envs("same_step"))
    to_numpy = gym.wrappers.vector.JaxToNumpy(envs)
    to_numpy.reset(seed=1)
    arrays = jax.tree.leaves(to_numpy.step(ACTIONS[0]))
    assert [x.ctypes.data for x in arrays] == pointers(envs.returned)


@no_tensorflow
def test_tensorflow_shares_the_memory():
    envs = make_envs("same_step")
    envs.reset(seed=1)
    returned = envs.step(ACTIONS[0])
    tensors = to_tensorflow(returned)
    jax.tree.map(lambda tensor, x: np.testing.assert_array_equal(tensor.numpy(), x), tensors, returned)
    assert [x.__array__().ctypes.data for x in jax.tree.leaves(tensors)] == pointers(returned)


# ---------------------------------------------------------------- Brax, and the examples of the docs
def test_brax_passes_gymnasiums_checker():
    check(GymnasiumEnv(jax_envs.make(jax_envs.BraxEnv("fast"), 1)))


def test_brax_is_seen():
    brax = jax_envs.BraxEnv("inverted_pendulum", backend="spring")
    env = GymnasiumEnv(jax_envs.make(brax, 1), render_mode="rgb_array")
    env.reset(seed=1)
    first = env.render()
    assert first.shape == (480, 640, 3) and first.dtype == np.uint8 and first.std() > 10
    env.reset(seed=2)
    assert (env.render() != first).any()
    assert env.metadata["render_fps"] == 50
    env.close()
    assert brax.renderer is None


def run_example(name: str) -> str:
    """What it prints, in a process of its own, as users run it: torch's import can crash after MuJoCo has drawn."""
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_brax_to_gymnasium():
    assert run_example("brax_to_gymnasium").startswith("the last 100 episodes took ")


@no_torch
def test_example_brax_to_torch():
    assert "of 1024 pendulums fell in the last step, on " in run_example("brax_to_torch")


@no_torch
def test_example_of_training_with_torch_learns():
    lines = run_example("brax_torch_ppo").splitlines()
    assert lines[-1].startswith("steps=10240 ")
    returns = [float(line.rpartition("=")[2]) for line in lines]
    assert returns[0] < 25 and np.mean(returns[-3:]) > 60

"""The script on Gymnasium's environments: they are stepped as Gymnasium itself would, however they are called."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from small_runs import SMALL, assert_refused

import cleanrl.ppo_continuous_action_gymnasium_jax_scan as ppo
from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate, load_agent

pytestmark = pytest.mark.usefixtures("compile_fast", "in_folder")

NAME = "ppo_continuous_action_gymnasium_jax_scan"
ARGS = ppo.Args(env_id="Counting-v0", **SMALL)


class Counting(gym.Env):
    """Observes step and last action; rewards 1; 5 steps long, truncated after 3 if its last action was above 0."""

    observation_space = gym.spaces.Dict(
        {"step": gym.spaces.Box(0, 10, (1,), np.float64), "action": gym.spaces.Box(-9, 9, (2,), np.float32)}
    )
    action_space = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 8.0], np.float32))

    def __init__(self, raises_at=None, render_mode=None):
        self.raises_at, self.render_mode = raises_at, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return {"step": np.array([0.0]), "action": self.np_random.normal(size=2).astype(np.float32)}, {}

    def step(self, action):
        assert action.shape == (2,) and action.dtype == np.float32 and self.action_space.contains(action)
        self.count += 1
        if self.count == self.raises_at:
            raise ArithmeticError("the world ended\n  with a bang\nor two")
        is_short = self.count == 3 and action[0] > 0
        return {"step": np.array([float(self.count)]), "action": action}, 1.0, self.count == 5, is_short, {}


class Plain(gym.Env):
    """As short as Gymnasium allows: no arguments, no pictures. Ends after a step."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return action, 1.0, True, False, {}


class Unready(Plain):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no licence\nfor it")


class Pair(Plain):
    observation_space = gym.spaces.Tuple([Plain.observation_space] * 2)


gym.register("Counting-v0", Counting)
gym.register("Raising-v0", partial(Counting, raises_at=2))
for toy in (Plain, Unready, Pair):
    gym.register(f"{toy.__name__}-v0", toy)


def rolled_out(*lanes):
    """A rollout of new agents, and the seeds' environments stepped by Gymnasium with its actions."""
    state = ppo.init_lanes(list(lanes), ppo.make_env(*lanes))
    args = replace(lanes[0], num_seeds=len(lanes))
    _, batch = ppo.parallel(partial(ppo.rollout, args), args)(state)
    return jax.tree.map(lambda x: np.asarray(x[0]), batch)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rollout_is_what_gymnasium_steps(mode):
    args = replace(
        ARGS, vectorization_mode=mode, env_id="Pendulum-v1" if mode == "async" else "Counting-v0", norm_obs=False
    )
    batch = jax.tree.map(lambda x: x[0], rolled_out(args))
    seeds = [int(x) for x in np.random.SeedSequence(args.seed, spawn_key=(0,)).generate_state(4)]
    envs = gym.vector.SyncVectorEnv([partial(gym.make, args.env_id)] * 4)
    obs, _ = envs.reset(seed=seeds)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    valid = np.ones(4)
    for t in range(args.num_steps):
        flat = np.concatenate([obs["action"], obs["step"]], axis=1) if isinstance(obs, dict) else obs
        np.testing.assert_allclose(batch.obs[t], flat, rtol=1e-6)
        action = low + (np.clip(batch.action[t], -1, 1) + 1) / 2 * (high - low)
        obs, reward, terminated, truncated, _ = envs.step(action.astype(np.float32))
        np.testing.assert_allclose(batch.reward[t], reward, rtol=1e-5)
        np.testing.assert_array_equal(batch.terminated[t], terminated)
        np.testing.assert_array_equal(batch.truncated[t], truncated)
        np.testing.assert_array_equal(batch.valid[t], valid)
        valid = 1.0 - (terminated | truncated)
    if mode == "sync":
        assert batch.truncated.any() and batch.terminated.any() and not batch.valid.all()


def test_lanes_are_what_each_would_be_alone():
    together = rolled_out(replace(ARGS, seed=1), replace(ARGS, seed=2))
    for i in range(2):
        alone = rolled_out(replace(ARGS, seed=i + 1))
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y[0], rtol=1e-5, atol=1e-6), together, alone)


def test_later_resets_go_on_with_the_streams_and_evaluation_has_its_own():
    env = ppo.make_env(ARGS)
    first, second = env.reset_fn(), env.reset_fn()
    np.testing.assert_array_equal(first, ppo.make_env(ARGS).reset_fn())
    evaluated, resumed = ppo.make_env(ARGS, evaluation=True).reset_fn(), ppo.make_env(ARGS, iteration=3).reset_fn()
    noise = np.concatenate([x[..., :2].ravel() for x in (first, second, evaluated, resumed)])
    assert len(set(noise.tolist())) == noise.size


def test_a_run_can_be_watched_and_gone_on_with(capfd):
    ppo.main(ARGS)
    (folder,) = Path("runs").iterdir()
    model_path = str(folder / f"{NAME}.cleanrl_model")
    returns, lengths = evaluate(model_path, ppo)
    assert f"return {returns.mean():.1f} ± {returns.std():.1f}" in capfd.readouterr().out
    assert set(lengths) <= {3, 5} and (returns == lengths).all()
    env, agent = load_agent(model_path, ppo)
    assert env.wrappers[1].stats.count == pytest.approx(3 * 64 + 4, abs=0.01)

    ppo.main(ppo.parse_args(["--resume", str(folder), "--total-timesteps", str(5 * 64), "--no-progress"]))
    env, agent = load_agent(model_path, ppo)
    assert env.wrappers[1].stats.count == pytest.approx(5 * 64 + 8, abs=0.01)  # a second start, with new episodes


@pytest.mark.parametrize(
    "env_id, line",
    [
        ("Raising-v0", "error: the training failed: ArithmeticError: the world ended with a bang or two"),
        ("Unready-v0", "error: the environments can't be reset: RuntimeError: no licence for it"),
    ],
)
def test_an_environment_that_raises_ends_the_training_with_a_line(env_id, line, capfd):
    with pytest.raises(SystemExit) as ended:
        ppo.main(replace(ARGS, env_id=env_id))
    assert (ended.value.code, capfd.readouterr().err.splitlines()[-1]) == (1, line)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"env_id": "Hoper-v5"}, "Did you mean: `Hopper`"),
        ({"env_id": "Pendulum"}, "give Pendulum-v1"),
        ({"env_id": "Hopper-v3"}, "Hopper-v3"),
        ({"env_id": "Pair-v0"}, "returns Tuple(Box(-1.0, 1.0, (1,), float32), "),
        ({"env_id": "no_such_module:Env-v0"}, "No module named 'no_such_module'"),
        ({"env_id": "CartPole-v1"}, "needs a Box, and cleanrl/ppo_envpool_xla_jax_scan.py serves EnvPool's"),
        ({"env_id": "CarRacing-v3"}, "CarRacing-v3"),
        ({"num_devices": 2}, "--num-processes 2"),
        ({"num_envs": 3}, "--num-minibatches"),
    ],
)
def test_bad_input_is_one_line(changes, words, capfd):
    changes = {"env_id": "Pendulum-v1", "num_minibatches": 32, "num_envs": 4, **changes}
    assert_refused(lambda: ppo.main(replace(ARGS, **changes)), capfd, words)


def test_ctrl_c_on_a_terminal_ends_a_run_with_processes_orderly(tmp_path):
    """All processes get the signal there; the environments' leave it to the training."""
    flags = (
        "--env-id Pendulum-v1 --vectorization-mode async --num-envs 4 --num-minibatches 4 --total-timesteps 100000000"
    )
    process = subprocess.Popen(
        [sys.executable, ppo.__file__, *flags.split()],
        cwd=tmp_path,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        first_line = process.stderr.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 4
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in first_line + err
    assert list(tmp_path.rglob("*.cleanrl_model"))
    deadline = time.monotonic() + 30
    while any(worker.is_running() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(worker.is_running() for worker in workers)


def test_an_environment_without_pictures_is_trained_and_evaluated(capfd):
    pytest.importorskip("imageio_ffmpeg")
    ppo.main(replace(ARGS, env_id="Plain-v0", capture_video=True))
    out, err = capfd.readouterr()
    assert err == "no video: the environment has no render mode rgb_array\n"
    assert "evaluation  return 1.0 ± 0.0, length 1 " in out


def test_environments_are_closed_after_an_evaluation(monkeypatch):
    made = []
    make_env = ppo.make_env
    monkeypatch.setattr(ppo, "make_env", lambda *lanes, **more: made.append(make_env(*lanes, **more)) or made[-1])
    ppo.main(ARGS)
    (model_path,) = map(str, Path("runs").rglob("*.cleanrl_model"))
    evaluate(model_path, ppo)
    assert [env.envs.closed for env in made] == [True] * 3  # the training's, its evaluation's, and the later one's


def test_a_signal_while_the_processes_start_is_not_lost():
    received = []
    handler = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with ppo.for_worker_processes():
            signal.raise_signal(signal.SIGTERM)
            assert not received
        assert received
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_the_video_is_of_the_first_environment(monkeypatch):
    class Painted(Counting):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

        def render(self):
            return np.full((4, 6, 3), self.count, np.uint8)

    gym.register("Painted-v0", Painted)
    env = ppo.make_env(replace(ARGS, env_id="Painted-v0", capture_video=True), evaluation=True)
    env, _ = env.reset()
    env, _ = env.step(jnp.zeros((2, 2)))
    np.testing.assert_array_equal(env.render(), np.full((4, 6, 3), 1))


KEEP_ENVS = """
import cleanrl.ppo_continuous_action_gymnasium_jax_scan as ppo
kept = ppo.make_env(ppo.Args(env_id="Pendulum-v1", num_envs=2, vectorization_mode="async"))
kept.reset()
"""


def test_a_program_that_closes_no_environments_ends_all_the_same():
    program = subprocess.run([sys.executable, "-c", KEEP_ENVS], capture_output=True, text=True, timeout=60)
    assert program.returncode == 0 and program.stderr == ""

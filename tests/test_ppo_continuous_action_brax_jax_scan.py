"""The script on Brax's environments: what a step and an episode are there, and runs that end and go on."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import assert_refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanrl.ppo_continuous_action_brax_jax_scan as ppo
from cleanrl_utils import running
from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate
from cleanrl_utils.models import read_model

pytest.importorskip("brax")
pytestmark = pytest.mark.usefixtures("compile_fast", "in_folder")

NAME = "ppo_continuous_action_brax_jax_scan"
ARGS = ppo.Args(
    env_id="fast",
    num_envs=4,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    hidden_size=8,
    iterations_per_call=2,
    total_timesteps=6 * 64,
    max_episode_steps=10,
    eval_episodes=2,
    progress=False,
    compilation_cache=False,
    checkpoint_interval=1e-9,
)


@flax.struct.dataclass
class State:
    """Brax's, of an environment that counts."""

    pipeline_state: jax.Array
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict
    info: dict


class Counting:
    """Observes its episode's random number and the step; rewards the step; ends after 5, if its number is below 0."""

    observation_size, action_size = 2, 1

    def reset(self, rng):
        number = jax.random.normal(rng)
        return State(number, jnp.stack([number, 0.0]), 0.0, 0.0, {}, {})  # weak types, which a step has not

    def step(self, state, action):
        count = state.obs[1] + 1
        ended = (count >= 5) & (state.pipeline_state < 0)
        return state.replace(obs=state.obs.at[1].set(count), reward=count, done=ended.astype(jnp.float32))


def curves(folder, left_out=("charts/SPS", "charts/SPS_update")):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag not in left_out]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_episodes_by_hand():
    reset, step = ppo.brax_functions(Counting(), num_envs=100, max_episode_steps=7)  # more than a batch of resets
    episodes, obs = reset(jax.random.split(jax.random.PRNGKey(0), 100))
    step = jax.jit(step)
    number, count, starts, resets = obs[:, 0], np.zeros(100), [np.asarray(obs[:, 0])], np.zeros(100, bool)
    for _ in range(30):
        episodes, (obs, reward, terminated, truncated) = step(episodes, jnp.zeros((100, 1)))
        count = np.where(resets, 0, count + 1)
        assert (obs[~resets, 0] == number[~resets]).all() and (obs[resets, 0] != number[resets]).all()
        starts.append(np.asarray(obs[resets, 0]))
        number = obs[:, 0]
        np.testing.assert_array_equal(obs[:, 1], count)  # at an episode's end too: the last observation is kept
        np.testing.assert_array_equal(reward, np.where(resets, 0, count))
        np.testing.assert_array_equal(terminated, (number < 0) & (count == 5))
        np.testing.assert_array_equal(truncated, (number >= 0) & (count == 7))
        resets = np.asarray(terminated | truncated)
    starts = np.concatenate(starts)
    assert len(starts) > 400 and len(set(starts.tolist())) == len(starts)  # no start is replayed


def test_one_call_is_so_many_iterations_and_compiled_once():
    with jax.log_compiles(False):
        state = ppo.init_lanes([ARGS], ppo.make_env(ARGS))
        together, metrics = ppo.train_iterations(ARGS, state)
        one = replace(ARGS, iterations_per_call=1, total_timesteps=ARGS.total_timesteps)
        first, first_metrics = ppo.train_iterations(one, state)
        second, second_metrics = ppo.train_iterations(one, first)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), together.agent.params, second.agent.params)
    for name in metrics:
        expected = [first_metrics[name][0, 0, 0], second_metrics[name][0, 0, 0]]
        np.testing.assert_allclose(metrics[name][0, 0], expected, rtol=1e-3, atol=1e-5, err_msg=name)
    ppo.train_iterations(ARGS, together)
    assert ppo.compiled(ppo.iterations, ARGS)._cache_size() == 1


def test_a_run_that_is_stopped_and_goes_on_is_the_one_that_was_not(monkeypatch):
    # Its starts are random, Brax's "fast" has but one: all keys have to go on.
    brax_envs = SimpleNamespace(_envs=["fast"], get_environment=lambda *_, **__: Counting())
    monkeypatch.setattr(ppo, "brax_envs", lambda: brax_envs)
    ppo.main(replace(ARGS, exp_name="whole"))
    (whole,) = Path("runs").glob("*__whole__*")

    def stop_in_the_second(args, state):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return train_iterations(args, state)

    train_iterations, calls = ppo.train_iterations, []
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(ppo, "train_iterations", stop_in_the_second)
        ppo.main(replace(ARGS, exp_name="parts"))
    assert ended.value.code == 143
    (parts,) = Path("runs").glob("*__parts__*")
    assert not list(parts.rglob("evaluation.json"))
    ppo.main(ppo.parse_args(["--resume", str(parts)]))
    assert curves(parts) == curves(whole)
    one, other = (read_model(str(run / f"{run.name.split('__')[1]}.cleanrl_model")) for run in (whole, parts))
    for part in ("params", "wrappers"):
        jax.tree.map(np.testing.assert_array_equal, one[part], other[part])


def test_lanes_are_what_each_would_be_alone():
    runs = ppo.train([replace(ARGS, seed=1), replace(ARGS, seed=2)])
    alone = ppo.train([replace(ARGS, seed=2, exp_name="alone")])
    together = curves(runs[1].folder)
    for tag, curve in curves(alone[0].folder).items():
        np.testing.assert_allclose(together[tag], curve, rtol=1e-3, atol=1e-4, err_msg=tag)
    first = curves(runs[0].folder)
    assert first["losses/loss"] != together["losses/loss"]


def test_an_evaluation_is_the_same_in_each_process(capfd):
    ppo.main(ARGS)
    (path,) = Path("runs").rglob("*.cleanrl_model")
    returns, lengths = evaluate(str(path), ppo)
    assert f"return {returns.mean():.1f} ± {returns.std():.1f}" in capfd.readouterr().out
    assert (lengths == 10).all()


def test_the_agent_is_seen_by_one_renderer():
    pytest.importorskip("mujoco")
    args = replace(ARGS, env_id="inverted_pendulum", capture_video=True)
    env = ppo.make_env(args, evaluation=True)
    env, _ = env.reset()
    first = env.render()
    state = env.episodes.state
    moved = state.replace(pipeline_state=state.pipeline_state.replace(q=state.pipeline_state.q + 0.5))
    second = env.replace(episodes=env.episodes.replace(state=moved)).render()
    assert first.shape == (480, 640, 3) and first.dtype == np.uint8 and (first != second).any()
    assert ppo.make_renderer.cache_info().misses == 1
    env.close()
    assert ppo.make_renderer.cache_info().currsize == 0


def test_when_evaluations_are_due(monkeypatch):
    due = []
    monkeypatch.setattr(running.Run, "evaluate", lambda _, step, path: due.append(step))
    ppo.main(replace(ARGS, total_timesteps=12 * 64, eval_interval=3))
    assert due == [4 * 64, 6 * 64, 10 * 64, 12 * 64]  # after the call in which they came due


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"env_id": "hoper"}, "there is hopper"),
        ({"total_timesteps": 100}, "give 128 or more"),
        ({"max_episode_steps": 0}, "--max-episode-steps 0"),
        ({"num_devices": 3}, "--num-devices 3"),
    ],
)
def test_bad_input_is_one_line(changes, words, capfd):
    assert_refused(lambda: ppo.main(replace(ARGS, **changes)), capfd, words)


def test_without_brax_a_line_says_how_to_get_it(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "brax.envs", None)
    monkeypatch.setitem(sys.modules, "brax", None)
    with pytest.raises(SystemExit) as ended:
        ppo.check_env_id("hopper")
    assert ended.value.code == 2 and "--extra brax" in capfd.readouterr().err


def test_two_devices_share_a_run_and_go_on_with_it(tmp_path):
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    sizes = (
        "--num-envs 8 --num-steps 16 --num-minibatches 4 --update-epochs 2 --iterations-per-call 2 --eval-episodes 2"
    )
    new = f"--env-id fast {sizes} --num-devices 2 --total-timesteps 512 --max-episode-steps 10 --no-progress"
    for flags in (new, "--resume {run} --total-timesteps 1024 --no-progress"):
        run = next(iter(tmp_path.glob("runs/*")), None)
        command = [sys.executable, ppo.__file__, *flags.format(run=run).split()]
        result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
    losses = curves(run)["losses/loss"]
    assert [step for step, _ in losses] == list(range(128, 1025, 128))
    model = read_model(str(run / f"{NAME}.cleanrl_model"))
    assert model["wrappers"]["VectorEnvNormObs"]["count"] == pytest.approx(1024 + 8, abs=0.01)  # both devices' steps

"""Trainings side by side in one program, each against the same training alone."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils.models import read_model

pytestmark = pytest.mark.usefixtures("compile_fast")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOPPER = ppo.Args(
    env_id="Hopper-v4",
    num_envs=8,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    hidden_size=8,
    total_timesteps=3 * 128,
    eval_episodes=2,
    progress=False,
    compilation_cache=False,
)
PENDULUM = replace(HOPPER, env_id="Pendulum-v1", total_timesteps=2 * 128)
SEEDS = [replace(HOPPER, seed=seed) for seed in (1, 2, 3)]
# Adam divides by the gradients' size: where one is all but 0, rounding decides on its sign.
close = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5)


@cache
def trained(*lanes):
    """A list of metrics, {tag: [num_lanes]}, of each iteration, and the last state, [num_lanes, ...]."""
    args = replace(lanes[0], num_seeds=len(lanes))
    state, history = ppo.init_lanes(list(lanes), ppo.make_env(*lanes)), []
    for _ in range(args.num_iterations):
        state, metrics = ppo.train_iteration(args, state)
        history.append(ppo.fetch(metrics))
    return history, ppo.fetch(state)


def assert_lane_equals(lanes, i, alone):
    (history, state), (history_alone, state_alone) = trained(*lanes), trained(alone)
    for metrics, metrics_alone in zip(history, history_alone, strict=True):
        assert metrics.keys() == metrics_alone.keys()
        for name in metrics:
            close(metrics[name][i], metrics_alone[name][0], err_msg=name)
    learned, learned_alone = (
        (s.agent.params, s.return_stats, [w.stats for w in s.env.wrappers if hasattr(w, "stats")])
        for s in (state, state_alone)
    )
    jax.tree.map(lambda x, y: close(x[i], y[0]), learned, learned_alone)
    np.testing.assert_array_equal(state.key[i], state_alone.key[0])


def test_each_lane_steps_its_own_environments_bit_for_bit():
    """40 steps of random actions make episodes end, too."""
    actions = np.random.default_rng(0).uniform(-1, 1, (40, len(SEEDS), 8, 3)).astype(np.float32)

    def episodes(lanes, actions):
        env = ppo.make_env(*lanes)
        first_obs = env.reset_fn()[0]
        step = jax.vmap(env.step_fn) if len(lanes) > 1 else ppo.without_axis(env.step_fn)
        handle = jnp.broadcast_to(env.handle, (len(lanes), *env.handle.shape))
        _, steps = jax.jit(lambda handle: jax.lax.scan(step, handle, actions))(handle)
        return first_obs, steps

    first_obs, steps = episodes(SEEDS, actions)
    assert steps[2].any() and len(np.unique(first_obs.reshape(-1, first_obs.shape[-1]), axis=0)) == 3 * 8
    for i, lane in enumerate(SEEDS):
        alone = episodes([lane], actions[:, i : i + 1])
        np.testing.assert_array_equal(first_obs[i], alone[0][0])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[:, i], y[:, 0]), steps, alone[1])


@pytest.mark.parametrize("i", [0, 2])
def test_a_seed_among_others_trains_as_alone(i):
    assert_lane_equals(SEEDS, i, SEEDS[i])


GRID = {
    "learning_rate": 1e-2,
    "gamma": 0.9,
    "gae_lambda": 0.5,
    "clip_coef": 1e-4,
    "ent_coef": 0.1,
    "vf_coef": 2.0,
    "max_grad_norm": 0.01,
}


def test_a_lane_with_values_of_its_own_trains_as_alone():
    assert {"seed", *GRID} == set(ppo.MAY_DIFFER)
    base = replace(PENDULUM, learning_rate=3e-3)
    lanes = [base, replace(base, **GRID), *(replace(base, **{name: value}) for name, value in GRID.items())]
    assert_lane_equals(lanes, 0, lanes[0])
    assert_lane_equals(lanes, 1, lanes[1])
    params = trained(*lanes)[1].agent.params
    for i, name in enumerate(GRID, start=2):  # each by itself makes a difference
        assert max(jax.tree.leaves(jax.tree.map(lambda x, i=i: np.abs(x[i] - x[0]).max(), params))) > 1e-4, name


def test_vmap_over_another_number_of_lanes_is_an_error():
    env = ppo.make_env(*SEEDS[:2])
    for num_lanes, handle_axis in [(3, 0), (2, None)]:
        handle = jnp.broadcast_to(env.handle, (num_lanes, *env.handle.shape)) if handle_axis == 0 else env.handle
        with pytest.raises(ValueError, match="environments of 2 lanes"):
            jax.vmap(env.step_fn, in_axes=(handle_axis, 0))(handle, jnp.zeros((num_lanes, 8, 3)))


@pytest.mark.parametrize("name, value", [("num_envs", 4), ("env_id", "Hopper-v4"), ("norm_adv", False)])
def test_lanes_that_one_program_cannot_train_are_refused(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{name} can't differ between lanes"):
        ppo.train([PENDULUM, replace(PENDULUM, **{name: value})])
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- what each lane leaves
def left_in(folder):
    events = EventAccumulator(str(folder)).Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    files = {path.suffix: path for path in folder.iterdir()}
    evaluation, args = (json.loads((folder / f"{name}.json").read_text()) for name in ("evaluation", "args"))
    model = read_model(str(files[".cleanrl_model"]))
    return {k: v for k, v in curves.items() if "SPS" not in k}, evaluation, args, model, len(files)


def test_num_seeds_leaves_a_run_folder_for_each_as_if_alone(tmp_path, monkeypatch):
    for name, args in [("both", replace(PENDULUM, seed=5, num_seeds=2)), ("alone", replace(PENDULUM, seed=6))]:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        ppo.main(args)
    folders = sorted((tmp_path / "both" / "runs").iterdir())
    assert [folder.name.split("__")[2] for folder in folders] == ["5", "6"]
    assert left_in(folders[0])[2] == asdict(replace(PENDULUM, seed=5))
    (folder_alone,) = (tmp_path / "alone" / "runs").iterdir()
    (curves, evaluation, args, model, files), alone = left_in(folders[1]), left_in(folder_alone)
    assert args == alone[2] == asdict(replace(PENDULUM, seed=6)) and files == alone[4]
    assert curves.keys() == alone[0].keys() and model["args"] == alone[3]["args"]
    jax.tree.map(close, (curves, evaluation), (alone[0], alone[1]))
    jax.tree.map(close, (model["params"], model["wrappers"]), (alone[3]["params"], alone[3]["wrappers"]))


def test_a_lane_that_diverges_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lanes = [replace(PENDULUM, learning_rate=lr, exp_name=name) for lr, name in [(1e-3, "a"), (1e30, "b"), (1e-4, "c")]]
    with pytest.raises(SystemExit) as error:
        ppo.train(lanes)
    out, err = capsys.readouterr()
    assert error.value.code == 1
    assert err.count("diverged: learning_rate 1e+30, the loss is") == err.count("diverged") == 1
    saved = {name: list(tmp_path.glob(f"runs/*__{name}__*/{name}.cleanrl_model")) for name in "abc"}
    assert [len(saved[name]) for name in "abc"] == [1, 0, 1]
    for name, lr in [("a", 1e-3), ("c", 1e-4)]:
        assert read_model(str(saved[name][0]))["args"]["learning_rate"] == lr
        assert f"evaluation  learning_rate {lr}, return" in out
        curves = EventAccumulator(str(saved[name][0].parent)).Reload().Scalars("losses/loss")
        assert len(curves) == PENDULUM.num_iterations and np.isfinite([e.value for e in curves]).all()


MAKE_AGENTS = """
import jax
import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo

lanes = [ppo.Args(env_id="Pendulum-v1", num_envs=1, seed=seed) for seed in range(8)]
env = ppo.make_env(*lanes)
for _ in range(20):
    jax.block_until_ready(ppo.init_lanes(lanes, env).agent.params)
"""


def test_agents_of_many_lanes_are_made_without_a_deadlock():
    """As they were in one of three processes when a batch of matrices was decomposed by threads that waited."""
    environ = {**os.environ, "NPROC": "2"}
    subprocess.run([sys.executable, "-c", MAKE_AGENTS], env=environ, cwd=ROOT, check=True, timeout=100)

"""Runs that end early and go on: what is in their checkpoints, curves and models, whatever ended them."""

import gc
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import checkpoints, running
from cleanrl_utils.models import read_model

pytestmark = pytest.mark.usefixtures("compile_fast")

ITERATION = 64  # steps
ARGS = ppo.Args(
    env_id="Pendulum-v1",
    num_envs=4,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    hidden_size=8,
    total_timesteps=6 * ITERATION,
    eval_episodes=2,
    progress=False,
    compilation_cache=False,
    checkpoint_interval=1e-9,  # at each iteration, if the one before is written
)
SMALL = "--env-id Pendulum-v1 --num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --hidden-size 8".split()
SMALL += ["--checkpoint-interval", "1e-9", "--no-progress"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """An empty one; each iteration waits for the checkpoint of the one before, so that all have theirs."""

    def wait(self):
        if self.writing:
            self.writing.result()
        return False

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints.CheckpointWriter, "is_busy", property(wait))


def run_dir() -> Path:
    (folder,) = Path("runs").iterdir()
    return folder


def curve(folder, tag="charts/episodes") -> list[int]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def interrupted(args: ppo.Args, iteration: int, signum=signal.SIGTERM) -> None:
    """Trains until it gets a signal in this iteration."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        at_iterations(patch, {iteration: lambda: signal.raise_signal(signum)})
        ppo.main(args)
    assert ended.value.code == 128 + signum


def at_iterations(monkeypatch, actions):
    """Calls actions[i] before the i-th iteration."""
    train_iteration, count = ppo.train_iteration, 0

    def act_and_train(*inputs):
        nonlocal count
        count += 1
        actions.get(count, lambda: None)()
        return train_iteration(*inputs)

    monkeypatch.setattr(ppo, "train_iteration", act_and_train)


def newest(folder) -> dict:
    return checkpoints.read(str(folder), checkpoints.steps(str(folder))[-1])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_goes_on_as_one(signum):
    interrupted(ARGS, 3, signum)
    folder = run_dir()
    assert checkpoints.steps(str(folder)) == [2 * ITERATION, 3 * ITERATION]
    assert read_model(f"{folder}/{ARGS.exp_name}.cleanrl_model") and not (folder / "evaluation.json").exists()
    ppo.main(replace(ARGS, resume="auto"))
    assert run_dir() == folder
    steps = [ITERATION * (i + 1) for i in range(6)]
    assert curve(folder) == curve(folder, "losses/loss") == steps
    assert curve(folder, "eval/episodic_return") == steps[-1:]
    rates = EventAccumulator(str(folder)).Reload().Scalars("charts/learning_rate")
    np.testing.assert_allclose(
        [rate.value for rate in rates], [ARGS.learning_rate * (1 - i / 6) for i in range(6)], 1e-6
    )
    assert json.loads((folder / "args.json").read_text())["resume"] is None
    assert checkpoints.steps(str(folder)) == [5 * ITERATION, 6 * ITERATION]
    assert newest(folder)["seconds"] > 0
    assert not list(folder.rglob("*.tmp"))
    assert checkpoints.find_unfinished(ARGS) is None


def test_what_goes_on_is_what_was_saved(monkeypatch):
    saved = {}

    def keep(runs, writer, states, global_step, seconds):
        saved[global_step] = states
        return save_checkpoints(runs, writer, states, global_step, seconds)

    save_checkpoints = running.save_checkpoints
    monkeypatch.setattr(running, "save_checkpoints", keep)
    ppo.main(replace(ARGS, total_timesteps=3 * ITERATION))
    loaded = checkpoints.load([replace(ARGS, resume=str(run_dir()))], ppo.script_name())
    before = saved[3 * ITERATION]
    template = flax.serialization.to_state_dict(before)
    restored = checkpoints.restore_states(template, loaded, [str(run_dir())])
    jax.tree.map(np.testing.assert_array_equal, template, restored)

    lanes = [replace(ARGS, resume=str(run_dir()))]
    restore = lambda template: checkpoints.restore_states(template, loaded, [str(run_dir())])  # noqa: E731
    env = ppo.make_env(*lanes, iteration=3)
    state = jax.device_get(ppo.init_lanes(lanes, env, restore))
    for name in ("agent", "return_stats", "iteration", "key"):
        for x, y in zip(jax.tree.leaves(getattr(state, name)), jax.tree.leaves(before[name]), strict=True):
            np.testing.assert_array_equal(x, y)
    added = state.env.wrappers[1].stats.count - before["wrapper_stats"]["VectorEnvNormObs"].count
    np.testing.assert_allclose(added, ARGS.num_envs, rtol=1e-4)  # the new episodes' first observations
    np.testing.assert_array_equal(
        state.env.wrappers[0].episodic_return, before["episodes"]["VectorEnvEpisodeStats"].episodic_return
    )
    assert not state.env.wrappers[0].lengths.any() and not state.env.wrappers[0].done.any()


def test_a_run_that_goes_on_has_streams_of_its_own():
    observations = [np.asarray(ppo.make_env(ARGS, iteration=i).reset_fn()) for i in (0, 1, 2, 1)]
    assert not np.isclose(observations[0], observations[1]).any()
    assert not np.isclose(observations[1], observations[2]).any()
    np.testing.assert_array_equal(observations[1], observations[3])


def test_a_finished_run_can_be_made_longer():
    ppo.main(replace(ARGS, total_timesteps=2 * ITERATION))
    folder = str(run_dir())
    ppo.main(replace(ARGS, total_timesteps=4 * ITERATION, resume=folder))
    steps = [ITERATION * (i + 1) for i in range(4)]
    assert curve(folder) == steps and curve(folder, "eval/episodic_return") == [steps[1], steps[3]]
    assert json.loads(Path(folder, "evaluation.json").read_text())["global_step"] == steps[3]


def test_a_run_that_ended_before_its_evaluation_makes_up_for_it():
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(running.Run, "evaluate", lambda *_: signal.raise_signal(signal.SIGTERM))
        ppo.main(ARGS)
    assert checkpoints.find_unfinished(ARGS) == str(run_dir())
    ppo.main(replace(ARGS, resume="auto"))
    assert curve(run_dir(), "eval/episodic_return") == [6 * ITERATION]


def test_nothing_to_go_on_with_starts_anew(capsys):
    ppo.main(replace(ARGS, resume="auto", total_timesteps=ITERATION))
    assert "no unfinished run to go on with: starting anew\n" in capsys.readouterr().err
    assert curve(run_dir()) == [ITERATION]


def test_many_seeds_go_on_together():
    args = replace(ARGS, num_seeds=2)
    interrupted(args, 3)
    folders = sorted(Path("runs").iterdir())
    os.remove(checkpoints.path_of(str(folders[0]), 3 * ITERATION))  # it was killed between the two
    ppo.main(replace(args, resume="auto"))
    assert sorted(Path("runs").iterdir()) == folders
    for folder in folders:
        assert curve(folder) == [ITERATION * (i + 1) for i in range(6)]
    keys = [newest(folder)["state"]["key"] for folder in folders]
    assert (keys[0] != keys[1]).any()


REFUSED = {
    "other flags": (dict(learning_rate=1e-3), "--learning-rate 0.001: the run * was trained with 0.0003"),
    "other envs": (dict(num_envs=8), "--num-envs 8: the run"),
    "fewer steps": (dict(total_timesteps=ITERATION), "has 128 steps behind it"),
    "no folder": (dict(resume="runs/none"), "there is no such folder"),
    "several": (dict(num_seeds=2), "give --resume auto"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what, capsys):
    values, words = REFUSED[what]
    ppo.main(replace(ARGS, total_timesteps=2 * ITERATION))
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        ppo.main(replace(replace(ARGS, resume=str(run_dir()), total_timesteps=3 * ITERATION), **values))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert all(part in error for part in words.split("*"))
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


def test_the_command_line_leaves_out_what_stays_as_it_was(monkeypatch):
    ppo.main(replace(ARGS, total_timesteps=2 * ITERATION, gamma=0.9, seed=7))
    argv = ["--resume", str(run_dir()), "--total-timesteps", str(3 * ITERATION)]
    args = ppo.parse_args(argv)
    assert (args.gamma, args.seed, args.env_id, args.hidden_size) == (0.9, 7, "Pendulum-v1", 8)
    assert (args.total_timesteps, args.resume) == (3 * ITERATION, str(run_dir()))
    assert ppo.parse_args(["--gamma", "0.5"]).gamma == 0.5


def test_where_the_processes_were_is_not_kept_when_a_run_goes_on(finished):
    folder = str(copied(finished))
    checkpoint = newest(folder)
    checkpoint["args"] |= dict(num_processes=2, process_id=0, coordinator_address="127.0.0.1:1234", num_devices=2)
    checkpoints.write(folder, checkpoint)
    args = ppo.parse_args(["--resume", folder])
    assert (args.num_processes, args.process_id, args.coordinator_address, args.num_devices) == (None, None, None, 2)
    args = ppo.parse_args(["--resume", folder, "--num-processes", "4", "--process-id", "3"])
    assert (args.num_processes, args.process_id, args.coordinator_address) == (4, 3, None)


def test_two_processes_never_train_one_run(capsys):
    ppo.main(replace(ARGS, total_timesteps=2 * ITERATION))
    held = checkpoints.lock(str(run_dir()))
    try:
        assert checkpoints.find_unfinished(replace(ARGS, total_timesteps=2 * ITERATION)) is None
        with pytest.raises(SystemExit, match="2"):
            ppo.main(replace(ARGS, resume=str(run_dir())))
    finally:
        os.close(held)
    assert "is being trained by another process" in capsys.readouterr().err


def unchecked(data: bytes) -> dict:
    """What is in a checkpoint's file."""
    return flax.serialization.msgpack_restore(data[:-4])


def with_checksum(data: bytes) -> bytes:
    return data + struct.pack("<I", zlib.crc32(data))


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    checkpoint = unchecked(data)
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "a list":
        path.write_bytes(with_checksum(flax.serialization.msgpack_serialize([1, 2])))
    elif how == "a flipped bit":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif how == "an older version":
        path.write_bytes(data[:-4])
    else:
        state = checkpoint["state"]
        if how == "nan":
            state["agent"]["params"]["params"]["log_std"] = np.full((1, 1), np.nan, np.float32)
        elif how == "another shape":
            state["key"] = state["key"][:, :1]
        elif how == "another type":
            state["return_stats"]["mean"] = state["return_stats"]["mean"].astype(np.float64)
        elif how == "a part is missing":
            del state["episodes"]
        elif how == "another script":
            checkpoint["script"] = "../../ppo\x1b[31m"
        elif how == "another step":
            checkpoint["global_step"] += 1
        elif how == "seconds":
            checkpoint["seconds"] = float("nan")
        elif how == "tracker":
            checkpoint["tracker_id"] = 3
        elif how == "unknown argument":
            checkpoint["args"]["\x1b[31mexec"] = "x"
        elif how == "no environments":
            checkpoint["args"]["num_envs"] = 0
        elif how == "iteration":
            state["iteration"] = -state["iteration"]
        path.write_bytes(with_checksum(flax.serialization.msgpack_serialize(checkpoint)))


KINDS = ["truncated", "empty", "a folder", "a list", "nan", "another shape", "another type", "a part is missing"]
KINDS += ["another script", "another step", "seconds", "tracker", "unknown argument", "iteration"]
KINDS += ["a flipped bit", "an older version", "no environments"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compile_fast):
    folder = tmp_path_factory.mktemp("finished")
    before = os.getcwd()
    os.chdir(folder)
    ppo.main(replace(ARGS, total_timesteps=2 * ITERATION))
    os.chdir(before)
    (run,) = (folder / "runs").iterdir()
    return run


def copied(finished) -> Path:
    subprocess.run(["cp", "-r", str(finished), "run"], check=True)
    return Path("run")


@pytest.mark.parametrize("how", KINDS)
def test_a_damaged_checkpoint_is_a_line(finished, how, capsys):
    copied(finished)
    os.remove(checkpoints.path_of("run", ITERATION))
    damage(Path(checkpoints.path_of("run", 2 * ITERATION)), how)
    with pytest.raises(SystemExit) as ended:
        ppo.main(ppo.parse_args(["--resume", "run", "--total-timesteps", str(3 * ITERATION)]))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert error[:-1].isprintable()


@pytest.mark.parametrize("how", ["truncated", "a flipped bit", "another step"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(finished, how, capsys):
    copied(finished)
    damage(Path(checkpoints.path_of("run", 2 * ITERATION)), how)
    checkpoints.warn_once.cache_clear()
    capsys.readouterr()
    ppo.main(ppo.parse_args(["--resume", "run", "--total-timesteps", str(3 * ITERATION), "--gamma", "0.99"]))
    error = capsys.readouterr().err
    assert error.startswith(f"{checkpoints.path_of('run', 2 * ITERATION)} is ")
    assert error.endswith(": going on from the one before\n") and error.count("\n") == 1
    assert curve("run") == [ITERATION, 2 * ITERATION, 3 * ITERATION]
    assert newest("run")["global_step"] == 3 * ITERATION


def test_of_runs_that_trained_together_the_newest_step_that_is_whole_in_all():
    for folder, steps in {"a": (1, 2, 3), "b": (2, 3, 4)}.items():
        for step in steps:
            write_small(folder, step, kept=3)
    damage_by_one_bit("a", 3)
    assert [x["global_step"] for x in checkpoints.newest_whole(["a", "b"])] == [2, 2]
    damage_by_one_bit("b", 2)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoints.newest_whole(["a", "b"])


def write_small(folder, step, kept=checkpoints.KEPT):
    parts = {"script": "s", "args": {}, "versions": {}, "seconds": 1.0, "tracker_id": None, "state": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "KEPT", kept)
        checkpoints.write(folder, {"global_step": step, **parts})


def damage_by_one_bit(folder, step):
    path = Path(checkpoints.path_of(folder, step))
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def test_checkpoints_of_a_future_that_was_given_up_are_removed():
    for step in (10, 20, 30):
        write_small("run", step)
    assert checkpoints.steps("run") == [20, 30]
    write_small("run", 25)  # it went on from step 20
    assert checkpoints.steps("run") == [20, 25]


def test_auto_passes_over_damaged_runs(finished, capsys):
    def run(start_time, edit=lambda checkpoint: None, damaged=()):
        folder = f"runs/Pendulum-v1__{ARGS.exp_name}__1__{start_time}"
        os.makedirs("runs", exist_ok=True)
        subprocess.run(["cp", "-r", str(finished), folder], check=True)
        for step in checkpoints.steps(folder):
            path = Path(checkpoints.path_of(folder, step))
            checkpoint = unchecked(path.read_bytes())
            checkpoint["args"]["total_timesteps"] = 100 * ITERATION
            edit(checkpoint["args"])
            path.write_bytes(checkpoints.packed(checkpoint))
            if step in damaged:
                damage_by_one_bit(folder, step)
        return folder

    def found():
        checkpoints.warn_once.cache_clear()
        capsys.readouterr()
        folder = checkpoints.find_unfinished(ARGS)
        return folder, capsys.readouterr().err.splitlines()

    whole = run(1700000001)
    assert found() == (whole, [])
    bad = [run(1700000002, damaged=(ITERATION, 2 * ITERATION))]
    bad += [run(1700000004, edit=lambda args: args.update({"\x1b[2J": 1}))]
    bad += [run(1700000005, edit=lambda args: args.update(num_envs=0))]
    bad += [run(1700000006, edit=lambda args: args.update(num_envs="many"))]
    run("\x1b[2J")
    folder, lines = found()
    passed = [line for line in lines if line.startswith("--resume auto passes over ")]
    assert folder == whole and [line.split()[4][:-1] for line in passed] == bad[::-1]
    assert len(lines) == len(bad) + 1 and all(line.isprintable() for line in lines)
    half = run(1700000007, damaged=(2 * ITERATION,))
    folder, lines = found()
    assert (
        folder == half
        and len(lines) == 1
        and lines[0].endswith("is damaged, or of another version: going on from the one before")
    )


def mutated(data: bytes, random) -> bytes:
    """One to three bits flipped."""
    changed = np.frombuffer(data, np.uint8).copy()
    where = random.integers(len(changed), size=random.integers(1, 4))
    changed[where] ^= (1 << random.integers(8, size=len(where))).astype(np.uint8)
    return changed.tobytes()


def test_mutated_checkpoints_are_all_found_out(finished):
    data, random = Path(checkpoints.path_of(str(finished), 2 * ITERATION)).read_bytes(), np.random.default_rng(1)
    assert checkpoints.unpacked(data, 2 * ITERATION)
    for _ in range(10_000):
        with pytest.raises(ValueError, match="^is damaged"):
            checkpoints.unpacked(mutated(data, random), 2 * ITERATION)


def test_mutated_checkpoints_with_a_checksum_that_fits(finished, monkeypatch):
    """Each is refused with a line, or fits by chance: of 2000, or as many as CLEANRL_MUTATIONS says."""
    count = int(os.environ.get("CLEANRL_MUTATIONS", 2000))
    copied(finished)
    os.remove(checkpoints.path_of("run", ITERATION))
    data, random = Path(checkpoints.path_of("run", 2 * ITERATION)).read_bytes(), np.random.default_rng(1)
    template = jax.tree.map(lambda x: x[:, None], unchecked(data)["state"])
    lanes, refused = [replace(ARGS, resume="run")], 0
    for _ in range(count):
        content = with_checksum(mutated(data[:-4], random))
        monkeypatch.setattr(checkpoints, "read_file", lambda *_, content=content: content)
        with redirect_stderr(io.StringIO()) as output:
            try:
                loaded = checkpoints.load(lanes, ppo.script_name())
                checkpoints.restore_states(template, loaded, ["run"])
            except SystemExit as ended:
                refused += 1
                error = output.getvalue()
                assert ended.code == 2 and error.endswith("\n") and error[:-1].isprintable(), error
    assert count / 20 < refused < count


# ---------------------------------------------------------------- values that are not finite
def broken(monkeypatch, what):
    """Pendulums whose observation or reward is not finite whenever they stand nearly upright."""
    make_step = ppo.xla_step

    def xla_step(envs):
        handle, step = make_step(envs)

        def broken_step(handle, action):
            handle, (obs, reward, terminated, truncated) = step(handle, action)
            upright = obs[:, 0] > 0.95
            if what == "observation":
                obs = jnp.where(upright[:, None], jnp.inf, obs)
            if what == "reward":
                reward = jnp.where(upright, jnp.nan, reward)
            return handle, (obs, reward, terminated, truncated)

        return handle, broken_step

    monkeypatch.setattr(ppo, "xla_step", xla_step)
    if what in ("loss", "gradient"):
        loss = ppo.ppo_loss

        def broken_loss(params, apply_fn, args, batch, targets):
            value, metrics = loss(params, apply_fn, args, batch, targets)
            if what == "loss":
                value = value + jnp.where(batch.obs.max() > 1.8, jnp.nan, 0.0)
                return value, metrics | {"losses/loss": value}
            steep = 1e30 * params["params"]["log_std"].sum()  # the value stays, the slope overflows
            return value + jnp.where(batch.obs.max() > 1.8, 1e30, 0.0) * (steep - jax.lax.stop_gradient(steep)), metrics

        monkeypatch.setattr(ppo, "ppo_loss", broken_loss)


@pytest.mark.parametrize("what", ["observation", "reward", "loss", "gradient"])
def test_what_is_not_finite_ends_the_training_and_the_last_good_checkpoint_stays(what, monkeypatch, capsys):
    broken(monkeypatch, what)
    once = dict(num_minibatches=1, update_epochs=1)  # a second update would have a loss from the broken parameters
    with pytest.raises(SystemExit, match="1"):
        ppo.main(replace(ARGS, total_timesteps=100 * ITERATION, **once if what == "gradient" else {}))
    error = capsys.readouterr().err
    assert f"diverged: the {what} is not finite at step " in error and error.count("\n") == 1
    step = int(error.partition("step ")[2].partition(";")[0].replace(",", ""))
    assert not list(run_dir().glob("*.cleanrl_model"))
    if step > ITERATION:
        assert checkpoints.steps(str(run_dir()))[-1] < step
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(newest(run_dir())["state"]["agent"]))


@pytest.mark.parametrize("what", ["observation", "reward", "loss", "gradient"])
def test_updates_that_are_not_finite_are_left_out_and_counted(what, monkeypatch, capsys):
    broken(monkeypatch, what)
    ppo.main(replace(ARGS, total_timesteps=30 * ITERATION, skip_nonfinite_updates=True))
    out, err = capsys.readouterr()
    assert err.count("such updates are left out") == 1
    events = EventAccumulator(str(run_dir())).Reload()
    skipped = [event.value for event in events.Scalars("charts/skipped_updates")]
    assert len(skipped) == 30 and 0 < sum(skipped) < 30
    assert f"left out    {sum(skipped):.0f} updates" in out
    state = newest(run_dir())["state"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state["agent"], state["wrapper_stats"])))


def test_without_the_option_nothing_is_computed_otherwise(monkeypatch):
    metrics = []
    for skip in (False, True):
        args = replace(ARGS, skip_nonfinite_updates=skip)
        state = ppo.init_lanes([args], ppo.make_env(args))
        for _ in range(3):
            state, last = ppo.train_iteration(args, state)
        metrics.append(jax.device_get(last))
    for name in metrics[0]:
        np.testing.assert_array_equal(metrics[0][name], metrics[1][name], err_msg=name)


# ---------------------------------------------------------------- disks, environments, trackers and clocks
def test_an_environment_that_raises_is_a_line(monkeypatch, capfd):
    monkeypatch.setattr(ppo, "xla_step", ppo.host_step)
    steps = 0

    def raising(self, action, *_):
        nonlocal steps
        steps += 1
        if steps > 3 * ARGS.num_steps:
            raise ValueError("the joint is broken")
        return step(self, action)

    env_class = type(ppo.make_env(ARGS).envs)
    step = env_class.step
    monkeypatch.setattr(env_class, "step", raising)
    with pytest.raises(SystemExit, match="1"):
        ppo.main(ARGS)
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "the joint is broken" in error[0]
    assert curve(run_dir()) == [ITERATION, 2 * ITERATION, 3 * ITERATION]
    assert 2 * ITERATION <= checkpoints.steps(str(run_dir()))[-1] <= 3 * ITERATION


@pytest.mark.parametrize(
    "fails_at, line", [("log", "tracking ends"), ("finish", "the tracker did not end orderly")], ids=["log", "finish"]
)
def test_a_tracker_that_dies_costs_a_line(fails_at, line, monkeypatch, capsys):
    def log(data):
        if fails_at == "log" and data["global_step"] > 2 * ITERATION:
            raise ConnectionError("gone")

    def finish():
        raise ConnectionError("gone")

    tracker = SimpleNamespace(id="abc", log=log, finish=finish)
    monkeypatch.setattr(running, "start_tracking", lambda *_: tracker)
    ppo.main(replace(ARGS, track=True))  # raises SystemExit if it ends otherwise than well
    error = capsys.readouterr().err
    assert error.startswith(f"{line} (ConnectionError: gone)") and error.count("\n") == 1
    assert curve(run_dir()) == [ITERATION * (i + 1) for i in range(6)]
    assert read_model(f"{run_dir()}/{ARGS.exp_name}.cleanrl_model") and (run_dir() / "evaluation.json").exists()


def test_the_tracker_goes_on_with_the_same_page(monkeypatch, tmp_path):
    ids = []

    def start_tracking(args, folder, tracker_id):
        ids.append(tracker_id)
        return SimpleNamespace(id="abc", log=lambda data: None, finish=lambda: None)

    monkeypatch.setattr(running, "start_tracking", start_tracking)
    ppo.main(replace(ARGS, track=True, total_timesteps=2 * ITERATION))
    ppo.main(replace(ARGS, track=True, resume=str(run_dir())))
    ppo.main(replace(ARGS, track=False, resume=str(run_dir()), total_timesteps=7 * ITERATION))
    assert ids == [None, "abc"] and newest(run_dir())["tracker_id"] == "abc"


def test_a_clock_that_goes_backwards_does_no_harm():
    now = time.time()

    def backwards():
        nonlocal now
        now -= 3600.0
        return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", backwards)
        ppo.main(replace(ARGS, progress=True))
    speeds = EventAccumulator(str(run_dir())).Reload().Scalars("charts/SPS")
    assert len(speeds) == 6 and all(speed.value > 0 for speed in speeds)


def test_twenty_runs_that_start_together_have_folders_of_their_own():
    with ThreadPoolExecutor(20) as threads:
        folders = list(threads.map(lambda _: running.make_run_dir(ARGS), range(20)))
    assert len(set(folders)) == 20


FIVE_TRAININGS = """
import os, sys, time
import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import running

time.time = lambda: 1764500000.5
open(f"ready{sys.argv[1]}", "w").close()
while not os.path.exists("start"):
    time.sleep(0.01)
running.evaluate_models = lambda *_: None  # it would take longer than the rest
ppo.main(ppo.parse_args(sys.argv[2:]))
"""


def test_twenty_runs_side_by_side_in_one_folder(tmp_path):
    """Four processes train five seeds each, the same ones, by clocks that stand still at the same second."""
    environ = {**os.environ, "PYTHONPATH": str(Path(ppo.__file__).parents[1]), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    flags = [*SMALL, "--num-seeds", "5", "--total-timesteps", "128"]
    command = [sys.executable, "-c", FIVE_TRAININGS]
    processes = [subprocess.Popen([*command, str(i), *flags], env=environ, **output) for i in range(4)]
    try:
        end = time.time() + 100
        while len(list(tmp_path.glob("ready*"))) < 4:
            assert time.time() < end and not any(process.poll() for process in processes)
            time.sleep(0.01)
        Path("start").touch()
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4 and "Traceback" not in "".join(outputs), outputs
    folders = sorted(Path("runs").iterdir())
    endings = [f"{seed}__{1764500000 + i}" for seed in range(1, 6) for i in range(4)]
    assert [folder.name.partition("_scan__")[2] for folder in folders] == endings
    for folder in folders:
        assert "".join(outputs).count(f"curves      {folder}\n") == 1
        assert curve(folder) == [64, 128]
        args = json.loads((folder / "args.json").read_text())
        assert read_model(f"{folder}/{ARGS.exp_name}.cleanrl_model")["args"] == args == newest(folder)["args"]
        assert newest(folder)["global_step"] == 128 and not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_first_iteration_compiles_ends_a_run_at_once(signum):
    command = [sys.executable, ppo.__file__, *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.time() + 100
            while not list(Path().glob("runs/*/events*")):
                assert process.poll() is None and time.time() < end
                time.sleep(0.01)
            process.send_signal(signum)
            assert process.wait(timeout=3) == -signum  # a shell shows it as 128 + signum
        finally:
            process.kill()
        assert process.stderr.read() == ""
    assert not checkpoints.steps(str(run_dir())) and checkpoints.find_unfinished(ARGS) is None


HANGING = """
import time
import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo

train_iteration, count = ppo.train_iteration, 0

def train_and_hang(*inputs):
    global count
    count += 1
    if count == 4:
        print("hangs", flush=True)
        while True:
            time.sleep(0.01)
    return train_iteration(*inputs)

ppo.train_iteration = train_and_hang
ppo.main(ppo.parse_args())
"""


def test_a_second_signal_ends_a_run_at_once_and_its_last_checkpoint_is_whole():
    environ = {**os.environ, "PYTHONPATH": str(Path(ppo.__file__).parents[1]), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *SMALL], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert "hangs\n" in iter(process.stdout.readline, "")
            time.sleep(0.3)  # a checkpoint may be being written
            for pause in (0.3, 1.0):  # the first two are one to it, that came twice
                process.send_signal(signal.SIGINT)
                time.sleep(pause)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=3) == -signal.SIGINT
        finally:
            process.kill()
        assert process.stderr.read() == "\nstopping; once more to stop at once\n"
    assert newest(run_dir())["global_step"] >= ITERATION and not list(run_dir().glob("*.cleanrl_model"))
    ppo.main(replace(ARGS, update_epochs=1, eval_episodes=10, resume="auto", total_timesteps=5 * ITERATION))
    assert curve(run_dir()) == [ITERATION * (i + 1) for i in range(5)]


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A disk of 2 MiB that is the working folder; functions that fill and free it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    monkeypatch.chdir(disk)

    def fill():
        with open(disk / "filler", "wb", buffering=0) as f:
            for size in (4096, 1):
                try:
                    while True:
                        f.write(b"x" * size)
                except OSError:
                    pass

    yield fill, (disk / "filler").unlink
    monkeypatch.chdir(tmp_path)
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
def read_only(tmp_path):
    """Functions that make the folders of runs read-only, for root too, and writable again."""
    if subprocess.run(["chattr", "+i", tmp_path], capture_output=True).returncode:
        pytest.skip("only root can make a folder read-only for itself, where the file system allows it")
    subprocess.run(["chattr", "-i", tmp_path], check=True)

    def change(flag):
        folders = [path for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")] if path.is_dir()]
        subprocess.run(["chattr", flag, *folders], check=True)

    yield partial(change, "+i"), partial(change, "-i")
    change("-i")


@pytest.mark.parametrize("fault", ["small_disk", "read_only"])
def test_a_disk_that_fails_for_a_while_costs_nothing(fault, request, monkeypatch, capsys):
    begin, end = request.getfixturevalue(fault)
    at_iterations(monkeypatch, {3: begin, 6: end})
    ppo.main(replace(ARGS, total_timesteps=8 * ITERATION, eval_interval=4))
    error = capsys.readouterr().err
    assert "Traceback" not in error and "the model can't be saved" in error
    assert ("curves can't be written" if fault == "small_disk" else "the checkpoint runs") in error
    assert curve(run_dir()) == [ITERATION * (i + 1) for i in range(8)]
    assert checkpoints.steps(str(run_dir()))[-1] == 8 * ITERATION
    assert read_model(f"{run_dir()}/{ARGS.exp_name}.cleanrl_model") and not list(run_dir().rglob("*.tmp"))


@pytest.mark.parametrize("fault", ["small_disk", "read_only"])
def test_a_disk_that_fails_for_good_costs_no_finished_model(fault, request, monkeypatch, capsys):
    begin, _ = request.getfixturevalue(fault)
    at_iterations(monkeypatch, {3: begin})
    ppo.main(replace(ARGS, total_timesteps=8 * ITERATION))
    out, error = capsys.readouterr()
    assert "Traceback" not in error and (fault == "read_only" or "curves are lost from step" in error)
    (path,) = [line.split()[1] for line in out.splitlines() if line.startswith("  model ")]
    assert not path.startswith("runs") and read_model(path)["args"]["total_timesteps"] == 8 * ITERATION
    assert "evaluation  return" in out
    assert newest(run_dir())


KILLED = """
import sys
import numpy as np
from cleanrl_utils.checkpoints import CheckpointWriter
from cleanrl_utils.events import EventWriter, trim
from cleanrl_utils import checkpoints
from cleanrl_utils.files import write_file

folder, kills = "runs/run", int(sys.argv[1])
import os, random, signal, time

def work():
    done = checkpoints.steps(folder)
    step = done[-1] if done else 0
    trim(folder, step)
    curves, writer = EventWriter(folder, flush_seconds=0.0), CheckpointWriter()
    while True:
        step += 1
        curves.add_scalar("x", step, step)
        if not writer.is_busy and curves.flush():
            state = {"weights": np.full(20000, step, np.float32)}
            writer.save({folder: {"script": "s", "args": {}, "versions": {}, "global_step": step, "seconds": 1.0,
                                  "tracker_id": None, "state": state}})
        write_file("runs/run/x.cleanrl_model", str(step).encode() * 1000)

os.makedirs(folder)
for kill in range(kills):
    pid = os.fork()
    if pid == 0:
        work()
    time.sleep(random.Random(kill).uniform(0.005, 0.12))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for step in checkpoints.steps(folder):
        weights = checkpoints.read(folder, step)["state"]["weights"]
        assert (weights == step).all() and len(weights) == 20000
    if os.path.exists("runs/run/x.cleanrl_model"):
        model = open("runs/run/x.cleanrl_model").read()
        assert model == model[: len(model) // 1000] * 1000 and model
trim(folder, checkpoints.steps(folder)[-1])
"""


def test_kills_at_any_moment_leave_whole_files_and_whole_curves(tmp_path):
    """The writers alone, without JAX's start of some seconds: killed 60 times."""
    environ = {**os.environ, "PYTHONPATH": str(Path(ppo.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", KILLED, "60"], cwd=tmp_path, env=environ, check=True, timeout=200)
    steps = curve(tmp_path / "runs/run", "x")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 60
    assert steps[-1] == checkpoints.steps(str(tmp_path / "runs/run"))[-1]


def test_a_real_run_that_is_killed_goes_on(tmp_path):
    """At random moments after a new checkpoint, three times, or as often as CLEANRL_KILLS says."""
    flags = [*SMALL, "--eval-episodes", "2", "--total-timesteps", str(4000 * ITERATION), "--resume", "auto"]
    random = np.random.default_rng(1)
    for _ in range(int(os.environ.get("CLEANRL_KILLS", 3))):
        process = subprocess.Popen([sys.executable, ppo.__file__, *flags], stderr=subprocess.PIPE, text=True)
        before = max([0, *(step for folder in Path("runs").glob("*") for step in checkpoints.steps(str(folder)))])
        end = time.time() + 100
        while True:
            folders = list(Path("runs").glob("*"))
            if folders and max([0, *checkpoints.steps(str(folders[0]))]) > before:
                break
            assert process.poll() is None and time.time() < end, process.communicate()
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
        assert checkpoints.read(str(run_dir()), checkpoints.steps(str(run_dir()))[-1])
    steps = checkpoints.steps(str(run_dir()))
    flags[flags.index("--total-timesteps") + 1] = str(steps[-1] + 5 * ITERATION)
    subprocess.run([sys.executable, ppo.__file__, *flags], check=True, timeout=100)
    assert curve(run_dir()) == [ITERATION * (i + 1) for i in range(steps[-1] // ITERATION + 5)]
    assert read_model(f"{run_dir()}/{ARGS.exp_name}.cleanrl_model")


def test_ten_runs_in_one_process_leave_neither_threads_nor_files_open():
    def counts():
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    args = replace(ARGS, total_timesteps=ITERATION)
    ppo.main(args)
    before = counts()
    for seed in range(2, 11):
        ppo.main(replace(args, seed=seed))
    after = counts()
    assert after[0] <= before[0] and after[1] <= before[1], (before, after)

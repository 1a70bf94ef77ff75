"""Training on several devices and in several processes; on devices that EnvPool can't be compiled for; the cache."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import devices_program
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
import cleanrl.ppo_continuous_action_gymnasium_jax_scan as ppo_gymnasium
from cleanrl_utils import checkpoints
from cleanrl_utils.models import read_model

SIZES = "--env-id Pendulum-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 3 --hidden-size 8".split()
SIZES += "--total-timesteps 128 --learning-rate 3e-3 --ent-coef 0.01 --eval-episodes 2 --no-progress".split()
SECONDS = 200  # what takes 10 of them; on a machine that does other things too, many more


def start(cwd, program, *argv, **environ):
    """In the folder cwd; what it prints goes to the files out and err there."""
    cwd.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "XDG_"))}
    environ = {**kept, "HOME": str(cwd.parent), "JAX_PLATFORMS": "cpu", **environ}
    with open(cwd / "out", "w") as out, open(cwd / "err", "w") as err:
        return subprocess.Popen(
            [sys.executable, program.__file__, *argv], cwd=cwd, env=environ, stdout=out, stderr=err, text=True
        )


def finish(cwd, process):
    try:
        returncode = process.wait(timeout=SECONDS)
    finally:
        process.kill()
    out, err = (cwd / "out").read_text(), (cwd / "err").read_text()
    return SimpleNamespace(cwd=cwd, returncode=returncode, out=out, err=err, runs=list(cwd.glob("runs/*")))


FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


# ---------------------------------------------------------------- two devices
@pytest.fixture(scope="module")
def two_devices(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("two") / "devices"
    environ = {"JAX_COMPILATION_CACHE_DIR": str(cwd / "own_cache"), "XDG_CACHE_HOME": str(cwd / "cache")}
    environ |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    done = finish(cwd, start(cwd, devices_program, **environ, **FAST))
    assert done.returncode == 0, done.err
    done.results = dict(np.load(cwd / "results.npz"))
    return done


def starting_with(prefix, results):
    found = {name.removeprefix(prefix): x for name, x in results.items() if name.startswith(prefix)}
    assert found
    return found


def test_two_pools_step_the_environments_of_one(two_devices):
    one, two = (starting_with(f"streams/{name}", two_devices.results) for name in ("one", "two"))
    assert len(np.unique(one["[0]"], axis=0)) == 4 and one["[1][3]"].sum() == 4  # an episode of each ends in it
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("name", ["default", "other"])
def test_two_devices_learn_what_one_learns_from_the_same_rollout(two_devices, name):
    one, two = (starting_with(f"learn/{name}/{devices}", two_devices.results) for devices in ("one", "two"))
    assert one.keys() == two.keys()
    for key in one:  # Adam's moments among them, so the gradients' size too
        np.testing.assert_array_equal(two[key][0], two[key][1], err_msg=key)
        np.testing.assert_allclose(two[key][0], one[key][0], rtol=1e-4, atol=1e-6, err_msg=key)


def test_devices_share_all_but_environments_and_noise(two_devices):
    for name, x in starting_with("shared", two_devices.results).items():
        assert x.shape[:2] == (2, 2)  # devices and seeds
        np.testing.assert_array_equal(x[0], x[1], err_msg=name)
    for x in starting_with("own", two_devices.results).values():
        lanes = x.reshape(4, -1)
        assert len(np.unique(lanes, axis=0)) == 4


def curve(run) -> list[int]:
    return [event.step for event in EventAccumulator(str(run)).Reload().Scalars("charts/episodes")]


def test_a_run_of_two_devices_goes_on_with_two(two_devices):
    (run,) = two_devices.cwd.glob("resumed/runs/*")
    assert curve(run) == [32, 64, 96, 128]
    state = checkpoints.read(str(run), 128)["state"]
    np.testing.assert_array_equal(state["agent"]["step"], [4 * 3 * 2] * 2)  # iterations, epochs, minibatches
    for x in jax.tree.leaves((state["agent"], state["wrapper_stats"], state["return_stats"])):
        np.testing.assert_array_equal(x[0], x[1])
    assert (state["key"][0] != state["key"][1]).any()
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["global_step"] == 128


def test_another_number_of_devices_is_refused(two_devices):
    (run,) = two_devices.cwd.glob("resumed/runs/*")
    line = f"error: --num-devices 1: the run runs/{run.name} was trained with 2 and goes on with that alone\n"
    assert line in two_devices.err and checkpoints.steps(str(run)) == [64, 128]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-devices 4096", r"--num-devices 4096: JAX sees 1 cpu .*JAX_NUM_CPU_DEVICES=4096"),
        ("--num-devices 2 --num-envs 3", r"--num-devices 2 has to divide --num-envs 3"),
        ("--num-devices 2 --num-minibatches 32", r"--num-minibatches 32 the 16 steps that each"),
        ("--process-id 0", r"--process-id and .* give --num-processes too"),
        ("--num-processes 2 --process-id 2 --coordinator-address 127.0.0.1:1", r"can't meet .*process_id=2"),
        ("--num-processes 2 --process-id 0", r"can't meet .*coordinator_address"),
    ],
)
def test_mistakes_end_with_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ppo.tyro.cli(ppo.Args, args=[*SIZES, "--no-compilation-cache", *flags.split()])
    if "has to" in message or "each" in message:
        monkeypatch.setattr(jax, "device_count", lambda: 2)
    if "can't meet" in message:  # JAX lets nobody meet once it has computed
        monkeypatch.setattr(jax._src.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv("NPROC", "8")
    with pytest.raises(SystemExit) as error:
        ppo.main(args)
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == "" and err.count("\n") == 1
    assert re.search(f"^error: .*{message}", err)
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------- two processes
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_pair(folder, *flags, program=ppo):
    flags = [*SIZES, "--num-processes", "2", "--num-devices", "2", "--no-compilation-cache", *flags]
    flags += ["--coordinator-address", f"127.0.0.1:{free_port()}"]
    environ = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1", **FAST}
    return [start(folder / str(i), program, *flags, "--process-id", str(i), **environ) for i in range(2)]


def finish_pair(folder, pair):
    done = [finish(folder / str(i), process) for i, process in enumerate(pair)]
    assert not (folder / "cache").exists()  # --no-compilation-cache
    return done


def signal_in_training(folder, number, signum):
    """One of two processes gets a signal while both train; also the seconds until both have ended."""
    pair = start_pair(folder, "--total-timesteps", "10000000", "--progress")
    try:
        deadline = time.time() + SECONDS
        while "compiled" not in (folder / "0" / "out").read_text() and time.time() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        assert [process.poll() for process in pair] == [None, None]
        pair[number].send_signal(signum)
        start_time = time.time()
        done = finish_pair(folder, pair)
        return done, time.time() - start_time
    finally:
        for process in pair:
            process.kill()


def test_two_processes_train_as_one_with_two_devices(two_devices, tmp_path):
    done = finish_pair(tmp_path, start_pair(tmp_path))
    assert [process.returncode for process in done] == [0, 0], [process.err for process in done]
    (run,), (run_of_one,) = done[0].runs, two_devices.runs
    assert {path.name for path in done[1].cwd.iterdir()} == {"out", "err"} and "curves" not in done[1].out
    model, model_of_one = (read_model(str(next(r.glob("*_model")))) for r in (run, run_of_one))
    learned, learned_of_one = ((m["params"], m["wrappers"]) for m in (model, model_of_one))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), learned, learned_of_one)
    evaluations = (json.loads((r / "evaluation.json").read_text()) for r in (run, run_of_one))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3), *evaluations)


def test_two_processes_train_on_gymnasiums_environments(tmp_path):
    done = finish_pair(tmp_path, start_pair(tmp_path, program=ppo_gymnasium))
    assert [process.returncode for process in done] == [0, 0], [process.err for process in done]
    (run,) = done[0].runs
    assert {path.name for path in done[1].cwd.iterdir()} == {"out", "err"}
    assert curve(run) == list(range(32, 128 + 1, 32))
    model = read_model(str(next(run.glob("*_model"))))
    # All environments' observations: the resets' and each step's, from both processes, once.
    assert model["wrappers"]["VectorEnvNormObs"]["count"] == pytest.approx(128 + 4, abs=0.01)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_killed_ends_the_other(number, tmp_path):
    done, seconds = signal_in_training(tmp_path, number, signal.SIGKILL)
    other = done[1 - number]
    assert other.returncode not in (0, None) and seconds < 30
    # Ours, or JAX's if that sees it first, with the stack of a failed check around it.
    assert re.search("a process that trains with this one is gone: start all anew|another task died", other.err)
    assert "Traceback" not in other.err, other.err


def test_sigterm_to_one_process_ends_both_with_the_model_saved_and_they_go_on(tmp_path):
    done, seconds = signal_in_training(tmp_path, 1, signal.SIGTERM)
    assert [process.returncode for process in done] == [128 + signal.SIGTERM] * 2 and seconds < 30
    (model,) = done[0].runs[0].glob("*.cleanrl_model")
    assert read_model(str(model))["args"]["num_devices"] == 2
    assert "Check failure" not in done[0].err + done[1].err

    (run,) = done[0].runs
    (step,) = checkpoints.steps(str(run))
    for name in ("pair/0", "pair/1", "alone"):  # all see the folder of the runs
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "runs").symlink_to(run.parent)
    pair = start_pair(tmp_path / "pair", "--resume", "auto", "--total-timesteps", str(step + 2 * 32))
    done = finish_pair(tmp_path / "pair", pair)
    assert [process.returncode for process in done] == [0, 0], [process.err for process in done]
    assert json.loads((run / "evaluation.json").read_text())["global_step"] == step + 2 * 32

    # One process with as many devices goes on with what two have trained.
    flags = ["--resume", f"runs/{run.name}", "--total-timesteps", str(step + 4 * 32), "--no-progress"]
    alone = finish(tmp_path / "alone", start(tmp_path / "alone", ppo, *flags, JAX_NUM_CPU_DEVICES="2", **FAST))
    assert alone.returncode == 0, alone.err
    assert list(run.parent.iterdir()) == [run] and curve(run) == list(range(32, step + 4 * 32 + 1, 32))
    args = json.loads((run / "args.json").read_text())
    assert args["num_processes"] is args["process_id"] is args["coordinator_address"] is None
    assert json.loads((run / "evaluation.json").read_text())["global_step"] == step + 4 * 32


# ---------------------------------------------------------------- steps as calls to the host
@pytest.mark.parametrize("env_id", ["Hopper-v4", "CartpoleBalance-v1"])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_host_step_steps_as_xla_step(env_id, num_lanes, monkeypatch, capsys):
    """Hopper's numbers are 64-bit, and dm_control's observations are dicts."""
    lanes = [replace(devices_program.ONE, env_id=env_id, seed=seed) for seed in range(num_lanes)]
    backend = jax.default_backend()

    def episode(name):
        monkeypatch.setattr(jax, "default_backend", lambda: name)
        env = ppo.make_env(*lanes)
        monkeypatch.undo()
        actions = np.random.default_rng(0).uniform(-1, 1, (50, num_lanes, *env.action_shape)).astype(np.float32)
        handle = np.broadcast_to(env.handle, (num_lanes, *env.handle.shape))
        step = jax.vmap(env.step_fn) if num_lanes > 1 else ppo.without_axis(env.step_fn)
        first_obs = env.reset_fn()
        handle, first = step(jnp.array(handle), jnp.array(actions[0]))
        _, others = jax.jit(lambda handle: jax.lax.scan(step, handle, actions[1:]))(handle)
        return jax.device_get((first_obs, first, others))

    compiled = episode(backend)
    assert capsys.readouterr().err == ""
    on_host = episode("tpu")
    assert capsys.readouterr().err == "EnvPool can't be compiled for tpu: its steps are calls to the host\n"
    obs = compiled[2][0]
    assert (obs[0] != obs[-1]).any() and obs.dtype == np.float32
    for x, y in zip(jax.tree.leaves(compiled), jax.tree.leaves(on_host), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- compilation cache
def test_a_cache_folder_of_ones_own_is_used(two_devices):
    assert len(list((two_devices.cwd / "own_cache").glob("*-cache"))) > 1
    assert not (two_devices.cwd / "cache").exists()


def test_second_start_finds_the_compiled_learning(tmp_path):
    def train(name, cache, *flags):
        done = finish(tmp_path / name, start(tmp_path / name, ppo, *SIZES, *flags, XDG_CACHE_HOME=str(cache)))
        assert done.returncode == 0, done.err
        return {path.name: path.stat() for path in (cache / "cleanrl" / "jax").glob("jit_*")}, done

    (tmp_path / "file").touch()
    with ThreadPoolExecutor() as pool:
        unwritable = pool.submit(train, "unwritable", tmp_path / "file")
        before, _ = train("first", tmp_path / "cache")
        after, _ = train("second", tmp_path / "cache", "--seed", "2")
        _, done = unwritable.result()
    learn = max((name for name in before if name.endswith("-cache")), key=lambda name: before[name].st_size)
    assert after[learn].st_mtime_ns == before[learn].st_mtime_ns  # not compiled anew, but read:
    read_at = learn.removesuffix("cache") + "atime"
    assert after[read_at].st_mtime_ns > before[read_at].st_mtime_ns

    assert done.runs and "Traceback" not in done.err  # a folder that can't be written costs no run

"""The script as its users meet it: what it prints, what it leaves behind, how it ends. The runs share two cores."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hub_stub import TOKEN, HubStub
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from video_frames import frames_of

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import running
from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate
from cleanrl_utils.models import read_model

NAME = "ppo_continuous_action_envpool_xla_jax_scan"
SCRIPT = Path(ppo.__file__)
SIZES = {"num_envs": 4, "num_steps": 32, "num_minibatches": 4, "update_epochs": 2, "eval_episodes": 2}
WANDB_KEY = "0123456789" * 4
SECONDS = 200  # a run takes 10 of them; on a machine that does other things too, many more

EPISODE_TAGS = {"charts/episodic_return", "charts/episodic_length"}
EPISODE_TAGS |= {"charts/avg_episodic_return", "charts/avg_episodic_length"}
TAGS = EPISODE_TAGS | {"charts/episodes", "charts/learning_rate", "charts/SPS", "charts/SPS_update"}
TAGS |= {f"losses/{name}" for name in "value_loss policy_loss entropy approx_kl old_approx_kl clipfrac loss".split()}
TAGS |= {"losses/explained_variance", "eval/episodic_return", "eval/episodic_length"}

STEPS = r" *\d+%\|[ ▏▎▍▌▋▊▉█]+\| [\d.]+[kM]?/[\d.]+[kM]?"
PROGRESS_LINE = re.compile(STEPS + r" \[[\d:]+<[\d:?]+, +[\d.?]+k?step/s(, return -?[\d.]+, length \d+)?\]")


def flags_of(**values):
    """--num-envs 4 --track --no-progress ..., as the command line takes them."""
    flags = []
    for name, value in values.items():
        name = name.replace("_", "-")
        flags += (
            ([f"--{name}"] if value else [f"--no-{name}"]) if isinstance(value, bool) else [f"--{name}", str(value)]
        )
    return flags


def start(cwd, *argv, environ=None, **popen):
    """The script in a process of its own, in the empty folder cwd, without the tester's accounts and settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_", "UV_", "XLA_", "COLUMNS"))}
    # Compiling takes most of a tiny run's time, so we let it be done badly.
    defaults = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONUNBUFFERED": "1", "HOME": str(cwd.parent)}
    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *argv], cwd=cwd, env={**kept, **defaults, **(environ or {})}, text=True, **popen
    )


def finish(cwd, process, **more):
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return SimpleNamespace(cwd=cwd, returncode=process.returncode, out=out, err=err, **more)


def run(cwd, *argv, **environ):
    return finish(cwd, start(cwd, *argv, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE))


def train(cwd, environ=None, **args):
    return run(cwd, *flags_of(**{"total_timesteps": 512, **SIZES, **args}), **(environ or {}))


def interrupt(cwd):
    """Ctrl-C once the first line of progress is there; stderr is a pipe."""
    pipe = subprocess.PIPE
    process = start(cwd, *flags_of(env_id="Hopper-v4", total_timesteps=10**8, **SIZES), stdout=pipe, stderr=pipe)
    first_line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    result = finish(cwd, process)
    result.err = first_line + result.err
    return result


def interrupt_evaluation(cwd):
    """Ctrl-C, as a terminal sends it to all processes, while an evaluation during training is recorded."""
    recorded = {"capture_video": True, "eval_interval": 1, "video_interval": 1}
    flags = flags_of(env_id="HalfCheetah-v4", total_timesteps=10**7, **recorded, **SIZES)
    pipe = subprocess.PIPE
    process = start(cwd, *flags, stdout=pipe, stderr=pipe, start_new_session=True)
    deadline = time.time() + SECONDS
    while not list(cwd.glob("runs/*/videos/*.tmp")) and process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    return finish(cwd, process)


def terminate_on_terminal(cwd):
    """SIGTERM once the live line shows a return; stdout and stderr are a terminal of 80 columns."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = start(
        cwd, *flags_of(env_id="Hopper-v4", total_timesteps=10**7, **SIZES), stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    screen, stopped = b"", False
    try:
        while chunk := os.read(terminal, 65536):
            screen += chunk
            if screen.count(b"return") >= 3 and not stopped:
                process.send_signal(signal.SIGTERM)
                stopped = True
    except OSError:  # EIO: the other side is closed
        pass
    os.close(terminal)
    watchdog.cancel()
    return finish(cwd, process, screen=screen.decode())


def train_unread(cwd):
    """Whoever read its output is gone, as after `| head`, from the start."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start(
        cwd, *flags_of(env_id="Pendulum-v1", total_timesteps=512, **SIZES), stdout=write_end, stderr=write_end
    )
    os.close(write_end)
    return finish(cwd, process)


@pytest.fixture(scope="module")
def hub():
    server = HubStub()
    yield server
    server.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, hub):
    """Every run of the script in a process, by name; each is a future. They start now, two at a time."""
    root = tmp_path_factory.mktemp("runs")
    online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "WANDB_MODE": "offline"}
    extras = {"exp_name": "mine", "track": True, "capture_video": True, "upload_model": True, "seed": 3}
    extras |= {"eval_interval": 1, "video_interval": 2}
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": WANDB_KEY, "WANDB_INIT_TIMEOUT": "3"}
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": str(root)}
    two_devices = {"JAX_NUM_CPU_DEVICES": "2"}
    pool = ThreadPoolExecutor(2)
    futures = {
        "Hopper-v4": pool.submit(train, root / "hopper", env_id="Hopper-v4", total_timesteps=1024, environ=optimized),
        "terminal": pool.submit(terminate_on_terminal, root / "terminal"),
        "interrupt": pool.submit(interrupt, root / "interrupt"),
        "extras": pool.submit(train, root / "extras", env_id="Pendulum-v1", environ=online, **extras),
        "Pendulum-v1": pool.submit(train, root / "pendulum", env_id="Pendulum-v1", progress=False),
        "BipedalWalker-v3": pool.submit(train, root / "walker", env_id="BipedalWalker-v3"),
        "CheetahRun-v1": pool.submit(train, root / "cheetah", env_id="CheetahRun-v1"),
        "interrupted evaluation": pool.submit(interrupt_evaluation, root / "evaluation"),
        "no login": pool.submit(train, root / "login", env_id="Pendulum-v1", track=True, save_model=False),
        "no server": pool.submit(
            train, root / "server", env_id="Pendulum-v1", track=True, save_model=False, environ=unreachable
        ),
        "diverging": pool.submit(train, root / "diverging", env_id="Pendulum-v1", learning_rate=1e30),
        "two seeds": pool.submit(train, root / "seeds", env_id="Hopper-v4", num_seeds=2, seed=5),
        "two devices": pool.submit(train, root / "devices", env_id="Hopper-v4", num_devices=2, environ=two_devices),
        "unread": pool.submit(train_unread, root / "unread"),
        "unknown flag": pool.submit(run, root / "flag", "--learning-rat", "1"),
        "unknown env": pool.submit(run, root / "env", "--env-id", "Hoper-v4"),
    }
    yield futures
    pool.shutdown(cancel_futures=True)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def run_dir_of(result):
    (run_dir,) = (result.cwd / "runs").iterdir()
    return run_dir


def scalars(run_dir):
    """Tag -> [(step, value), ...]"""
    events = EventAccumulator(str(run_dir)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# ---------------------------------------------------------------- runs that succeed
@pytest.mark.parametrize("env_id", ["Hopper-v4", "BipedalWalker-v3", "Pendulum-v1", "CheetahRun-v1"])
def test_a_run_leaves_its_files_and_says_what_comes_next(runs, env_id):
    result = runs[env_id].result()
    assert result.returncode == 0, result.err

    run_dir = run_dir_of(result)
    assert re.fullmatch(rf"{env_id}__{NAME}__1__\d{{10}}", run_dir.name)
    events, *others = sorted(file.replace("events.", "0events.") for file in files_below(result.cwd / "runs"))
    prefix = f"{run_dir.name}/"
    files = [prefix + name for name in ("args.json", "checkpoint/lock", "evaluation.json", f"{NAME}.cleanrl_model")]
    (checkpoint,) = [name for name in others if name.endswith(".msgpack")]  # the one at the end
    assert sorted(others + [events]) == sorted([*files, checkpoint, events]), others
    assert files_below(result.cwd) == [f"runs/{file}" for file in files_below(result.cwd / "runs")]

    args = ppo.Args(env_id=env_id, total_timesteps=1024 if env_id == "Hopper-v4" else 512, **SIZES)
    assert {**json.loads((run_dir / "args.json").read_text()), "progress": True} == asdict(args)
    model = read_model(str(run_dir / f"{NAME}.cleanrl_model"))
    assert model["script"] == NAME and {**model["args"], "progress": True} == asdict(args)
    assert set(model["versions"]) == {"envpool", "flax", "jax", "numpy"}
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert evaluation["global_step"] == args.total_timesteps and len(evaluation["episodic_length"]) == 2

    ((step, mean),) = scalars(run_dir)["eval/episodic_return"]
    assert step == args.total_timesteps
    assert np.mean(evaluation["episodic_return"]) == pytest.approx(mean)
    compiled = "" if env_id == "Pendulum-v1" else r"  compiled    in [\d.]+ s\n"  # with --no-progress it is not said
    assert re.fullmatch(
        rf"""{compiled}
{env_id}: {step:,} steps, [\d,]+ per second
  curves      runs/{run_dir.name}
  model       runs/{run_dir.name}/{NAME}.cleanrl_model
  evaluation  return {mean:.1f} ± [\d.]+, length \d+ at step {step:,} \(2 episodes, deterministic actions\)
next:
  tensorboard --logdir runs
  python -m cleanrl_utils.enjoy --exp-name {NAME} --env-id {env_id}
""",
        result.out,
    ), result.out


@pytest.mark.parametrize("env_id", ["Hopper-v4", "BipedalWalker-v3", "CheetahRun-v1"])
def test_progress_is_plain_lines_without_a_terminal_and_nothing_else_is_on_stderr(runs, env_id):
    lines = runs[env_id].result().err.splitlines()
    assert len(lines) >= 2
    assert [line for line in lines if not PROGRESS_LINE.fullmatch(line)] == []
    assert lines[-1].startswith("100%")
    assert ("return" in lines[-1]) == (env_id != "CheetahRun-v1")  # its episodes take 1000 steps


def test_no_progress_means_none(runs):
    assert runs["Pendulum-v1"].result().err == ""


def test_the_tags_are_those_documented_and_carry_the_step(runs):
    curves = scalars(run_dir_of(runs["Hopper-v4"].result()))
    assert set(curves) == TAGS
    assert all(np.isfinite(value) for points in curves.values() for _, value in points)
    for tag in TAGS - EPISODE_TAGS - {"eval/episodic_return", "eval/episodic_length"}:
        assert [step for step, _ in curves[tag]] == list(range(128, 1025, 128)), tag
    rates = [value for _, value in curves["charts/learning_rate"]]
    np.testing.assert_allclose(rates, 3e-4 * np.arange(8, 0, -1) / 8, rtol=1e-5)
    assert set(EventAccumulator(str(run_dir_of(runs["Hopper-v4"].result()))).Reload().Tags()["tensors"]) == {
        "hyperparameters/text_summary"
    }


def test_averages_over_episodes_are_absent_before_one_has_ended(runs):
    curves = scalars(run_dir_of(runs["Pendulum-v1"].result()))
    assert set(curves) == TAGS - EPISODE_TAGS  # 128 steps of the 200 that an episode takes
    assert [value for _, value in curves["charts/episodes"]] == [0.0] * 4


# ---------------------------------------------------------------- the terminal, and signals
def test_one_line_is_rewritten_in_place_on_a_terminal_of_80_columns(runs):
    screen = runs["terminal"].result().screen
    first, live, *_ = screen.split("\n")  # nothing but the live line, until the signal, and that it compiled
    assert re.fullmatch(r"  compiled    in [\d.]+ s", first.rstrip("\r").split("\r")[-1])
    frames = [frame for frame in [*first.rstrip("\r").split("\r")[:-1], *live.split("\r")] if frame]
    assert len(frames) > 3
    assert [frame for frame in frames if len(frame) > 80] == []
    shown = [frame.rstrip() for frame in frames if frame.strip()]
    assert any(frame.endswith("compiling]") for frame in shown[:2])
    assert [frame for frame in shown[2:] if not PROGRESS_LINE.fullmatch(frame)] == []
    assert re.search(r" [\d.]+k?/10\.0M \[[\d:]+<[\d:]+, +[\d.]+k?step/s, return [\d.]+, length \d+\]$", shown[-1])


@pytest.mark.parametrize("name, exit_code", [("interrupt", 130), ("terminal", 143)])
def test_a_signal_ends_the_run_and_keeps_the_model(runs, name, exit_code):
    result = runs[name].result()
    assert result.returncode == exit_code
    output = result.screen if name == "terminal" else result.out + result.err
    assert "Traceback" not in output and "stopping; once more to stop at once" in output
    assert "evaluation" not in output and "next:" not in output

    run_dir = run_dir_of(result)
    assert {path.name.split(".")[0] for path in run_dir.iterdir()} == {"args", "checkpoint", "events", NAME}
    env, agent = load(run_dir / f"{NAME}.cleanrl_model")
    curves = scalars(run_dir)
    (last_step, _) = curves["losses/loss"][-1]
    assert f"Hopper-v4: {last_step:,} steps" in output  # the last iteration is in the curves and in the model
    observed = next(w.stats.count for w in env.wrappers if hasattr(w, "stats"))
    assert observed == pytest.approx(last_step + 4, abs=1)


def test_a_run_goes_on_when_nobody_reads_its_output(runs):
    result = runs["unread"].result()
    assert result.returncode == 0
    (path,) = result.cwd.rglob("*.cleanrl_model")
    assert (path.parent / "evaluation.json").exists()
    assert scalars(path.parent)["losses/loss"][-1][0] == 512


def load(path):
    from cleanrl_utils.evals.ppo_envpool_jax_eval import load_agent

    return load_agent(str(path), ppo)


@pytest.mark.parametrize("module", [str(SCRIPT), "-m cleanrl_utils.enjoy"])
def test_ctrl_c_during_the_imports_ends_at_once_without_a_word(module, tmp_path):
    """JAX swallows a KeyboardInterrupt that arrives while it collects garbage: the run would go on."""
    command = [sys.executable, *module.split(" "), "--env-id", "Pendulum-v1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps, imported = Path(f"/proc/{process.pid}/maps"), "jaxlib/_jax.so"
    while process.poll() is None and imported not in maps.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    result = finish(tmp_path, process)
    assert (result.returncode, result.out, result.err) == (-signal.SIGINT, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def in_process(tmp_path, monkeypatch):
    """An empty working folder; compiling is done badly."""
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_disable_most_optimizations", True)
    yield tmp_path
    jax.config.update("jax_disable_most_optimizations", False)


def test_ctrl_c_during_the_evaluation_ends_the_run_too(in_process, monkeypatch, capsys):
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(running.Run, "evaluate", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        ppo.main(ppo.Args(env_id="Pendulum-v1", total_timesteps=128, **SIZES))
    assert getattr(stopped.value, "code", "a traceback") == 130
    assert "next:" not in capsys.readouterr().out
    (model,) = in_process.rglob("*.cleanrl_model")
    load(model)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_twice_still_saves_the_model(in_process, monkeypatch, signum):
    """A parent process passes a signal on: the second may come when the training loop has ended."""
    save_model, calls = ppo.save_model, []

    def stop_training(*args):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signum)
        return train_iteration(*args)

    def save_while_stopped(*args):
        if signum == signal.SIGTERM and signal.getsignal(signum) == signal.SIG_DFL:
            pytest.fail("a second SIGTERM would kill the process before the model is saved")
        signal.raise_signal(signum)
        save_model(*args)

    train_iteration = ppo.train_iteration
    monkeypatch.setattr(ppo, "train_iteration", stop_training)
    monkeypatch.setattr(ppo, "save_model", save_while_stopped)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        ppo.main(ppo.Args(env_id="Pendulum-v1", total_timesteps=1280, **SIZES))
    assert getattr(stopped.value, "code", "a traceback") == 128 + signum and len(calls) == 2
    (model,) = in_process.rglob("*.cleanrl_model")
    load(model)


def test_values_that_are_not_finite_are_left_out_without_a_word(in_process, caplog):
    run = running.Run(ppo, ppo.Args(), label="", stop_signals_received=[], checkpoint=None)
    run.log({"losses/explained_variance": np.float32("nan"), "charts/a": np.nan, "charts/b": 1.0}, 1)
    run.close()
    assert caplog.text == ""
    assert scalars(run.folder) == {"charts/b": [(1, 1.0)]}


def test_no_save_model_leaves_the_curves_only(in_process, capsys):
    ppo.main(ppo.Args(env_id="Pendulum-v1", total_timesteps=128, save_model=False, **SIZES))
    (run_dir,) = (in_process / "runs").iterdir()
    assert {path.name.split(".")[0] for path in run_dir.iterdir()} == {"args", "checkpoint", "events"}
    assert set(scalars(run_dir)) == TAGS - EPISODE_TAGS - {"eval/episodic_return", "eval/episodic_length"}
    out = capsys.readouterr().out
    assert "  model" not in out and "evaluation" not in out and "enjoy" not in out


def test_runs_of_one_second_have_folders_of_their_own(in_process, monkeypatch):
    monkeypatch.setattr(running.time, "time", lambda: 1700000000.5)
    folders = [running.make_run_dir(ppo.Args(env_id="phys2d/Pendulum-v0", exp_name="a")) for _ in range(3)]
    assert folders == [f"runs/phys2d-Pendulum-v0__a__1__{second}" for second in (1700000000, 1700000001, 1700000002)]


# ---------------------------------------------------------------- bad input
BAD_INPUT = {  # what is wrong -> arguments, words of the one line
    "unknown env": ({"env_id": "Hoper-v4"}, ["Hoper-v4", "Hopper-v4"]),
    "nonsense env": ({"env_id": "qqqqqqqqqqqqqq"}, ["qqqqqqqqqqqqqq", "list_all_envs"]),
    "empty env": ({"env_id": ""}, ["--env-id"]),
    "discrete env": (
        {"env_id": "CartPole-v1"},
        ["CartPole-v1", "Discrete", "Box", "cleanrl/ppo_envpool_xla_jax_scan.py"],
    ),
    "discrete toy env": ({"env_id": "Taxi-v3"}, ["Taxi-v3", "Discrete", "cleanrl/ppo_envpool_xla_jax_scan.py"]),
    "discrete pixel env": (
        {"env_id": "Pong-v5"},
        ["Pong-v5", "Discrete", "Box", "ppo_atari_envpool_xla_jax_scan.py serves"],
    ),
    "pixel env": ({"env_id": "CarRacing-v3"}, ["CarRacing-v3", "pixels", "vectors"]),
    "minibatches": ({"num_envs": 4, "num_steps": 32, "num_minibatches": 5}, ["128", "4 and 8"]),
    "too many minibatches": ({"num_envs": 4, "num_steps": 32, "num_minibatches": 500}, ["500", "128"]),
    "many minibatches": ({"num_envs": 999_983, "num_minibatches": 30_000_000}, ["num-minibatches"]),
    "fewer steps than a batch": ({"total_timesteps": 2047}, ["--total-timesteps 2047", "2048 or more"]),
    "nan": ({"gamma": float("nan")}, ["--gamma nan", "0 to 1"]),
    "infinite": ({"learning_rate": float("inf")}, ["--learning-rate inf"]),
    "video of no model": ({"save_model": False, "capture_video": True}, ["--capture-video", "--no-save-model"]),
    "evaluations of no model": ({"save_model": False, "eval_interval": 1}, ["--eval-interval", "--no-save-model"]),
    "videos of no evaluation": ({"capture_video": True, "video_interval": 1}, ["--video-interval", "--eval-interval"]),
    "no videos": ({"eval_interval": 1, "video_interval": 1}, ["--video-interval", "--capture-video"]),
    "upload of no model": ({"save_model": False, "upload_model": True}, ["--upload-model", "--no-save-model"]),
    "upload of a bad name": ({"upload_model": True, "exp_name": "a b"}, ["--exp-name", "Pendulum-v1-a b-seed1"]),
    "upload to a bad name": ({"upload_model": True, "hf_entity": "a/b"}, ["--hf-entity", "a/b/Pendulum"]),
    "name with a folder": ({"exp_name": "a/b"}, ["--exp-name", "'a/b'"]),
    "name above": ({"exp_name": ".."}, ["--exp-name"]),
    "no name": ({"exp_name": ""}, ["--exp-name"]),
    "name of two lines": ({"exp_name": "a\nb"}, ["--exp-name"]),
    "name that is no text": ({"exp_name": "a\udcff"}, ["--exp-name"]),
    "name too long for a folder": ({"exp_name": "a" * 240}, ["--exp-name"]),
    "name of too many bytes": ({"exp_name": "\N{FROG FACE}" * 100}, ["--exp-name"]),
    "unbounded actions": ({"env_id": "LqrLqr21-v1"}, ["LqrLqr21-v1", "unbounded"]),
    "more rollouts than int32": ({"total_timesteps": 2**43, "num_envs": 64}, ["--total-timesteps", "2147483647"]),
    "no bound": ({"min_log_std": float("-inf")}, ["--min-log-std -inf", "-20 to 2"]),
    "clip above 1": ({"clip_coef": 1.5}, ["--clip-coef 1.5", "up to 1"]),
    "seeds beyond the last": ({"seed": 2**32 - 2, "num_seeds": 3}, ["--seed 4294967294", "--num-seeds 3"]),
    "a process of none": ({"process_id": 0}, ["--process-id", "--num-processes"]),
    "a coordinator of none": ({"coordinator_address": "127.0.0.1:1"}, ["--coordinator-address", "--num-processes"]),
    "more devices than there are": ({"num_devices": 9}, ["--num-devices 9", "1 cpu", "JAX_NUM_CPU_DEVICES=9"]),
    "too many episodes": ({"eval_episodes": 10**9}, ["--eval-episodes", "10,000"]),
}
for name in (
    "total_timesteps num_envs num_steps num_minibatches update_epochs eval_episodes eval_interval video_interval"
).split():
    for value in (0, -4):
        BAD_INPUT[f"{name} {value}"] = ({name: value}, [f"--{name.replace('_', '-')} {value}", "1 or more"])
for name in "gamma gae_lambda".split():
    for value in (-0.1, 1.1):
        BAD_INPUT[f"{name} {value}"] = ({name: value}, [f"--{name.replace('_', '-')} {value}", "0 to 1"])
for name in "learning_rate clip_coef max_grad_norm target_kl".split():
    for value in (0.0, -0.1, float("nan")):
        BAD_INPUT[f"{name} {value}"] = ({name: value}, [f"--{name.replace('_', '-')} {value}", "above 0"])
for name in "ent_coef vf_coef".split():
    for value in (-0.1, float("nan")):
        BAD_INPUT[f"{name} {value}"] = ({name: value}, [f"--{name.replace('_', '-')} {value}", "0 or more"])
for name in "num_seeds num_processes hidden_size".split():
    for value in (0, 10_001):
        BAD_INPUT[f"{name} {value}"] = ({name: value}, [f"--{name.replace('_', '-')} {value}", "1 or more", "10,000"])
for name in "num_devices process_id".split():
    BAD_INPUT[f"{name} -1"] = ({name: -1}, [f"--{name.replace('_', '-')} -1", "0 or more"])
for value in (-1, 2**32):
    BAD_INPUT[f"seed {value}"] = ({"seed": value}, [f"--seed {value}", "4294967295"])


def assert_one_line(error, words):
    assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert [word for word in words if word not in error] == [], error


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_is_written(what, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC", "")  # --num-devices sets it
    args, words = BAD_INPUT[what]
    monkeypatch.setattr(ppo, "train_iteration", lambda *_: pytest.fail("it trained"))
    with pytest.raises(SystemExit) as stopped:
        ppo.main(ppo.Args(**{"env_id": "Pendulum-v1", **args}))
    assert stopped.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert_one_line(err, words)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "args, words",
    [
        ({"num_envs": 63, "num_minibatches": 1}, ["--num-devices 2", "--num-envs 63"]),
        ({"num_minibatches": 2048}, ["--num-devices 2", "--num-minibatches 2048", "1024 steps"]),
        ({"num_devices": 3}, ["--num-devices 3", "2 cpu device(s)"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_the_devices(monkeypatch, capfd, args, words):
    monkeypatch.setenv("NPROC", "")
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert ppo.start_jax(ppo.Args(num_devices=0)) == ppo.Args(num_devices=2)
    with pytest.raises(SystemExit) as stopped:
        ppo.start_jax(ppo.Args(**{"num_devices": 0, **args}))
    assert stopped.value.code == 2
    assert_one_line(capfd.readouterr().err, words)


def test_the_flags_of_processes_reach_jax(monkeypatch, capfd):
    def initialize(*args, **_):
        asked.append(args)
        raise RuntimeError("nobody\nis there")

    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    ppo.start_jax(ppo.Args())
    assert asked == []
    with pytest.raises(SystemExit) as stopped:
        ppo.start_jax(ppo.Args(num_processes=4, process_id=2, coordinator_address="127.0.0.1:1"))
    assert asked == [("127.0.0.1:1", 4, 2)] and stopped.value.code == 2
    assert_one_line(capfd.readouterr().err, ["4 processes", "nobody is there", "--coordinator-address"])


def test_the_number_of_threads_is_not_passed_on_to_other_processes(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    ppo.start_jax(ppo.Args())
    assert "NPROC" not in os.environ
    monkeypatch.setenv("NPROC", "3")
    ppo.start_jax(ppo.Args())
    assert os.environ["NPROC"] == "3"


def test_compiled_functions_are_kept_unless_told_not_to(runs, monkeypatch, tmp_path):
    kept = runs["Hopper-v4"].result().cwd.parent / "cleanrl" / "jax"
    assert [path.name for path in kept.glob("*-cache")] != []

    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/a/folder/of/the/user")  # JAX takes it by itself
    ppo.start_jax(ppo.Args())
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    ppo.start_jax(ppo.Args(compilation_cache=False))
    assert not {"jax_compilation_cache_dir", "jax_compilation_cache_max_size"} & updates.keys()
    ppo.start_jax(ppo.Args())
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / ".cache" / "cleanrl" / "jax")
    assert updates["jax_compilation_cache_max_size"] == 2**30


def test_each_of_two_seeds_leaves_a_run_of_its_own(runs):
    result = runs["two seeds"].result()
    assert result.returncode == 0, result.err
    assert "Hopper-v4: 512 steps of each of 2 trainings, " in result.out
    run_dirs = sorted((result.cwd / "runs").iterdir())
    lines = [line for line in result.out.splitlines() if line.startswith("  evaluation")]
    for seed, run_dir, line in zip((5, 6), run_dirs, lines, strict=True):
        args = ppo.Args(env_id="Hopper-v4", seed=seed, total_timesteps=512, **SIZES)
        assert json.loads((run_dir / "args.json").read_text()) == asdict(args)
        assert run_dir.name.startswith(f"Hopper-v4__{NAME}__{seed}__")
        assert set(scalars(run_dir)) == TAGS
        ((_, mean),) = scalars(run_dir)["eval/episodic_return"]
        assert line.startswith(f"  evaluation  seed {seed}, return {mean:.1f} ± ")
        load(run_dir / f"{NAME}.cleanrl_model")


def test_two_devices_share_a_run(runs):
    result = runs["two devices"].result()
    assert result.returncode == 0, result.err
    run_dir = run_dir_of(result)
    assert json.loads((run_dir / "args.json").read_text())["num_devices"] == 2
    env, _ = load(run_dir / f"{NAME}.cleanrl_model")
    (stats,) = (wrapper.stats for wrapper in env.wrappers if hasattr(wrapper, "stats"))
    assert stats.count == pytest.approx(512 + 4, abs=1)  # the environments of both
    assert set(scalars(run_dir)) == TAGS


def test_runs_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file")  # for root, who runs the tests, no folder is read-only
    with pytest.raises(SystemExit) as stopped:
        ppo.main(ppo.Args(env_id="Pendulum-v1"))
    assert stopped.value.code == 2
    assert_one_line(capfd.readouterr().err, [str(tmp_path / "runs")])
    assert os.listdir(tmp_path) == ["runs"] and Path("runs").read_text() == "a file"


def test_bad_input_of_a_real_process(runs):
    result = runs["unknown env"].result()
    assert (result.returncode, result.out) == (2, "")
    assert_one_line(result.err, ["Hoper-v4", "Hopper-v4"])
    assert files_below(result.cwd) == []

    result = runs["unknown flag"].result()  # here the words are tyro's
    assert result.returncode == 2 and "--learning-rate" in result.err and "Traceback" not in result.err
    assert files_below(result.cwd) == []


# ---------------------------------------------------------------- --track, --capture-video, --upload-model
def test_tracking_records_the_arguments_and_every_tag(runs):
    result = runs["extras"].result()
    assert result.returncode == 0, result.err
    (folder,) = (result.cwd / "wandb").glob("offline-run-*")
    (log,) = folder.glob("run-*.wandb")
    wandb = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    inspected = subprocess.run(wandb, capture_output=True, text=True, check=True, timeout=SECONDS)
    records = [json.loads(line) for line in inspected.stdout.splitlines()]
    config = next(record["run"]["config"]["update"] for record in records if record["type"] == "run")
    expected = json.loads((run_dir_of(result) / "args.json").read_text())
    assert {name: config[name] for name in expected} == expected
    assert config.keys() - expected.keys() <= {"_wandb"}

    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    curves = scalars(run_dir_of(result))
    assert sorted({item["global_step"] for item in history}) == [128, 256, 384, 512]
    assert [item["global_step"] for item in history if "video.path" in item] == [256, 512]
    assert len(list((folder / "files" / "media" / "videos").glob("*.mp4"))) == 2
    for tag, points in curves.items():
        tracked = [(item["global_step"], item[tag]) for item in history if tag in item]
        assert tracked == [(step, pytest.approx(value, rel=1e-5, abs=1e-12)) for step, value in points], tag


@pytest.mark.parametrize("what", ["no login", "no server"])
def test_tracking_that_is_impossible_goes_on_offline_and_says_so(runs, what):
    result = runs[what].result()
    assert result.returncode == 0, result.err
    assert "Traceback" not in result.err
    assert sum(line.startswith("tracking offline") for line in result.err.splitlines()) == 1
    assert len(list((result.cwd / "wandb").glob("offline-run-*"))) == 1
    files = [path for path in result.cwd.rglob("*") if path.is_file()]
    assert WANDB_KEY not in result.out + result.err and not any(WANDB_KEY.encode() in f.read_bytes() for f in files)
    assert "losses/loss" in scalars(run_dir_of(result))


def test_a_run_that_diverges_stops_with_a_line_and_saves_no_model(runs):
    result = runs["diverging"].result()
    assert result.returncode == 1
    (line,) = (line for line in result.err.splitlines() if "step/s" not in line)
    assert line.startswith("diverged: the loss is ") and "--learning-rate" in line
    assert list(result.cwd.rglob("events.*")) and not list(result.cwd.rglob("*.cleanrl_model"))


def test_evaluations_during_training_and_at_the_end(runs):
    result = runs["extras"].result()
    run_dir = run_dir_of(result)
    points = scalars(run_dir)["eval/episodic_return"]
    assert [step for step, _ in points] == [128, 256, 384, 512]
    lines = [line for line in result.out.splitlines() if line.startswith("  evaluation")]
    for line, (step, mean) in zip(lines, points, strict=True):
        assert line.startswith(f"  evaluation  return {mean:.1f} ± ") and f"at step {step} (2 episodes" in line
    assert json.loads((run_dir / "evaluation.json").read_text())["global_step"] == 512


def test_the_videos_lie_in_the_folder_of_the_run(runs):
    result = runs["extras"].result()
    folder = run_dir_of(result) / "videos"
    assert files_below(folder) == ["mine-step256.mp4", "mine.mp4"]  # of the 2nd evaluation, and the last
    for name in files_below(folder):
        assert f"  video       runs/{folder.parent.name}/videos/{name}\n" in result.out
        assert len(frames_of(folder / name)) == 200


def test_ctrl_c_while_an_evaluation_is_recorded(runs):
    result = runs["interrupted evaluation"].result()
    assert result.returncode == 130 and "Traceback" not in result.err, result.err
    assert "no video: KeyboardInterrupt while recording" in result.err and "evaluation" not in result.out
    run_dir = run_dir_of(result)
    files = [name.partition("events.")[0] for name in files_below(run_dir) if not name.startswith("checkpoint/")]
    assert files == ["args.json", "", f"{NAME}.cleanrl_model"]
    load(run_dir / f"{NAME}.cleanrl_model")


def test_when_evaluations_are_due_and_recorded(in_process, monkeypatch):
    due = []
    monkeypatch.setattr(running.Run, "evaluate", lambda _, step, path: due.append((step, path)))
    intervals = {"capture_video": True, "eval_interval": 2, "video_interval": 2}
    ppo.main(ppo.Args(env_id="Pendulum-v1", exp_name="x", total_timesteps=8 * 128, **intervals, **SIZES))
    (run_dir,) = in_process.glob("runs/*")
    folder = f"runs/{run_dir.name}/videos"
    assert due == [(256, None), (512, f"{folder}/x-step512.mp4"), (768, None), (1024, f"{folder}/x.mp4")]


def test_a_model_of_any_flags_can_be_watched(runs):
    result = runs["extras"].result()
    returns, _ = evaluate(str(run_dir_of(result) / "mine.cleanrl_model"), ppo)
    assert np.isfinite(returns).all()


def test_training_does_not_notice_its_evaluations(in_process):
    """The same curves, but for the times, and the same model."""
    for name, eval_interval in [("a", None), ("b", 1)]:
        args = ppo.Args(env_id="Pendulum-v1", exp_name=name, total_timesteps=384, eval_interval=eval_interval, **SIZES)
        ppo.main(args)
    (a,), (b,) = (list(in_process.glob(f"runs/*__{name}__*")) for name in "ab")
    params_a, params_b = (read_model(str(next(run_dir.glob("*.cleanrl_model"))))["params"] for run_dir in (a, b))
    assert jax.tree.all(jax.tree.map(np.array_equal, params_a, params_b))
    curves_a, curves_b = scalars(a), scalars(b)
    assert curves_a.keys() == curves_b.keys()
    assert all(curves_a[tag] == curves_b[tag] for tag in curves_a if "SPS" not in tag and "eval" not in tag)


def test_an_evaluation_of_an_earlier_model_is_not_left_beside_a_later_one(in_process, monkeypatch):
    train_iteration, calls = ppo.train_iteration, []

    def stop_at_the_second(*args):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return train_iteration(*args)

    monkeypatch.setattr(ppo, "train_iteration", stop_at_the_second)
    with pytest.raises(SystemExit):
        ppo.main(ppo.Args(env_id="Pendulum-v1", total_timesteps=384, eval_interval=1, **SIZES))
    (run_dir,) = in_process.glob("runs/*")
    assert [step for step, _ in scalars(run_dir)["eval/episodic_return"]] == [128]
    assert list(run_dir.glob("*.cleanrl_model")) and not (run_dir / "evaluation.json").exists()


def test_the_run_arrives_at_the_hub_whole(runs, hub):
    result = runs["extras"].result()
    run_dir = run_dir_of(result)
    repository = "alice/Pendulum-v1-mine-seed3"
    assert f"  hub         {hub.url}/{repository}\n" in result.out and "not uploaded" not in result.err
    files = dict(hub.repositories[repository])
    assert files.pop("replay.mp4") == (run_dir / "videos" / "mine.mp4").read_bytes()  # the newest
    for name in files_below(run_dir):  # the curves up to the evaluation included
        if not name.startswith(("videos/", "checkpoint/")):
            assert files.pop(name) == (run_dir / name).read_bytes(), name
    assert files.keys() == {"README.md", SCRIPT.name, "requirements.txt"}  # no curve: no episode has ended
    *_, (_, mean) = scalars(run_dir)["eval/episodic_return"]
    assert f"{mean:.2f} +/- " in files["README.md"].decode()


def test_the_token_is_nowhere(runs, hub):
    result = runs["extras"].result()
    assert TOKEN not in result.out + result.err
    left = [path for path in result.cwd.parent.rglob("*") if path.is_file()]
    assert len(left) > 10 and [path for path in left if TOKEN.encode() in path.read_bytes()] == []
    assert [
        name for name, data in hub.repositories["alice/Pendulum-v1-mine-seed3"].items() if TOKEN.encode() in data
    ] == []

"""What surrounds a training: its signals, its progress on the terminal, and what each run of it leaves on disk."""

import json
import math
import os
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import dropwhile
from types import ModuleType
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from cleanrl_utils import checkpoints
from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.events import EventWriter, trim
from cleanrl_utils.files import write_file


# ---------------------------------------------------------------- terminal
def say(text: str, file=None) -> None:
    """A line to stdout, or to `file`. That nobody reads it any more, or that its disk is full, costs no run."""
    file = file or sys.stdout
    try:
        tqdm.write(text, file=file)
        file.flush()
    except BrokenPipeError:  # else Python's exit would fail of what is left to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    except OSError:
        pass


@contextmanager
def stop_signals():
    """A list, and a function from whose first call on Ctrl-C and SIGTERM are collected in it: training can end after
    its current iteration. Before, they end the program: while XLA compiles Python would not hear of them.
    """
    received = []

    def receive(signum, _):
        if not received:
            with suppress(OSError):  # no print: the signal may have come in the middle of one
                os.write(2, b"\nstopping; once more to stop at once\n")
        elif time.monotonic() - received[0][1] > 1.0:  # sooner, it is the same one passed on by a parent process
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        received.append((signum, time.monotonic()))

    def collect():
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, receive)

    try:
        yield received, collect
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Progress:
    """One live line on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, args, num_lanes: int = 1, shown: bool = True, iteration: int = 0, seconds_between_lines=10.0):
        self.live = sys.stderr.isatty()
        self.output = sys.stderr if self.live else open(os.devnull, "w")
        self.seconds_between_lines = seconds_between_lines
        self.last_line_time = -math.inf
        self.start_time = time.monotonic()
        self.bar = tqdm(
            total=num_lanes * args.num_iterations * args.batch_size,
            initial=num_lanes * iteration * args.batch_size,
            disable=not shown,
            file=self.output,
            unit="step",
            unit_scale=True,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        )
        self.bar.set_postfix_str("compiling")

    def update(self, args, metrics: dict[str, np.ndarray]) -> None:
        """Adds an iteration with its metrics, [num_lanes], of which the means are shown."""
        if self.bar.disable:
            return
        returns, lengths = metrics["charts/avg_episodic_return"], metrics["charts/avg_episodic_length"]
        ended = np.isfinite(lengths)  # nan until an episode has ended
        means = f"return {returns[ended].mean():.1f}, length {lengths[ended].mean():.0f}" if ended.any() else ""
        self.bar.set_postfix_str(means, refresh=False)
        if self.bar.n == self.bar.initial:
            say(f"  compiled    in {time.monotonic() - self.start_time:.1f} s")
        with suppress(OSError):  # the terminal is gone
            self.bar.update(args.batch_size * len(returns))
        finished = self.bar.n == self.bar.total
        if not self.live and (finished or time.monotonic() - self.last_line_time > self.seconds_between_lines):
            self.last_line_time = time.monotonic()
            say(str(self.bar), sys.stderr)

    def close(self) -> None:
        with suppress(OSError):
            self.bar.close()
        if not self.live:
            self.output.close()


def reason_of(error: jax.errors.JaxRuntimeError) -> str:
    """One line: the first, or, of an environment called by the host that raised, its exception."""
    text = str(error).strip()
    if "Traceback" not in text:
        return text.splitlines()[0]
    source_and_exception = text.rpartition('\n  File "')[2].splitlines()[1:]
    exception = dropwhile(lambda line: line.startswith("    "), source_and_exception)
    return " ".join(" ".join(exception).split())


# ---------------------------------------------------------------- what a run leaves
def make_run_dir(args) -> str:
    start_time = int(time.time())
    while True:
        run_dir = f"runs/{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{start_time}"
        try:
            os.makedirs(run_dir)
            return run_dir
        except OSError as error:
            if not os.path.isdir(run_dir):
                usage_error(f"can't write to {os.path.abspath('runs')}: {error.strerror}")
            start_time += 1  # a run of the same name started in this second


def evaluation_path(model_path: str) -> str:
    return os.path.join(os.path.dirname(model_path), "evaluation.json")


def start_tracking(args, run_dir: str, tracker_id: str | None):
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds that a server out of reach costs; 90 by default
    import wandb

    init = partial(
        wandb.init,
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        config=asdict(args),
        id=tracker_id,  # of a run that goes on, else None
        resume="allow",
        name=os.path.basename(run_dir),
        save_code=True,
        reinit="create_new",  # one for each lane
        settings=wandb.Settings(x_disable_meta=True),  # it holds Slurm's variables, a token among them
    )
    try:
        return init()
    except Exception as error:  # no login, no network: neither may cost a run
        reason = " ".join(f"{type(error).__name__}: {error}".split()).partition(" Consider increasing")[0]
        warn(f"tracking offline (`wandb sync` uploads it later): {reason}")
        return init(mode="offline")


class Run:
    """What a lane leaves: its folder with curves, checkpoints, model and evaluations, and its page at the tracker.

    `script` is the module of the training script, `label` what sets the lane apart from the others.
    """

    def __init__(self, script: ModuleType, args, label: str, stop_signals_received: list, checkpoint: dict | None):
        self.script, self.args, self.label = script, replace(args, resume=None), label
        self.stop_signals_received = stop_signals_received
        self.folder = args.resume or make_run_dir(args)
        self.model_path = f"{self.folder}/{args.exp_name}.cleanrl_model"
        self.evaluator = None  # one for all evaluations, made when the first is due
        self.diverged = self.model_lost = False
        self.skipped_updates = 0
        try:
            self.lock = checkpoints.lock(self.folder)
            if checkpoint:  # the evaluation at its step will be repeated if it was the last one
                step = checkpoint["global_step"]
                trim(self.folder, step, evaluated=step < args.num_iterations * args.batch_size)
            write_file(f"{self.folder}/args.json", json.dumps(asdict(self.args), indent=2).encode())
        except BlockingIOError:
            usage_error(f"{self.folder} is being trained by another process")
        except OSError as error:
            usage_error(f"can't write to {os.path.abspath(self.folder)}: {error.strerror}")
        tracker_id = checkpoint["tracker_id"] if checkpoint else None
        self.tracker = start_tracking(self.args, self.folder, tracker_id) if args.track else None
        self.tracker_id = self.tracker.id if self.tracker else tracker_id
        self.curves = EventWriter(self.folder)
        rows = "".join(f"|{name}|{value}|\n" for name, value in asdict(self.args).items())
        self.curves.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    def log(self, metrics: dict[str, Any], global_step: int) -> None:
        # Where there was nothing to average over a metric is not finite. (A loss that is not ends the training.)
        metrics = {name: float(value) for name, value in metrics.items() if np.isfinite(value)}
        for name, value in metrics.items():
            self.curves.add_scalar(name, value, global_step)
        self.track({**metrics, "global_step": global_step})

    def track(self, data: dict[str, Any]) -> None:
        try:
            if self.tracker:
                self.tracker.log(data)
        except Exception as error:  # whatever happens to it may not cost a run
            warn(f"tracking ends ({type(error).__name__}: {error}); the curves go on in {self.folder}")
            self.tracker = None

    def track_video(self, path: str, global_step: int) -> None:
        if self.tracker:
            import wandb

            try:
                video = wandb.Video(path, format="mp4")
            except Exception as error:
                warn(f"the tracker takes no video ({type(error).__name__}: {error})")
                return
            self.track({"video": video, "global_step": global_step})

    def check_finite(self, finite: dict[str, bool], global_step: int) -> None:
        causes = ("observation", "reward", "loss", "gradient")  # one leads to the next
        broken = [name for name in causes if not finite[f"finite/{name}"]]
        if not broken or self.diverged:
            return
        of_env = broken[0] in ("observation", "reward")
        advice = "--skip-nonfinite-updates leaves such updates out" if of_env else "lower --learning-rate"
        what = f"{self.label}the {broken[0]} is not finite at step {global_step:,}"
        if not self.args.skip_nonfinite_updates:
            self.diverged = True
            warn(f"diverged: {what}; {advice}")
            return
        self.skipped_updates += 1
        if self.skipped_updates == 1:
            warn(f"{what}: such updates are left out")

    def save_model(self, state, is_last: bool) -> None:
        """The last one is saved elsewhere if the folder can't be written to."""
        try:
            self.script.save_model(self.model_path, self.args, state)
            self.model_lost = False
        except OSError as error:
            warn(f"the model can't be saved to {self.folder}: {error.strerror}")
            self.model_lost = True
            with suppress(OSError):
                if is_last:
                    elsewhere = f"{tempfile.mkdtemp(prefix='cleanrl-')}/{self.args.exp_name}.cleanrl_model"
                    self.script.save_model(elsewhere, self.args, state)
                    self.model_path, self.model_lost = elsewhere, False

    def evaluate(self, global_step: int, video_path: str | None = None) -> None:
        from cleanrl_utils.evals.ppo_envpool_jax_eval import Evaluator

        is_stopped = lambda: bool(self.stop_signals_received)  # noqa: E731
        self.evaluator = self.evaluator or Evaluator(self.script, self.args, is_stopped)
        try:
            returns, lengths = self.evaluator(self.model_path, video_path)
        except KeyboardInterrupt:  # a signal to stop came; the model is saved
            return
        if video_path and os.path.exists(video_path):
            say(f"  video       {video_path}")
            self.track_video(video_path, global_step)
        say(
            f"  evaluation  {self.label}return {returns.mean():.1f} ± {returns.std():.1f}, length {lengths.mean():.0f} "
            f"at step {global_step:,} ({self.args.eval_episodes} episodes, deterministic actions)"
        )
        episodes = {"episodic_return": returns.tolist(), "episodic_length": lengths.tolist()}
        evaluation = json.dumps({"global_step": global_step, **episodes}, indent=2)
        self.log({"eval/episodic_return": returns.mean(), "eval/episodic_length": lengths.mean()}, global_step)
        self.curves.flush()
        try:
            write_file(evaluation_path(self.model_path), evaluation.encode())
        except OSError as error:
            warn(f"the evaluation can't be saved beside the model: {error.strerror}")

    def checkpoint(self, state: dict, global_step: int, seconds: float) -> dict:
        return {
            "script": self.script.script_name(),
            "args": asdict(self.args),
            "versions": {"python": sys.version.split()[0], **self.script.versions()},
            "global_step": global_step,
            "seconds": seconds,
            "tracker_id": self.tracker_id,
            "state": state,
        }

    def close(self) -> None:
        if self.evaluator:
            self.evaluator.close()
        self.evaluator = None
        self.curves.close()
        try:
            if self.tracker:
                self.tracker.finish()
        except Exception as error:
            warn(f"the tracker did not end orderly ({type(error).__name__}: {error})")
        os.close(self.lock)


def make_runs(script: ModuleType, lanes: list, stop_signals_received: list, checkpoints: list[dict]) -> list[Run]:
    """One for each lane; none in a process that only computes."""
    if jax.process_index() > 0:
        return []
    differing = [name for name in script.MAY_DIFFER if len({getattr(lane, name) for lane in lanes}) > 1]
    labels = ["".join(f"{name} {getattr(lane, name)}, " for name in differing) for lane in lanes]
    of_lanes = zip(lanes, labels, checkpoints or [None] * len(lanes), strict=True)
    return [Run(script, lane, label, stop_signals_received, checkpoint) for lane, label, checkpoint in of_lanes]


def save_models(runs: list[Run], states, is_last: bool = False) -> None:
    """`states`: the training's, of arrays [num_lanes, ...]."""
    for i, run in enumerate(runs):
        if not run.diverged:
            run.save_model(jax.tree.map(lambda x, i=i: np.asarray(x[i]), states), is_last)


def evaluate_models(runs: list[Run], global_step: int, video_suffix: str | None) -> None:
    for run in runs:
        if not (run.diverged or run.model_lost or run.stop_signals_received):
            video_name = None if video_suffix is None else f"{run.args.exp_name}{video_suffix}.mp4"
            run.evaluate(global_step, video_name and f"{run.folder}/videos/{video_name}")


def save_checkpoints(runs: list[Run], writer, states: dict, global_step: int, seconds: float) -> None:
    """Each run's own, if the curves up to here are on disk: a run that goes on has no gap in them.

    `states`: what the trainings go on from, of arrays [num_devices, num_lanes, ...].
    """
    writer.save(
        {
            run.folder: run.checkpoint(jax.tree.map(lambda x, i=i: x[:, i], states), global_step, seconds)
            for i, run in enumerate(runs)
            if not run.diverged and run.curves.flush()
        }
    )


def print_summary(runs: list[Run], global_step: int, seconds: float, stopped: bool) -> None:
    """Speed and folders of runs that have ended, and how those that were stopped go on, to stdout."""
    if runs:
        together = f" of each of {len(runs)} trainings" if len(runs) > 1 else ""
        sps = len(runs) * global_step / max(seconds, 1e-9)
        say(f"\n{runs[0].args.env_id}: {global_step:,} steps{together}, {sps:,.0f} per second")
    for run in runs:
        say(f"  curves      {run.folder}")
        if run.args.save_model and not run.diverged and not run.model_lost:
            say(f"  model       {run.model_path}")
        if run.skipped_updates:
            say(f"  left out    {run.label}{run.skipped_updates} updates with values that are not finite")
    if runs and stopped and runs[0].args.checkpoint_interval:
        say(f"  to go on    --resume {runs[0].folder if len(runs) == 1 else 'auto, with the same flags'}")


# ---------------------------------------------------------------- several processes
def agree(*conditions: bool) -> list[bool]:
    """Which are true in one of the processes that train together, so that all of them go the same way."""
    if jax.process_count() == 1:
        return list(conditions)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.array(conditions)).reshape(-1, len(conditions)).any(0).tolist()


def of_first_process(texts: list[str]) -> list[str]:
    """Process 0's texts, of up to 1000 bytes, in all processes that train together."""
    if jax.process_count() == 1:
        return texts
    from jax.experimental import multihost_utils

    padded = np.array([list(text.encode().ljust(1000)) for text in texts], np.uint8)
    return [bytes(row).decode().rstrip() for row in multihost_utils.broadcast_one_to_all(padded)]


def lanes_of(args) -> list:
    """The seeds' trainings, each with the folder of the run that it goes on with, if it does."""
    lanes = [replace(args, seed=args.seed + i, num_seeds=1) for i in range(args.num_seeds)]
    if args.resume is None:
        return lanes
    if args.resume != "auto":
        if args.num_seeds > 1:
            usage_error(f"--resume {args.resume} is one run: with --num-seeds {args.num_seeds} give --resume auto")
        return lanes
    folders = of_first_process(
        [(jax.process_index() == 0 and checkpoints.find_unfinished(lane)) or "" for lane in lanes]
    )
    lanes = [replace(lane, resume=folder or None) for lane, folder in zip(lanes, folders, strict=True)]
    missing = [lane.seed for lane in lanes if lane.resume is None]
    if len(missing) == len(lanes):
        warn("no unfinished run to go on with: starting anew")
    elif missing:
        usage_error(f"--resume auto: seed {missing[0]} has no unfinished run, others have: resume those apart")
    return lanes

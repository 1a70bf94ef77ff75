"""A long run with checkpoints, evaluations and videos: whether memory, open files and child processes stay flat.

    python benchmark/soak.py --minutes 20

Samples a training process every few seconds once its second video is there, stops it with SIGTERM, and prints a table
of ten parts of the time. Exit code 1 if memory grew by 5% or more after the first tenth, if files stayed open, or if a
zombie was seen twice.
"""

import glob
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import tyro

from cleanrl_utils.errors import usage_error
from cleanrl_utils.models import SCRIPTS_FOLDER
from cleanrl_utils.report import markdown_table


@dataclass(frozen=True)
class Args:
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script"""
    env_id: str = "Hopper-v4"
    """the environment"""
    minutes: float = 20.0
    """how long the training lasts, after its second video"""
    folder: str = "."
    """where `runs` is made"""


@dataclass(frozen=True)
class Sample:
    memory_mib: float
    files: int
    threads: int
    zombies: int


def sample(process: psutil.Process) -> Sample:
    children = process.children(recursive=True)
    zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in children)
    return Sample(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads(), zombies)


def main(args: Args) -> int:
    if args.minutes <= 0:
        usage_error(f"--minutes {args.minutes}: give a number above 0")
    script = os.path.join(SCRIPTS_FOLDER, f"{args.script}.py")
    flags = ["--env-id", args.env_id, "--total-timesteps", str(10**9), "--no-progress", "--checkpoint-interval", "0.5"]
    flags += ["--eval-interval", "40", "--capture-video", "--video-interval", "2"]
    videos = os.path.join(args.folder, "runs", "*", "videos", "*.mp4")
    before = len(glob.glob(videos))
    os.makedirs(args.folder, exist_ok=True)
    with subprocess.Popen([sys.executable, script, *flags], cwd=args.folder, stdout=subprocess.DEVNULL) as training:
        process, samples = psutil.Process(training.pid), []
        end = time.monotonic() + 600
        while len(glob.glob(videos)) < before + 2 and training.poll() is None and time.monotonic() < end:
            time.sleep(0.5)  # until then memory grows: the renderer takes 200 MiB
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end and training.poll() is None:
            samples.append(sample(process))
            time.sleep(min(2.0, 60 * args.minutes / 40))
        stopped = time.monotonic()
        training.send_signal(signal.SIGTERM)
        exit_code = training.wait(timeout=60)
        ended = time.monotonic()
    if len(samples) < 10:
        print(f"error: the training ended early, with exit code {exit_code}", file=sys.stderr)
        return 1
    parts = [samples[len(samples) * i // 10 : len(samples) * (i + 1) // 10] for i in range(10)]
    rows = []
    for i, part in enumerate(parts):
        medians = [statistics.median(getattr(s, name) for s in part) for name in ("memory_mib", "files", "threads")]
        rows.append([f"{args.minutes * i / 10:.1f}", f"{medians[0]:.1f}", *map(str, medians[1:])])
    print(markdown_table(["minute", "memory, MiB", "open files", "threads"], rows))
    first, last = (statistics.median(s.memory_mib for s in part) for part in (parts[1], parts[-1]))
    print(f"memory grew by {100 * (last / first - 1):.1f}%; zombies at a time: {max(s.zombies for s in samples)}")
    print(f"SIGTERM: exit code {exit_code} after {ended - stopped:.1f} s")
    more_files = statistics.median(s.files for s in parts[-1]) > statistics.median(s.files for s in parts[1])
    stayed = any(a.zombies and b.zombies for a, b in zip(samples, samples[1:], strict=False))
    return int(last / first >= 1.05 or more_files or stayed or exit_code != 128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

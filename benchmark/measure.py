"""One training, measured in a process of its own: steps per second, memory and compilation time, as a line of JSON.

    python benchmark/measure.py --num-envs 256 --num-seeds 4
    python benchmark/measure.py --whole-run --env-id Pendulum-v1 --total-timesteps 100000
    python benchmark/measure.py --row "256 environments" --num-envs 256

It takes every flag of the training script besides its own. `scale.py` and `gpu_check.sh` measure with it: a process
does not give back EnvPool's memory, so that each point needs another one.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

import jax
import tyro

from cleanrl_utils.models import load_script

WARM_UP_ITERATIONS = 3


@dataclass(frozen=True)
class Args:
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script"""
    seconds: float = 6.0
    """measure for about so long, after the warm-up: 3 iterations at least"""
    whole_run: bool = False
    """run the script's whole training, with all that it logs: tells the memory after a tenth of it and after all"""
    row: str | None = None
    """print a row of a Markdown table that begins with this, not JSON"""


def describe_machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "envpool"))
    device = jax.devices()[0]
    backend = "the CPU" if device.platform == "cpu" else f"the {device.device_kind}"
    python = f"Python {platform.python_version()}"
    return f"{platform.machine()} with {os.cpu_count()} cores, {python}, {packages}, JAX on {backend}"


def memory(name: Literal["VmRSS", "VmHWM"]) -> float:
    """MiB of main memory that this process holds, or held at most. (`getrusage` would count its parent's too.)"""
    with open("/proc/self/status", encoding="utf-8") as f:
        kib = next(int(line.split()[1]) for line in f if line.startswith(name))
    return kib / 1024


def gpu_memory() -> dict[str, float]:
    """MiB of the GPU: what JAX's arrays hold at most, and what is taken in all, by all processes; empty on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if jax.default_backend() != "gpu" or not stats:
        return {}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        taken = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        taken = "nan"
    return {"gpu_arrays_mib": stats["peak_bytes_in_use"] / 2**20, "gpu_taken_mib": float(taken)}


def measure(script, args, seconds: float) -> dict[str, float]:
    """Medians over the iterations after the warm-up; the steps are those of all seeds together."""
    lanes = [replace(args, seed=args.seed + i, num_seeds=1) for i in range(args.num_seeds)]
    env = script.make_env(*lanes)
    start_time = time.perf_counter()
    state = script.init_lanes(lanes, env)
    durations, first_duration = [], None
    while len(durations) < WARM_UP_ITERATIONS + 3 or time.perf_counter() - start_time < seconds:
        iteration_start_time = time.perf_counter()
        state, metrics = script.train_iteration(args, state)
        script.fetch(metrics)
        durations.append(time.perf_counter() - iteration_start_time)
        if first_duration is None:
            first_duration = time.perf_counter() - start_time
        if len(durations) == WARM_UP_ITERATIONS:
            start_time = time.perf_counter()
    duration = statistics.median(durations[WARM_UP_ITERATIONS:])
    return {
        "steps_per_second": args.num_seeds * args.batch_size / duration,
        "compile_seconds": first_duration - duration,
        "iterations": len(durations) - WARM_UP_ITERATIONS,
    }


def measure_whole_run(script, args) -> dict[str, float]:
    """Main memory in use, MiB, after a tenth of the iterations and after all of them."""
    used = []

    from cleanrl_utils import running

    class Progress(running.Progress):  # what `train` calls after each iteration
        def update(self, *args):
            super().update(*args)
            used.append(memory("VmRSS"))

    running.Progress = Progress
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.chdir(folder)
        script.train([replace(args, save_model=False, progress=False)])
    return {"memory_after_a_tenth_mib": used[args.num_iterations // 10 - 1], "memory_after_all_mib": used[-1]}


def main(args: Args, script, script_args) -> None:
    imported = memory("VmHWM")
    script.check_args(script_args)
    jax.config.update("jax_enable_compilation_cache", False)  # else what an earlier point compiled would be found
    script_args = script.start_jax(script_args)
    script.check_env_id(script_args.env_id)
    if args.whole_run:
        measured = measure_whole_run(script, script_args)
    else:
        measured = measure(script, script_args, args.seconds)
    measured |= {"memory_mib": memory("VmHWM"), "imported_mib": imported, **gpu_memory(), "machine": describe_machine()}
    if args.row is None:
        print(json.dumps(measured))
    else:
        names = ("steps_per_second", "compile_seconds", "memory_mib", "gpu_arrays_mib", "gpu_taken_mib")
        print(
            f"| {args.row} |", " | ".join(f"{measured[name]:,.0f}" if name in measured else "-" for name in names), "|"
        )


if __name__ == "__main__":
    own_args, script_flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    script_module = load_script(own_args.script)
    main(own_args, script_module, tyro.cli(script_module.Args, args=script_flags))

"""The tools in benchmark/ that measure how a training scales, and what a GPU does for it."""

import csv
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import compare_observations
import jax
import measure
import numpy as np
import pytest
import scale

from cleanrl.ppo_continuous_action_envpool_xla_jax_scan import Args as ScriptArgs

ROOT = Path(__file__).resolve().parents[1]
HAND_MADE = [
    {"factor": "num_envs", "num_envs": 64, "minibatch_size": 64, "steps_per_second": 20000.4, "compile_seconds": 4.26},
    {"factor": "num_envs", "num_envs": 128, "minibatch_size": 128, "steps_per_second": 1234567, "compile_seconds": 5},
    {"factor": "num_devices", "num_devices": 2, "minibatch_size": 32, "steps_per_second": 999, "compile_seconds": 1},
    {
        "factor": "num_iterations",
        "num_iterations": 2000,
        "num_envs": 8,
        "env_id": "Pendulum-v1",
        "memory_after_a_tenth_mib": 432.94,
        "memory_after_all_mib": 1433.01,
    },
]


def write_hand_made(path, **changed):
    common = {"env_id": "Hopper-v4", "memory_mib": 712.6, "imported_mib": 278.7, "machine": "a slide rule"}
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, scale.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**common, **row, **changed} for row in HAND_MADE)


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def usage_error_line(capsys, **flags):
    with pytest.raises(SystemExit) as end:
        scale.main(scale.Args(**flags))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_tables_and_picture_are_made_of_the_csv_file(tmp_path):
    output = str(tmp_path / "sizes")
    write_hand_made(output + ".csv")
    scale.main(scale.Args(output=output, plot_only=True))
    lines = Path(output + ".md").read_text().splitlines()
    assert "| Environments | minibatch | steps/s | peak memory, MiB | compilation, s |" in lines
    assert "| 64 | 64 | 20,000 | 713 | 4.3 |" in lines
    assert "| 128 | 128 | 1,234,567 | 713 | 5.0 |" in lines
    assert "| 2 | 32 | 999 | 713 | 1.0 |" in lines
    assert "- **Machine** (environments, devices, iterations): a slide rule." in lines
    assert any("432.9 MiB of memory were in use after 200 iterations, 1,433.0 MiB after 2,000." in x for x in lines)
    assert any("packages take 279 MiB" in line for line in lines)
    assert any("](sizes.png)" in line for line in lines)
    pictures = [Path(output + ending).read_bytes() for ending in (".png", ".svg")]
    assert pictures[0].startswith(b"\x89PNG") and b"</svg>" in pictures[1]
    scale.main(scale.Args(output=output, plot_only=True))
    assert [Path(output + ending).read_bytes() for ending in (".png", ".svg")] == pictures


def test_every_point_is_in_the_picture(tmp_path):
    write_hand_made(tmp_path / "sizes.csv")
    rows = scale.read_rows(tmp_path / "sizes.csv")
    rows.append({**rows[0], "factor": "num_seeds", "num_seeds": 4.0, "steps_per_second": 5e6, "compile_seconds": 40.0})
    axes = scale.draw(rows).axes
    assert len(axes) == 3 * 2
    for ax in axes:
        (line,) = ax.lines
        (low, high), y = ax.get_ylim(), line.get_ydata()
        assert low == 0 and len(y) and max(y) < high


def test_only_some_sizes_are_measured_and_the_others_kept(tmp_path, monkeypatch, capsys):
    asked = []

    def measure_point(args, factor, sizes):
        asked.append(sizes)
        measured = {"steps_per_second": 7.0, "compile_seconds": 1.0, "memory_mib": 300.0, "iterations": 3}
        return None if sizes == {"num_steps": 8} else {**measured, "imported_mib": 200.0, "machine": "an abacus"}

    monkeypatch.setattr(scale, "measure_point", measure_point)
    points = {"num_envs": [{"num_envs": 64}, {"num_envs": 128}], "num_steps": [{"num_steps": 32}, {"num_steps": 8}]}
    monkeypatch.setattr(scale, "POINTS", scale.POINTS | points)
    output = str(tmp_path / "sizes")
    write_hand_made(output + ".csv", machine="a slide rule")
    with pytest.raises(SystemExit) as end:
        scale.main(scale.Args(output=output, only=("num_envs", "num_steps")))
    assert end.value.code == 1  # one point failed
    assert asked == [{"num_envs": 64}, {"num_envs": 128}, {"num_steps": 8}]  # 32 steps is the default, as is 64
    rows = [(row["factor"], row["num_envs"], row["num_steps"], row["machine"]) for row in read(output + ".csv")]
    assert rows[:3] == [
        ("num_envs", "64", "32", "an abacus"),
        ("num_envs", "128", "32", "an abacus"),
        ("num_steps", "64", "32", "an abacus"),
    ]
    assert [row[0] for row in rows[3:]] == ["num_devices", "num_iterations"]
    sizes = [(row["minibatch_size"], row["num_minibatches"]) for row in read(output + ".csv")[:2]]
    assert sizes == [("64", "32"), ("128", "32")]


def test_mistakes_end_in_a_line(tmp_path, capsys):
    output = str(tmp_path / "sizes")
    assert "leave out --only" in usage_error_line(capsys, output=output, plot_only=True, only=("num_envs",))
    assert "without an ending" in usage_error_line(capsys, output=output + ".md")
    assert "without --plot-only it is made" in usage_error_line(capsys, output=output, plot_only=True)
    Path(output + ".csv").write_text("factor,speed\nnum_envs,3\n")
    assert "its first line should read factor,env_id" in usage_error_line(capsys, output=output, plot_only=True)
    write_hand_made(output + ".csv", memory_mib="much")
    assert "is damaged" in usage_error_line(capsys, output=output, plot_only=True)
    assert os.listdir(tmp_path) == ["sizes.csv"]


def test_a_point_and_a_whole_run_are_measured_in_processes_of_their_own(tmp_path, monkeypatch):
    points = {"num_envs": [scale.TINY], "num_iterations": [{**scale.TINY, "total_timesteps": 64 * 20}]}
    monkeypatch.setattr(scale, "POINTS", scale.POINTS | points)
    output = str(tmp_path / "sizes")
    scale.main(scale.Args(output=output, only=("num_envs", "num_iterations"), seconds=0.1))
    point, run = read(output + ".csv")
    assert (point["num_envs"], point["minibatch_size"], run["num_iterations"]) == ("8", "64", "20")
    assert float(point["steps_per_second"]) > 0 and float(point["compile_seconds"]) > 0
    assert 0 < float(point["imported_mib"]) < float(point["memory_mib"])
    early, late = (float(run[name]) for name in scale.WHOLE_RUN)
    assert float(run["imported_mib"]) < early < float(run["memory_mib"]) + 1 and late < early + 20
    assert "JAX on the" in point["machine"] and not list(tmp_path.glob("runs"))


def test_a_point_that_fails_says_why(capfd):
    args = scale.Args(env_id="NoSuchEnv-v0")
    assert scale.measure_point(args, "num_envs", {"num_envs": 8}) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: num_envs {'num_envs': 8} failed:") and "NoSuchEnv-v0" in line


def test_warm_up_and_compilation_do_not_count_as_speed(monkeypatch):
    """A clock by hand: 2 s to make the state, 10 s and 3 s for the first iterations, then 1, 1, 8, 1, 1, ... s."""
    now = [0.0]
    durations = iter([10.0, 3.0, 3.0, 1.0, 1.0, 8.0, *[1.0] * 100])

    def pass_time(seconds, result):
        now[0] += seconds
        return result

    script = SimpleNamespace(
        make_env=lambda *lanes: pass_time(100.0, [lane.seed for lane in lanes]),
        init_lanes=lambda lanes, env: pass_time(2.0, env),
        train_iteration=lambda args, state: pass_time(next(durations), (state, {})),
        fetch=lambda metrics: metrics,
    )
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    measured = measure.measure(script, ScriptArgs(num_envs=64, num_steps=32, num_seeds=3), seconds=11.5)
    assert measured == {"steps_per_second": 3 * 64 * 32, "compile_seconds": 11.0, "iterations": 5}


def test_memory_counts_what_this_process_holds():
    before = measure.memory("VmRSS")
    with mmap.mmap(-1, 64 * 2**20) as block:  # never memory that the process had already
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert 60 < measure.memory("VmRSS") - before < 80
    assert measure.memory("VmHWM") >= before + 60


def test_compiled_steps_are_compared_with_those_of_numpy(monkeypatch, capsys):
    args = compare_observations.Args(env_ids=("Hopper-v4",), num_envs=4, num_steps=100)
    compare_observations.main(args)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()]
    assert [(row[1], row[2], row[4]) for row in rows] == [
        ("`xla_step`", "400", "equal"),
        ("`host_step`", "400", "equal"),
    ]
    assert int(rows[0][3]) > 0  # past the ends of episodes
    original = compare_observations.compiled_steps

    def one_entry_off(*inputs):
        obs, *others = original(*inputs)
        obs = np.array(obs)
        obs[-1, -1, -1] = np.nextafter(obs[-1, -1, -1], math.inf)
        return [obs, *others]

    monkeypatch.setattr(compare_observations, "compiled_steps", one_entry_off)
    with pytest.raises(SystemExit) as end:
        compare_observations.main(args)
    assert end.value.code == 1 and capsys.readouterr().out.count("**differ**") == 2


def gpu_check(*flags, python=sys.executable):
    command = ["bash", str(ROOT / "benchmark" / "gpu_check.sh"), *flags]
    return subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_the_check_ends_in_a_line():
    check = gpu_check()
    assert (check.returncode, check.stdout) == (2, "")
    (line,) = check.stderr.splitlines()
    assert line.startswith("error: JAX sees no GPU: install its CUDA build") and "jax[cuda13]" in line


def test_the_check_knows_one_flag():
    check = gpu_check("--tpu")
    assert (check.returncode, check.stdout) == (2, "")
    assert check.stderr == "error: --tpu: there is only --cpu, for a try without a GPU\n"


def test_a_part_that_fails_costs_its_own_row(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh
case "$*" in
-c*) echo "the machine"; echo "devices: one" ;;
*observations*) echo "| obs | equal |" ;;
*"--num-envs 16"*) echo "first" >&2; echo "out | of memory" >&2; exit 3 ;;
*) echo "| row |" ;;
esac
"""
    )
    python.chmod(0o755)
    check = gpu_check("--cpu", python=python)
    assert check.returncode == 1
    lines = check.stdout.splitlines()
    assert lines[:2] == ["the machine", "devices: one"] and "| obs | equal |" in lines
    assert "| 16 environments on cpu | exit code 3: out / of memory |" in lines
    assert lines.count("| row |") >= 2

"""How speed, memory and compilation time of a training grow with its sizes: a table and a picture, in one run.

    python benchmark/scale.py
    python benchmark/scale.py --only num_envs num_seeds
    python benchmark/scale.py --plot-only

One size at a time is changed from the script's defaults, as a user changes one flag. Each point is a process of its
own (`measure.py`). Writes scale.csv, scale.md (table), scale.png and scale.svg; `--only` replaces the points of these
sizes and keeps the others, `--plot-only` draws anew what scale.csv holds. On 2 cores, all takes about 10 minutes.
"""

import csv
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal, get_args

import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from cleanrl_utils.errors import usage_error
from cleanrl_utils.files import write_file
from cleanrl_utils.models import load_script
from cleanrl_utils.report import OUTPUT_ENDINGS, distinct, figure_bytes, format_number, markdown_table

Factor = Literal["num_envs", "num_steps", "hidden_size", "num_seeds", "num_devices", "num_iterations"]
TINY = {"env_id": "Pendulum-v1", "num_envs": 8, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1}
# Of each factor the points: what differs from the script's defaults.
POINTS: dict[Factor, list[dict]] = {
    "num_envs": [{"num_envs": n} for n in (8, 16, 32, 64, 128, 256, 512, 1024)],
    "num_steps": [{"num_steps": n} for n in (8, 16, 32, 64, 128, 256, 512)],
    "hidden_size": [{"hidden_size": n} for n in (64, 128, 256, 512, 1024)],
    "num_seeds": [{"num_seeds": n} for n in (1, 2, 4, 8, 16)],
    "num_devices": [{"num_minibatches": m, "num_devices": n} for m in (32, 4) for n in (1, 2)],
    "num_iterations": [{**TINY, "total_timesteps": 64 * 2000}],
}
DRAWN: tuple[Factor, ...] = ("num_envs", "num_steps", "hidden_size", "num_seeds")
TITLES: dict[Factor, str] = {
    "num_envs": "environments",
    "num_steps": "steps per rollout",
    "hidden_size": "hidden units",
    "num_seeds": "seeds",
    "num_devices": "devices",
    "num_iterations": "iterations",
}
METRICS = {"steps_per_second": "steps/s", "memory_mib": "peak memory, MiB", "compile_seconds": "compilation, s"}
SIZES = ("num_envs", "num_steps", "num_minibatches", "hidden_size", "num_seeds", "num_devices", "num_iterations")
WHOLE_RUN = ("memory_after_a_tenth_mib", "memory_after_all_mib")  # of `num_iterations` alone
COLUMNS = ("factor", "env_id", *SIZES, "minibatch_size", *METRICS, *WHOLE_RUN, "iterations", "imported_mib", "machine")
LIMIT_SECONDS = 300  # of a point


@dataclass(frozen=True)
class Args:
    env_id: str = "HalfCheetah-v4"
    """the environment (that of `num_iterations` is Pendulum-v1)"""
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script, with its default hyperparameters"""
    only: tuple[Factor, ...] = ()
    """the sizes to measure; none named: all"""
    plot_only: bool = False
    """measure nothing: make table and picture anew"""
    seconds: float = 6.0
    """measure each point for about so long, after its warm-up: 3 iterations at least"""
    output: str = "docs/benchmark/scale"
    """where to write NAME.csv, NAME.md, NAME.png and NAME.svg, without an ending"""


# ---------------------------------------------------------------- measuring
def measure_point(args: Args, factor: Factor, sizes: dict) -> dict | None:
    """What `measure.py` prints of a training with these sizes; if it fails, a line says so."""
    command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "measure.py")]
    flags = {"script": args.script, "seconds": args.seconds, "env_id": args.env_id, **sizes}
    command += [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if factor == "num_iterations":
        command.append("--whole-run")
    environment = dict(os.environ)
    if factor == "num_devices":  # else the script chooses how many devices a CPU is
        environment["JAX_NUM_CPU_DEVICES"] = str(sizes["num_devices"])
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if run.returncode == 0:
            return json.loads(run.stdout.splitlines()[-1])
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"not done after {LIMIT_SECONDS} s"
    print(f"error: {factor} {sizes} failed: {reason}", file=sys.stderr)
    return None


def measure_points(args: Args, rows: list[dict]) -> bool:
    """Puts the points' rows in the place of the former ones, and saves them one by one; whether all succeeded."""
    script = load_script(args.script)
    known, all_measured = {}, True
    for factor in args.only or get_args(Factor):
        rows[:] = [row for row in rows if row["factor"] != factor]
        for sizes in POINTS[factor]:
            script_args = script.Args(**{"env_id": args.env_id, **sizes})
            if script_args not in known:  # the defaults are a point of several factors
                known[script_args] = measure_point(args, factor, sizes)
            measured = known[script_args]
            if measured is None:
                all_measured = False
                continue
            row = {"factor": factor, "env_id": script_args.env_id, **measured}
            row |= {name: getattr(script_args, name) for name in SIZES}
            row["minibatch_size"] = script_args.batch_size // script_args.num_devices // script_args.num_minibatches
            rows.append({name: row.get(name, "") for name in COLUMNS})
            write_file(args.output + ".csv", csv_text(rows).encode())
            print(f"{TITLES[factor]} {row[factor]}: {', '.join(f'{METRICS[m]} {cell(rows[-1], m)}' for m in METRICS)}")
    return all_measured


def csv_text(rows: list[dict]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def read_rows(path: str) -> list[dict]:
    """The csv file's rows, numbers as numbers."""
    try:
        with open(path, newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f)
            rows = list(reader)
    except OSError as error:
        usage_error(f"can't read {path}: {error.strerror}; without --plot-only it is made")
    if tuple(reader.fieldnames or ()) != COLUMNS:
        usage_error(f"{path}: its first line should read {','.join(COLUMNS)}")
    texts = ("factor", "env_id", "machine")
    try:
        return [{k: v if k in texts or v == "" else float(v) for k, v in row.items()} for row in rows]
    except (TypeError, ValueError):
        usage_error(f"{path} is damaged: without --plot-only it is made anew")


# ---------------------------------------------------------------- table
def cell(row: dict, metric: str) -> str:
    value = row[metric]
    return "-" if value == "" else f"{value:.1f}" if metric == "compile_seconds" else f"{value:,.0f}"


def table(rows: list[dict], factor: Factor) -> str:
    header = [TITLES[factor].capitalize(), "minibatch", *METRICS.values()]
    body = [
        [f"{row[factor]:,.0f}", f"{row['minibatch_size']:,.0f}", *(cell(row, metric) for metric in METRICS)]
        for row in rows
    ]
    return markdown_table(header, body)


def markdown(rows: list[dict], name: str) -> str:
    """The tables, one for each factor, with what they need to be understood."""
    env_ids = ", ".join(distinct(row["env_id"] for row in rows if row["factor"] != "num_iterations"))
    lines = ["Generated by `python benchmark/scale.py`.", ""]
    for machine in distinct(row["machine"] for row in rows):
        factors = distinct(TITLES[row["factor"]] for row in rows if row["machine"] == machine)
        lines.append(f"- **Machine** ({', '.join(factors)}): {machine}.")
    lines += [
        f"- **Training**: {env_ids} with the script's defaults, of which one is changed at a time. The number of "
        "minibatches stays at its default, so that their size (column *minibatch*, steps on each device) grows with "
        "environments and steps.",
        "- **Steps/s**: environment steps per second, rollout and learning, of all seeds together; from the median "
        "duration of the iterations after a warm-up.",
        "- **Peak memory**: the most main memory that the process held. Of it, Python and the packages take "
        f"{format_number(min(row['imported_mib'] for row in rows), like=1000)} MiB.",
        "- **Compilation**: what the first iteration and the making of the training state take beyond a later "
        "iteration, without the compilation cache.",
    ]
    if drawn := [row for row in rows if row["factor"] in DRAWN]:
        titles = ", ".join(distinct(TITLES[row["factor"]] for row in drawn))
        lines += ["", f"![Speed, memory and compilation time against {titles}]({name}.png)"]
    for factor in POINTS:
        own = [row for row in rows if row["factor"] == factor]
        if own and factor == "num_iterations":
            (row,) = own
            lines += [
                "",
                f"The length of a training: in a whole run of the script, with all that it logs ({row['env_id']}, "
                f"{row['num_envs']:,.0f} environments), {row['memory_after_a_tenth_mib']:,.1f} MiB of memory were in "
                f"use after {row[factor] // 10:,.0f} iterations, {row['memory_after_all_mib']:,.1f} MiB after "
                f"{row[factor]:,.0f}.",
            ]
        elif own:
            lines += ["", table(own, factor).rstrip("\n")]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- picture
def draw(rows: list[dict]) -> Figure:
    """A column of panels for each factor, a row for each metric; sizes on a logarithmic axis."""
    factors = [factor for factor in DRAWN if any(row["factor"] == factor for row in rows)]
    figure = Figure(figsize=(max(2.6 * len(factors), 4.6), 6.2), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(len(METRICS), len(factors), squeeze=False, sharex="col", sharey="row")
    for column, factor in zip(axes.T, factors, strict=True):
        own = sorted((row for row in rows if row["factor"] == factor), key=lambda row: row[factor])
        sizes = [row[factor] for row in own]
        for ax, metric in zip(column, METRICS, strict=True):
            ax.plot(sizes, [row[metric] for row in own], color="C0", linewidth=1.6, marker="o", markersize=3.5)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
            ax.yaxis.set_major_formatter(EngFormatter(sep=""))
            ax.minorticks_off()
            ax.tick_params(axis="x", labelrotation=60, labelsize=9)
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        column[-1].set_xlabel(TITLES[factor])
    for ax, label in zip(axes[:, 0], METRICS.values(), strict=True):
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)  # only now: it fixes the top for all of the row
    figure.align_xlabels()
    return figure


def main(args: Args) -> None:
    name = os.path.basename(args.output)
    if not name or name.endswith(OUTPUT_ENDINGS):
        usage_error(f"--output {args.output}: give a name without an ending; {', '.join(OUTPUT_ENDINGS)} are added")
    if args.plot_only and args.only:
        usage_error("--plot-only measures nothing: leave out --only")
    kept = args.plot_only or (args.only and os.path.exists(args.output + ".csv"))
    rows = read_rows(args.output + ".csv") if kept else []
    all_measured, start_time = True, time.time()
    try:
        os.makedirs(os.path.dirname(args.output) or ".", exist_ok=True)
        if not args.plot_only:
            all_measured = measure_points(args, rows)
            print(f"measured in {time.time() - start_time:.0f} s")
        if not rows:
            usage_error(f"{args.output}.csv holds no points: nothing to draw")
        rows.sort(key=lambda row: list(POINTS).index(row["factor"]))
        write_file(args.output + ".csv", csv_text(rows).encode())
        write_file(args.output + ".md", markdown(rows, name).encode())
        if any(row["factor"] in DRAWN for row in rows):
            figure = draw(rows)
            write_file(args.output + ".png", figure_bytes(figure, "png"))
            write_file(args.output + ".svg", figure_bytes(figure, "svg"))
    except OSError as error:
        usage_error(f"can't write {error.filename or args.output}: {error.strerror}")
    print(f"wrote {args.output}.csv, .md, .png and .svg")
    if not all_measured:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

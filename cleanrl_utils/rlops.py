"""openrlbenchmark's rlops on the runs on this machine: curves, tables and, with --rliable, aggregate scores.

    python -m cleanrl_utils.rlops --runs runs -- \\
        --filters '?we=local&wpn=cleanRL&ceik=env_id&cen=exp_name&metric=charts/avg_episodic_return' \\
            ppo_continuous_action_envpool_xla_jax_scan \\
        --env-ids Hopper-v4 Walker2d-v4 --rliable --output-filename compare

What follows `--` goes to `python -m openrlbenchmark.rlops --offline --scan-history` as it is, and its exit code comes
back. It needs older packages than the project, those in openrlbenchmark.txt, and gets an environment of its own for
them (see python_environments.py).
"""

import csv
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass

import tyro

from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.files import write_file
from cleanrl_utils.python_environments import find_environment
from cleanrl_utils.results import Run, format_steps, group_runs, read_runs

REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "openrlbenchmark.txt")


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders of runs or of the report's `--save-results` (or single ones)"""
    wandb_entity: str = "local"
    """what the filters call them with `we`"""
    wandb_project_name: str = "cleanRL"
    """what the filters call them with `wpn`"""


def write_openrlbenchmark_store(folder: str, entity: str, project: str, runs: list[Run]) -> None:
    """What `openrlbenchmark.rlops --offline --scan-history` reads: its offline_db.py and cache.py, version 0.3.1.

    Every run has its budget as a tag, e.g. `?tag=1M`, as rlops knows no other way to tell two budgets apart.
    """
    store = os.path.join(folder, entity, project)
    os.makedirs(store, exist_ok=True)
    rows, tags = [], {}
    for run in runs:
        tag = format_steps(run.config["total_timesteps"])
        tags.setdefault(tag, []).append(run.name)
        attributes = {
            "id": run.name,
            "name": run.name,
            "state": "finished",
            "url": run.name,
            "path": [entity, project, run.name],
            "project": project,
            "entity": entity,
            "config": run.config,
        }
        rows.append([*(json.dumps(x) if isinstance(x, list | dict) else x for x in attributes.values()), entity])
        os.makedirs(os.path.join(store, run.name), exist_ok=True)
        write_file(os.path.join(store, run.name, "run_df.csv"), history_csv(run).encode())
        attributes |= {"tags": [tag], "user": {"username": entity, "name": entity}}
        write_file(os.path.join(store, run.name, "run.json"), json.dumps(attributes).encode())

    database = sqlite3.connect(":memory:")
    text = "VARCHAR(255) NOT NULL"
    database.execute(
        f"CREATE TABLE offlinerun (id {text}, name {text}, state {text}, url {text}, path TEXT NOT NULL, "
        f"project {text}, entity {text}, config TEXT NOT NULL, username {text})"
    )
    database.execute(f"CREATE TABLE tag (id INTEGER NOT NULL PRIMARY KEY, name {text})")
    database.execute(
        "CREATE TABLE tag_offlinerun_through (id INTEGER NOT NULL PRIMARY KEY, "
        "tag_id INTEGER NOT NULL REFERENCES tag (id), offlinerun_id INTEGER NOT NULL REFERENCES offlinerun (id))"
    )
    database.executemany("INSERT INTO offlinerun VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    for tag_id, (tag, run_ids) in enumerate(tags.items(), start=1):
        database.execute("INSERT INTO tag VALUES (?, ?)", [tag_id, tag])
        pairs = [(tag_id, run_id) for run_id in run_ids]
        database.executemany("INSERT INTO tag_offlinerun_through (tag_id, offlinerun_id) VALUES (?, ?)", pairs)
    database.commit()
    write_file(os.path.join(store, "offline.sqlite"), database.serialize())
    database.close()


def history_csv(run: Run) -> str:
    """Every scalar, a row per step."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["", "global_step", "_runtime", *run.scalars])
    for i, step in enumerate(sorted(run.wall_times)):
        values = (values.get(step, "") for values in run.scalars.values())
        writer.writerow([i, step, f"{run.wall_times[step]:.3f}", *values])
    return buffer.getvalue()


def run_rlops(environment: str, args: Args, runs: list[Run], rlops_args: list[str]) -> int:
    """Its exit code. rlops looks for its store within its own package: each call gets a copy of it, with its runs."""
    with tempfile.TemporaryDirectory() as scratch:
        package = os.path.join(scratch, "openrlbenchmark")
        site_packages = sysconfig.get_path("purelib", "venv", {"base": environment})
        shutil.copytree(os.path.join(site_packages, "openrlbenchmark"), package)
        store = os.path.join(package, "dataset")
        write_openrlbenchmark_store(store, args.wandb_entity, args.wandb_project_name, runs)
        command = [os.path.join(environment, "bin", "python"), "-m", "openrlbenchmark.rlops"]
        variables = {"PYTHONPATH": scratch, "PYTHONSAFEPATH": "1", "MPLBACKEND": "agg"}
        try:
            return subprocess.run(
                [*command, "--offline", "--scan-history", *rlops_args], env=os.environ | variables
            ).returncode
        except KeyboardInterrupt:
            return 130


def main(args: Args, rlops_args: list[str]) -> None:
    if not rlops_args:
        usage_error("give the arguments of rlops after --; its own help: python -m cleanrl_utils.rlops -- --help")
    runs, left_out = read_runs(args.runs)
    for line in left_out:
        warn(line)
    if not runs:
        usage_error(f"no finished runs in {', '.join(args.runs)}")
    exit_code = run_rlops(find_environment("openrlbenchmark", REQUIREMENTS), args, runs, rlops_args)
    if exit_code:
        groups = ", ".join(f"{group.exp_name} in {group.env_id}" for group in group_runs(runs, ()))
        filters = f"?we={args.wandb_entity}&wpn={args.wandb_project_name}"
        warn(f"error: rlops failed; the runs that it was given, as {filters}: {groups}")
    sys.exit(exit_code)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own_args, rlops_args = sys.argv[1:split], sys.argv[split + 1 :]
    main(tyro.cli(Args, prog="python -m cleanrl_utils.rlops", description=__doc__, args=own_args), rlops_args)

"""openrlbenchmark's rlops on the runs on this machine: curves, tables and, with --rliable, aggregate scores.

    python -m cleanrl_utils.rlops --runs runs -- \\
        --filters '?we=local&wpn=cleanRL&ceik=env_id&cen=exp_name&metric=charts/avg_episodic_return' \\
            ppo_continuous_action_envpool_xla_jax_scan \\
        --env-ids Hopper-v4 Walker2d-v4 --rliable --output-filename compare

What follows `--` goes to `python -m openrlbenchmark.rlops --offline --scan-history` as it is, and its exit code comes
back. It needs older packages than the project, those in openrlbenchmark.txt, and gets an environment of its own for
them (see python_environments.py).
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass

import tyro

from cleanrl_utils import report, results
from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.python_environments import find_environment

REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "openrlbenchmark.txt")


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders of runs or of the report's `--save-results` (or single ones)"""
    wandb_entity: str = "local"
    """what the filters call them with `we`"""
    wandb_project_name: str = "cleanRL"
    """what the filters call them with `wpn`"""


def run_rlops(environment: str, args: Args, runs: list[results.Run], rlops_args: list[str]) -> int:
    """Its exit code. rlops looks for its store within its own package: each call gets a copy of it, with its runs."""
    with tempfile.TemporaryDirectory() as scratch:
        package = os.path.join(scratch, "openrlbenchmark")
        site_packages = sysconfig.get_path("purelib", "venv", {"base": environment})
        shutil.copytree(os.path.join(site_packages, "openrlbenchmark"), package)
        store = os.path.join(package, "dataset")
        report.write_openrlbenchmark_store(store, args.wandb_entity, args.wandb_project_name, runs)
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
    runs, left_out = results.read_runs(args.runs)
    for line in left_out:
        warn(line)
    if not runs:
        usage_error(f"no finished runs in {', '.join(args.runs)}")
    exit_code = run_rlops(find_environment("openrlbenchmark", REQUIREMENTS), args, runs, rlops_args)
    if exit_code:
        groups = ", ".join(f"{group.exp_name} in {group.env_id}" for group in results.group_runs(runs, ()))
        filters = f"?we={args.wandb_entity}&wpn={args.wandb_project_name}"
        warn(f"error: rlops failed; the runs that it was given, as {filters}: {groups}")
    sys.exit(exit_code)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own_args, rlops_args = sys.argv[1:split], sys.argv[split + 1 :]
    main(tyro.cli(Args, prog="python -m cleanrl_utils.rlops", description=__doc__, args=own_args), rlops_args)

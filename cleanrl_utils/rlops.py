"""openrlbenchmark's rlops on the runs on this machine: curves, tables and, with --rliable, aggregate scores.

    python -m cleanrl_utils.rlops --runs runs -- \\
        --filters '?we=local&wpn=cleanRL&ceik=env_id&cen=exp_name&metric=charts/avg_episodic_return' \\
            ppo_continuous_action_envpool_xla_jax_scan \\
        --env-ids Hopper-v4 Walker2d-v4 --rliable --output-filename compare

What follows `--` goes to `python -m openrlbenchmark.rlops --offline --scan-history` as it is, and its exit code comes
back. It needs older packages than the project, those in openrlbenchmark.txt, and gets an environment of its own for
them in ~/.cache/cleanrl: the first call makes it, from the package registry, and no later one needs the network.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass

import tyro

from cleanrl_utils import report
from cleanrl_utils.errors import usage_error

REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "openrlbenchmark.txt")


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders of runs (or single runs)"""
    wandb_entity: str = "local"
    """what the filters call them with `we`"""
    wandb_project_name: str = "cleanRL"
    """what the filters call them with `wpn`"""


def cache_folder() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cleanrl")


def find_environment() -> str:
    """The environment that holds openrlbenchmark, made if this Python and these requirements have none yet."""
    with open(REQUIREMENTS, "rb") as f:
        key = hashlib.sha256(f.read() + sys.version.encode()).hexdigest()[:8]
    environment = os.path.join(cache_folder(), f"openrlbenchmark-{key}")
    if not os.path.exists(os.path.join(environment, "bin", "python")):
        try:
            os.makedirs(cache_folder(), exist_ok=True)
            with open(environment + ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # of two calls at once, the second waits for the first one's
                if not os.path.exists(os.path.join(environment, "bin", "python")):
                    make_environment(environment)
        except OSError as error:
            usage_error(f"can't write {error.filename}: {error.strerror}; XDG_CACHE_HOME names another place")
    return environment


def make_environment(environment: str) -> None:
    """Under a second name first: at its path there is never half an environment."""
    print(f"making an environment for openrlbenchmark in {environment}, once", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)  # its Python is gone
    with tempfile.TemporaryDirectory(dir=os.path.dirname(environment)) as scratch:
        new = os.path.join(scratch, "environment")
        python = os.path.join(new, "bin", "python")
        uv = shutil.which("uv")
        if uv:
            make = [uv, "venv", "--quiet", "--python", sys.executable, new]
            install = [uv, "pip", "install", "--quiet", "--python", python, "--requirement", REQUIREMENTS]
        else:
            make = [sys.executable, "-m", "venv", new]
            install = [python, "-I", "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS]
        for command in make, install:
            # not in the checkout: there, uv would hold these packages to the project's versions
            result = subprocess.run(command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if result.returncode:
                reason = (result.stdout.strip().splitlines() or [f"exit code {result.returncode}"])[-1].strip()
                usage_error(f"can't install openrlbenchmark, which needs the package registry once: {reason}")
        os.rename(new, environment)


def run_rlops(environment: str, args: Args, runs: list[report.Run], rlops_args: list[str]) -> int:
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
    runs, left_out = report.read_runs(report.Args(runs=args.runs))
    for line in left_out:
        print(line, file=sys.stderr)
    if not runs:
        usage_error(f"no finished runs in {', '.join(args.runs)}")
    exit_code = run_rlops(find_environment(), args, runs, rlops_args)
    if exit_code:
        groups = ", ".join(f"{group.exp_name} in {group.env_id}" for group in report.group_runs(runs, ()))
        filters = f"?we={args.wandb_entity}&wpn={args.wandb_project_name}"
        print(f"error: rlops failed; the runs that it was given, as {filters}: {groups}", file=sys.stderr)
    sys.exit(exit_code)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own_args, rlops_args = sys.argv[1:split], sys.argv[split + 1 :]
    main(tyro.cli(Args, prog="python -m cleanrl_utils.rlops", description=__doc__, args=own_args), rlops_args)

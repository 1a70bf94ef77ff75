"""Runs one command for every environment and seed: a few at a time on this machine, or as one Slurm job array.

    python -m cleanrl_utils.benchmark --env-ids Hopper-v4 Walker2d-v4 --num-seeds 3 --workers 2 \\
        --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000"

Each run leaves two files in `--log-folder`: a .log with all it printed, and a .json with its command, commit, times,
exit code and run folder, which is what `--resume` goes by.
"""

import difflib
import fcntl
import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cleanrl_utils.errors import usage_error
from cleanrl_utils.files import write_file
from cleanrl_utils.untrusted_json import read_json

PYTHON = ("python", "python3")
STATUS_STYLES = {"failed": "bold red", "stopped": "yellow", "running": "cyan", "waiting": "dim", "done": "green"}


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = ()
    """the ids of the environments"""
    command: str = ""
    """the command to run, to which `--env-id` and `--seed` are added; `python` is the Python that runs the benchmark"""
    num_seeds: int = 3
    """the number of seeds of each environment"""
    start_seed: int = 1
    """the first seed"""
    workers: int = 1
    """the number of runs at a time"""
    log_folder: str = "logs"
    """where the log and the record of each run go"""
    resume: bool = False
    """leave out the runs that passed before (same command, environment and seed, whatever the commit)"""
    dry_run: bool = False
    """print the commands and do nothing"""
    grace_period: float = 20.0
    """seconds that runs get to end by themselves after Ctrl-C or SIGTERM, before they are killed"""

    slurm: bool = False
    """submit the runs as one Slurm job array; sbatch's own SBATCH_... variables set what has no flag here"""
    slurm_local: bool = False
    """try `--slurm` without Slurm: the same jobs as processes of this machine, all at once"""
    slurm_partition: str | None = None
    """the Slurm partition (default: the cluster's)"""
    slurm_cpus_per_task: int = 4
    """CPU cores for each run"""
    slurm_gpus_per_task: int = 0
    """GPUs for each run"""
    slurm_time: int = 240
    """minutes that each run may take"""
    slurm_max_parallel: int | None = None
    """the number of runs at a time (default: as many as Slurm finds room for)"""


@dataclass(eq=False)
class Run:
    command: str
    env_id: str
    seed: int
    log_folder: str
    status: str = "waiting"  # or another of STATUS_STYLES
    process: subprocess.Popen | None = None
    start_time: float | None = None
    end_time: float | None = None
    stopped_by: str | None = None  # the name of a signal

    @property
    def command_line(self) -> str:
        return f"{self.command} --env-id {shlex.quote(self.env_id)} --seed {self.seed}"

    @property
    def path(self) -> str:
        """Path of its files without .log or .json; another command, environment or seed has another."""
        key = hashlib.sha256(json.dumps([self.command, self.env_id, self.seed]).encode()).hexdigest()[:8]
        name = f"{self.env_id}__{experiment_name(self.command)}__{self.seed}__{key}"
        return os.path.join(self.log_folder, name.replace("/", "-"))

    @property
    def duration(self) -> str:
        return "" if self.start_time is None else format_seconds((self.end_time or time.time()) - self.start_time)

    def __str__(self) -> str:
        return f"{self.env_id} seed {self.seed}"


def format_seconds(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


# ---------------------------------------------------------------- what to run
def find_script(argv: list[str]) -> str:
    """The path of the Python file that a command runs, or else its program."""
    for arg, following in zip(argv, [*argv[1:], ""], strict=True):
        if arg.endswith(".py"):
            return arg
        if arg == "-m":
            return following.replace(".", "/") + ".py"
    return argv[0]


def experiment_name(command: str) -> str:
    """What a training script calls itself in the name of its run folder."""
    given = re.search(r"--exp[-_]name[= ](\S+)", command)
    return given[1] if given else os.path.basename(find_script(shlex.split(command))).removesuffix(".py")


def check_args(args: Args) -> None:
    """Ends the program (see `usage_error`) on a mistake that can be seen before anything runs."""
    if not args.env_ids:
        usage_error("no environments: name some, as in --env-ids Hopper-v4 Walker2d-v4")
    for env_id in args.env_ids:
        if not env_id.strip() or not env_id.isprintable():
            usage_error(f"--env-ids holds {env_id!r}, which is no environment's name")
    if len(set(args.env_ids)) < len(args.env_ids):
        usage_error("--env-ids names an environment twice")
    at_least = {"num_seeds": 1, "start_seed": 0, "workers": 1, "grace_period": 0}
    at_least |= {"slurm_cpus_per_task": 1, "slurm_gpus_per_task": 0, "slurm_time": 1, "slurm_max_parallel": 1}
    for f in fields(args):
        flag, value = f"--{f.name.replace('_', '-')}", getattr(args, f.name)
        if f.name in at_least and value is not None and not value >= at_least[f.name]:
            usage_error(f"{flag} {value}: give {at_least[f.name]} or more")
        if f.name.startswith("slurm_") and value != f.default and not (args.slurm or args.slurm_local):
            usage_error(f"{flag} does nothing without --slurm: add that, or leave both out")
    if args.workers > 1 and (args.slurm or args.slurm_local):
        usage_error(f"--workers {args.workers} is for runs on this machine: give Slurm --slurm-max-parallel")
    if not args.log_folder:
        usage_error("--log-folder is empty: give one, or leave it out for logs/")
    check_command(args.command)


def check_command(command: str) -> None:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        usage_error(f"--command {command!r}: {error}")
    if not argv:
        usage_error('no command: give one, as in --command "python cleanrl/SCRIPT.py --total-timesteps 1000000"')
    for arg in argv:
        if re.match("--(env[-_]id|seed)(=|$)", arg):
            usage_error(f"--command holds {arg}, which the benchmark adds: use --env-ids, --start-seed and --num-seeds")
        if arg in ("&&", "||", "|", ";", "&", ">", ">>", "<"):
            usage_error(f"--command holds {arg}, but no shell runs it: put it into a script, and give that")
        if re.match(r"[\w-]*(API[_-]?KEY|TOKEN|PASSWORD|SECRET)(=|$)", arg, re.IGNORECASE):
            usage_error(
                f"--command holds {arg.split('=')[0]}, but it is written to files: export that variable instead"
            )
    if not shutil.which(argv[0]) and argv[0] not in PYTHON:
        usage_error(f"--command: no program {argv[0]!r} here" + ("; export variables first" if "=" in argv[0] else ""))
    script = find_script(argv)
    if script.endswith(".py") and script in argv and not os.path.isfile(script):
        nearest = difflib.get_close_matches(script, glob.glob(os.path.join(os.path.dirname(script), "*.py")), n=1)
        usage_error(f"--command: no file {script} here" + "".join(f", did you mean {path}?" for path in nearest))


def select_runs(args: Args) -> list[Run]:
    """Every environment with the first seed, then with the next: what is cut short still compares environments."""
    command = shlex.join(shlex.split(args.command))
    seeds = range(args.start_seed, args.start_seed + args.num_seeds)
    runs = [Run(command, env_id, seed, args.log_folder) for seed in seeds for env_id in args.env_ids]
    running = [run for run in runs if is_running(run)]
    if running and not args.resume and not args.dry_run:
        usage_error(f"{running[0]} is running already ({running[0].path}.log): wait, or leave it out with --resume")
    if args.resume:
        passed = [run for run in runs if run not in running and has_passed(run)]
        print(f"resuming: {len(passed)} of {len(runs)} runs passed before, {len(running)} are running", file=sys.stderr)
        runs = [run for run in runs if run not in running + passed]
        for run in runs:
            if record := read_record(run):
                reason = exit_reason(record.get("exit_code"), record.get("stopped_by"))
                print(f"did not pass: {run}, {reason} ({run.path}.log)", file=sys.stderr)
    return runs


# ---------------------------------------------------------------- what is kept of a run
def git(*command: str) -> str:
    """What git prints about the repository here; nothing if there is none."""
    with suppress(OSError):
        return subprocess.run(["git", "--no-optional-locks", *command], capture_output=True, text=True).stdout.strip()
    return ""


def git_state() -> dict:
    """Commit, whether files differ from it (new ones too), and a name for it as `git describe` gives it."""
    if not (commit := git("rev-parse", "--verify", "HEAD")):
        return {"git_commit": None, "git_dirty": None, "git_describe": None}
    dirty = bool(git("status", "--porcelain"))
    describe = git("describe", "--tags", "--always") + "-dirty" * dirty
    return {"git_commit": commit, "git_dirty": dirty, "git_describe": describe}


def write_record(run: Run, state: dict) -> None:
    start_time, end_time = (
        t and datetime.fromtimestamp(t, UTC).isoformat(timespec="seconds") for t in (run.start_time, run.end_time)
    )
    record = {"command": run.command, "env_id": run.env_id, "seed": run.seed, **state}
    record |= {"start_time": start_time, "end_time": end_time, "exit_code": run.process and run.process.returncode}
    record |= {"stopped_by": run.stopped_by, "run_dirs": find_run_dirs(run) if run.end_time else []}
    write_file(f"{run.path}.json", json.dumps(record, indent=2).encode())


def read_record(run: Run) -> dict:
    """What `write_record` wrote; nothing if there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        record = read_json(f"{run.path}.json")
        exit_codes, signals = (None, *range(-64, 256)), (None, *signal.Signals.__members__)
        if isinstance(record, dict) and record.get("exit_code") in exit_codes and record.get("stopped_by") in signals:
            return record
    return {}


def has_passed(run: Run) -> bool:
    record = read_record(run)
    return record.get("exit_code") == 0 and not record.get("stopped_by")


def is_running(run: Run) -> bool:
    """Whether a process holds the lock on its log (see `start`): of another benchmark, or left by a killed one."""
    try:
        with open(f"{run.path}.log", "rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no log yet, or a file system without locks
        pass
    return False


def last_lines(run: Run, n: int) -> list[str]:
    """The last n lines of its log that show something; of a progress bar that redraws itself, the newest state."""
    try:
        with open(f"{run.path}.log", "rb") as f:
            f.seek(max(0, os.path.getsize(f.name) - 16384))
            text = f.read().decode(errors="replace")
    except OSError:
        return []
    text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text)  # colours and cursor movements
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    lines = ["".join(c for c in line if c.isprintable()).rstrip() for line in lines]
    return [line for line in lines if line][-n:]


def find_run_dirs(run: Run) -> list[str]:
    """The folders that it made in runs/, one for each seed of the command, if they can be told from others' there."""
    given = re.search(r"--num[-_]seeds[= ](\d+)", run.command)
    log = "\n".join(last_lines(run, 1000))
    found = []
    for seed in range(run.seed, run.seed + (int(given[1]) if given else 1)):
        name = f"{run.env_id.replace('/', '-')}__{experiment_name(run.command)}__{seed}__"
        times = [path.rpartition("__")[2] for path in glob.glob(f"runs/{glob.escape(name)}*")]
        run_dirs = [f"runs/{name}{t}" for t in times if t.isdecimal() and int(t) >= int(run.start_time)]
        if len(run_dirs) > 1:
            run_dirs = [run_dir for run_dir in run_dirs if run_dir in log]
        found += run_dirs if len(run_dirs) == 1 else []
    return found


def exit_reason(exit_code: int | None, stopped_by: str | None = None) -> str:
    if stopped_by:
        return f"stopped by {stopped_by}"
    if exit_code is None:
        return "never ended"
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}, {signal.strsignal(-exit_code)}"


# ---------------------------------------------------------------- on this machine
def child_env(args: Args, git_describe: str | None) -> dict[str, str]:
    """The environment of the runs: nothing in it changes what they compute."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    tags = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]
    if git_describe and git_describe not in tags:
        env["WANDB_TAGS"] = ",".join([*tags, git_describe])
    if args.workers > 1:  # or the first run on a GPU takes three quarters of its memory
        env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return env


def start(run: Run, env: dict[str, str], state: dict) -> None:
    argv = shlex.split(run.command_line)
    if argv[0] in PYTHON:
        argv[0] = sys.executable
    run.status, run.start_time = "running", time.time()
    write_record(run, state)
    with open(f"{run.path}.log", "ab") as log:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run inherits it, and holds it until it ends
        log.truncate(0)
        # A session of its own, so that Ctrl-C reaches this program alone, which then stops the runs in order.
        run.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def kill(run: Run) -> None:
    """Ends what is left of it: its process and all that this started."""
    with suppress(ProcessLookupError, PermissionError):  # nothing is left
        os.killpg(run.process.pid, signal.SIGKILL)


def make_table(runs: list[Run], start_time: float, max_rows: int) -> Group:
    counts = {status: sum(run.status == status for run in runs) for status in STATUS_STYLES}
    title = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    table = Table(box=SIMPLE_HEAD, expand=True, title=Text(f"{title}, {format_seconds(time.time() - start_time)}"))
    table.title_justify = table.caption_justify = "left"
    for name in ("environment", "seed", "status", "time"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("seed", "time") else "left")
    table.add_column("last line of its log", no_wrap=True, overflow="ellipsis", ratio=1)
    if len(runs) > max_rows:  # those that matter most
        table.caption = f"and {len(runs) - max_rows} more"
        runs = sorted(runs, key=lambda run: list(STATUS_STYLES).index(run.status))[:max_rows]
    for run in runs:
        last_line = "".join(last_lines(run, 1)).strip() if run.start_time else ""
        status = Text(run.status, style=STATUS_STYLES[run.status])
        table.add_row(Text(run.env_id), str(run.seed), status, run.duration, Text(last_line))
    return Group(table, "")  # a line for the ^C that the terminal shows, or the table would move


@contextmanager
def display(runs: list[Run]) -> Iterator[Callable[[], None]]:
    """Yields what shows the runs as they are by then: in a live table on a terminal, elsewhere a line per change."""
    console, start_time, shown = Console(), time.time(), ["waiting"] * len(runs)

    def print_changes():
        for i, run in enumerate(runs):
            if run.status != shown[i]:
                shown[i] = run.status
                detail = f"log in {run.path}.log" if run.status == "running" else f"after {run.duration}"
                detail += f", {exit_reason(run.process.returncode)}" if run.status == "failed" else ""
                print(f"[{i + 1}/{len(runs)}] {run.status}: {run}, {detail}", flush=True)

    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield print_changes
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda: live.update(make_table(runs, start_time, max(1, console.height - 9)), refresh=True)
        live.update(make_table(runs, start_time, len(runs)), refresh=True)


def is_second_interrupt(received: list[tuple[int, float]]) -> bool:
    """Whether the user means it: SIGTERM comes twice from Slurm, and Ctrl-C may come again from a parent process."""
    return any(signum == signal.SIGINT and t > received[0][1] + 1 for signum, t in received)


def run_all(runs: list[Run], args: Args) -> int | None:
    """Runs them, `workers` at a time; returns the signal that stopped it, if one did."""
    received: list[tuple[int, float]] = []
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for signum in [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (not nohup):
        signal.signal(signum, lambda signum, _: received.append((signum, time.time())))
    # SIGUSR2 announces the end to a job: Slurm's before preemption, to each of its processes, and submitit's local one.
    # Blocked (the runs inherit that), it can't end a run at once: it is seen below, and the runs are asked to end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    state, kill_time = git_state(), None
    env = child_env(args, state["git_describe"])
    with display(runs) as refresh:
        try:
            while True:
                running = [run for run in runs if run.status == "running"]
                for run in running:
                    if run.process.poll() is not None:
                        if received:  # Slurm sends a signal to the runs too, and what ends by it may exit with 0
                            run.stopped_by = signal.Signals(received[0][0]).name
                        run.end_time = time.time()
                        run.status = "stopped" if run.stopped_by else "failed" if run.process.returncode else "done"
                        write_record(run, state)
                running = [run for run in running if run.status == "running"]
                if not received and signal.SIGUSR2 in signal.sigpending():
                    received.append((signal.SIGUSR2, time.time()))
                if received and kill_time is None:
                    kill_time = time.time() + args.grace_period
                    name = signal.Signals(received[0][0]).name
                    print(f"{name}: stopping {len(running)} runs; one more Ctrl-C kills them at once", flush=True)
                    for run in running:
                        run.stopped_by = name
                        run.process.terminate()
                elif received and (is_second_interrupt(received) or time.time() > kill_time):
                    for run in running:
                        kill(run)
                waiting = [run for run in runs if run.status == "waiting" and not received]
                for run in waiting[: args.workers - len(running)]:
                    start(run, env, state)
                refresh()
                if not running and not waiting:
                    return received[0][0] if received else None
                time.sleep(0.2)
        finally:
            for run in runs:
                if run.process and run.status in ("running", "stopped"):
                    kill(run)


# ---------------------------------------------------------------- on Slurm
def submit(runs: list[Run], args: Args) -> None:
    """One Slurm job array, in which each job is this program with one run."""
    try:
        import submitit
    except ImportError:
        usage_error("--slurm needs submitit: pip install submitit")
    if not args.slurm_local and not (shutil.which("sbatch") and shutil.which("srun")):
        usage_error("--slurm: no sbatch and srun here: use it where Slurm is, or try --slurm-local")
    executor = submitit.AutoExecutor(f"{args.log_folder}/slurm/%j", cluster="local" if args.slurm_local else "slurm")
    executor.update_parameters(
        name=experiment_name(args.command),
        timeout_min=args.slurm_time,
        cpus_per_task=args.slurm_cpus_per_task,
        gpus_per_node=args.slurm_gpus_per_task or None,  # each job is one task on one node
        slurm_partition=args.slurm_partition,
        slurm_signal_delay_s=0,  # no SIGUSR2 before the time is up, when SIGTERM comes: it may be a minute early
        slurm_array_parallelism=args.slurm_max_parallel or len(runs),
        slurm_srun_args=[f"--cpus-per-task={args.slurm_cpus_per_task}"],  # srun doesn't take it from sbatch
    )
    program = [sys.executable, "-m", "cleanrl_utils.benchmark", f"--log-folder={args.log_folder}", "--num-seeds=1"]
    program += [f"--command={args.command}", f"--grace-period={args.grace_period}"]
    program += ["--resume"] * args.resume  # for what another job has done by the time that this one starts
    argvs = [[*program, f"--start-seed={run.seed}", "--env-ids", run.env_id] for run in runs]
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for submitit's own processes on this machine
    try:  # exec: signals and the exit code are then those of this program, not of submitit
        with redirect_stderr(io.StringIO()):  # where submitit repeats the error that it raises
            jobs = executor.map_array(os.execv, [sys.executable] * len(runs), argvs)
    except submitit.core.utils.FailedJobError as error:
        usage_error(f"Slurm did not take the jobs: {' '.join(str(error).split())}")
    signal.signal(signal.SIGINT, on_interrupt)
    if args.slurm_local:
        for job in jobs:
            job.wait()
    else:
        job_id = jobs[0].job_id.partition("_")[0]
        print(
            f"submitted {len(runs)} runs as Slurm job {job_id}: `squeue -j {job_id}` shows those that have not ended,"
        )
        print("the same command with --resume --dry-run those that have not passed")


def report(runs: list[Run]) -> int:
    """Names what failed, with the end of its log; returns the exit code."""
    failed = [run for run in runs if not has_passed(run)]
    for run in failed:
        record = read_record(run)
        reason = exit_reason(record.get("exit_code"), record.get("stopped_by"))
        print(f"\nfailed: {run}, {reason}", file=sys.stderr)
        for line in last_lines(run, 5):
            print(f"    {line}", file=sys.stderr)
        print(f"    ({run.path}.log)", file=sys.stderr)
    if failed:
        print(f"\n{len(failed)} of {len(runs)} runs failed; --resume runs those again, and only those", file=sys.stderr)
        return 1
    print(f"all {len(runs)} runs passed")
    return 0


def main(args: Args) -> int:
    check_args(args)
    runs = select_runs(args)
    if args.dry_run:
        print("".join(f"{run.command_line}\n" for run in runs), end="")
    if args.dry_run or not runs:
        return 0
    try:
        os.makedirs(args.log_folder, exist_ok=True)
        if args.slurm or args.slurm_local:
            submit(runs, args)
            return report(runs) if args.slurm_local else 0
        if signum := run_all(runs, args):
            print("stopped; --resume runs what has not passed", file=sys.stderr)
            return 128 + signum
    except OSError as error:  # a folder that can't be written to, a full disk, a command that is no program
        usage_error(f"{error.filename or args.log_folder}: {error.strerror}")
    except KeyboardInterrupt:  # while jobs are submitted; of --slurm-local the jobs see it too, and stop
        return 130
    return report(runs)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

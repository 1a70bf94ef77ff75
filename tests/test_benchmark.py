"""The benchmark runner, with small stand-ins for training scripts."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from cleanrl_utils import benchmark
from cleanrl_utils.benchmark import Args, Run, experiment_name, last_lines, main

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "cleanrl_utils.benchmark"]
# Leaves what a training script leaves, counts its starts, and fails or waits for the environments so named.
SCRIPT = """
import os, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
env_id, seed = args["--env-id"], args["--seed"]
open("starts", "a").write(f"{env_id} {seed}\\n")
start_time = int(time.time())
while os.path.exists(run_dir := f"runs/{env_id.replace('/', '-')}__train__{seed}__{start_time}"):
    start_time += 1
os.makedirs(run_dir)
print("step 1\\rstep 2", file=sys.stderr)
print("tags", os.environ.get("WANDB_TAGS"))
if env_id.startswith("Bad") and not os.path.exists("mended"):
    raise ValueError("[red]this one fails[/red]")
if env_id.startswith("Slow"):
    time.sleep(60)
if env_id.startswith(("Stubborn", "Polite")):
    import signal
    def stop(*_):
        print("not me", flush=True)
        if env_id.startswith("Polite"):
            time.sleep(1)
            print("saved")
            sys.exit()
    signal.signal(signal.SIGTERM, stop)
    open("ready", "w").write(str(os.getpid()))
    while True:
        time.sleep(60)
"""


def enter_folder(tmp_path, monkeypatch):
    """A new working directory, which no git repository holds, with the stand-in."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("WANDB_TAGS", raising=False)
    return tmp_path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return enter_folder(tmp_path, monkeypatch)


def run_benchmark(*args):
    return subprocess.run([*PROGRAM, "--command", "python train.py", *args], capture_output=True, text=True, timeout=60)


def start_benchmark(*args, launcher=()):
    command = [*launcher, *PROGRAM, "--command", "python train.py", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, timeout=30):
    end = time.time() + timeout
    while not condition():
        assert time.time() < end, "timed out"
        time.sleep(0.05)


def starts(folder):
    path = folder / "starts"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def git(*args):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *args], check=True, capture_output=True, text=True).stdout.strip()


def git_commit():
    """Puts the folder into a new repository; returns its commit."""
    git("init", "-q")
    Path(".gitignore").write_text("logs\nruns\nstarts\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git("rev-parse", "HEAD")


def record(folder, env_id, seed):
    (path,) = (folder / "logs").glob(f"{env_id}__train__{seed}__*.json")
    return json.loads(path.read_text())


def test_runs_every_environment_and_seed(folder):
    result = run_benchmark(
        "--env-ids", "Good-v1", "ALE/Good-v5", "--num-seeds", "2", "--start-seed", "3", "--workers", "4"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.endswith("all 4 runs passed\n")
    assert "] done: ALE/Good-v5 seed 4, after 0:00:0" in result.stdout
    assert starts(folder) == ["ALE/Good-v5 3", "ALE/Good-v5 4", "Good-v1 3", "Good-v1 4"]
    assert len(list((folder / "logs").glob("*.log"))) == 4
    kept = record(folder, "ALE-Good-v5", 4)
    assert kept["command"] == "python train.py"
    assert (kept["env_id"], kept["seed"], kept["exit_code"], kept["stopped_by"]) == ("ALE/Good-v5", 4, 0, None)
    assert kept["start_time"] <= kept["end_time"]
    assert kept["git_commit"] is None
    (run_dir,) = kept["run_dirs"]
    assert Path(run_dir).is_dir() and run_dir.startswith("runs/ALE-Good-v5__train__4__")


def test_no_more_than_workers_at_a_time(folder):
    (folder / "train.py").write_text("""
import os, sys, time
open(f"running{os.getpid()}", "w")
time.sleep(0.3)
open("counts", "a").write(f"{sum(name.startswith('running') for name in os.listdir())}\\n")
os.remove(f"running{os.getpid()}")
""")
    result = run_benchmark("--env-ids", "A-v1", "--num-seeds", "5", "--workers", "2")
    assert result.returncode == 0, result.stderr
    counts = (folder / "counts").read_text().split()
    assert len(counts) == 5 and max(counts) == "2"


def test_names_what_failed_and_resume_runs_only_that(folder):
    args = ["--env-ids", "Good-v1", "Bad-v1", "--num-seeds", "2", "--workers", "4"]
    result = run_benchmark(*args)
    assert result.returncode == 1
    assert "failed: Bad-v1 seed 1, exit code 1" in result.stderr
    assert "    ValueError: [red]this one fails[/red]" in result.stderr
    assert "2 of 4 runs failed" in result.stderr
    assert record(folder, "Bad-v1", 2)["exit_code"] == 1

    (folder / "mended").touch()
    (folder / "starts").unlink()
    result = run_benchmark(*args, "--resume")
    assert result.returncode == 0, result.stderr
    assert "2 of 4 runs passed before" in result.stderr
    assert "did not pass: Bad-v1 seed 2, exit code 1 (logs/Bad-v1__train__2__" in result.stderr
    assert starts(folder) == ["Bad-v1 1", "Bad-v1 2"]

    result = run_benchmark(*args, "--resume")
    assert result.returncode == 0
    assert len(starts(folder)) == 2, "all had passed"
    assert run_benchmark(*args).returncode == 0
    assert len(starts(folder)) == 6, "without --resume everything runs"


def test_resume_knows_command_environment_and_seed(folder, capsys):
    run_benchmark("--env-ids", "Good-v1", "--num-seeds", "1")

    def left(command="python train.py", **args):
        assert (
            main(Args(**{"env_ids": ("Good-v1",), "num_seeds": 1, **args}, command=command, resume=True, dry_run=True))
            == 0
        )
        return capsys.readouterr().out

    assert left() == ""
    assert left(command="python  'train.py'") == "", "the same command, written otherwise"
    assert left(num_seeds=2) == "python train.py --env-id Good-v1 --seed 2\n"
    assert left(env_ids=("Good-v1", "B-v1")) == "python train.py --env-id B-v1 --seed 1\n"
    assert left(command="python train.py --gamma 0.9") == "python train.py --gamma 0.9 --env-id Good-v1 --seed 1\n"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"exit_code": null}', '{"exit_code": 0, "stopped_by": "SIGTERM"}', "[" * 100_000]
    + ['{"exit_code": "\\u001b[2J"}', '{"exit_code": -1e9}', '{"exit_code": 1, "stopped_by": "\\u001b[2J"}']
    + ['{"exit_code": [0]}', '{"exit_code": NaN}', '{"exit_code": -65}'],
)
def test_resume_runs_again_what_has_no_good_record(folder, capsys, content):
    run = Run("python train.py", "Good-v1", 1, "logs")
    os.mkdir("logs")
    Path(f"{run.path}.json").write_text(content)
    assert main(Args(("Good-v1",), "python train.py", num_seeds=1, resume=True, dry_run=True)) == 0
    out, err = capsys.readouterr()
    assert "Good-v1 --seed 1" in out and all(line.isprintable() for line in err.splitlines())


def test_a_run_that_is_still_going_is_not_started_again(folder, capsys):
    run = Run("python train.py", "Good-v1", 1, "logs")
    os.mkdir("logs")
    with open(f"{run.path}.log", "w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="2"):
            main(Args(("Good-v1",), "python train.py", num_seeds=1))
        assert "Good-v1 seed 1 is running already" in capsys.readouterr().err
        assert main(Args(("Good-v1",), "python train.py", num_seeds=2, resume=True, dry_run=True)) == 0
        assert capsys.readouterr().out == "python train.py --env-id Good-v1 --seed 2\n"


def test_resume_after_the_runner_was_killed(folder, capsys):
    def left():
        assert main(Args(("Polite-v1",), "python train.py", num_seeds=1, resume=True, dry_run=True)) == 0
        return capsys.readouterr().out

    process = start_benchmark("--env-ids", "Polite-v1", "--num-seeds", "1")
    wait_for(lambda: (folder / "ready").exists() and (folder / "ready").read_text())
    process.kill()
    process.communicate(timeout=30)
    assert left() == "", "the run goes on"
    os.kill(int((folder / "ready").read_text()), signal.SIGTERM)
    wait_for(left)
    assert record(folder, "Polite-v1", 1)["exit_code"] is None, "nobody was there to see it"


def test_dry_run_prints_the_commands_and_writes_nothing(folder, capsys):
    assert main(Args(("A-v1", "B b"), "python train.py --x '1 2'", num_seeds=2, dry_run=True)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "python train.py --x '1 2' --env-id A-v1 --seed 1",
        "python train.py --x '1 2' --env-id 'B b' --seed 1",
        "python train.py --x '1 2' --env-id A-v1 --seed 2",
        "python train.py --x '1 2' --env-id 'B b' --seed 2",
    ]
    assert os.listdir() == ["train.py"]


MISTAKES = {
    "no environments": dict(env_ids=()),
    "an environment twice": dict(env_ids=("A-v1", "A-v1")),
    "--env-ids holds ''": dict(env_ids=("A-v1", "")),
    "--env-ids holds 'A\\nB'": dict(env_ids=("A\nB",)),
    "no command": dict(command=""),
    "No closing quotation": dict(command="python 'train.py"),
    "did you mean train.py?": dict(command="python trian.py"),
    "no file cleanrl/nothing.py": dict(command="python cleanrl/nothing.py"),
    "no program 'pythn'": dict(command="pythn train.py"),
    "export variables first": dict(command="A=1 python train.py"),
    "holds WANDB_API_KEY, but": dict(command="env WANDB_API_KEY=secret-value python train.py"),
    "holds --hf-token, but": dict(command="python train.py --hf-token=secret-value"),
    "holds --password, but": dict(command="python train.py --password secret-value"),
    "holds --seed=3, which": dict(command="python train.py --seed=3"),
    "holds --env-id, which": dict(command="python train.py --env-id A-v1"),
    "holds &&, but no shell runs it": dict(command="python train.py && echo done"),
    "--log-folder is empty": dict(log_folder=""),
    "--num-seeds 0: give 1 or more": dict(num_seeds=0),
    "--start-seed -1: give 0 or more": dict(start_seed=-1),
    "--workers 0: give 1 or more": dict(workers=0),
    "--grace-period nan: give 0 or more": dict(grace_period=float("nan")),
    "--slurm-partition does nothing without --slurm": dict(slurm_partition="gpu"),
    "--slurm-max-parallel 0: give 1 or more": dict(slurm=True, slurm_max_parallel=0),
    "--workers 2 is for runs on this machine": dict(slurm=True, workers=2),
    "train.py: File exists": dict(log_folder="train.py"),
    "train.py/logs: Not a directory": dict(log_folder="train.py/logs"),
    "./train: Exec format error": dict(command="./train"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(folder, capsys, line, monkeypatch):
    (folder / "train").touch(mode=0o755)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        main(Args(**{"env_ids": ("A-v1",), "command": "python train.py", **MISTAKES[line]}))
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert line in err
    assert "secret-value" not in err
    assert starts(folder) == []


def test_a_mistake_at_the_command_line(folder):
    result = run_benchmark("--num-seeds", "2")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: no environments") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_stops_the_runs(folder, signum):
    args = ["--env-ids", "Slow-v1", "--num-seeds", "3", "--workers", "2"]
    process = start_benchmark(*args)
    wait_for(lambda: len(starts(folder)) == 2)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, out
    assert f"{signum.name}: stopping 2 runs" in out and "--resume" in out and "Traceback" not in out
    assert starts(folder) == ["Slow-v1 1", "Slow-v1 2"]
    kept = record(folder, "Slow-v1", 1)
    assert (kept["exit_code"], kept["stopped_by"]) == (-signal.SIGTERM, signum.name)


def test_goes_on_under_nohup(folder):
    process = start_benchmark("--env-ids", "Good-v1", "--num-seeds", "2", launcher=["nohup"])
    wait_for(lambda: starts(folder))
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out


@pytest.mark.parametrize("second_signal", [False, True])
def test_a_run_that_will_not_stop_is_killed(folder, second_signal):
    process = start_benchmark(
        "--env-ids", "Stubborn-v1", "--num-seeds", "1", f"--grace-period={60 if second_signal else 0.5}"
    )
    wait_for((folder / "ready").exists)
    process.send_signal(signal.SIGINT)
    (log,) = (folder / "logs").glob("*.log")
    wait_for(lambda: "not me" in log.read_text())
    if second_signal:
        time.sleep(1.1)  # sooner, it counts as the same one
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert record(folder, "Stubborn-v1", 1)["exit_code"] == -signal.SIGKILL


@pytest.mark.parametrize("signum, run_first", [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_a_run_that_stops_in_its_own_time_has_not_passed(folder, capsys, signum, run_first):
    process = start_benchmark("--env-ids", "Polite-v1", "--num-seeds", "1")
    wait_for(lambda: (folder / "ready").exists() and (folder / "ready").read_text())
    if run_first:  # Slurm sends it to both
        process.send_signal(signal.SIGSTOP)
        pid = int((folder / "ready").read_text())
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
    for _ in range(2):  # as it comes from a terminal through `uv run`, or from Slurm
        process.send_signal(signum)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, out
    kept = record(folder, "Polite-v1", 1)
    assert (kept["exit_code"], kept["stopped_by"]) == (0, signum.name)
    assert main(Args(("Polite-v1",), "python train.py", num_seeds=1, resume=True, dry_run=True)) == 0
    out, err = capsys.readouterr()
    assert "Polite-v1 --seed 1" in out
    assert f"did not pass: Polite-v1 seed 1, stopped by {signum.name} (logs/" in err


def test_a_live_table_on_a_terminal(folder):
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (30, 100))
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    args = ["--command", "python train.py", "--env-ids", "Good-v1", "Bad-v1", "--num-seeds", "1"]
    process = subprocess.Popen([*PROGRAM, *args], stdout=other_end, stderr=other_end, env=env)
    os.close(other_end)
    out = b""
    try:
        while chunk := os.read(terminal, 4096):
            out += chunk
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(terminal)
    assert process.wait(timeout=30) == 1
    out = out.decode()
    assert "1 running, 1 waiting" in out and "1 failed, 1 done" in out
    assert "ValueError: [red]this one fails[/red]" in out
    assert "[1/2]" not in out, "the lines are for elsewhere"


@pytest.mark.parametrize(
    "tags, expected", [(None, "{describe}"), ("a,b", "a,b,{describe}"), ("{describe}", "{describe}")]
)
def test_commit_and_tags_from_git(folder, monkeypatch, tags, expected):
    commit = git_commit()
    git("tag", "v1")
    Path("new").touch()
    if tags:
        monkeypatch.setenv("WANDB_TAGS", tags.format(describe="v1-dirty"))
    assert run_benchmark("--env-ids", "Good-v1", "--num-seeds", "1").returncode == 0
    kept = record(folder, "Good-v1", 1)
    assert (kept["git_commit"], kept["git_dirty"]) == (commit, True)
    assert f"tags {expected.format(describe='v1-dirty')}" in last_lines(Run("python train.py", "Good-v1", 1, "logs"), 9)


def test_git_state_where_there_is_little_of_it(folder, monkeypatch):
    nothing = {"git_commit": None, "git_dirty": None, "git_describe": None}
    assert benchmark.git_state() == nothing
    git("init", "-q")
    assert benchmark.git_state() == nothing, "no commit yet"
    commit = git_commit()
    git("checkout", "-q", "--detach")
    state = benchmark.git_state()
    assert (state["git_commit"], state["git_dirty"]) == (commit, False) and commit.startswith(state["git_describe"])
    monkeypatch.setenv("PATH", "")
    assert benchmark.git_state() == nothing, "no git"


def test_run_folder_is_not_guessed(folder):
    run = Run("python train.py", "Good-v1", 1, "logs", start_time=100.7)
    for name in ("Good-v1__train__1__99", "Good-v1__train__2__100", "Good-v1__other__1__100", "Good-v1__train__1__100"):
        os.makedirs(f"runs/{name}")
    assert benchmark.find_run_dirs(run) == ["runs/Good-v1__train__1__100"]
    os.makedirs("runs/Good-v1__train__1__101")
    assert benchmark.find_run_dirs(run) == [], "another benchmark may have made it"
    os.mkdir("logs")
    Path(f"{run.path}.log").write_text("model runs/Good-v1__train__1__101/train.cleanrl_model\n")
    assert benchmark.find_run_dirs(run) == ["runs/Good-v1__train__1__101"]
    run = Run("python train.py --num-seeds 2", "Good-v1", 1, "logs", start_time=100.7)
    assert benchmark.find_run_dirs(run) == ["runs/Good-v1__train__2__100"], "no log of this command"
    Path(f"{run.path}.log").write_text("model runs/Good-v1__train__1__100/train.cleanrl_model\n")
    assert benchmark.find_run_dirs(run) == ["runs/Good-v1__train__1__100", "runs/Good-v1__train__2__100"]


def test_experiment_name():
    assert experiment_name("python cleanrl/ppo.py --gamma 0.9") == "ppo"
    assert experiment_name("uv run python -m cleanrl.ppo") == "ppo"
    assert experiment_name("python cleanrl/ppo.py --exp-name mine") == "mine"
    assert experiment_name("bin/train") == "train"
    assert Run("python train.py --exp-name a/b", "ALE/A-v5", 1, "logs/x").path.startswith("logs/x/ALE-A-v5__a-b__1__")


def test_last_lines(folder):
    os.mkdir("logs")
    run = Run("python train.py", "Good-v1", 1, "logs")
    assert last_lines(run, 3) == []
    Path(f"{run.path}.log").write_bytes(b"x" * 99999 + b"\nfirst\n\n  10%\r  20%\r\n\x1b[31mred\x1b[0m \xff\x00\n\n")
    assert last_lines(run, 3) == ["first", "  20%", "red \ufffd"]


def test_slurm_says_what_is_missing(folder, capsys, monkeypatch):
    args = Args(("Good-v1",), "python train.py", slurm=True)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SystemExit, match="2"):
        main(args)
    assert capsys.readouterr().err == "error: --slurm needs submitit: pip install submitit\n"
    if find_spec("submitit"):
        monkeypatch.undo()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
        with pytest.raises(SystemExit, match="2"):
            main(args)
        assert capsys.readouterr().err.startswith("error: --slurm: no sbatch and srun here")


def test_the_slurm_template_has_the_runs_of_the_benchmark(monkeypatch):
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    template = ["bash", "benchmark/ppo_slurm.sh", "--dry-run"]
    result = subprocess.run(template, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    runs = subprocess.check_output(
        ["bash", "-c", 'source benchmark/ppo_runs.sh && printf "%s\\n" "$short" "${env_ids[@]}"'], cwd=ROOT, text=True
    )
    command, *env_ids = runs.splitlines()
    assert len(env_ids) == 11
    assert 'train --env-ids "${env_ids[@]}" --command "$short ' in (ROOT / "benchmark/ppo.sh").read_text()
    assert result.stdout.splitlines() == [
        f"{command} --env-id {e} --seed {seed}" for seed in (1, 2, 3, 4, 5) for e in env_ids
    ]


needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")


@needs_submitit
def test_slurm_jobs_with_submitits_local_executor(folder):
    args = ["--env-ids", "ALE/Good-v5", "Bad-v1", "--num-seeds", "1", "--slurm-local"]
    result = run_benchmark(*args)
    assert result.returncode == 1, result.stdout + result.stderr
    assert starts(folder) == ["ALE/Good-v5 1", "Bad-v1 1"]
    assert "failed: Bad-v1 seed 1, exit code 1" in result.stderr and "1 of 2 runs failed" in result.stderr
    assert record(folder, "ALE-Good-v5", 1)["exit_code"] == 0


@needs_submitit
def test_slurm_is_asked_for_one_job_array(folder, monkeypatch):
    """With a stand-in for sbatch that keeps the file it is given."""
    os.mkdir("bin")
    for name, text in {"srun": "", "sbatch": 'cp "$1" submitted\necho "Submitted batch job 123"\n'}.items():
        Path(f"bin/{name}").write_text(f"#!/bin/sh\n{text}")
        os.chmod(f"bin/{name}", 0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    flags = "--slurm --slurm-partition gpu --slurm-cpus-per-task 3 --slurm-gpus-per-task 1 --slurm-time 90"
    args = ["--env-ids", "A-v1", "B-v1", *flags.split(), "--slurm-max-parallel", "2"]
    result = run_benchmark(*args)
    assert result.returncode == 0, result.stderr
    assert "submitted 6 runs as Slurm job 123" in result.stdout
    lines = (folder / "submitted").read_text().splitlines()
    for (
        option
    ) in "array=0-5%2 partition=gpu cpus-per-task=3 gpus-per-node=1 time=90 job-name=train signal=USR2@0".split():
        assert f"#SBATCH --{option}" in lines
    (srun,) = (line for line in lines if line.startswith("srun"))
    assert "--cpus-per-task=3" in srun
    Path("bin/sbatch").write_text("#!/bin/sh\necho sbatch: error: invalid partition specified: gpu >&2\nexit 1\n")
    result = run_benchmark(*args)
    assert result.returncode == 2
    assert result.stderr.startswith("error: Slurm did not take the jobs") and result.stderr.count("\n") == 1
    assert "invalid partition" in result.stderr

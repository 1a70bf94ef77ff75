"""The benchmark runner on a real Slurm of one node."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_benchmark import enter_folder, git_commit, record, run_benchmark, starts, wait_for

NODE = Path(__file__).with_name("slurm_node.py")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0
    or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch")))
    or not find_spec("submitit"),
    reason="a Slurm of one node needs root, slurm-wlm and munge (apt-get install slurm-wlm munge), and submitit",
)


def processes_of(folder):
    """Those that know the folder: the daemons from their environment, jobs and what they started too."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended meanwhile
            pass
    return found


def start_node(folder):
    process = subprocess.Popen([sys.executable, NODE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line == f"export SLURM_CONF={folder}/slurm.conf\n", "the node did not start"
    assert len(processes_of(folder)) >= 3
    return process


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm") / "node"
    process = start_node(folder)
    yield folder
    process.stdin.close()
    process.wait(timeout=60)
    assert processes_of(folder) == []


@pytest.fixture
def folder(tmp_path, monkeypatch, node):
    monkeypatch.setenv("SLURM_CONF", f"{node}/slurm.conf")
    yield enter_folder(tmp_path, monkeypatch)
    slurm("scancel", "--user=root")
    wait_for_jobs()


def slurm(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def wait_for_jobs(*options):
    wait_for(lambda: slurm("squeue", "--noheader", *options) == "", timeout=60)


def submit(*args):
    """Submits them, and returns the job id."""
    result = run_benchmark("--slurm", *args)
    assert result.returncode == 0, result.stderr
    return re.search(r"as Slurm job (\d+)", result.stdout)[1]


def to_do(*args):
    """What `--resume` would run."""
    result = run_benchmark("--slurm", *args, "--resume", "--dry-run")
    assert result.returncode == 0, result.stderr
    return result.stdout.replace("python train.py --env-id ", "").splitlines()


def describe_tasks(job_id):
    """The words of `scontrol show job` for each task of an array, as a dict."""
    lines = slurm("scontrol", "--oneliner", "show", "job", job_id).splitlines()
    tasks = [dict(re.findall(r"(\S+?)=(\S+)", line)) for line in lines]
    return sorted(tasks, key=lambda task: task["ArrayTaskId"])


def test_an_array_of_runs_and_what_resume_submits(folder):
    commit = git_commit()
    args = ["--env-ids", "ALE/Good-v5", "Bad-v1", "--num-seeds", "2"]
    flags = "--slurm-partition other --slurm-cpus-per-task 3 --slurm-gpus-per-task 1 --slurm-time 77"
    job_id = submit(*args, *flags.split())
    wait_for_jobs()
    assert starts(folder) == ["ALE/Good-v5 1", "ALE/Good-v5 2", "Bad-v1 1", "Bad-v1 2"]
    tasks = describe_tasks(job_id)
    assert [task["ArrayTaskId"] for task in tasks] == ["0", "1", "2", "3"]
    assert [(task["JobState"], task["ExitCode"]) for task in tasks] == [("COMPLETED", "0:0"), ("FAILED", "1:0")] * 2
    for task in tasks:
        assert (task["JobName"], task["Partition"], task["TimeLimit"]) == ("train", "other", "01:17:00")
        assert (task["NumCPUs"], task["CPUs/Task"], task["TresPerNode"][-5:]) == ("3", "3", "gpu:1")

    for env_id, exit_code, line in [("ALE-Good-v5", 0, "tags"), ("Bad-v1", 1, "ValueError: [red]this one fails[/red]")]:
        for seed in (1, 2):
            kept = record(folder, env_id, seed)
            assert (kept["command"], kept["exit_code"], kept["stopped_by"]) == ("python train.py", exit_code, None)
            assert (kept["git_commit"], kept["git_dirty"]) == (commit, False)
            (log,) = (folder / "logs").glob(f"{env_id}__train__{seed}__*.log")
            assert line in log.read_text()
    assert "failed: Bad-v1 seed 1, exit code 1" in (folder / f"logs/slurm/{job_id}_1/{job_id}_1_0_log.err").read_text()

    assert to_do(*args) == ["Bad-v1 --seed 1", "Bad-v1 --seed 2"]
    (folder / "mended").touch()
    (folder / "starts").unlink()
    submit(*args, "--resume")
    wait_for_jobs()
    assert starts(folder) == ["Bad-v1 1", "Bad-v1 2"]
    assert to_do(*args) == []


def test_no_more_than_max_parallel_at_a_time(folder):
    (folder / "train.py").write_text("""
import os, time
open(f"running{os.getpid()}", "w")
end = time.time() + 20
while time.time() < end:  # the first two wait for each other, and then for a third that must not come
    running = sum(name.startswith("running") for name in os.listdir())
    if running > 1:
        end = min(end, time.time() + 1)
    if os.path.exists("counts") or running > 2:
        break
    time.sleep(0.05)
open("counts", "a").write(f"{running}\\n")
os.remove(f"running{os.getpid()}")
""")
    submit("--env-ids", "A-v1", "--num-seeds", "3", "--slurm-max-parallel", "2")
    wait_for_jobs()
    counts = (folder / "counts").read_text().split()
    assert len(counts) == 3 and max(counts) == "2"


def test_a_cancelled_run_has_not_passed(folder):
    args = ["--env-ids", "Polite-v1", "--num-seeds", "2"]
    job_id = submit(*args, "--slurm-max-parallel", "1")
    wait_for((folder / "ready").exists, timeout=60)
    assert to_do(*args) == ["Polite-v1 --seed 2"], "the first is running"
    slurm("scancel", job_id)
    wait_for_jobs()
    kept = record(folder, "Polite-v1", 1)
    assert (kept["exit_code"], kept["stopped_by"]) == (0, "SIGTERM")
    (log,) = (folder / "logs").glob("*.log")
    assert "saved" in log.read_text(), "it gets the grace period"
    assert starts(folder) == ["Polite-v1 1"]
    assert to_do(*args) == ["Polite-v1 --seed 1", "Polite-v1 --seed 2"]


def test_what_is_submitted_twice_runs_once(folder):
    args = ["--env-ids", "Good-v1", "--num-seeds", "1", "--slurm-cpus-per-task", "16"]  # one at a time
    slurm("scontrol", "update", "partition=main", "state=down")
    submit(*args)
    submit(*args, "--resume")
    slurm("scontrol", "update", "partition=main", "state=up")
    wait_for_jobs()
    assert starts(folder) == ["Good-v1 1"]


@pytest.mark.parametrize("flags", ["--slurm-partition nowhere", "--slurm-gpus-per-task 5"])
def test_what_slurm_does_not_take_is_one_line(folder, flags):
    result = run_benchmark("--env-ids", "Good-v1", "--slurm", *flags.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: Slurm did not take the jobs") and result.stderr.count("\n") == 1
    assert re.search("partition|configuration", result.stderr)


def test_a_node_takes_its_jobs_along(tmp_path, monkeypatch):
    process = start_node(tmp_path / "node")
    monkeypatch.setenv("SLURM_CONF", f"{tmp_path}/node/slurm.conf")
    slurm("sbatch", f"--output={tmp_path}/out", "--wrap", "trap '' TERM; echo ready; sleep 100")
    wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() == "ready\n")
    process.terminate()
    process.wait(timeout=60)
    assert processes_of(tmp_path) == []

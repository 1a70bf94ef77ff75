"""A real Slurm of one node: munged, slurmctld and slurmd, with all that they write in one new folder.

    python tests/slurm_node.py FOLDER

prints the `export` by which sbatch, squeue and the others find it, and keeps it up until Ctrl-C, SIGTERM or the end of
its input. It wants root and Debian's packages slurm-wlm and munge, but neither systemd nor cgroups.
"""

import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
# It pretends to have 16 CPUs and 4 GPUs, so that what runs at a time does not depend on the machine.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld_port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 Gres=gpu:4
PartitionName=main Nodes={host} Default=YES
PartitionName=other Nodes={host}
"""


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


def write_config(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    slurmctld_port, slurmd_port = free_ports(2)
    host = socket.gethostname().partition(".")[0]
    config = CONFIG.format(folder=folder, host=host, slurmctld_port=slurmctld_port, slurmd_port=slurmd_port)
    with suppress(OSError):  # for it listens at the address of the host's name, or else everywhere
        if socket.gethostbyname(socket.gethostname()) == "127.0.0.1":
            config += "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n"
    (folder / "slurm.conf").write_text(config)
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout
    year, month = map(int, re.findall(r"\d+", version)[:2])
    # "disabled" came in 23.11; before that a plugin has to load, which then isn't used.
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={'disabled' if (year, month) >= (23, 11) else 'cgroup/v1'}\n")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    for i in range(4):
        (folder / f"gpu{i}").symlink_to("/dev/null")  # it has to be a device


def start(folder: Path, *command: str) -> subprocess.Popen:
    with open(folder / f"{command[0]}.out", "w") as out:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # Ctrl-C is for this program alone
        )


def wait_for(condition, folder: Path, daemons: list[subprocess.Popen]) -> None:
    end = time.time() + 60
    while not condition():
        dead = [daemon.args[3] for daemon in daemons if daemon.poll() is not None]
        if dead or time.time() > end:
            for path in sorted(folder.glob("*.out")):
                print(f"{path}:\n{path.read_text()}", file=sys.stderr)
            sys.exit(f"error: {', '.join(dead)} ended" if dead else "error: Slurm is not up after 60 seconds")
        time.sleep(0.05)


def is_idle() -> bool:
    return "idle" in subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True).stdout


def kill_children() -> None:
    """Kills what is left below this program: of jobs too, for it adopts what their daemons leave behind."""
    me = f"PPid:\t{os.getpid()}\n"
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = []
        for path in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):  # it ended meanwhile
                if me in path.read_text():
                    children.append(int(path.parent.name))
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main(folder: Path) -> None:
    write_config(folder)
    os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    daemons = []
    try:
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        files |= {"seed-file": "munge.seed", "log-file": "munged.log"}
        options = [f"--{option}={folder}/{name}" for option, name in files.items()]
        daemons.append(start(folder, "munged", "--foreground", "--force", *options))  # --force: as root, anywhere
        wait_for((folder / "munge.socket").exists, folder, daemons)
        daemons.append(start(folder, "slurmctld", "-D"))
        daemons.append(start(folder, "slurmd", "-D"))
        wait_for(is_idle, folder, daemons)
        print(f"export SLURM_CONF={folder}/slurm.conf", flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        pass
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
        kill_children()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())

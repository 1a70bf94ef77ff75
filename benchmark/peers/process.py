"""The peers' drivers as processes that measure when told to: the other side of `driver.py`."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from cleanrl_utils.python_environments import find_environment

FOLDER = os.path.dirname(os.path.abspath(__file__))


def find_python(peer: str) -> str:
    """The Python with the peer's packages; see `find_environment`. What has no list of them runs in ours."""
    if not os.path.exists(os.path.join(FOLDER, "requirements", f"{peer}.txt")):
        return sys.executable
    environment = find_environment(peer, os.path.join(FOLDER, "requirements", f"{peer}.txt"))
    return os.path.join(environment, "bin", "python")


class Peer:
    """A driver, started and warmed up. If it fails, a line says so, and `failed` is set."""

    def __init__(self, name: str, python: str, flags: dict[str, object]):
        self.name, self.flags, self.failed = name, flags, False
        self.steps_per_second: list[float] = []
        # -P: the driver tianshou.py is not to be what `import tianshou` finds
        command = [python, "-P", "-m", f"peers.{name}", "--by-turns"]
        command += [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        self.stderr = tempfile.TemporaryFile("w+", errors="replace")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.stderr}
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": os.path.dirname(FOLDER)}, text=True, **pipes
        )
        self.about = self.read()

    def read(self) -> dict:
        """The driver's next line; empty once it has failed."""
        line = "" if self.failed else self.process.stdout.readline()
        if line:
            return json.loads(line)
        if not self.failed:
            self.failed = True
            exit_code = self.process.wait()
            self.stderr.seek(0)
            reason = (self.stderr.read().strip().splitlines() or [f"exit code {exit_code}"])[-1]
            print(f"error: {self.name} failed on {self.flags['env_id']}: {reason}", file=sys.stderr)
        return {}

    def measure(self) -> None:
        if self.failed:
            return
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # read says why
        if measured := self.read():
            self.steps_per_second.append(measured["steps_per_second"])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.stderr):
            file.close()

    def description(self) -> str:
        """Name, versions and, in one line, what the driver's docstring says after its title."""
        versions = ", ".join(f"{package} {version}" for package, version in self.about["versions"].items())
        _, _, differences = self.about["description"].partition("\n\n")
        return f"{self.name} ({versions}): {' '.join(differences.split())}"


@contextmanager
def start_peers(pythons: dict[str, str], flags: dict[str, object]) -> Iterator[list[Peer]]:
    """The peers of these names and Pythons, warmed up one after the other; none is left behind."""
    peers = []
    try:
        for name, python in pythons.items():
            peers.append(Peer(name, python, flags))
        yield peers
    finally:
        for peer in peers:
            peer.stop()

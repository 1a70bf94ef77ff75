"""Python environments apart from the project's, in ~/.cache/cleanrl, for packages that it can't hold itself.

The first call makes one, from the package registry, and no later one needs the network.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

from cleanrl_utils.errors import usage_error


def cache_folder() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cleanrl")


def find_environment(name: str, requirements: str) -> str:
    """The environment with the packages of that file, made if this Python and these requirements have none yet."""
    with open(requirements, "rb") as f:
        key = hashlib.sha256(f.read() + sys.version.encode()).hexdigest()[:8]
    environment = os.path.join(cache_folder(), f"{name}-{key}")
    if not os.path.exists(os.path.join(environment, "bin", "python")):
        try:
            os.makedirs(cache_folder(), exist_ok=True)
            with open(environment + ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # of two calls at once, the second waits for the first one's
                if not os.path.exists(os.path.join(environment, "bin", "python")):
                    make_environment(environment, name, requirements)
        except OSError as error:
            usage_error(f"can't write {error.filename}: {error.strerror}; XDG_CACHE_HOME names another place")
    return environment


def make_environment(environment: str, name: str, requirements: str) -> None:
    """Under a second name first: at its path there is never half an environment."""
    print(f"making an environment for {name} in {environment}, once", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)  # its Python is gone
    with tempfile.TemporaryDirectory(dir=os.path.dirname(environment)) as scratch:
        new = os.path.join(scratch, "environment")
        python = os.path.join(new, "bin", "python")
        uv = shutil.which("uv")
        if uv:
            make = [uv, "venv", "--quiet", "--python", sys.executable, new]
            install = [uv, "pip", "install", "--quiet", "--python", python, "--requirement", requirements]
        else:
            make = [sys.executable, "-m", "venv", new]
            install = [python, "-I", "-m", "pip", "install", "--quiet", "--requirement", requirements]
        for command in make, install:
            # not in the checkout: there, uv would hold these packages to the project's versions
            result = subprocess.run(command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if result.returncode:
                reason = (result.stdout.strip().splitlines() or [f"exit code {result.returncode}"])[-1].strip()
                usage_error(f"can't install {name}, which needs the package registry once: {reason}")
        os.rename(new, environment)

"""Files that survive a crash."""

import os
from contextlib import suppress


def write_file(path: str, data: bytes) -> None:
    """The file at `path` is always whole: a crash leaves what was there before, and of several processes one wins."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.remove(temporary)
        raise

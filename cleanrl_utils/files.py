"""Files that survive a crash."""

import os
from contextlib import suppress


def write_file(path: str, data: bytes) -> None:
    """The file at `path` is always whole: a crash leaves what was there before."""
    try:
        with open(path + ".tmp", "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except OSError:
        with suppress(OSError):
            os.remove(path + ".tmp")
        raise

"""Reads JSON files that anyone may have written, or a disk damaged. Without NumPy, whose threads take signals."""

import errno
import json
import math
import os
import stat

MAX_JSON_SIZE = 4 * 1024 * 1024  # bytes; Python needs up to 30 times as much for a file of nothing but empty lists


def read_file(path: str, max_bytes: int) -> bytes:
    """Raises OSError if that is not a regular file (a pipe might never end), or it is larger."""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as f:
        status = os.fstat(f.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", path)
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", path)
        return f.read(status.st_size)


def read_json(path: str):
    """A file's content, as of `parse_json`; raises OSError or ValueError."""
    return parse_json(read_file(path, MAX_JSON_SIZE).decode())


def parse_json(text: str):
    """Its content, whose numbers are finite, and integers of 64 bits at most; else raises ValueError.

    Its text may hold characters that can't be printed.
    """
    try:
        return json.loads(
            text, object_pairs_hook=unique, parse_int=parse_int, parse_float=parse_float, parse_constant=parse_float
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def unique(pairs: list[tuple]) -> dict:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name is there twice")
    return content


def parse_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError("a number is too large")
    return int(text)


def parse_float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError("a number is not finite")
    return float(text)

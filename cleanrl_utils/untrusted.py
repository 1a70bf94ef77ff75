"""Reads files that anyone may have written, or a disk damaged: none costs more than a few times its size."""

import errno
import json
import math
import os
import stat

import msgpack
import numpy as np

MAX_JSON_SIZE = 4 * 1024 * 1024  # bytes; Python needs up to 30 times as much for a file of nothing but empty lists
MAX_TREE_SIZE = 4 * 1024 * 1024  # bytes of names and text, and ENTRY_SIZE for each name: all but the arrays
ENTRY_SIZE = 100
MAX_ENTRIES = 1000  # of one dict
MAX_DEPTH = 32
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name.encode(): np.dtype(name) for name in DTYPES.split()}


def read_file(path: str, max_bytes: int) -> bytes:
    """Raises OSError if that is not a regular file (a pipe might never end), or it is larger."""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as f:
        status = os.fstat(f.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", path)
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", path)
        return f.read(status.st_size)


# ---------------------------------------------------------------- json
def read_json(path: str):
    """The file's content, whose numbers are finite, and integers of 64 bits at most; else raises OSError or ValueError.

    Its text may hold characters that can't be printed.
    """
    text = read_file(path, MAX_JSON_SIZE).decode()
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


# ---------------------------------------------------------------- msgpack
def unpack(data: bytes) -> dict:
    """The dicts of names with numbers, text, None and numeric arrays that `flax.serialization.to_bytes` has packed.

    Anything else raises some Exception. flax's own `msgpack_restore` would make objects of all that is there, which
    can take 70 times the memory, and more for arrays.
    """
    left = MAX_TREE_SIZE

    def make_dict(pairs):
        nonlocal left
        left -= ENTRY_SIZE * (1 + len(pairs)) + sum(len(x) for pair in pairs for x in pair if type(x) is bytes)
        if left < 0:
            raise ValueError("too many names, or too long")
        return unique([(name.decode(), x.decode() if type(x) is bytes else x) for name, x in pairs])

    tree = msgpack.unpackb(
        data, raw=True, object_pairs_hook=make_dict, ext_hook=unpack_array, max_map_len=MAX_ENTRIES, max_array_len=0
    )
    if not isinstance(tree, dict) or not is_plain(tree):
        raise ValueError("more than names, numbers, text and arrays")
    return tree


def unpack_array(code: int, data: bytes) -> np.ndarray:
    """As `flax.serialization._ndarray_from_bytes`, of plain types only."""
    if code != 1:
        raise ValueError("not an array")
    return msgpack.unpackb(data, raw=True, list_hook=make_array, max_array_len=32, max_map_len=0)


def make_array(items: list) -> tuple | np.ndarray:
    """The shape, if these are integers; else the array of a shape, a name of a dtype, and bytes."""
    if all(type(item) is int and item >= 0 for item in items):
        return tuple(items)
    shape, dtype, buffer = items
    return np.frombuffer(buffer, DTYPES[dtype]).reshape(shape)


def is_plain(tree, depth: int = MAX_DEPTH) -> bool:
    if isinstance(tree, dict):
        return depth > 0 and all(is_plain(value, depth - 1) for value in tree.values())
    return tree is None or type(tree) in (bool, int, float, str, np.ndarray)

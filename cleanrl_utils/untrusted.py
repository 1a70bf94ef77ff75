"""Reads files that anyone may have written, or a disk damaged: none costs more than a few times its size."""

import msgpack
import numpy as np

from cleanrl_utils.untrusted_json import MAX_JSON_SIZE, read_file, read_json, unique  # noqa: F401

MAX_TREE_SIZE = 4 * 1024 * 1024  # bytes of names and text, and ENTRY_SIZE for each name: all but the arrays
ENTRY_SIZE = 100
MAX_ENTRIES = 1000  # of one dict
MAX_DEPTH = 32
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name.encode(): np.dtype(name) for name in DTYPES.split()}


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

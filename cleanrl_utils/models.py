"""Saved models: msgpack files of plain data, read as untrusted input."""

import dataclasses
import glob
import importlib
import os
import re
import reprlib
import types
import typing
import zlib

import flax
import jax
import numpy as np

from cleanrl_utils.errors import usage_error
from cleanrl_utils.untrusted import read_file, unpack

MAX_FILE_SIZE = 1024 * 1024 * 1024  # bytes; with --hidden-size 10000, the largest, a model has 0.8 GB
MAX_TEXT = 1000  # characters of an argument
PARTS = {"script": str, "args": dict, "params": dict, "wrappers": dict, "versions": dict}
ZOO_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zoo_models")
SCRIPTS_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cleanrl")


def packed(model: dict) -> bytes:
    """The content of its file: msgpack, with a checksum among the parts, so that no flipped bit becomes a weight."""
    return flax.serialization.to_bytes({**model, "checksum": zlib.crc32(flax.serialization.to_bytes(model))})


def read_model(path: str) -> dict:
    """The saved dict, with the `PARTS`. Ends the program with a line if the file holds anything else."""
    model = read_msgpack(path, MAX_FILE_SIZE)
    checksum = model.pop("checksum", None)  # files of earlier versions have none
    if any(not isinstance(model.get(part), kind) for part, kind in PARTS.items()) or model.keys() != PARTS.keys():
        usage_error(f"{path} is not a model: that is a dict of {', '.join(PARTS)}")
    if checksum not in (None, zlib.crc32(flax.serialization.to_bytes(model))):
        usage_error(f"{path} is damaged: train it anew, or copy it again")
    return model


def read_msgpack(path: str, max_bytes: int) -> dict:
    """What `unpack` makes of the file. Ends the program with a line if that is nothing, or the file is larger."""
    try:
        data = read_file(path, max_bytes)
    except OSError as error:
        usage_error(f"can't read {path}: {error.strerror}")
    try:
        return unpack(data)
    except Exception:  # msgpack and NumPy each raise their own on damaged bytes
        usage_error(f"{path} is damaged or not a model: train it anew, or copy it again")


def load_script(name: str) -> types.ModuleType:
    """The training script of that name as a module; its file has to lie in the folder `cleanrl`."""
    scripts = sorted(os.path.basename(path)[:-3] for path in glob.glob(os.path.join(SCRIPTS_FOLDER, "[!_]*.py")))
    if name not in scripts:
        usage_error(f"there is no script {reprlib.repr(name)}; there is {', '.join(scripts)}")
    return importlib.import_module(f"cleanrl.{name}")


def restore_args(args_class: type, saved: dict, path: str, **overrides):
    """An `args_class` with the saved values; a field that the model's version did not have keeps its default."""
    try:
        check_types(args_class, saved)
    except ValueError as error:
        usage_error(f"{path}: {error}")
    return args_class(**{**saved, **overrides})


def check_types(args_class: type, saved: dict) -> None:
    """Raises ValueError if a saved value is none of its argument."""
    hints = typing.get_type_hints(args_class)
    fields = {field.name for field in dataclasses.fields(args_class)}
    for name, value in saved.items():
        if name not in fields:
            raise ValueError(f"the script has no argument {reprlib.repr(name)}; another version saved it")
        allowed = typing.get_args(hints[name]) or (hints[name],)  # `float | None` is two types, a Literal its values
        is_allowed = type(value) in allowed or (float in allowed and type(value) is int)
        if not is_allowed and not (isinstance(value, str) and value in allowed):
            raise ValueError(f"the argument {name} is {reprlib.repr(value)}, not of type {hints[name]}")
        if isinstance(value, str) and (len(value) > MAX_TEXT or not value.isprintable()):  # it may be printed
            raise ValueError(f"the argument {name} is {reprlib.repr(value)}: too long or not printable")


def restore(template, saved, path: str, part: str, finite: bool = True):
    """`template` with the saved arrays, if `check_arrays` finds that they fit."""
    check_arrays(template, saved, path, part, finite)
    return jax.tree.map(jax.numpy.asarray, flax.serialization.from_state_dict(template, saved))


def check_arrays(template, saved, path: str, part: str, finite: bool = True) -> None:
    """Ends the program with a line unless names, shapes and dtypes are the template's, and all values finite.

    The template's leaves may be `jax.ShapeDtypeStruct`s.
    """

    def described(tree):  # empty dicts and None are no leaves to JAX
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
        return {jax.tree_util.keystr(key): f"{dtype(x)}{list(np.shape(x))}" for key, x in leaves if key}

    def dtype(x):
        return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype

    def is_empty(tree):
        return tree is None or (isinstance(tree, dict) and not tree)

    expected = described(flax.serialization.to_state_dict(template))
    found = described(saved)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            usage_error(
                f"{path}: {part}{name[:100]} is {found.get(name, 'missing')}, the script needs "
                f"{expected.get(name, 'none')}: the model is of another environment or another version of the script"
            )
    if finite and not all(np.isfinite(x).all() for x in jax.tree.leaves(saved)):
        usage_error(f"{path}: {part} holds values that are not finite: the training had diverged")


def find_model(exp_name: str, env_id: str, runs: str | None = "runs") -> str:
    """Path of the newest model of that experiment and environment below `runs`, or else of the zoo's."""
    name = f"{glob.escape(env_id.replace('/', '-'))}__{glob.escape(exp_name)}__*__*"
    paths = glob.glob(os.path.join(glob.escape(runs), name, f"{glob.escape(exp_name)}.cleanrl_model")) if runs else []
    paths = [path for path in paths if os.path.exists(path) and path.isprintable()]  # no links to nowhere
    if paths:
        return max(paths, key=lambda path: (os.path.getmtime(path), path))
    if not os.path.exists(zoo_path(exp_name, env_id)):
        searched = f"{os.path.abspath(runs)} and the zoo" if runs else "the zoo"
        usage_error(f"no model of {exp_name} for {env_id} in {searched}: train one, or give --model-path")
    return zoo_path(exp_name, env_id)


def agent_name(env_id: str, exp_name: str, seed: int) -> str:
    """Of its repository on the Hub, and of its videos."""
    return f"{re.sub('[/:]', '-', env_id)}-{exp_name}-seed{seed}"


def zoo_path(exp_name: str, env_id: str) -> str:
    """Where the model of that experiment and environment lies that comes with the package, if there is one."""
    folder, file = env_id.replace("/", "-"), f"{exp_name.replace('/', '-')}.cleanrl_model"
    return os.path.join(ZOO_FOLDER, folder, file)

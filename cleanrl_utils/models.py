"""Saved models: msgpack files of plain data, read as untrusted input."""

import dataclasses
import glob
import importlib
import os
import types
import typing

import flax
import jax
import numpy as np

from cleanrl_utils.errors import usage_error

MAX_FILE_SIZE = 256 * 1024 * 1024  # bytes
SCRIPTS_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cleanrl")


def read_model(path: str) -> dict:
    """The saved dict: `script`, `args`, `params`, `wrappers`, `versions`. Ends with a line if it isn't one."""
    try:
        if os.path.getsize(path) > MAX_FILE_SIZE:
            usage_error(f"{path} is larger than {MAX_FILE_SIZE >> 20} MiB: it is no model of ours")
        with open(path, "rb") as f:
            model = flax.serialization.msgpack_restore(f.read())
    except OSError as error:
        usage_error(f"can't read the model {path}: {error.strerror}")
    except Exception:  # msgpack, flax and numpy each raise their own on damaged bytes
        usage_error(f"{path} is damaged or not a model: train it anew, or copy it again")
    expected = {"script": str, "args": dict, "params": dict, "wrappers": dict, "versions": dict}
    if not isinstance(model, dict) or any(not isinstance(model.get(key), kind) for key, kind in expected.items()):
        usage_error(f"{path} is not a model: it lacks one of {', '.join(expected)}")
    return model


def load_script(name: str) -> types.ModuleType:
    """The training script of that name as a module; its file has to lie in the folder `cleanrl`."""
    scripts = sorted(os.path.basename(path)[:-3] for path in glob.glob(os.path.join(SCRIPTS_FOLDER, "[!_]*.py")))
    if name not in scripts:
        usage_error(f"there is no script {name!r}; there is {', '.join(scripts)}")
    return importlib.import_module(f"cleanrl.{name}")


def restore_args(args_class: type, saved: dict, path: str, **overrides):
    """An `args_class` with the saved values; a field that the model's version did not have keeps its default."""
    hints = typing.get_type_hints(args_class)
    fields = {field.name for field in dataclasses.fields(args_class)}
    for name, value in saved.items():
        if name not in fields:
            usage_error(f"{path}: the script has no argument {name!r}; it was saved by another version")
        if not isinstance(value, hints[name]) and not (hints[name] is float and type(value) is int):
            usage_error(f"{path}: the argument {name} is {value!r}, not of type {hints[name]}")
    return args_class(**{**saved, **overrides})


def restore(template, saved, path: str, part: str):
    """`template` with the saved arrays; their names, shapes and dtypes have to be those of the template."""

    def described(tree):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(key): (np.shape(x), np.asarray(x).dtype.name) for key, x in leaves}

    expected = described(flax.serialization.to_state_dict(template))
    found = described(saved)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            usage_error(
                f"{path}: {part}{name} is {found.get(name, 'missing')}, the script needs {expected.get(name, 'none')}: "
                "the model is of another environment or another version of the script"
            )
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(saved)):
        usage_error(f"{path}: {part} holds values that are not finite: the training had diverged")
    return jax.tree.map(jax.numpy.asarray, flax.serialization.from_state_dict(template, saved))


def find_model(exp_name: str, env_id: str, runs: str = "runs") -> str:
    """Path of the newest model of that experiment and environment below `runs`."""
    name = f"{glob.escape(env_id.replace('/', '-'))}__{glob.escape(exp_name)}__*__*"
    paths = glob.glob(os.path.join(runs, name, f"{glob.escape(exp_name)}.cleanrl_model"))
    if not paths:
        usage_error(f"no model of {exp_name} for {env_id} in {os.path.abspath(runs)}: train one, or give --model-path")
    return max(paths, key=os.path.getmtime)

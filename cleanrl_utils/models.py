"""Saved models: msgpack files of plain data, read as untrusted input."""

import dataclasses
import glob
import importlib
import os
import reprlib
import types
import typing
import warnings

import flax
import jax
import numpy as np

from cleanrl_utils.errors import usage_error

MAX_FILE_SIZE = 64 * 1024 * 1024  # bytes; Python needs up to 70 times as much for a file of nothing but empty dicts
PARTS = {"script": str, "args": dict, "params": dict, "wrappers": dict, "versions": dict}
ZOO_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zoo_models")
SCRIPTS_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cleanrl")


def read_model(path: str) -> dict:
    """The saved dict, with the `PARTS`. Ends the program with a line if the file holds anything else."""
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        usage_error(f"can't read the model {path}: {error.strerror}")
    if len(data) > MAX_FILE_SIZE:
        usage_error(f"{path} is larger than {MAX_FILE_SIZE >> 20} MiB: it is no model of ours")
    try:
        with warnings.catch_warnings(action="ignore"):  # NumPy warns of some names of types
            model = flax.serialization.msgpack_restore(data)
        plain = is_plain(model)
    except Exception:  # msgpack, flax and NumPy each raise their own on damaged bytes
        usage_error(f"{path} is damaged or not a model: train it anew, or copy it again")
    if not plain or not isinstance(model, dict) or any(not isinstance(model.get(k), kind) for k, kind in PARTS.items()):
        usage_error(f"{path} is not a model: that is a dict of {', '.join(PARTS)}")
    return model


def is_plain(tree) -> bool:
    """Whether it is made of dicts with names for keys, numbers, strings and numeric arrays only."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) and is_plain(value) for key, value in tree.items())
    if isinstance(tree, np.ndarray):
        return tree.dtype.kind in "biuf"
    return tree is None or type(tree) in (bool, int, float, str)


def load_script(name: str) -> types.ModuleType:
    """The training script of that name as a module; its file has to lie in the folder `cleanrl`."""
    scripts = sorted(os.path.basename(path)[:-3] for path in glob.glob(os.path.join(SCRIPTS_FOLDER, "[!_]*.py")))
    if name not in scripts:
        usage_error(f"there is no script {reprlib.repr(name)}; there is {', '.join(scripts)}")
    return importlib.import_module(f"cleanrl.{name}")


def restore_args(args_class: type, saved: dict, path: str, **overrides):
    """An `args_class` with the saved values; a field that the model's version did not have keeps its default."""
    hints = typing.get_type_hints(args_class)
    fields = {field.name for field in dataclasses.fields(args_class)}
    for name, value in saved.items():
        if name not in fields:
            usage_error(f"{path}: the script has no argument {reprlib.repr(name)}; another version saved it")
        allowed = typing.get_args(hints[name]) or (hints[name],)  # `float | None` is two types
        if type(value) not in allowed and not (float in allowed and type(value) is int):
            usage_error(f"{path}: the argument {name} is {reprlib.repr(value)}, not of type {hints[name]}")
    return args_class(**{**saved, **overrides})


def restore(template, saved, path: str, part: str):
    """`template` with the saved arrays; their names, shapes and dtypes have to be those of the template."""

    def described(tree):  # empty dicts and None are no leaves to JAX
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
        return {jax.tree_util.keystr(key): f"{np.asarray(x).dtype}{list(np.shape(x))}" for key, x in leaves if key}

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
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(saved)):
        usage_error(f"{path}: {part} holds values that are not finite: the training had diverged")
    return jax.tree.map(jax.numpy.asarray, flax.serialization.from_state_dict(template, saved))


def find_model(exp_name: str, env_id: str, runs: str | None = "runs") -> str:
    """Path of the newest model of that experiment and environment below `runs`, or else of the zoo's."""
    name = f"{glob.escape(env_id.replace('/', '-'))}__{glob.escape(exp_name)}__*__*"
    paths = glob.glob(os.path.join(glob.escape(runs), name, f"{glob.escape(exp_name)}.cleanrl_model")) if runs else []
    if paths:
        return max(paths, key=lambda path: (os.path.getmtime(path), path))
    if not os.path.exists(zoo_path(exp_name, env_id)):
        searched = f"{os.path.abspath(runs)} and the zoo" if runs else "the zoo"
        usage_error(f"no model of {exp_name} for {env_id} in {searched}: train one, or give --model-path")
    return zoo_path(exp_name, env_id)


def agent_name(env_id: str, exp_name: str, seed: int) -> str:
    """Of its repository on the Hub, and of its videos."""
    return f"{env_id.replace('/', '-')}-{exp_name}-seed{seed}"


def zoo_path(exp_name: str, env_id: str) -> str:
    """Where the model of that experiment and environment lies that comes with the package, if there is one."""
    folder, file = env_id.replace("/", "-"), f"{exp_name.replace('/', '-')}.cleanrl_model"
    return os.path.join(ZOO_FOLDER, folder, file)

"""Gymnasium's spaces as types of JAX arrays.

A value of a Dict space is a dict, of a Tuple space a tuple, of any other space one array; a batch of values has the
leading axis [num_envs].
"""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


def outward_dtype(dtype) -> np.dtype:
    """Floats are float32 outside an environment, 64-bit integers 32-bit ones, and the others what they are."""
    dtype = np.dtype(dtype)
    if np.issubdtype(dtype, np.floating):
        return np.dtype(np.float32)
    return {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}.get(dtype, dtype)


def check_dtype(dtype, declared) -> None:
    """Raises TypeError for observations that the dtype of their space would change, like floats made integers."""
    both_integers = np.issubdtype(dtype, np.integer) and np.issubdtype(declared, np.integer)
    if not (both_integers or np.can_cast(dtype, declared, "same_kind")):
        raise TypeError(f"observations are {dtype}, their space says {declared}: make both the same")


def outward_space(space: gym.Space) -> gym.Space:
    """The same space with the dtypes that its values have in JAX; raises TypeError for one that JAX can't hold."""
    match space:
        case Dict():
            return Dict({name: outward_space(entry) for name, entry in space.items()}, sort_keys=False)
        case Tuple():
            return Tuple([outward_space(entry) for entry in space])
        case Box():
            dtype = outward_dtype(space.dtype)
            if np.issubdtype(dtype, np.integer):
                limits = np.iinfo(dtype)
                low, high = (np.clip(bound, limits.min, limits.max) for bound in (space.low, space.high))
            else:
                low, high = space.low, space.high
            with np.errstate(over="ignore"):  # bounds above float32's are infinite
                return Box(low.astype(dtype), high.astype(dtype), space.shape, dtype)
        case Discrete():
            return Discrete(space.n, start=space.start, dtype=outward_dtype(space.dtype))
        case MultiDiscrete():
            return MultiDiscrete(space.nvec, dtype=outward_dtype(space.dtype), start=space.start)
        case MultiBinary():
            return MultiBinary(space.n)
    raise TypeError(f"{space} is no array for JAX: Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple are")


def map_space(function, space: gym.Space, *values):
    """`function(leaf, *values)` of each space inside nested Dict and Tuple spaces, as a pytree like their values."""
    match space:
        case Dict():
            return {name: map_space(function, entry, *(x[name] for x in values)) for name, entry in space.items()}
        case Tuple():
            return tuple(map_space(function, entry, *(x[i] for x in values)) for i, entry in enumerate(space))
    return function(space, *values)


def batch_type(space: gym.Space, num_envs: int):
    """The shapes and dtypes of num_envs values: a pytree of jax.ShapeDtypeStruct."""
    return map_space(lambda leaf: jax.ShapeDtypeStruct((num_envs, *leaf.shape), leaf.dtype), space)


def flat_space(space: gym.Space) -> Box:
    """The float32 vectors that `flatten` makes of the space's values, of Gymnasium's `flatten_space`."""
    flat = gym.spaces.flatten_space(space)
    return Box(flat.low.astype(np.float32), flat.high.astype(np.float32))


def flatten(space: gym.Space, x) -> jax.Array:
    """A batch of values as float32 vectors, [num_envs, dim], equal to Gymnasium's `flatten` of each one.

    Entries follow each other in the order of the space, integers of Discrete and MultiDiscrete spaces are one-hot.
    """

    def flatten_leaf(leaf, x):
        match leaf:
            case Discrete():
                return jax.nn.one_hot(x - leaf.start, leaf.n)
            case MultiDiscrete():
                columns = (x - leaf.start).reshape(x.shape[0], -1).T
                one_hot = [jax.nn.one_hot(i, n) for i, n in zip(columns, leaf.nvec.ravel(), strict=True)]
                return jnp.concatenate(one_hot, axis=1)
        return x.reshape(x.shape[0], gym.spaces.flatdim(leaf)).astype(jnp.float32)

    return jnp.concatenate(in_order(space, map_space(flatten_leaf, space, x)), axis=1)


def unflatten(space: gym.Space, x: jax.Array):
    """The values that float32 vectors [num_envs, dim] stand for: of one-hot entries the greatest one counts."""

    def unflatten_leaf(leaf):
        nonlocal x
        values, x = jnp.split(x, [gym.spaces.flatdim(leaf)], axis=1)
        match leaf:
            case Discrete():
                return (jnp.argmax(values, axis=1) + leaf.start).astype(leaf.dtype)
            case MultiDiscrete():
                one_hot = jnp.split(values, np.cumsum(leaf.nvec.ravel())[:-1], axis=1)
                values = jnp.stack([jnp.argmax(part, axis=1) for part in one_hot], axis=1)
                return (values.reshape(-1, *leaf.shape) + leaf.start).astype(leaf.dtype)
            case MultiBinary():
                values = values > 0.5
        return values.reshape(len(values), *leaf.shape).astype(leaf.dtype)

    return map_space(unflatten_leaf, space)


def in_order(space: gym.Space, values) -> list:
    """The leaves of one value in the space's order, which differs from JAX's where Dict keys are not sorted."""
    leaves = []
    map_space(lambda _, x: leaves.append(x), space, values)
    return leaves

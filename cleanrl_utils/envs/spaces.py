"""Gymnasium's spaces as types of JAX arrays.

A value of a Dict space is a dict, of a Tuple space a tuple, of any other space one array; a batch of values has the
leading axis [num_envs].
"""

import gymnasium as gym
import jax
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


def outward_dtype(dtype) -> np.dtype:
    """Floats are float32 outside an environment, 64-bit integers 32-bit ones, and the others what they are."""
    dtype = np.dtype(dtype)
    if np.issubdtype(dtype, np.floating):
        return np.dtype(np.float32)
    return {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}.get(dtype, dtype)


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
                return Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
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

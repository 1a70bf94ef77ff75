"""Gymnasium's environments in compiled code: each step is a call to the host, in the order of the program.

    env = gymnasium_callback.make("Hopper-v5", num_envs=8, seed=1, vectorization_mode="async")
    env = gymnasium_callback.make(gym.make_vec("CartPole-v1", num_envs=8))  # any gymnasium.vector.VectorEnv
    env = gymnasium_callback.make(gym.make("CartPole-v1"))  # one environment, for evaluation
    env, timestep = env.reset()
    env, timestep = jax.jit(lambda env, action: env.step(action))(env, action)

Where it differs from the other back ends:

- Where an environment reports a termination and a truncation at once, it terminated.
- Environments are state of the process, which `env` only orders: each `env` that `step` returns is to be used, once.
  To step an older one raises RuntimeError.
- What an environment raises stops the compiled program with jax.errors.JaxRuntimeError. Under `original_errors` it is
  the environment's own exception, as it is outside of compiled code. The environments go on after a `reset`; of an
  AsyncVectorEnv Gymnasium ends the process of the one that raised, and logs its traceback: make it anew.
- A step costs a fraction of a millisecond more than a plain loop's: docs/envs/index.md has the measurements. It works
  on one device; a GPU is handed each observation.
- Gymnasium's own vector wrappers take the reset of one environment for one of all. They are served around environments
  that reset themselves; for other ones, which `same_step` has to reset, there is `env.with_wrappers`.
- Entries of `info` that `info_keys` names are those of the step that was taken: at an episode's end, the last ones.

Many seeds: `make(env_id, ..., seed=(1, 2, 3))` has environments for each, and is one `env` with the leading axis
[num_seeds]; use it under `jax.vmap`, with all seeds together.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cleanrl_utils.envs.base import (
    AUTORESETS,
    Backend,
    TimeStep,
    VectorEnv,
    check_seed,
    for_one_seed,
    independent_seeds,
    new_env,
)
from cleanrl_utils.envs.spaces import batch_type, check_dtype, map_space, outward_space

NATIVE = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


def make(
    envs: str | gym.vector.VectorEnv | gym.Env,
    num_envs: int | None = None,
    seed: int | Sequence[int] | None = 0,
    autoreset: str | None = None,
    *,
    vectorization_mode: str = "sync",
    vector_kwargs: Mapping[str, Any] | None = None,
    flatten_obs: bool = False,
    flatten_action: bool = False,
    info_keys: Sequence[str] | Mapping[str, jax.ShapeDtypeStruct] = (),
    **kwargs,
) -> VectorEnv:
    """The environments of an id, num_envs for each seed, or those handed over, which are then to be left alone.

    The first `reset` is with `seed`, with None for streams that never come again; different seeds share no stream.
    Without `autoreset` an id's environments, and such as have no reset of their own, are reset in the same step, and
    others as they are. `info_keys` names numbers in the environments' info that `timestep.info` is to hold as float32
    [num_envs], nan where an environment had none (everywhere, for a misspelt one), "episode/r" those of a dict inside;
    or it maps names to the types of other arrays, of one environment.
    For an id are `vectorization_mode`, "sync" or "async" (a process for each environment), `vector_kwargs`, of
    Gymnasium's SyncVectorEnv or AsyncVectorEnv, and `kwargs`, of `gym.make`. The processes are forked where that is
    Python's way: environments that use JAX themselves need vector_kwargs={"context": "forkserver"}.
    Raises ValueError or TypeError, with what to pass, for what can't be served.
    """
    seeds = [None] if seed is None else np.atleast_1d(check_seed(seed)).tolist()
    if autoreset not in (None, *AUTORESETS):
        raise ValueError(f"autoreset={autoreset!r}: pass one of {', '.join(map(repr, AUTORESETS))}, or None")
    if isinstance(envs, str):
        if num_envs is None or num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: pass the number of environments, 1 or more")
        if vectorization_mode not in ("sync", "async"):
            raise ValueError(f"vectorization_mode={vectorization_mode!r}: pass 'sync' or 'async'")
        # Of the spec: the id may be registered in this process only.
        functions = [partial(gym.make, gym.spec(envs), **kwargs)] * (num_envs * len(seeds))
        options = {"copy": False, "autoreset_mode": NATIVE[autoreset or "same_step"], **(vector_kwargs or {})}
        with warnings.catch_warnings():  # JAX's, of a fork: these processes never call it
            warnings.filterwarnings("ignore", message=".*fork.*", category=RuntimeWarning)
            envs = (SyncVectorEnv if vectorization_mode == "sync" else AsyncVectorEnv)(functions, **options)
    else:
        if kwargs or vector_kwargs:
            names = ", ".join([*kwargs, *(vector_kwargs or {})])
            raise TypeError(f"{names}: these are for an id, the environments that were passed are made")
        envs = as_vector_env(envs, num_envs, len(seeds), autoreset)
    backend = GymnasiumCallback(envs, seeds, serve_autoreset(envs, autoreset), info_keys)
    token = jnp.zeros((len(seeds),) * (np.ndim(seed) > 0), jnp.uint32)
    return new_env(backend, token, flatten_obs, flatten_action)


def as_vector_env(envs, num_envs: int | None, num_seeds: int, autoreset: str | None):
    """What was handed over as vectorised environments; raises ValueError or TypeError if their number is another."""
    is_vector_env = isinstance(envs, gym.vector.VectorEnv) or getattr(envs, "is_vector_env", False)
    if not is_vector_env and not isinstance(envs, gym.Env):
        raise TypeError(f"{type(envs).__name__}: pass an id, a gymnasium.vector.VectorEnv or a gymnasium.Env")
    found, wanted = envs.num_envs if is_vector_env else 1, (num_envs or 0) * num_seeds
    if wanted not in (0, found) or found % num_seeds:
        what = f"{found} environments" if is_vector_env else "one environment, not vectorised"
        total = f"num_envs * {num_seeds} seeds" if num_seeds > 1 else "num_envs"
        raise ValueError(
            f"this is {what}, but num_envs={num_envs} for {num_seeds} seed(s): pass "
            f"gym.make_vec(..., num_envs={wanted or num_seeds}), or leave num_envs out if {total} is {found}"
        )
    return envs if is_vector_env else SyncVectorEnv([lambda: envs], autoreset_mode=NATIVE[autoreset or "same_step"])


def serve_autoreset(envs, autoreset: str | None) -> str:
    """How the environments are to be reset; raises ValueError if they can't be."""
    mode = envs.metadata.get("autoreset_mode")
    if mode is None:
        raise ValueError("these environments don't tell how they are reset: set envs.metadata['autoreset_mode']")
    mode = AutoresetMode(mode)
    if autoreset == "next_step" and mode != AutoresetMode.NEXT_STEP:
        raise ValueError(
            f"environments with {mode} can't wait for the next step to be reset: pass autoreset='same_step', or make "
            f"them with autoreset_mode=AutoresetMode.NEXT_STEP"
        )
    autoreset = autoreset or ("next_step" if mode == AutoresetMode.NEXT_STEP else "same_step")
    if autoreset == "same_step" and mode != AutoresetMode.SAME_STEP and envs is not envs.unwrapped:
        raise ValueError(
            f"{type(envs).__name__} takes the reset of one environment for one of all: make the environments with "
            f"autoreset_mode=AutoresetMode.SAME_STEP, or pass envs.unwrapped, and the wrappers to env.with_wrappers"
        )
    in_pipes = isinstance(envs.unwrapped, AsyncVectorEnv) and not envs.unwrapped.shared_memory
    if autoreset == "same_step" and mode == AutoresetMode.NEXT_STEP and in_pipes:
        raise ValueError(
            "AsyncVectorEnv(..., shared_memory=False) resets twice where it is asked to reset: make it with "
            "autoreset_mode=AutoresetMode.SAME_STEP"
        )
    return autoreset


class GymnasiumCallback(Backend):
    """The state is a token, the number of calls to the host so far, which tells an old env from the last one."""

    def __init__(self, envs, seeds: Sequence[int | None], autoreset: str, info_keys):
        kind = type(envs.unwrapped)
        self.has_seed_each = issubclass(kind, SyncVectorEnv | AsyncVectorEnv)
        self.is_envpool = hasattr(kind, "xla")
        if len(seeds) > 1 and not self.has_seed_each:
            raise ValueError(f"{kind.__name__} can't seed each environment apart: pass one seed, or an id")
        if self.is_envpool and envs.unwrapped.is_async:
            raise ValueError("this EnvPool steps but a part of its environments: make it without batch_size")
        self.envs = envs
        self.num_envs = envs.num_envs // len(seeds)
        self.autoreset = autoreset
        self.native_mode = AutoresetMode(envs.metadata["autoreset_mode"])
        self.single_observation_space = outward_space(envs.single_observation_space)
        self.single_action_space = outward_space(envs.single_action_space)
        if isinstance(info_keys, str):
            raise ValueError(f"info_keys={info_keys!r}: pass several names, [{info_keys!r}]")
        number = jax.ShapeDtypeStruct((), np.float32)
        self.info_types = dict(info_keys) if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, number)
        self.seeds = seeds
        self.can_render = getattr(envs, "render_mode", None) == "rgb_array" and not self.is_envpool
        self.render_fps = envs.metadata.get("render_fps", self.render_fps)
        self.num_calls, self.must_reset = 0, True
        self._reset, self._reset_each, self._step = (
            partial(self._call, function, for_one_seed(partial(self._callback, function), len(seeds)))
            for function in (self._reset_on_host, partial(self._reset_on_host, is_for_each=True), self._step_on_host)
        )

    def reset(self, token, seed):
        """With a seed for all, or with [num_envs] of them, which the environments then get as they are."""
        if seed is None:
            return self._reset(token, ())
        seed = jnp.asarray(check_seed(seed))
        if self.is_envpool or (seed.ndim and not self.has_seed_each):
            how = "when it is made, not at reset" if self.is_envpool else "for all of its environments at once"
            raise ValueError(f"{type(self.envs.unwrapped).__name__} takes its seed {how}")
        return (self._reset_each if seed.ndim else self._reset)(token, seed)

    def step(self, token, action):
        return self._step(token, action)

    def render(self, token, i: int) -> np.ndarray:
        return self.envs.render()[i]

    def close(self):
        self.envs.close()

    # ------------------------------------------------------------ in JAX
    def _call(self, function, compiled, token, x):
        if token.shape != ():
            raise ValueError(f"env has the leading axis {token.shape}: use it under vmap over the seeds")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((token, x))):
            return compiled(token, x)
        return jax.tree.map(jnp.asarray, function(token, x))  # a debugger stops in the environment

    def _callback(self, function, token, x):
        n = self.envs.num_envs
        obs, flag = batch_type(self.single_observation_space, n), jax.ShapeDtypeStruct((n,), bool)
        info = {name: jax.ShapeDtypeStruct((n, *one.shape), one.dtype) for name, one in self.info_types.items()}
        if self.autoreset == "same_step":
            info["final_obs"] = obs
        timestep = TimeStep(obs, jax.ShapeDtypeStruct((n,), np.float32), flag, flag, info)
        leaves, structure = jax.tree.flatten((token, x))

        def on_host(packed):
            return function(*jax.tree.unflatten(structure, unpack(np.asarray(packed), leaves)))

        leaves, packed = [jax.typeof(leaf) for leaf in leaves], pack(leaves)
        types = jax.ShapeDtypeStruct((), np.uint32), timestep
        return jax.experimental.io_callback(on_host, types, packed, ordered=True)

    # ------------------------------------------------------------ on the host: NumPy, as JAX would wait for itself
    def _reset_on_host(self, token, seed, is_for_each: bool = False):
        with self._one_call():
            seeds = self.seeds if isinstance(seed, tuple) else np.ravel(seed).tolist()
            self.seeds = [None]  # from here on the streams go on
            if seeds[0] is None or self.is_envpool:
                seed = None
            elif self.has_seed_each:
                seed = seeds if is_for_each else independent_seeds(seeds, self.num_envs).ravel().tolist()
            else:
                seed = int(independent_seeds(seeds, 1)[0, 0])
            obs, infos = self.envs.reset(seed=seed)
            obs, no = self._copy(obs), np.zeros(self.envs.num_envs, bool)
            timestep = TimeStep(obs, no.astype(np.float32), no, no, self._info(infos, no))
            if self.autoreset == "same_step":
                timestep.info["final_obs"] = obs
        return np.uint32(self.num_calls), timestep

    def _step_on_host(self, token, action):
        with self._one_call(token):
            # Copies, for an environment may write to its action.
            action = map_space(lambda leaf, x: np.array(x, leaf.dtype), self.envs.single_action_space, action)
            obs, reward, terminated, truncated, infos = self.envs.step(action)
            obs, terminated = self._copy(obs), np.array(terminated, bool)
            truncated = np.asarray(truncated, bool) & ~terminated
            done = terminated | truncated
            timestep = TimeStep(obs, np.array(reward, np.float32), terminated, truncated, self._info(infos, done))
            if self.autoreset == "same_step":
                timestep.info["final_obs"] = obs
                if done.any():
                    obs, timestep.info["final_obs"] = self._first_and_final(obs, infos, done)
                    timestep = timestep.replace(obs=obs)
        return np.uint32(self.num_calls), timestep

    @contextmanager
    def _one_call(self, token=None) -> Iterator[None]:
        """Keeps what is raised for `original_errors`; with a token, it has to be the last one."""
        try:
            if token is not None and self.must_reset:
                raise RuntimeError("these environments are to be reset before they are stepped")
            if token is not None and int(token) != self.num_calls:
                raise RuntimeError("this env was stepped before, and its environments can't go back: use the new env")
            self.must_reset = True  # unless all goes well
            yield
            self.must_reset = False
            self.num_calls = (self.num_calls + 1) % 2**32
        except BaseException as error:
            last_error[:] = [error]
            raise

    def _copy(self, obs):
        """The observations as they are outside; raises ValueError if their shapes are not their space's."""

        def copy(leaf, x):
            x = cast(leaf, x)
            if x.shape != (self.envs.num_envs, *leaf.shape):
                raise ValueError(f"observations are {x.shape}, their space says {(self.envs.num_envs, *leaf.shape)}")
            return x

        return map_space(copy, self.single_observation_space, obs)

    def _first_and_final(self, obs, infos: dict, done: np.ndarray):
        """The next episodes' first observations, and the last ones of those that are done; obs itself elsewhere."""
        if self.native_mode == AutoresetMode.SAME_STEP:
            final = self._copy(obs)
            for i in np.flatnonzero(done):
                map_space(
                    lambda leaf, x, one, i=i: put(x, i, cast(leaf, one)),
                    self.single_observation_space,
                    final,
                    infos["final_obs"][i],
                )
            return obs, final
        reset_obs, _ = self.envs.reset(options={"reset_mask": done.copy()})

        def first(leaf, x, new):
            new = cast(leaf, new)
            if len(new) == len(done):  # EnvPool returns only those that were reset
                if not np.array_equal(new[~done], x[~done], equal_nan=True):
                    raise ValueError(
                        f"{type(self.envs.unwrapped).__name__} can't reset single environments: pass autoreset="
                        f"'next_step'"
                    )
                new = new[done]
            x = x.copy()
            x[done] = new
            return x

        return map_space(first, self.single_observation_space, obs, reset_obs), obs

    def _info(self, infos: dict, done: np.ndarray) -> dict[str, np.ndarray]:
        """The numbers that are kept, of the step taken: where it ended an episode they are in final_info."""
        final = infos.get("final_info", {}) if self.native_mode == AutoresetMode.SAME_STEP else {}
        info = {}
        for name, one in self.info_types.items():
            info[name] = np.full(
                (len(done), *one.shape), np.nan if np.issubdtype(one.dtype, np.floating) else 0, one.dtype
            )
            for source, where in ((infos, ~done if final else True), (final, done)):
                entry, there = look_up(source, name)
                if isinstance(entry, Mapping):
                    inside = ", ".join(repr(f"{name}/{key}") for key in entry if not key.startswith("_"))
                    raise ValueError(f"info_keys={name!r}: this entry is a dict, pass {inside}")
                if entry is not None:
                    there = np.broadcast_to(where & there, len(done))
                    info[name][there] = np.asarray(entry)[there]
        return info


def look_up(infos: Mapping[str, Any], name: str):
    """The entry of that name, with "a/b" that of the dict "a", and the mask of where there is one; None without."""
    there = infos.get(f"_{name}", True)
    if name in infos or "/" not in name:
        return infos.get(name), there
    name, _, rest = name.partition("/")
    inside = infos.get(name)
    entry, there = look_up(inside, rest) if isinstance(inside, Mapping) else (None, True)
    return entry, there & infos.get(f"_{name}", True)


def cast(leaf: gym.Space, x) -> np.ndarray:
    """A copy with the dtype of the space; raises TypeError or ValueError where it would be other numbers."""
    x = np.asarray(x)
    check_dtype(x.dtype, leaf.dtype)
    y = x.astype(leaf.dtype)
    if x.dtype.kind in "iu" and leaf.dtype.kind in "iu" and not np.can_cast(x.dtype, leaf.dtype) and (x != y).any():
        raise ValueError(f"observations of {x.min()} to {x.max()} don't fit {leaf.dtype}, which their space says")
    return y


def pack(leaves: Sequence[jax.Array]) -> jax.Array:
    """The bytes of all arrays in one, since each that a callback takes costs it 0.1 ms."""

    def as_bytes(x):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        return jax.lax.bitcast_convert_type(x, jnp.uint8).ravel()

    return jnp.concatenate([as_bytes(x) for x in leaves])


def unpack(packed: np.ndarray, types: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    ends = np.cumsum([x.size * x.dtype.itemsize for x in types])
    parts = np.split(packed, ends[:-1])
    return [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, types, strict=True)]


def put(x: np.ndarray, i: int, value) -> None:
    x[i] = value


last_error: list[BaseException] = []  # of an environment called from compiled code


@contextmanager
def original_errors() -> Iterator[None]:
    """Within it, or in a function that it decorates, environments in compiled code raise what they raise.

    Of XLA's JaxRuntimeError only the text would be left of it. At its end it waits for the steps that are under way.
    """
    last_error.clear()
    logger = logging.getLogger("jax._src.callback")  # which prints the traceback, too
    logger.addFilter(drop)
    try:
        yield
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        if not last_error:
            raise
        raise last_error.pop() from None
    finally:
        logger.removeFilter(drop)


def drop(record: logging.LogRecord) -> bool:
    return False

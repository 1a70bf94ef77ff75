"""EnvPool's environments, stepped by its threads from within compiled code, without a call into Python.

    env = envpool_xla.make("Hopper-v4", num_envs=64, seed=1)
    env, timestep = env.reset()
    env, timestep = jax.jit(lambda env, action: env.step(action))(env, action)

Where it differs from the other back ends:

- The seed is given to `make`, for EnvPool takes none later: `reset` goes on with the streams.
- A termination exactly on the last step that is allowed arrives as a truncation.
- Environments are state of the process, which `env` only orders: each `env` that `step` returns is to be used, once.
  Compiled functions hold them: after `jax.clear_caches()` they are freed with `env`.

Many seeds: `make(..., seed=(1, 2, 3))` has environments for each, and is one `env` with the leading axis [num_seeds];
use it under `jax.vmap`, with all seeds together. Many devices: `make(..., num_devices=2)` has a pool for each, and
is one `env` with the leading axis [num_devices] (in front of the seeds'); use it under `jax.shard_map(...,
check_vma=False)` over a mesh axis called "devices", and take the axis off inside.

autoreset="same_step" costs speed, as EnvPool resets on the next step: here an asynchronous pool hands the environments
over one by one, and steps those that finished once more. docs/envs/index.md has the measurements.
"""

import ctypes
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from cleanrl_utils.envs.base import (
    AUTORESETS,
    Backend,
    TimeStep,
    VectorEnv,
    check_name,
    check_seed,
    for_one_seed,
    independent_seeds,
    new_env,
)
from cleanrl_utils.envs.spaces import outward_dtype, outward_space

with suppress(OSError):  # EnvPool 1.2.5 (Python 3.11) ends the process when it renders, unless libEGL came first
    ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
# EnvPool draws Jumanji's games with matplotlib, whose import takes a second: put off until one of them is made.
jumanji = sys.modules["envpool.jumanji"] = types.ModuleType("envpool.jumanji")
jumanji.__path__ = [os.path.join(*find_spec("envpool").submodule_search_locations, "jumanji")]
import envpool  # noqa: E402
from envpool.python.envpool import EnvPoolMixin  # noqa: E402

del sys.modules["envpool.jumanji"]


# copied from cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py
def num_cores() -> int:
    """Of this machine, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def make(
    env_id: str,
    num_envs: int,
    seed: int | Sequence[int] = 0,
    autoreset: str = "next_step",
    *,
    flatten_obs: bool = False,
    info_keys: Sequence[str] = (),
    num_devices: int = 1,
    num_threads: int | None = None,
    **kwargs,
) -> VectorEnv:
    """num_envs environments of each seed on each device; `kwargs` are EnvPool's (max_episode_steps, ...).

    Different seeds share no stream of random numbers. `info_keys` names entries of EnvPool's info, [num_envs, ...],
    that `timestep.info` is to hold. Raises ValueError for names, sizes and environments that don't fit.
    """
    check_name(env_id, envpool.list_all_envs(), "EnvPool")
    check_arguments(autoreset, num_envs)
    seeds = np.atleast_1d(check_seed(seed)).tolist()
    env_seeds = independent_seeds(seeds, num_devices * num_envs).reshape(len(seeds), num_devices, num_envs)
    pools = [
        envpool.make(
            env_id,
            env_type="gymnasium",
            num_envs=len(seeds) * num_envs,
            batch_size=1 if autoreset == "same_step" else len(seeds) * num_envs,
            num_threads=num_threads or max(1, num_cores() // num_devices),
            env_seed=env_seeds[:, i].ravel().tolist(),
            **kwargs,
        )
        for i in range(num_devices)
    ]
    backend = EnvPoolXla(pools, autoreset, info_keys, len(seeds))
    axes = (num_devices,) * (num_devices > 1) + (len(seeds),) * (np.ndim(seed) > 0)
    token = jnp.broadcast_to(backend.token, (*axes, *backend.token.shape))
    return new_env(backend, token, flatten_obs)


def from_pool(pool, *, flatten_obs: bool = False, info_keys: Sequence[str] = ()) -> VectorEnv:
    """The environments of a pool that `envpool.make(..., env_type="gymnasium")` made, which is then to be left alone.

    By its batch size they are reset on the next step or, if that is 1 of several, in the same one.
    """
    if not isinstance(pool, EnvPoolMixin):
        is_wrapped = isinstance(getattr(pool, "unwrapped", None), EnvPoolMixin)
        why = "compiled steps would go past what wraps this pool" if is_wrapped else "this is no EnvPool"
        advice = "pass pool.unwrapped, and the wrappers to env.with_wrappers" if is_wrapped else "see envpool.make"
        raise ValueError(f"{why}: {advice}")
    if not hasattr(pool, "single_observation_space"):
        raise ValueError("this pool speaks another interface: make it with env_type='gymnasium'")
    if pool.is_async and pool.config["batch_size"] != 1:
        raise ValueError(f"batch_size={pool.config['batch_size']} of {len(pool)}: make the pool with 1, or all")
    backend = EnvPoolXla([pool], "same_step" if pool.is_async else "next_step", info_keys, num_seeds=1)
    return new_env(backend, backend.token, flatten_obs)


def check_arguments(autoreset: str, num_envs: int) -> None:
    if autoreset not in AUTORESETS:
        raise ValueError(f"autoreset={autoreset!r}: pass one of {', '.join(map(repr, AUTORESETS))}")
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs}: pass 1 or more")
    if jax.default_backend() not in ("cpu", "gpu"):
        raise ValueError(
            f"EnvPool can't be compiled for {jax.default_backend()}: pass envpool.make(..., env_type='gymnasium') to "
            f"gymnasium_callback.make"
        )


class EnvPoolXla(Backend):
    """The state is EnvPool's token: threading it through the calls orders them.

    There is a pool for each device, with the environments of all seeds.
    """

    def __init__(self, pools: list, autoreset: str, info_keys: Sequence[str], num_seeds: int):
        pool = pools[0]
        self.pools = pools  # kept alive: compiled functions hold but their address
        self.num_envs = len(pool) // num_seeds
        self.autoreset = autoreset
        self.single_observation_space = outward_space(mended_space(pool.observation_space))
        self.single_action_space = outward_space(pool.action_space)
        self.can_render = pool.render_mode == "rgb_array"
        tokens, *functions = zip(*(xla_functions(pool, autoreset, info_keys) for pool in pools), strict=True)
        self.token = tokens[0]
        # Compiled by themselves, too, or steps outside of compiled code would be compiled anew each time.
        self._reset, self._send, self._recv = (
            jax.jit(for_one_seed(for_own_device(each), num_seeds)) for each in functions
        )

    def reset(self, token, seed):
        if seed is not None:
            raise ValueError("EnvPool takes its seed when it is made: pass it to envpool_xla.make, and reset without")
        return self._reset(self._checked(token), ())

    def send(self, token, action):
        return self._send(self._checked(token), action)[0]

    def recv(self, token):
        return self._recv(token, ())

    def render(self, token, i: int) -> np.ndarray:
        return self.pools[0].render(env_ids=[i])[0]

    def _checked(self, token):
        if token.shape != self.token.shape:
            shard_map = "shard_map over the devices, then " * (len(self.pools) > 1)
            raise ValueError(
                f"env has the leading axes {token.shape[:-1]}: use it under {shard_map}vmap over the seeds"
            )
        return token


def xla_functions(pool, autoreset: str, info_keys: Sequence[str]):
    """EnvPool's token, and three functions of all environments of the pool, to be compiled.

    Each is (token, x) -> (token, y): reset's x is () and y a TimeStep, send's x the actions and y (), recv's x ()
    and y a TimeStep. MuJoCo's buffers are 64-bit: with 32-bit ones EnvPool would overrun memory.
    """
    with jax.enable_x64(True):
        handle, xla_recv, xla_send, _ = pool.xla()
        state = jax.eval_shape(xla_recv, handle)[1]
        token = jnp.asarray(handle)
    num_envs, batch_size = len(pool), 1 if autoreset == "same_step" else len(pool)
    space, action_spec = pool.observation_space, pool.spec.action_array_spec[pool.spec._action_keys[-1]]
    expected = sorted(((batch_size, *leaf.shape), str(leaf.dtype)) for leaf in space_leaves(space))
    declared = sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(state[0]))
    if declared != expected or any(x.shape != (batch_size,) for x in state[1:4]):
        raise ValueError(f"EnvPool's XLA interface declares {state[:4]}, not {batch_size} x {space}")
    for name in info_keys:
        if name not in state[4]:
            raise ValueError(f"info_keys={name!r}: EnvPool's info of this environment has {', '.join(state[4])}")

    def to_timestep(obs, reward, terminated, truncated, info):
        values = TimeStep(obs, reward, terminated, truncated, {name: info[name] for name in info_keys})
        return jax.tree.map(lambda x: x.astype(outward_dtype(x.dtype)), values)

    def send(token, action, env_ids=pool.all_env_ids):
        with jax.enable_x64(True):
            return xla_send(token, action.astype(action_spec.dtype), env_ids), ()

    def send_each(token, action, env_ids=pool.all_env_ids, n=num_envs):
        """Sends the first n of env_ids their actions, one by one: the compiled call of this pool takes one."""

        def send_one(i, token):
            return send(token, *(jax.lax.dynamic_slice_in_dim(x, i, 1) for x in (action, env_ids)))[0]

        return jax.lax.fori_loop(0, n, send_one, token), ()

    def recv_batch(token):
        with jax.enable_x64(True):
            token, (*values, info) = xla_recv(token)
            return token, info["env_id"], to_timestep(*values, info)

    def recv(token, _):
        token, _, timestep = recv_batch(token)
        return token, timestep

    def recv_each(token, n, timestep):
        """Receives n environments one by one; their values replace those in `timestep`."""

        def recv_one(_, carry):
            token, timestep = carry
            token, env_id, received = recv_batch(token)
            return token, jax.tree.map(lambda x, new: x.at[env_id].set(new), timestep, received)

        return jax.lax.fori_loop(0, n, recv_one, (token, timestep))

    def recv_and_reset(token, _):
        """Receives all environments and steps those that finished once more, which resets them."""
        blank = jax.tree.map(lambda x: jnp.zeros((num_envs, *x.shape[1:]), x.dtype), jax.eval_shape(recv, token, ())[1])
        token, last = recv_each(token, num_envs, blank)
        finished, num_finished = jnp.argsort(~last.done).astype(jnp.int32), last.done.sum()
        ignored = jnp.zeros((num_envs, *pool.action_space.shape))
        token, _ = send_each(token, ignored, finished, num_finished)
        token, first = recv_each(token, num_finished, last)
        return token, last.replace(obs=first.obs, info={**last.info, "final_obs": last.obs})

    def reset_on_host(token):  # NumPy only: JAX can hang in a callback
        if autoreset == "same_step" and num_envs > 1:
            pool.async_reset()
            received = [pool.recv(reset=True) for _ in range(num_envs)]
            received.sort(key=lambda values: values[1]["env_id"][0])
            obs, info = jax.tree.map(lambda *x: np.concatenate(x), *received)
        else:
            obs, info = pool.reset()
        no = np.zeros(num_envs, bool)
        timestep = to_timestep(obs, np.zeros(num_envs), no, no, info)
        if autoreset == "same_step":
            timestep.info["final_obs"] = timestep.obs
        return np.asarray(token), timestep

    def reset(token, _):
        types = jax.eval_shape(recv_and_reset if autoreset == "same_step" else recv, token, ())
        return jax.experimental.io_callback(reset_on_host, types, token)

    return (token, reset, send_each, recv_and_reset) if autoreset == "same_step" else (token, reset, send, recv)


def for_own_device(functions: Sequence[Callable]) -> Callable:
    """Each device's own function, of its own EnvPool: one pool called from two devices would mix their steps up."""
    if len(functions) == 1:
        return functions[0]
    return lambda *inputs: jax.lax.switch(jax.lax.axis_index("devices") % len(functions), functions, *inputs)


# copied from cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py
def space_leaves(space: gym.Space) -> list[gym.Space]:
    """The spaces inside nested Dict spaces, in alphabetical order."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for _, entry in sorted(space.items()) for leaf in space_leaves(entry)]
    return [space]


def mended_space(space: gym.Space) -> gym.Space:
    """EnvPool's dm_control spaces have the smallest positive number as the lower bound, meaning the lowest number."""
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({name: mended_space(entry) for name, entry in space.items()}, sort_keys=False)
    if isinstance(space, gym.spaces.Box) and space.dtype == np.float64:
        low = np.where(space.low == np.finfo(np.float64).tiny, -np.inf, space.low)
        return gym.spaces.Box(low, space.high, dtype=np.float64)
    return space

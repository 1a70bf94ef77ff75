"""Brax's environments through the Gymnasium bridge against the pure JAX loop, and what fresh resets cost.

    python benchmark/envs_bridge.py
    python benchmark/envs_bridge.py --resets

Steps per second of: a compiled scan over the steps; Gymnasium's `step` called from Python, which waits for each time
step as a policy would; the same with torch's tensors (if torch is installed). Actions are given. With `--resets`: the
scan with `reset_batch_size` of several sizes, with a reset of all environments at every step, and with no fresh reset
at all but the first states replayed, as Brax's own wrapper does. They alternate, so that the load of a shared machine
falls on each; medians over the rounds, and the ratios of the CPU's time that each took, which other processes do not
lengthen (on a GPU it tells little). Not a test: the machine is noisy.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import tyro
from measure import describe_machine
from throughput import median_and_range, print_table

from cleanrl_utils.envs import jax_envs
from cleanrl_utils.envs.base import VectorEnv
from cleanrl_utils.envs.to_gymnasium import GymnasiumVectorEnv


@dataclass(frozen=True)
class Args:
    env_id: str = "hopper"
    """Brax's environment"""
    backend: str = "spring"
    """its physics: generalized, positional, spring or mjx"""
    num_envs: int = 1024
    """the number of environments"""
    num_steps: int = 50
    """the number of steps of each in a round"""
    rounds: int = 7
    """how often each is measured"""
    resets: bool = False
    """measure ways to reset, not ways to step"""


class ResetAll(jax_envs.JaxBackend):
    """Resets all environments at every step, and takes what it needs."""

    def restart(self, state, obs, ended):
        return where(ended, jax.vmap(self.start)(state.key), (state, obs))


class ReplayFirst(jax_envs.JaxBackend):
    """Goes back to the first states."""

    def restart(self, state, obs, ended):
        return where(ended, self.first, (state, obs))


def where(mask, tree, other):
    return jax.tree.map(lambda x, y: jnp.where(jax_envs.expand(mask, x), x, y), tree, other)


def scan_steps(env: VectorEnv, actions) -> Callable:
    """A round of steps in one compiled call."""

    @jax.jit
    def scan(env, actions):
        def step(env, action):
            env, timestep = env.step(action)
            return env, (timestep.reward, timestep.done)

        return jax.lax.scan(step, env, actions)

    return lambda: jax.block_until_ready(scan(env, actions))


def bridge_steps(env: VectorEnv, actions) -> Callable:
    envs, actions = GymnasiumVectorEnv(env), list(actions)

    def run():
        envs.env = env
        for action in actions:
            jax.block_until_ready(envs.step(action))

    return run


def torch_steps(env: VectorEnv, actions) -> Callable:
    import torch
    from gymnasium.wrappers.vector import JaxToTorch

    envs, actions = GymnasiumVectorEnv(env), list(torch.from_dlpack(actions))
    to_torch = JaxToTorch(envs)

    def run():
        envs.env = env
        for action in actions:
            to_torch.step(action)[0].sum().item()

    return run


def ways_to_step(args: Args, brax, actions) -> dict[str, Callable]:
    env, _ = jax_envs.make(brax, args.num_envs, seed=1, autoreset="same_step").reset()
    ways = {"compiled scan": scan_steps(env, actions), "GymnasiumVectorEnv": bridge_steps(env, actions)}
    if find_spec("torch"):
        ways["GymnasiumVectorEnv, JaxToTorch"] = torch_steps(env, actions)
    return ways


def ways_to_reset(args: Args, brax, actions) -> dict[str, Callable]:
    backends = {"first states replayed": ReplayFirst(brax, args.num_envs, "same_step")}
    for batch_size in sorted({max(1, args.num_envs // share) for share in (64, 16, 1)}):
        backend = jax_envs.JaxBackend(brax, args.num_envs, "same_step", reset_batch_size=batch_size)
        backends[f"reset_batch_size={batch_size}"] = backend
    backends["all reset at every step"] = ResetAll(brax, args.num_envs, "same_step")
    ways = {}
    for name, backend in backends.items():
        env = VectorEnv(backend, jax_envs.Episodes(None, backend.keys(1), None, None, None))
        env, timestep = env.reset()
        backend.first = env.state, timestep.obs
        ways[name] = scan_steps(env, actions)
    return ways


def main(args: Args) -> None:
    print(describe_machine())
    brax = jax_envs.BraxEnv(args.env_id, backend=args.backend)
    shape = args.num_steps, args.num_envs, *brax.action_space.shape
    actions = jax.random.uniform(jax.random.key(1), shape, minval=-1.0)
    ways = (ways_to_reset if args.resets else ways_to_step)(args, brax, actions)
    for run in ways.values():
        run()  # compiles
    durations, cpu_durations = {name: [] for name in ways}, {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, run in ways.items():
            start_time, cpu_start_time = time.perf_counter(), time.process_time()
            run()
            durations[name].append(time.perf_counter() - start_time)
            cpu_durations[name].append(time.process_time() - cpu_start_time)
    rows = []
    for name in ways:
        steps_per_second = args.num_steps * args.num_envs / statistics.median(durations[name])
        ratios = (ratios_to_first(of_ways, name) for of_ways in (durations, cpu_durations))
        rows.append([name, f"{steps_per_second:,.0f}", *ratios])
    print_table("way", "steps/s", "speed, ratio to the first", "the same by CPU time", rows=rows)


def ratios_to_first(durations: dict[str, list[float]], name: str) -> str:
    first = next(iter(durations.values()))
    return median_and_range([x / y for x, y in zip(first, durations[name], strict=True)])


if __name__ == "__main__":
    main(tyro.cli(Args))

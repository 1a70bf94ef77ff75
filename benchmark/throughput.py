"""Training speed against the raw EnvPool limit and against other libraries, environment by environment, in one run.

    python benchmark/throughput.py --env-ids Hopper-v4 HalfCheetah-v4 Ant-v4
    python benchmark/throughput.py --peers jaxnasium sbx sb3 tianshou cleanrl_torch

Steps per second of the raw pool (random actions, EnvPool's XLA step alone in a compiled scan: nothing can be faster)
and of the script's `train_iteration` after compilation, and their ratio. They alternate, so that the load of a
shared machine falls on each; medians over the rounds. Not a test: the machine is noisy.

The peers train at the script's sizes, each by its driver in `benchmark/peers`, in a Python environment of its own. The
first call makes it from the package registry, whose PyTorch for Linux is a CUDA build of several GB: with uv,
UV_FIND_LINKS can name a folder that holds a CPU build of the version that is pinned.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from peers.process import Peer, find_python, start_peers

from cleanrl_utils.models import load_script


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = ("Hopper-v4", "HalfCheetah-v4", "Ant-v4")
    """the environments"""
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script, with its default hyperparameters"""
    rounds: int = 7
    """how often each is measured"""
    iterations: int = 10
    """iterations (of num_envs x num_steps steps) a measurement"""
    warm_up_iterations: int = 20
    """iterations before the first measurement, so that episodes are under way"""
    peers: tuple[Literal["jaxnasium", "sbx", "sb3", "tianshou", "cleanrl_torch"], ...] = ()
    """the other libraries to measure; none given: none"""


def raw_pool(script, args) -> Callable[[], None]:
    """A function that steps the bare pool as many times as an iteration does, with random actions."""
    env = script.make_env(args)
    low, high = (jnp.asarray(bound, jnp.float32) for bound in (env.envs.action_space.low, env.envs.action_space.high))
    env, _ = env.replace(wrappers=()).reset()
    shape = (args.num_steps, *env.action_shape)
    actions = jax.random.uniform(jax.random.PRNGKey(0), shape, minval=low, maxval=high)

    def step(env, action):
        env, timestep = env.step(action)
        return env, timestep.reward.sum()

    scan = jax.jit(lambda env: jax.lax.scan(step, env, actions))
    carried = [env]

    def run():
        carried[0], rewards = scan(carried[0])
        jax.block_until_ready(rewards)

    return run


def training(script, args) -> Callable[[], None]:
    """A function that runs one training iteration."""
    carried = [script.init_state(args, script.make_env(args))]

    def run():
        carried[0], metrics = script.train_iteration(args, carried[0])
        jax.device_get(metrics)

    return run


def median_and_range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def steps_per_second(run: Callable[[], None], iterations: int, batch_size: int) -> float:
    start_time = time.perf_counter()
    for _ in range(iterations):
        run()
    return iterations * batch_size / (time.perf_counter() - start_time)


def peer_flags(args: Args, script_args) -> dict[str, object]:
    """What the drivers are told: the script's sizes and how to measure."""
    sizes = ("env_id", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    how = ("warm_up_iterations", "iterations", "rounds")
    return {name: getattr(script_args, name) for name in sizes} | {name: getattr(args, name) for name in how}


def peer_row(peer: Peer, trained: list[float]) -> str:
    """Its row of the table, given what the script reached in the same rounds."""
    row = f"| {peer.flags['env_id']} | {peer.name} |"
    if peer.failed:
        return f"{row} failed | |"
    ratios = [ours / theirs for ours, theirs in zip(trained, peer.steps_per_second, strict=True)]
    return f"{row} {statistics.median(peer.steps_per_second):,.0f} | {median_and_range(ratios)} |"


def print_peers(measured: list[tuple[Peer, list[float]]]) -> None:
    """A table, and a line for each library on what differs."""
    print("\n| environment | peer | training, steps/s | the script's ratio to it (lowest - highest) |")
    print("|---|---|---|---|")
    for peer, trained in measured:
        print(peer_row(peer, trained))
    print()
    for description in {peer.name: peer.description() for peer, _ in measured if peer.about}.values():
        print(f"- {description}")


def main(args: Args) -> None:
    pythons = {name: find_python(name) for name in args.peers}
    script = load_script(args.script)
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "envpool"))
    print(f"{platform.machine()} with {os.cpu_count()} cores, Python {platform.python_version()}, {packages}, on the")
    print(f"{jax.default_backend()}; medians of {args.rounds} rounds of {args.iterations} iterations\n")
    print("| environment | raw pool, steps/s | training, steps/s | ratio (lowest - highest) |")
    print("|---|---|---|---|")
    measured = []
    for env_id in args.env_ids:
        script.check_env_id(env_id)
        script_args = script.Args(env_id=env_id)
        runs = [raw_pool(script, script_args), training(script, script_args)]
        for run in runs:
            steps_per_second(run, args.warm_up_iterations, script_args.batch_size)
        rounds = []
        with start_peers(pythons, peer_flags(args, script_args)) as peers:
            for _ in range(args.rounds):
                rounds.append([steps_per_second(run, args.iterations, script_args.batch_size) for run in runs])
                for peer in peers:
                    peer.measure()
        raw, trained = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [trained / raw for raw, trained in rounds]
        print(f"| {env_id} | {raw:,.0f} | {trained:,.0f} | {median_and_range(ratios)} |", flush=True)
        measured += [(peer, [trained for _, trained in rounds]) for peer in peers]
    if measured:
        print_peers(measured)
    if any(peer.failed for peer, _ in measured):
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))

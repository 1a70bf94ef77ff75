"""Training speed against the raw EnvPool limit, environment by environment, in one run.

    python benchmark/throughput.py --env-ids Hopper-v4 HalfCheetah-v4 Ant-v4

Steps per second of the raw pool (random actions, EnvPool's XLA step alone in a compiled scan: nothing can be faster)
and of the script's `train_iteration` after compilation, and their ratio. The two alternate, so that the load of a
shared machine falls on both; medians over the rounds. Not a test: the machine is noisy.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import jax
import jax.numpy as jnp
import tyro

from cleanrl_utils.models import load_script


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = ("Hopper-v4", "HalfCheetah-v4", "Ant-v4")
    """the environments"""
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script, with its default hyperparameters"""
    rounds: int = 7
    """how often each of the two is measured"""
    iterations: int = 10
    """iterations (of num_envs x num_steps steps) a measurement"""
    warm_up_iterations: int = 20
    """iterations before the first measurement, so that episodes are under way"""


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


def steps_per_second(run: Callable[[], None], iterations: int, batch_size: int) -> float:
    start_time = time.perf_counter()
    for _ in range(iterations):
        run()
    return iterations * batch_size / (time.perf_counter() - start_time)


def main(args: Args) -> None:
    script = load_script(args.script)
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "envpool"))
    print(f"{platform.machine()} with {os.cpu_count()} cores, Python {platform.python_version()}, {packages}, on the")
    print(f"{jax.default_backend()}; medians of {args.rounds} rounds of {args.iterations} iterations\n")
    print("| environment | raw pool, steps/s | training, steps/s | ratio (lowest - highest) |")
    print("|---|---|---|---|")
    for env_id in args.env_ids:
        script.check_env_id(env_id)
        script_args = script.Args(env_id=env_id)
        runs = [raw_pool(script, script_args), training(script, script_args)]
        for run in runs:
            steps_per_second(run, args.warm_up_iterations, script_args.batch_size)
        rounds = [
            [steps_per_second(run, args.iterations, script_args.batch_size) for run in runs] for _ in range(args.rounds)
        ]
        raw, trained = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [trained / raw for raw, trained in rounds]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        print(f"| {env_id} | {raw:,.0f} | {trained:,.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))

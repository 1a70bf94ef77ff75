"""What it costs EnvPool in compiled code to reset environments in the step that ends their episode.

    python benchmark/envs_autoreset.py --env-ids CartPole-v1 Hopper-v4 HalfCheetah-v4 --num-envs 64

Steps per second of a compiled scan with autoreset="next_step" and "same_step", of the same seeds and random actions;
the steps that only reset are not counted. They alternate, so that the load of a shared machine falls on each; medians
over the rounds. One row of a Markdown table for each environment. Not a test: the machine is noisy.
"""

import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro
from measure import describe_machine
from throughput import median_and_range, print_table

from cleanrl_utils.envs import envpool_xla


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = ("CartPole-v1", "Hopper-v4", "HalfCheetah-v4")
    """the environments"""
    num_envs: int = 64
    """the number of environments"""
    num_steps: int = 256
    """the number of steps of each in a round"""
    rounds: int = 7
    """how often each is measured"""


class Environments:
    def __init__(self, args: Args, env_id: str, autoreset: str):
        self.env, self.timestep = envpool_xla.make(env_id, args.num_envs, seed=1, autoreset=autoreset).reset()
        space = self.env.single_action_space
        space.seed(1)
        self.actions = jnp.array([[space.sample() for _ in range(args.num_envs)] for _ in range(args.num_steps)])

        @jax.jit
        def scan(env, timestep, actions):
            def step(carry, action):
                env, timestep = carry
                valid = env.valid(timestep)
                env, timestep = env.step(action)
                return (env, timestep), valid.sum()

            carry, valid = jax.lax.scan(step, (env, timestep), actions)
            return carry, valid.sum()

        self.scan = scan

    def steps_per_second(self) -> float:
        start_time = time.perf_counter()
        (self.env, self.timestep), valid = self.scan(self.env, self.timestep, self.actions)
        return int(valid) / (time.perf_counter() - start_time)


def main(args: Args) -> None:
    print(describe_machine())
    rows = []
    for env_id in args.env_ids:
        pools = [Environments(args, env_id, autoreset) for autoreset in ("next_step", "same_step")]
        speeds = [[pool.steps_per_second() for pool in pools] for _ in range(args.rounds + 1)][1:]  # the first compiles
        next_step, same_step = zip(*speeds, strict=True)
        ratios = [y / x for x, y in speeds]
        medians = [f"{statistics.median(x):,.0f}" for x in (next_step, same_step)]
        rows.append([env_id, *medians, median_and_range(ratios)])
    print_table("environment", "next_step, steps/s", "same_step, steps/s", "ratio", rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Args))

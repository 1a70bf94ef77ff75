"""Gymnasium's environments in a compiled scan against a plain Python loop over the same environments.

    python benchmark/envs_callback.py --env-ids CartPole-v1 Pendulum-v1 --num-envs 16

Steps per second of both, with actions that are given, and with those of a policy in JAX (two layers of 64), which the
plain loop calls for each step as a compiled function. They alternate, so that the load of a shared machine falls on
each; medians over the rounds. One row of a Markdown table for each environment. Not a test: the machine is noisy.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from measure import describe_machine
from throughput import median_and_range, print_table

from cleanrl_utils.envs import gymnasium_callback
from cleanrl_utils.envs.spaces import unflatten


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = ("CartPole-v1", "Pendulum-v1")
    """the environments; for Hopper-v5 and the like, `uv pip install mujoco`"""
    vectorization_mode: str = "sync"
    """sync, or async: each environment in a process of its own"""
    num_envs: int = 16
    """the number of environments"""
    num_steps: int = 256
    """the number of steps of each in a round"""
    rounds: int = 7
    """how often each is measured"""


def policy(weights, obs: jax.Array) -> jax.Array:
    for w in weights[:-1]:
        obs = jnp.tanh(obs @ w)
    return obs @ weights[-1]


class Environments:
    """The same ones, stepped in two ways."""

    def __init__(self, args: Args, env_id: str):
        kind = SyncVectorEnv if args.vectorization_mode == "sync" else AsyncVectorEnv
        functions = [partial(gym.make, env_id)] * args.num_envs
        self.envs = kind(functions, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        self.env, timestep = gymnasium_callback.make(self.envs).reset(seed=1)
        self.obs, self.num_steps = timestep.obs, args.num_steps
        space = self.env.single_action_space
        sizes = [self.obs.shape[-1], 64, 64, gym.spaces.flatdim(space)]
        rng = np.random.default_rng(1)
        weights = [rng.normal(size=shape).astype(np.float32) / 8 for shape in zip(sizes[:-1], sizes[1:], strict=True)]
        self.act = jax.jit(lambda obs: unflatten(space, policy(weights, obs)))
        space.seed(1)
        samples = [[space.sample() for _ in range(args.num_envs)] for _ in range(args.num_steps)]
        self.actions = np.array(samples, space.dtype)

        @partial(jax.jit, static_argnames="has_policy")
        def scan(env, obs, actions, has_policy):
            def step(carry, action):
                env, obs = carry
                env, timestep = env.step(self.act(obs) if has_policy else action)
                return (env, timestep.obs), timestep.reward

            return jax.lax.scan(step, (env, obs), actions)

        self.scan = scan

    def compiled(self, has_policy: bool) -> None:
        (self.env, self.obs), rewards = self.scan(self.env, self.obs, self.actions, has_policy)
        jax.block_until_ready(rewards)

    def plain(self, has_policy: bool) -> None:
        obs, rewards = np.asarray(self.obs), []
        for action in self.actions:
            action = np.asarray(self.act(obs) if has_policy else action, self.envs.single_action_space.dtype)
            obs, reward, *_ = self.envs.step(action)
            rewards.append(reward)


def main(args: Args) -> None:
    print(describe_machine())
    rows = []
    for env_id in args.env_ids:
        environments = Environments(args, env_id)
        for has_policy in (False, True):
            speeds = {environments.compiled: [], environments.plain: []}
            for run in speeds:
                run(has_policy)  # compiles
            for _ in range(args.rounds):
                for run, of_rounds in speeds.items():
                    start_time = time.perf_counter()
                    run(has_policy)
                    of_rounds.append(args.num_steps * args.num_envs / (time.perf_counter() - start_time))
            compiled, plain = speeds.values()
            ratios = [x / y for x, y in zip(compiled, plain, strict=True)]
            medians = [f"{statistics.median(x):,.0f}" for x in (compiled, plain)]
            rows.append([env_id, "of a policy" if has_policy else "given", *medians, median_and_range(ratios)])
        environments.envs.close()
    print_table("environment", "actions", "compiled scan, steps/s", "Python loop, steps/s", "ratio", rows=rows)


if __name__ == "__main__":
    main(tyro.cli(Args))

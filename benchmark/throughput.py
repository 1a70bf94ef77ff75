"""Training speed against the raw EnvPool limit and against other libraries, environment by environment, in one run.

    python benchmark/throughput.py --env-ids Hopper-v4 HalfCheetah-v4 Ant-v4
    python benchmark/throughput.py --peers jaxnasium sbx sb3 tianshou cleanrl_torch
    python benchmark/throughput.py --script ppo_atari_envpool_xla_jax_scan --env-ids Pong-v5 \
        --rounds 3 --iterations 2 --warm-up-iterations 2

Steps per second of the raw pool (EnvPool's XLA step alone in a compiled scan: nothing can be faster), with random
actions and with those that the training sends, and of the script's training iterations after compilation; their
ratios; and where the time of an iteration goes. All alternate, so that the load of a shared machine falls on each;
medians over the rounds. Not a test: the machine is noisy.

The peers train at the script's sizes, each by its driver in `benchmark/peers`, in a Python environment of its own. The
first call makes it from the package registry, whose PyTorch for Linux is a CUDA build of several GB: with uv,
UV_FIND_LINKS can name a folder that holds a CPU build of the version that is pinned.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import jax
import jax.numpy as jnp
import tyro
from measure import describe_machine
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
    peers: tuple[Literal["jaxnasium", "sbx", "sb3", "tianshou", "cleanrl_torch", "many_seeds"], ...] = ()
    """the other libraries to measure; none given: none"""


class Training:
    """The script's training, which keeps the time of its two halves and the actions that it sent."""

    def __init__(self, script, args):
        self.script, self.args = script, args
        self.state = script.init_lanes([args], script.make_env(args))
        self.actions, self.rollout_seconds, self.learn_seconds = [], [], []

    def run(self) -> None:
        """One iteration, as `train_iteration` has it."""
        start_time = time.perf_counter()
        self.state, batch = self.script.compiled(self.script.rollout, self.args)(self.state)
        jax.block_until_ready(batch)
        rollout_time = time.perf_counter()
        self.state, metrics = self.script.compiled(self.script.learn, self.args)(self.state, batch)
        self.script.fetch(metrics)
        self.rollout_seconds.append(rollout_time - start_time)
        self.learn_seconds.append(time.perf_counter() - rollout_time)
        self.actions.append(batch.action[0, 0])


class RawPool:
    """The bare pool: EnvPool's XLA step alone in a compiled scan."""

    def __init__(self, script, args):
        env = script.make_env(args)
        of_actions = tuple(w for w in env.wrappers if type(w).send is not script.EnvWrapper.send)
        self.env, _ = env.replace(wrappers=of_actions).reset()
        self.shape = (args.num_steps, *env.action_shape)
        self.scan = jax.jit(lambda env, actions: jax.lax.scan(self.step, env, actions))
        self.key = jax.random.PRNGKey(0)

    @staticmethod
    def step(env, action):
        env, timestep = env.step(action)
        return env, timestep.reward.sum()

    def run(self, actions: jax.Array) -> None:
        """As many steps as an iteration has, with these actions, [num_steps, num_envs, ...]."""
        self.env, rewards = self.scan(self.env, actions.reshape(self.shape))
        jax.block_until_ready(rewards)

    def run_random(self) -> None:
        self.key, key = jax.random.split(self.key)
        space = getattr(self.env.envs, "action_space", None)  # Brax's environments have none
        if isinstance(space, gym.spaces.Discrete):
            self.run(jax.random.randint(key, self.shape, 0, space.n))
        else:  # the script rescales them
            self.run(jax.random.uniform(key, self.shape, minval=-1.0, maxval=1.0))


def advantages(training: Training) -> Callable[[], None]:
    """A function that computes advantages and returns as often as an iteration does."""
    script, args = training.script, training.args
    state = jax.tree.map(lambda x: x[0, 0], training.state)
    _, batch = jax.eval_shape(lambda state: script.rollout(args, state), state)
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
    times = 1 + args.recompute_advantage * args.update_epochs
    compute = jax.jit(lambda agent, stats: script.compute_targets(args, agent, stats, batch, state.timestep.obs))

    def run():
        for _ in range(times):
            jax.block_until_ready(compute(state.agent, state.return_stats))

    return run


def median_and_range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def seconds(run: Callable[[], None], times: int) -> float:
    """Of one of so many calls."""
    start_time = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start_time) / times


def print_table(*columns: str, rows: list[list[str]]) -> None:
    print()
    for row in (columns, ["---"] * len(columns), *rows):
        print("|", " | ".join(row), "|")


def peer_flags(args: Args, script_args) -> dict[str, object]:
    """What the drivers are told: the script's sizes and how to measure."""
    sizes = ("env_id", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    how = ("warm_up_iterations", "iterations", "rounds")
    return {name: getattr(script_args, name) for name in sizes} | {name: getattr(args, name) for name in how}


def peer_row(peer: Peer, trained: list[float]) -> list[str]:
    """Its row of the table, given what the script reached in the same rounds."""
    if peer.failed:
        return [peer.flags["env_id"], peer.name, "failed", ""]
    ratios = [ours / theirs for ours, theirs in zip(trained, peer.steps_per_second, strict=True)]
    return [
        peer.flags["env_id"],
        peer.name,
        f"{statistics.median(peer.steps_per_second):,.0f}",
        median_and_range(ratios),
    ]


def print_peers(measured: list[tuple[Peer, list[float]]]) -> None:
    """A table, and a line for each library on what differs."""
    if not measured:
        return
    columns = ("environment", "peer", "training, steps/s", "the script's ratio to it (lowest - highest)")
    print_table(*columns, rows=[peer_row(peer, trained) for peer, trained in measured])
    print()
    for description in {peer.name: peer.description() for peer, _ in measured if peer.about}.values():
        print(f"- {description}")


def measure(training: Training, raw_pools: list[RawPool], iterations: int) -> dict[str, float]:
    """Seconds of an iteration: of the training, of its parts, and of the raw pools."""
    random_actions, same_actions = raw_pools
    for spent in (training.actions, training.rollout_seconds, training.learn_seconds):
        spent.clear()
    return {
        "training": seconds(training.run, iterations),
        "random": seconds(random_actions.run_random, iterations),
        "same": seconds(map(same_actions.run, training.actions).__next__, iterations),
        "rollout": statistics.mean(training.rollout_seconds),
        "learn": statistics.mean(training.learn_seconds),
    }


def main(args: Args) -> None:
    pythons = {name: find_python(name) for name in args.peers}
    script = load_script(args.script)
    script.start_jax(script.Args(compilation_cache=False))
    print(f"{describe_machine()}; medians of {args.rounds} rounds of {args.iterations} iterations")
    failed = []
    for env_id in args.env_ids:
        script.check_env_id(env_id)
        script_args = script.Args(env_id=env_id)
        training, raw_pools = Training(script, script_args), [RawPool(script, script_args) for _ in range(2)]
        measure(training, raw_pools, args.warm_up_iterations)
        compute_advantages, rounds = advantages(training), []
        compute_advantages()  # compiles
        with start_peers(pythons, peer_flags(args, script_args)) as peers:
            for _ in range(args.rounds):
                rounds.append(measure(training, raw_pools, args.iterations))
                rounds[-1]["advantages"] = seconds(compute_advantages, args.iterations)
                for peer in peers:
                    peer.measure()
        median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        steps = [f"{script_args.batch_size / median[name]:,.0f}" for name in ("random", "same", "training")]
        ratios = [median_and_range([r[raw] / r["training"] for r in rounds]) for raw in ("random", "same")]
        pools = ("raw pool", "raw pool, the training's actions")
        columns = [*(f"{name}, steps/s" for name in (*pools, "training")), *(f"ratio to the {name}" for name in pools)]
        print_table("environment", *columns, rows=[[env_id, *steps, *ratios]])
        parts = {
            "environment": median["same"],
            "inference": median["rollout"] - median["same"],
            "advantages": median["advantages"],
            "update": median["learn"] - median["advantages"],
            "host": median["training"] - median["rollout"] - median["learn"],
            "iteration": median["training"],
        }
        columns = [f"{name}, ms" for name in parts]
        print_table("environment", *columns, rows=[[env_id, *(f"{1000 * x:.1f}" for x in parts.values())]])
        trained = [script_args.batch_size / r["training"] for r in rounds]
        print_peers([(peer, trained) for peer in peers])
        failed += [peer for peer in peers if peer.failed]
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))

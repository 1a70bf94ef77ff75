"""Returns of the random policy, from which the report's normalised scores count.

    python benchmark/random_policy.py

Actions are uniform within the bounds of the action space. The rows of source `random` in benchmark/references.csv are
replaced by new ones: mean and sample standard deviation over the episodes, the first of each of so many environments.
"""

import csv
import os
from dataclasses import dataclass

import envpool
import numpy as np
import tyro

from cleanrl_utils.files import write_file
from cleanrl_utils.report import RANDOM


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = (
        "Hopper-v4",
        "HalfCheetah-v4",
        "Walker2d-v4",
        "Ant-v4",
        "Swimmer-v4",
        "Humanoid-v4",
        "HumanoidStandup-v4",
        "Reacher-v4",
        "Pusher-v4",
        "InvertedPendulum-v4",
        "InvertedDoublePendulum-v4",
    )
    """the environments"""
    num_episodes: int = 100
    """episodes in each environment"""
    seed: int = 1
    """seed of the environments and the actions"""
    references: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "references.csv")
    """the file whose rows are replaced"""


def random_returns(env_id: str, num_episodes: int, seed: int) -> np.ndarray:
    """Raw returns, [num_episodes]."""
    env_seeds = np.random.SeedSequence(seed).generate_state(num_episodes) >> 1
    env = envpool.make(env_id, env_type="gymnasium", num_envs=num_episodes, env_seed=env_seeds.tolist())
    low, high = env.action_space.low, env.action_space.high
    rng = np.random.default_rng(seed)
    env.reset()
    returns, running = np.zeros(num_episodes), np.ones(num_episodes, bool)
    while running.any():
        action = rng.uniform(low, high, (num_episodes, *low.shape)).astype(low.dtype)
        _, reward, terminated, truncated, _ = env.step(action)
        returns += running * reward
        running &= ~(terminated | truncated)
    return returns


def main(args: Args) -> None:
    with open(args.references, newline="") as f:
        reader = csv.DictReader(f)
        rows = [row for row in reader if (row["source"], row["env_id"] in args.env_ids) != (RANDOM, True)]
    for env_id in args.env_ids:
        returns = random_returns(env_id, args.num_episodes, args.seed)
        row = {"env_id": env_id, "source": RANDOM, "budget": 0, "measure": "training"}
        row |= {"mean": f"{returns.mean():.6g}", "std": f"{returns.std(ddof=1):.6g}"}
        rows.append(row | {"note": f"uniform actions; {args.num_episodes} episodes"})
        print(f"{env_id}: {row['mean']} ± {row['std']}", flush=True)
    lines = [reader.fieldnames, *([row[name] for name in reader.fieldnames] for row in rows)]
    write_file(args.references, "".join(",".join(map(str, line)) + "\n" for line in lines).encode())


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python benchmark/random_policy.py", description=__doc__))

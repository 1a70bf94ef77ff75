"""Whether compiled steps of EnvPool return, on JAX's device, what its NumPy interface returns, bit by bit.

    python benchmark/compare_observations.py --env-ids HalfCheetah-v4 Hopper-v4 Pendulum-v1

Both sides step pools of the same seeds with the same random actions, past the ends of episodes. One row of a Markdown
table for each environment and each way to step it; exit code 1 if anything differs.
"""

import sys
from dataclasses import dataclass

import envpool
import jax
import numpy as np
import tyro

from cleanrl_utils.models import load_script


@dataclass(frozen=True)
class Args:
    env_ids: tuple[str, ...] = ("HalfCheetah-v4", "Hopper-v4", "Pendulum-v1")
    """the environments"""
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script whose steps are compared"""
    num_envs: int = 16
    """the number of parallel environments"""
    num_steps: int = 300
    """the number of steps of each"""


def make_pool(env_id: str, num_envs: int):
    return envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, env_seed=list(range(num_envs)))


def numpy_steps(script, pool, actions: np.ndarray) -> list[np.ndarray]:
    """Observations, rewards and both flags, [num_steps, num_envs, ...]."""
    pool.reset()
    steps = []
    for action in actions:
        obs, reward, terminated, truncated, _ = pool.step(action.astype(pool.action_space.dtype))
        steps.append((script.flatten_obs(obs, np), reward.astype(np.float32), terminated, truncated))
    return [np.stack(x) for x in zip(*steps, strict=True)]


def compiled_steps(make_step, pool, actions: np.ndarray) -> list[np.ndarray]:
    """The same from a compiled scan over the script's step."""
    handle, step = make_step(pool)
    pool.reset()
    _, steps = jax.jit(lambda handle, actions: jax.lax.scan(step, handle, actions))(handle, actions)
    return [np.asarray(x) for x in steps]


def main(args: Args) -> None:
    script, all_equal = load_script(args.script), True
    for env_id in args.env_ids:
        script.check_env_id(env_id)
        pools = [make_pool(env_id, args.num_envs) for _ in range(3)]
        low, high = pools[0].action_space.low, pools[0].action_space.high
        shape = (args.num_steps, args.num_envs, *low.shape)
        actions = np.random.default_rng(0).uniform(low, high, shape).astype(np.float32)
        expected = numpy_steps(script, pools[0], actions)
        ended = int((expected[2] | expected[3]).sum())
        for make_step, pool in zip((script.xla_step, script.host_step), pools[1:], strict=True):
            found = compiled_steps(make_step, pool, actions)
            equal = all(np.array_equal(x, y) for x, y in zip(expected, found, strict=True))
            difference = "equal" if equal else f"**differ** by up to {np.abs(expected[0] - found[0]).max():.3g}"
            all_equal &= equal
            steps = f"{args.num_steps * args.num_envs:,}"
            print(f"| {env_id} | `{make_step.__name__}` | {steps} | {ended} | {difference} |")
    if not all_equal:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

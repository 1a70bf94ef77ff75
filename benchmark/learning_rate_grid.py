"""A grid in one process: each learning rate with each seed is a lane of one program, with a run folder of its own.

    python benchmark/learning_rate_grid.py --env-id Hopper-v4 --total-timesteps 300000 --num-seeds 2

All flags are the script's own.
"""

from dataclasses import replace

import tyro

from cleanrl.ppo_continuous_action_envpool_xla_jax_scan import Args, check_args, check_env_id, start_jax, train

LEARNING_RATES = (1e-4, 3e-4, 1e-3)


def main(args: Args):
    check_args(args)
    args = start_jax(args)
    check_env_id(args.env_id)
    seeds = range(args.seed, args.seed + args.num_seeds)
    return train([replace(args, learning_rate=lr, seed=seed, num_seeds=1) for lr in LEARNING_RATES for seed in seeds])


if __name__ == "__main__":
    main(tyro.cli(Args))

#!/usr/bin/env bash
# The runs of ppo_envpool_xla_jax_scan.py behind docs/benchmark/, and their tables: about five minutes on 2 cores.
# What passed before is left out. Exit code 1: an evaluation lies below its minimum.
set -euo pipefail
exp_name=ppo_envpool_xla_jax_scan

train() {
    uv run python -m cleanrl_utils.benchmark --num-seeds 1 --start-seed 1 --workers 1 --resume "$@"
}

command="python cleanrl/$exp_name.py --eval-episodes 100"
train --env-ids CartPole-v1 --command "$command --total-timesteps 100000 --num-seeds 5"
train --env-ids Acrobot-v1 LunarLander-v3 --command "$command --total-timesteps 1000000 --num-seeds 3"

uv run python -m cleanrl_utils.report --runs runs \
    --exp-names "$exp_name" --env-ids CartPole-v1 Acrobot-v1 LunarLander-v3 \
    --check benchmark/regression_discrete.csv \
    --output "docs/benchmark/$exp_name"

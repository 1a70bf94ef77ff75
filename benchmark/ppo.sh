#!/usr/bin/env bash
# The runs behind docs/benchmark/ppo_continuous_action_envpool_xla_jax_scan.md, and the command that makes the page.
# 1M steps, 3 seeds; and 3 seeds more of Hopper, whose seeds differ most. About 40 minutes on 2 cores.
set -euo pipefail

env_ids=(
    Hopper-v4 HalfCheetah-v4 Walker2d-v4 Ant-v4 Swimmer-v4 Reacher-v4 Pusher-v4
    InvertedPendulum-v4 InvertedDoublePendulum-v4
)

uv run python -m cleanrl_utils.benchmark \
    --env-ids "${env_ids[@]}" \
    --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000" \
    --num-seeds 3 --start-seed 1 --workers 1 --resume

uv run python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v4 \
    --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000 --exp-name more_seeds" \
    --num-seeds 3 --start-seed 4 --workers 1 --resume

uv run python -m cleanrl_utils.report \
    --runs runs --exp-names ppo_continuous_action_envpool_xla_jax_scan more_seeds \
    --env-ids "${env_ids[@]}" \
    --references benchmark/references.csv --check benchmark/regression.csv \
    --output docs/benchmark/ppo_continuous_action_envpool_xla_jax_scan

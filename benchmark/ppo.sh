#!/usr/bin/env bash
# The runs behind docs/benchmark/ppo_continuous_action_envpool_xla_jax_scan.md; ppo_plot.sh makes the page of them.
# 1M steps, 3 seeds; and 3 seeds more of Hopper, whose seeds differ most. About 40 minutes on 2 cores.
set -euo pipefail
source benchmark/ppo_env_ids.sh

uv run python -m cleanrl_utils.benchmark \
    --env-ids "${env_ids[@]}" \
    --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000" \
    --num-seeds 3 --start-seed 1 --workers 1 --resume

uv run python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v4 \
    --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000 --exp-name more_seeds" \
    --num-seeds 3 --start-seed 4 --workers 1 --resume

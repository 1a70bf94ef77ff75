#!/usr/bin/env bash
# The runs of ppo_continuous_action_gymnasium_jax_scan.py behind docs/benchmark/, and their tables. A few minutes.
set -euo pipefail
exp_name=ppo_continuous_action_gymnasium_jax_scan

uv run --extra gymnasium python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v5 \
    --command "python cleanrl/$exp_name.py --total-timesteps 300000 --num-envs 16 --num-steps 128 \
        --gae-lambda 0.98 --learning-rate 1e-3 --no-anneal-lr" \
    --num-seeds 3 --start-seed 1 --workers 1 --resume

uv run python -m cleanrl_utils.report --runs runs \
    --exp-names "$exp_name" --env-ids Hopper-v5 --output "docs/benchmark/$exp_name"

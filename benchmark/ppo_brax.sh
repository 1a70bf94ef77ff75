#!/usr/bin/env bash
# The runs of ppo_continuous_action_brax_jax_scan.py behind docs/benchmark/, and their tables.
set -euo pipefail
exp_name=ppo_continuous_action_brax_jax_scan

uv run --extra brax python -m cleanrl_utils.benchmark \
    --env-ids hopper \
    --command "python cleanrl/$exp_name.py --total-timesteps 2000000" \
    --num-seeds 3 --start-seed 1 --workers 1 --resume

uv run python -m cleanrl_utils.report --runs runs \
    --exp-names "$exp_name" --env-ids hopper --output "docs/benchmark/$exp_name"

#!/usr/bin/env bash
# The runs behind docs/benchmark/ppo_continuous_action_envpool_xla_jax_scan.md, and the command that makes the page.
# 1M steps, 3 seeds; and 3 seeds more of Hopper, whose seeds differ most. About 15 minutes on 2 cores.
set -euo pipefail

uv run python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v4 HalfCheetah-v4 Walker2d-v4 \
    --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000" \
    --num-seeds 3 --start-seed 1 --workers 1 --resume

uv run python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v4 \
    --command "python cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py --total-timesteps 1000000 --exp-name more_seeds" \
    --num-seeds 3 --start-seed 4 --workers 1 --resume

uv run python -m cleanrl_utils.report \
    --runs runs --exp-names ppo_continuous_action_envpool_xla_jax_scan more_seeds \
    --env-ids Hopper-v4 HalfCheetah-v4 Walker2d-v4 \
    --references benchmark/references.csv --check benchmark/regression.csv \
    --output docs/benchmark/ppo_continuous_action_envpool_xla_jax_scan

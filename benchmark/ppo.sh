#!/usr/bin/env bash
# The runs behind docs/benchmark/ppo_continuous_action_envpool_xla_jax_scan.md; ppo_plot.sh makes the page of them.
# 5 seeds side by side for 1M steps, 3 for 3M steps: an estimated 90 and 150 minutes on 2 cores.
# What passed before is left out, so that it can be stopped and started anew.
set -euo pipefail
source benchmark/ppo_runs.sh

train() {
    uv run python -m cleanrl_utils.benchmark --num-seeds 1 --start-seed 1 --workers 1 --resume "$@"
}

train --env-ids "${env_ids[@]}" --command "$short --num-seeds 5"
train --env-ids Swimmer-v4 --command "$short --num-seeds 5 $swimmer"
train --env-ids "${env_ids[@]}" --command "$long --num-seeds 3"
train --env-ids Swimmer-v4 --command "$long --num-seeds 3 $swimmer"

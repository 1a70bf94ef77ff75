#!/usr/bin/env bash
# A small study: learning rate and discount of PPO for the pendulum, four trials side by side. A few minutes on 2 cores.
set -euo pipefail

uv run python -m cleanrl_utils.tuner --study-name tune_example --env-ids Pendulum-v1 \
    --params "learning_rate log 1e-4 3e-2" "gamma 0.8 0.999" "update_epochs choice 5 10" \
    --num-trials 24 --population 4 --num-seeds 1 "$@" \
    -- --num-envs 16 --num-minibatches 8 --total-timesteps 51200

mkdir -p docs/benchmark/tune_example
cp tuning/tune_example/report.{md,png} docs/benchmark/tune_example/

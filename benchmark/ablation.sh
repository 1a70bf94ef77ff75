#!/usr/bin/env bash
# The experiments on learning behind docs/benchmark/: Hopper with 300,000 steps and one thing changed, and the default
# with 1M steps, each with four seeds side by side in one process. About 40 minutes on 2 cores.
set -euo pipefail

short=(
    default envs_16_steps_128 envs_8_steps_256 learning_rate_1e-3 "envs_16_steps_128 learning_rate_1e-3"
    gae_lambda_0.98 log_std_0 clip_gradients_apart vf_coef_1 no_norm_adv epochs_20
)
exp_names=()
for variant in "${short[@]}"; do
    exp_name="${variant// /+}-300k"
    exp_names+=("$exp_name")
    # shellcheck disable=SC2086 (a variant may be two)
    uv run python benchmark/ablation.py --variant $variant --env-id Hopper-v4 --num-seeds 4 \
        --total-timesteps 300000 --exp-name "$exp_name" --no-progress
done
for env_id in Reacher-v4 InvertedDoublePendulum-v4 Hopper-v4 Swimmer-v4 Ant-v4; do
    uv run python benchmark/ablation.py --variant default --env-id "$env_id" --num-seeds 4 --eval-interval 30 --no-progress
done

uv run python -m cleanrl_utils.report --runs runs --exp-names "${exp_names[@]}" --env-ids Hopper-v4 \
    --output docs/benchmark/experiments_hopper_300k
uv run python -m cleanrl_utils.report --runs runs --exp-names default --references benchmark/references.csv \
    --env-ids Ant-v4 Hopper-v4 InvertedDoublePendulum-v4 Reacher-v4 Swimmer-v4 \
    --output docs/benchmark/experiments_default_1m

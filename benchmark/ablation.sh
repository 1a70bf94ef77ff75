#!/usr/bin/env bash
# The experiments on learning behind docs/advanced/learning.md, each with seeds side by side in one process; 3 hours on
# 2 cores. All start from the former default, tianshou's hyperparameters with advantages normalised.
set -euo pipefail

# Environment, seeds, steps, then what is changed: one or several variants of benchmark/ablation.py.
while read -r env_id num_seeds total_timesteps variants; do
    exp_name=${variants// /+}
    [ "$total_timesteps" = 1000000 ] || exp_name="$exp_name-300k"
    # shellcheck disable=SC2086 (the variants may be several)
    uv run python benchmark/ablation.py --variant former_default $variants --env-id "$env_id-v4" \
        --num-seeds "$num_seeds" --total-timesteps "$total_timesteps" --exp-name "$exp_name" \
        --eval-interval 61 --eval-episodes "$([ "$env_id" = Reacher ] && echo 50 || echo 10)" --no-progress </dev/null
done <<'RUNS'
Hopper 4 300000 former_default
Hopper 4 300000 envs_16_steps_128
Hopper 4 300000 envs_8_steps_256
Hopper 4 300000 learning_rate_1e-3
Hopper 4 300000 envs_16_steps_128 learning_rate_1e-3
Hopper 4 300000 gae_lambda_0.98
Hopper 4 300000 log_std_0
Hopper 4 300000 clip_gradients_apart
Hopper 4 300000 vf_coef_1
Hopper 4 300000 no_norm_adv
Hopper 4 300000 epochs_20
InvertedDoublePendulum 4 1000000 former_default
InvertedDoublePendulum 4 1000000 envs_16_steps_128
InvertedDoublePendulum 4 1000000 gamma_0.995
InvertedDoublePendulum 4 1000000 log_std_at_least_-2
InvertedDoublePendulum 4 1000000 log_std_at_least_-1.5
InvertedDoublePendulum 4 1000000 learning_rate_5e-4 log_std_at_least_-2
InvertedDoublePendulum 4 1000000 learning_rate_5e-4 log_std_at_least_-1.75
InvertedDoublePendulum 4 1000000 envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-2
InvertedDoublePendulum 4 1000000 envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-1.5
Reacher 4 1000000 former_default
Reacher 4 1000000 envs_16_steps_128 learning_rate_1e-3
Reacher 4 1000000 log_std_at_least_-2
Reacher 4 1000000 learning_rate_5e-4 log_std_at_least_-2
Reacher 4 1000000 learning_rate_5e-4 log_std_at_least_-1.75
Reacher 4 1000000 learning_rate_1e-3 log_std_at_least_-2
Reacher 4 1000000 envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-2
Reacher 4 1000000 envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-1.5
HalfCheetah 4 1000000 log_std_at_least_-2
HalfCheetah 4 1000000 learning_rate_5e-4 log_std_at_least_-2
HalfCheetah 4 1000000 learning_rate_5e-4 log_std_at_least_-1.5
HalfCheetah 4 1000000 envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-1.5
Hopper 4 1000000 learning_rate_1e-3 log_std_at_least_-1.5
Hopper 4 1000000 envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-1.5
Humanoid 2 1000000 former_default
Hopper 5 1000000 learning_rate_5e-4 log_std_at_least_-1.75
HalfCheetah 5 1000000 learning_rate_5e-4 log_std_at_least_-1.75
Walker2d 5 1000000 learning_rate_5e-4 log_std_at_least_-1.75
Ant 4 1000000 former_default
Ant 4 1000000 learning_rate_5e-4 log_std_at_least_-2
Ant 4 1000000 learning_rate_5e-4 log_std_at_least_-1_to_-2.5
InvertedDoublePendulum 4 1000000 learning_rate_5e-4 log_std_at_least_-1_to_-2.5
RUNS

# What was left to try; these start from the present default.
changes=(kl_adaptive_0.02 norm_adv_batch clip_vloss minibatches_16 minibatches_8 tanh layer_norm critic_256)
more=(anneal_to_0.1 epochs_5 normalized_rewards last_layer_1 reset_steps_learned)
for change in "" "${changes[@]}" "${more[@]}"; do
    # shellcheck disable=SC2086
    uv run python benchmark/ablation.py --variant default $change --env-id Walker2d-v4 --num-seeds 4 \
        --total-timesteps 300000 --exp-name "default${change:++$change}-300k" --eval-interval 61 --no-progress
done
for env_id in Hopper-v4 Walker2d-v4; do
    uv run python benchmark/ablation.py --variant default minibatches_16 --env-id "$env_id" --num-seeds 5 \
        --exp-name default+minibatches_16 --eval-interval 30 --no-progress
done

# A setting for Hopper that learns within 300,000 steps, from the present default.
while read -r variants; do
    # shellcheck disable=SC2086
    uv run python benchmark/ablation.py --variant default $variants --env-id Hopper-v4 --num-seeds 4 \
        --total-timesteps 300000 --exp-name "default+${variants// /+}-300k" --eval-interval 61 --no-progress </dev/null
done <<'VARIANTS'
envs_16_steps_128 learning_rate_1e-3 gae_lambda_0.98
envs_16_steps_128 learning_rate_1e-3 gae_lambda_0.98 no_anneal
envs_16_steps_128 learning_rate_1e-3 gae_lambda_0.98 no_anneal log_std_at_least_-1.5
envs_16_steps_128 learning_rate_1e-3 log_std_at_least_-1.5
envs_16_steps_128 learning_rate_1e-3 norm_adv_batch
envs_8_steps_256 learning_rate_1e-3 gae_lambda_0.98
VARIANTS

# A setting for Swimmer; these start from the present default. Evaluations every 125,000 or 250,000 steps.
for variants in "gamma_0.999" "gamma_0.9999 gae_lambda_0.98" "rl_zoo_swimmer" "rl_zoo_swimmer gamma_0.999"; do
    # shellcheck disable=SC2086
    uv run python benchmark/ablation.py --variant default $variants --env-id Swimmer-v4 --num-seeds 4 \
        --exp-name "default+${variants// /+}" --eval-interval 61 --no-progress
done

uv run python -m cleanrl_utils.report --runs runs --env-ids Hopper-v4 --output docs/benchmark/experiments_hopper_300k \
    --exp-names {former_default,envs_16_steps_128,envs_8_steps_256,learning_rate_1e-3,gae_lambda_0.98,log_std_0}-300k \
        {envs_16_steps_128+learning_rate_1e-3,clip_gradients_apart,vf_coef_1,no_norm_adv,epochs_20}-300k
setting=default+envs_16_steps_128+learning_rate_1e-3
uv run python -m cleanrl_utils.report --runs runs --env-ids Hopper-v4 --exp-names \
    $setting+{gae_lambda_0.98{,+no_anneal,+no_anneal+log_std_at_least_-1.5},log_std_at_least_-1.5,norm_adv_batch}-300k \
    default+envs_8_steps_256+learning_rate_1e-3+gae_lambda_0.98-300k \
    --output docs/benchmark/experiments_hopper_steps_300k
names=("${changes[@]/#/default+}")
names=("${names[@]/%/-300k}")
uv run python -m cleanrl_utils.report --runs runs --env-ids Walker2d-v4 \
    --exp-names default-300k "${names[@]}" --output docs/benchmark/experiments_walker2d_300k
names=("${more[@]/#/default+}")
names=("${names[@]/%/-300k}")
uv run python -m cleanrl_utils.report --runs runs --env-ids Walker2d-v4 \
    --exp-names "${names[@]}" --output docs/benchmark/experiments_walker2d_300k_more
uv run python -m cleanrl_utils.report --runs runs --env-ids Hopper-v4 Walker2d-v4 --exp-names default+minibatches_16 \
    --references benchmark/references.csv --output docs/benchmark/experiments_minibatches
uv run python -m cleanrl_utils.report --runs runs --env-ids Swimmer-v4 --output docs/benchmark/experiments_swimmer \
    --exp-names default+{gamma_0.999,gamma_0.9999+gae_lambda_0.98,rl_zoo_swimmer{,+gamma_0.999}} \
    --references benchmark/references.csv
uv run python -m cleanrl_utils.report --runs runs --output docs/benchmark/experiments_1m \
    --env-ids InvertedDoublePendulum-v4 Reacher-v4 HalfCheetah-v4 Hopper-v4 Walker2d-v4 Ant-v4 Humanoid-v4 \
    --exp-names former_default envs_16_steps_128 gamma_0.995 log_std_at_least_-{2,1.5} \
        learning_rate_5e-4+log_std_at_least_-{2,1.75,1.5,1_to_-2.5} learning_rate_1e-3+log_std_at_least_-{2,1.5} \
        envs_16_steps_128+learning_rate_1e-3{,+log_std_at_least_-2,+log_std_at_least_-1.5} \
    --references benchmark/references.csv

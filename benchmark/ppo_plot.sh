#!/usr/bin/env bash
# Keeps the runs of ppo.sh, if there are any, as small files in benchmark/results, and makes the tables and pictures in
# docs/benchmark/ of those. Exit code 1: a return lies below its minimum.
# Of all its environments that have runs, or of those that are named: bash benchmark/ppo_plot.sh Hopper-v4 Walker2d-v4
set -euo pipefail
source benchmark/ppo_runs.sh
[ $# -eq 0 ] || env_ids=("$@")

found_in() {
    for env_id in "${env_ids[@]}"; do
        if compgen -G "$1/${env_id}__*" >/dev/null; then echo "$env_id"; fi
    done
}

mapfile -t new < <(found_in runs)
[ ${#new[@]} -eq 0 ] || uv run python -m cleanrl_utils.report --runs runs \
    --exp-names "$exp_name" swimmer --env-ids "${new[@]}" \
    --save-results benchmark/results
[ $# -gt 0 ] || mapfile -t env_ids < <(found_in benchmark/results)

# The last 20 rows of thinned results are about a fifth of the training.
uv run python -m cleanrl_utils.rlops --runs benchmark/results -- \
    --filters '?we=local&wpn=cleanRL&ceik=env_id&cen=exp_name&metric=charts/avg_episodic_return' \
        "$exp_name?tag=1M&cl=$exp_name" \
    --env-ids "${env_ids[@]}" \
    --metric-last-n-average-window 20 \
    --output-filename "docs/benchmark/rlops/$exp_name" \
    --pc.ncols 3 --pc.ncols-legend 1 \
    --rliable \
    --rc.score_normalization_method maxmin \
    --rc.normalized_score_threshold 1.0 \
    --rc.sample_efficiency_plots \
    --rc.sample_efficiency_and_walltime_efficiency_method Median \
    --rc.performance_profile_plots \
    --rc.aggregate_metrics_plots \
    --rc.sample_efficiency_num_bootstrap_reps 2000 \
    --rc.performance_profile_num_bootstrap_reps 2000 \
    --rc.interval_estimates_num_bootstrap_reps 2000

uv run python -m cleanrl_utils.report --runs benchmark/results \
    --exp-names "$exp_name" swimmer --env-ids "${env_ids[@]}" \
    --references benchmark/references.csv --check-sources cleanrl-pr355 tianshou \
    --check benchmark/regression.csv \
    --output "docs/benchmark/$exp_name"

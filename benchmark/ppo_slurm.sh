#!/usr/bin/env bash
# The runs of the PPO benchmark as one Slurm job array: MuJoCo environments x seeds, one job each.
# Needs submitit (pip install submitit), and a checkout and Python environment that every node sees.
#
#   bash benchmark/ppo_slurm.sh                       submit all runs
#   bash benchmark/ppo_slurm.sh --resume --dry-run    list what has not passed yet
#   bash benchmark/ppo_slurm.sh --resume              submit that again
#   bash benchmark/ppo_slurm.sh --slurm-partition gpu --slurm-gpus-per-task 1
#
# What has no flag goes by sbatch's own variables: export SBATCH_ACCOUNT=..., SBATCH_QOS=..., SBATCH_MEM_PER_NODE=...
# The runs of 1M steps, as in ppo.sh, but one job for each seed.
set -euo pipefail
source benchmark/ppo_runs.sh

python -m cleanrl_utils.benchmark \
    --env-ids "${env_ids[@]}" \
    --command "$short" \
    --num-seeds 5 --start-seed 1 \
    --slurm --slurm-cpus-per-task 4 --slurm-time 60 --slurm-max-parallel 8 \
    "$@"

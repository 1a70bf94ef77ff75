#!/usr/bin/env bash
# What a GPU does for the training, as a table, in less than 8 minutes:
#
#   uv run bash benchmark/gpu_check.sh           on a machine with an NVIDIA GPU
#   uv run bash benchmark/gpu_check.sh --cpu     the same parts on the CPU, at small sizes
#
# First the CUDA build of JAX, or cuda12 for an older driver. The driver's version is in
# nvidia-smi's first line:
#
#   uv pip install "jax[cuda13]"
#
# Parts: the devices; whether EnvPool's steps on the GPU are those of its NumPy interface; steps per second and memory
# by environments, on the GPU and on the CPU beside it; many seeds; training in Brax, without EnvPool. Each part has a
# time limit of its own: one that hangs or fails costs its own row. Exit code 1 then, 2 if JAX sees no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/benchmark${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
seconds_in_all=470
failed=0

platform=cuda num_envs=(64 256 1024) num_seeds=(4 16) num_brax_envs=(2048 4096 8192) small=() num_steps=300
case "${1:-}" in
"") ;;
--cpu)
    platform=cpu num_envs=(8 16) num_seeds=(2) num_brax_envs=(64) num_steps=100
    small=(--seconds 1 --update-epochs 2 --num-steps 8)
    ;;
*)
    echo "error: $*: there is only --cpu, for a try without a GPU" >&2
    exit 2
    ;;
esac

# part LIMIT PLATFORM NAME COMMAND...: the command prints its rows; if it fails or takes too long, one row says so.
part() {
    local limit=$1 platform=$2 name=$3 left=$((seconds_in_all - SECONDS)) errors code
    shift 3
    if ((left < 10)); then
        echo "| $name | left out: the time is up |"
        failed=1
        return
    fi
    ((limit = limit < left ? limit : left))
    errors=$(mktemp)
    JAX_PLATFORMS=$platform timeout --kill-after 5 "$limit" "$python" "$@" 2>"$errors"
    code=$?
    if ((code)); then
        failed=1
        case $code in
        124) echo "| $name | not done after $limit s |" ;;
        137) echo "| $name | killed: out of memory, or hanging after $limit s |" ;;
        *) echo "| $name | exit code $code: $(grep -v '^ *$' "$errors" | tail -n 1 | tr '|' '/') |" ;;
        esac
    fi
    rm -f "$errors"
}

# Of the first GPU, or of the CPU; the training's compiled functions are made anew in each part.
training() { # PLATFORM NAME FLAGS...
    local platform=$1 name=$2
    shift 2
    part 60 "$platform" "$name" benchmark/measure.py --row "$name" "${small[@]}" "$@"
}

if ! devices=$(JAX_PLATFORMS=$platform timeout --kill-after 5 60 "$python" -c "
import jax
from measure import describe_machine
print(describe_machine())
print('devices:', *jax.devices())" 2>&1); then
    reason=$(tail -n 1 <<<"$devices")
    echo "error: JAX sees no GPU: install its CUDA build, uv pip install \"jax[cuda13]\", or give --cpu ($reason)" >&2
    exit 2
fi
tail -n 2 <<<"$devices"

echo
echo "| environment | step | steps | episode ends | against NumPy |"
echo "|---|---|---|---|---|"
part 90 $platform "observations" benchmark/compare_observations.py --num-steps $num_steps

echo
echo "| training | steps/s | compilation, s | main memory, MiB | GPU: arrays, MiB | GPU: taken in all, MiB |"
echo "|---|---|---|---|---|---|"
for n in "${num_envs[@]}"; do
    training $platform "$n environments on $platform" --num-envs "$n"
    if [ $platform != cpu ]; then training cpu "$n environments on cpu" --num-envs "$n"; fi
done
for n in "${num_seeds[@]}"; do
    training $platform "$n seeds on $platform" --num-seeds "$n"
done
brax=ppo_continuous_action_brax_jax_scan
if [ -e cleanrl/$brax.py ]; then
    for n in "${num_brax_envs[@]}"; do
        training $platform "Brax, $n environments on $platform" --script $brax --num-envs "$n"
    done
else
    echo "| Brax | cleanrl/$brax.py does not exist yet |"
fi
exit $failed

#!/usr/bin/env bash
# The 57 Atari games, 10M steps, 3 seeds: for a machine with a GPU, where it has not been run yet. CleanRL's script of
# this name took 35 to 40 minutes a run on its GPU machine (docs/benchmark/ppo_atari_envpool_xla_jax_scan_runtimes.md in
# its repository): about 105 hours for all of them, one by one, and the evaluations' time.
# --workers runs several side by side; what passed before is left out. Some games only, with their table in
# runs/: bash benchmark/ppo_atari.sh Pong-v5
set -euo pipefail
exp_name=ppo_atari_envpool_xla_jax_scan
games=(
    Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing Breakout
    Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk Enduro FishingDerby Freeway Frostbite Gopher
    Gravitar Hero IceHockey Jamesbond Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix
    Pitfall Pong PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner
    Surround Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon
)
env_ids=("$@") output=runs/$exp_name
[ $# -gt 0 ] || env_ids=("${games[@]/%/-v5}") output=docs/benchmark/$exp_name

uv run python -m cleanrl_utils.benchmark --env-ids "${env_ids[@]}" \
    --command "python cleanrl/$exp_name.py" \
    --num-seeds 3 --start-seed 1 --workers 1 --resume

uv run python -m cleanrl_utils.report --runs runs \
    --exp-names "$exp_name" --env-ids "${env_ids[@]}" \
    --references benchmark/references.csv \
    --output "$output"

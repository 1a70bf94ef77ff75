# What the PPO benchmark runs, for the scripts beside this one: environments, and the commands of its two budgets.
# The learning rate is annealed over the budget, so that each budget has runs of its own. 16 evaluations on the way.
env_ids=(
    Hopper-v4 HalfCheetah-v4 Walker2d-v4 Ant-v4 Swimmer-v4 Reacher-v4 Pusher-v4
    InvertedPendulum-v4 InvertedDoublePendulum-v4 Humanoid-v4 HumanoidStandup-v4
)
exp_name=ppo_continuous_action_envpool_xla_jax_scan
short="python cleanrl/$exp_name.py --total-timesteps 1000000 --eval-interval 30"
long="python cleanrl/$exp_name.py --total-timesteps 3000000 --eval-interval 90"
# A setting for one task, RL Zoo's but for its gamma of 0.9999: swimming pays off over hundreds of steps, more than the
# default discount and rollouts have.
swimmer="--exp-name swimmer --gamma 0.999 --gae-lambda 0.98 --num-envs 4 --num-steps 1024 --num-minibatches 16"
swimmer="$swimmer --learning-rate 6e-4"

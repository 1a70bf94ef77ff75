# The environments of the PPO benchmark, for the scripts beside this one.
env_ids=(
    Hopper-v4 HalfCheetah-v4 Walker2d-v4 Ant-v4 Swimmer-v4 Reacher-v4 Pusher-v4
    InvertedPendulum-v4 InvertedDoublePendulum-v4
)

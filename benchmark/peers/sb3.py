"""Stable-Baselines3's PPO on EnvPool, which is faster than its own vectorisers.

What differs from our script: PyTorch on one thread, step by step; advantages not recomputed in each epoch; rewards
rather than returns normalised; finished environments reset in the same step; actions clipped to the environment's
bounds, not rescaled; no learning rate annealing, no episode statistics.
"""

from peers.driver import measure


def make_training(args):
    import torch
    from peers.envpool_vec_env import make_training
    from stable_baselines3 import PPO

    torch.set_num_threads(1)  # on networks this small, more threads are slower
    return make_training(args, PPO)


if __name__ == "__main__":
    measure(__doc__, ["stable-baselines3", "torch", "envpool"], make_training)

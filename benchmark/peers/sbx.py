"""SBX's PPO (Stable-Baselines3 in JAX) on EnvPool, which is faster than SB3's own vectorisers.

What differs from our script: the rollout in Python and NumPy, step by step, and one compiled call per minibatch;
advantages not recomputed in each epoch; rewards rather than returns normalised; finished environments reset in the same
step; actions clipped to the environment's bounds, not rescaled; no learning rate annealing, no episode statistics.
"""

from peers.driver import measure


def make_training(args):
    import torch
    from peers.envpool_vec_env import make_training
    from sbx import PPO

    torch.set_num_threads(1)
    return make_training(args, PPO)


if __name__ == "__main__":
    measure(__doc__, ["sbx-rl", "jax", "envpool"], make_training)

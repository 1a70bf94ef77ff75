"""tianshou's PPO on EnvPool, put together as in its own MuJoCo example, with our script's sizes and losses.

What differs from our script: PyTorch on one thread, the rollout step by step in Python and NumPy, GAE in Numba;
finished environments reset in the same step; no learning rate annealing. Its collector and update are called without
its trainer, so without test episodes and logs, and without EnvPool's info. Recomputed advantages, normalised returns
and observations, and clipped and rescaled actions are as in our script, which follows it.
"""

from peers.driver import measure


def make_training(args):
    import envpool
    import numpy as np
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import VectorEnvNormObs
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
    from tianshou.utils.torch_utils import policy_within_training_step
    from torch import nn
    from torch.distributions import Independent, Normal

    class NormObsWithoutInfo(VectorEnvNormObs):
        """tianshou would take EnvPool's info apart, step by step and environment by environment."""

        def reset(self, env_id=None, **kwargs):
            obs, _ = super().reset(env_id, **kwargs)
            return obs, np.array([{} for _ in obs])

        def step(self, action, id=None):
            obs, reward, terminated, truncated, _ = super().step(action, id)
            return obs, reward, terminated, truncated, np.array([{} for _ in obs])

    torch.set_num_threads(1)  # on networks this small, more threads are slower
    envs = envpool.make_gymnasium(args.env_id, num_envs=args.num_envs, seed=1)
    obs_shape, action_space = envs.observation_space.shape, envs.action_space
    networks = [Net(state_shape=obs_shape, hidden_sizes=(64, 64), activation=nn.Tanh) for _ in range(2)]
    actor = ContinuousActorProbabilistic(preprocess_net=networks[0], action_shape=action_space.shape, unbounded=True)
    critic = ContinuousCritic(preprocess_net=networks[1])
    nn.init.constant_(actor.sigma_param, -0.5)
    for layer in [*actor.modules(), *critic.modules()]:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain=np.sqrt(2))
            nn.init.zeros_(layer.bias)
    for layer in actor.mu.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data.mul_(0.01)
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda mean_and_std: Independent(Normal(*mean_and_std), 1),
        action_scaling=True,
        action_bound_method="clip",
        action_space=action_space,
    )
    ppo = PPO(
        policy=policy,
        critic=critic,
        optim=AdamOptimizerFactory(lr=3e-4),
        advantage_normalization=True,
        recompute_advantage=True,
        vf_coef=0.25,
        ent_coef=0.0,
        max_grad_norm=0.5,
        return_scaling=True,
    )
    buffer = VectorReplayBuffer(args.batch_size, args.num_envs)
    collector = Collector(ppo, NormObsWithoutInfo(envs), buffer, exploration_noise=True)
    collector.reset()

    def train(iterations):
        for _ in range(iterations):
            with policy_within_training_step(policy):
                collector.collect(n_step=args.batch_size)
                ppo.update(buffer=buffer, batch_size=args.minibatch_size, repeat=args.update_epochs)
            collector.reset_buffer(keep_statistics=True)

    return train


if __name__ == "__main__":
    measure(__doc__, ["tianshou", "torch", "envpool"], make_training)

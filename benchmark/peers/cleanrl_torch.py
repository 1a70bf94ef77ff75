"""PPO in PyTorch after CleanRL's ppo_continuous_action.py, whose package (cleanrl 1.2.0) needs Python below 3.11.

What differs from our script: PyTorch on one thread, step by step, on Gymnasium's SyncVectorEnv and MuJoCo's Python
package; advantages not recomputed in each epoch; rewards rather than returns normalised; statistics of observations and
rewards apart for each environment; truncation not bootstrapped; a clipped value loss; actions clipped to the
environment's bounds, not rescaled; no learning rate annealing, nothing logged.
"""

from peers.driver import measure

GAMMA, GAE_LAMBDA, CLIP_COEF, VF_COEF, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.5, 0.5


def make_env(env_id):
    import gymnasium as gym
    import numpy as np
    from gymnasium import wrappers

    env = wrappers.FlattenObservation(gym.make(env_id))
    env = wrappers.ClipAction(wrappers.RecordEpisodeStatistics(env))
    env = wrappers.NormalizeObservation(env)
    env = wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = wrappers.NormalizeReward(env, gamma=GAMMA)
    return wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def make_training(args):
    import gymnasium as gym
    import numpy as np
    import torch
    from torch import nn
    from torch.distributions import Normal

    torch.set_num_threads(1)  # on networks this small, more threads are slower
    envs = gym.vector.SyncVectorEnv(
        [lambda: make_env(args.env_id)] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    def mlp(out_features, out_scale):
        layers = [nn.Linear(obs_dim, 64), nn.Linear(64, 64), nn.Linear(64, out_features)]
        for layer, scale in zip(layers, [np.sqrt(2), np.sqrt(2), out_scale], strict=True):
            nn.init.orthogonal_(layer.weight, scale)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    actor, critic, log_std = mlp(action_dim, 0.01), mlp(1, 1.0), nn.Parameter(torch.zeros(action_dim))
    parameters = [*actor.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)

    def zeros(*shape):
        return torch.zeros(args.num_steps, args.num_envs, *shape)

    obs, actions, log_probs, rewards, dones, values = zeros(obs_dim), zeros(action_dim), *(zeros() for _ in range(4))

    @torch.no_grad()
    def rollout(next_obs):
        """The observations after it; fills the tensors."""
        for step in range(args.num_steps):
            policy = Normal(actor(next_obs), log_std.exp())
            action = policy.sample()
            obs[step], actions[step], values[step] = next_obs, action, critic(next_obs).squeeze(-1)
            log_probs[step] = policy.log_prob(action).sum(-1)
            next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            rewards[step], dones[step] = torch.as_tensor(reward), torch.as_tensor(terminated | truncated)
            next_obs = torch.as_tensor(next_obs, dtype=torch.float32)
        return next_obs

    @torch.no_grad()
    def compute_gae(next_obs):
        advantages, advantage, next_value = zeros(), torch.zeros(args.num_envs), critic(next_obs).squeeze(-1)
        for step in reversed(range(args.num_steps)):
            running = 1.0 - dones[step]
            delta = rewards[step] + GAMMA * next_value * running - values[step]
            advantage = delta + GAMMA * GAE_LAMBDA * running * advantage
            advantages[step], next_value = advantage, values[step]
        return advantages

    def ppo_loss(obs, action, old_log_prob, advantage, returns, old_value):
        policy, value = Normal(actor(obs), log_std.exp()), critic(obs).squeeze(-1)
        ratio = (policy.log_prob(action).sum(-1) - old_log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF)).mean()
        clipped_value = old_value + (value - old_value).clamp(-CLIP_COEF, CLIP_COEF)
        value_loss = 0.5 * torch.max((value - returns) ** 2, (clipped_value - returns) ** 2).mean()
        return policy_loss + VF_COEF * value_loss

    def update(advantages):
        batch = (obs, actions, log_probs, advantages, advantages + values, values)
        batch = [x.flatten(0, 1) for x in batch]
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(args.batch_size).split(args.minibatch_size):
                optimizer.zero_grad()
                ppo_loss(*(x[minibatch] for x in batch)).backward()
                nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()

    next_obs = torch.as_tensor(envs.reset(seed=1)[0], dtype=torch.float32)

    def train(iterations):
        nonlocal next_obs
        for _ in range(iterations):
            next_obs = rollout(next_obs)
            update(compute_gae(next_obs))

    return train


if __name__ == "__main__":
    measure(__doc__, ["gymnasium", "mujoco", "torch"], make_training)

"""PPO in torch learns on Brax's environments: 10,240 steps, some seconds once they are compiled.

    python docs/envs/examples/brax_torch_ppo.py

The environments and their wrappers are JAX's, compiled together; torch reads their arrays where they are.
Prints the mean return of the episodes that ended, of each iteration.
"""

import torch
from gymnasium.wrappers.vector import JaxToTorch
from torch import nn

from cleanrl_utils.envs import jax_envs
from cleanrl_utils.envs.to_gymnasium import GymnasiumVectorEnv
from cleanrl_utils.envs.wrappers import ClipAction, NormalizeObservation, RecordEpisodeStatistics

NUM_ENVS, NUM_STEPS, NUM_ITERATIONS = 32, 32, 10
GAMMA, GAE_LAMBDA, CLIP_COEF = 0.99, 0.95, 0.2


def make_envs():
    """Time steps end episodes in the same step: `info["final_obs"]` is what the action led to, in all environments."""
    brax = jax_envs.BraxEnv("inverted_pendulum", backend="spring")
    env = jax_envs.make(brax, NUM_ENVS, seed=1, autoreset="same_step")
    clip_action = ClipAction.create(env.single_action_space)
    env = env.with_wrappers(RecordEpisodeStatistics(), NormalizeObservation(), clip_action)
    return JaxToTorch(GymnasiumVectorEnv(env))


class Agent(nn.Module):
    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, action_dim))
        self.critic = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    def policy(self, obs):
        return torch.distributions.Independent(torch.distributions.Normal(self.actor(obs), self.log_std.exp()), 1)


@torch.no_grad()
def rollout(envs, agent, obs):
    """NUM_STEPS steps: the last obs, the transitions, leaves [NUM_STEPS, NUM_ENVS, ...], and the finished returns."""
    transitions, returns = [], []
    for _ in range(NUM_STEPS):
        policy = agent.policy(obs)
        action = policy.sample()
        next_obs, reward, terminated, truncated, info = envs.step(action)
        after = info["final_obs"]
        transitions.append((obs, action, policy.log_prob(action), reward, after, terminated, terminated | truncated))
        returns.extend(info["episode"]["r"][info["_episode"]].tolist())
        obs = next_obs
    return obs, [torch.stack(x) for x in zip(*transitions, strict=True)], returns


@torch.no_grad()
def compute_advantages(agent, obs, reward, after, terminated, done):
    """https://arxiv.org/abs/1506.02438, where a truncated episode is worth what its last observation is."""
    value, next_value = agent.value(obs), agent.value(after)
    delta = reward + GAMMA * next_value * ~terminated - value
    advantage, last = torch.zeros_like(value), torch.zeros_like(value[0])
    for t in reversed(range(len(delta))):
        advantage[t] = last = delta[t] + GAMMA * GAE_LAMBDA * last * ~done[t]
    return advantage, advantage + value


def update(agent, optimizer, obs, action, log_prob, advantage, target):
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(10):
        for i in torch.randperm(len(obs), device=obs.device).split(256):
            ratio = (agent.policy(obs[i]).log_prob(action[i]) - log_prob[i]).exp()
            clipped = ratio.clamp(1 - CLIP_COEF, 1 + CLIP_COEF)
            policy_loss = -torch.min(advantage[i] * ratio, advantage[i] * clipped).mean()
            loss = policy_loss + 0.5 * ((agent.value(obs[i]) - target[i]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)  # on networks this small, more threads are slower
    envs = make_envs()
    obs, _ = envs.reset(seed=1)
    agent = Agent(*obs.shape[1:], *envs.single_action_space.shape).to(obs.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    for iteration in range(1, NUM_ITERATIONS + 1):
        obs, (*transitions, after, terminated, done), returns = rollout(envs, agent, obs)
        advantage, target = compute_advantages(agent, transitions[0], transitions[3], after, terminated, done)
        obs_actions = (x.flatten(0, 1) for x in (*transitions[:3], advantage, target))
        update(agent, optimizer, *obs_actions)
        print(f"steps={iteration * NUM_STEPS * NUM_ENVS} episodic_return={sum(returns) / max(1, len(returns)):.1f}")


if __name__ == "__main__":
    main()

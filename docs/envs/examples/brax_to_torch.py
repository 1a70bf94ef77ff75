"""Brax to torch, without a copy: python docs/envs/examples/brax_to_torch.py"""

import torch
from gymnasium.wrappers.vector import JaxToTorch

from cleanrl_utils.envs import jax_envs
from cleanrl_utils.envs.to_gymnasium import GymnasiumVectorEnv

env = jax_envs.make(jax_envs.BraxEnv("inverted_pendulum", backend="spring"), num_envs=1024, autoreset="same_step")
envs = JaxToTorch(GymnasiumVectorEnv(env))
obs, info = envs.reset(seed=1)
policy = torch.nn.Linear(*obs.shape[1:], *envs.single_action_space.shape, device=obs.device)
with torch.no_grad():
    for _ in range(20):
        obs, reward, terminated, truncated, info = envs.step(policy(obs).tanh())
print(f"{terminated.sum()} of {envs.num_envs} pendulums fell in the last step, on {obs.device}")

"""Brax as a Gymnasium vector environment: python docs/envs/examples/brax_to_gymnasium.py"""

import gymnasium as gym

from cleanrl_utils.envs import jax_envs
from cleanrl_utils.envs.to_gymnasium import GymnasiumVectorEnv

env = jax_envs.make(jax_envs.BraxEnv("inverted_pendulum", backend="spring"), num_envs=1024, autoreset="same_step")
envs = GymnasiumVectorEnv(env)  # JAX's arrays, on the device
envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.wrappers.vector.JaxToNumpy(envs))  # Gymnasium's own wrappers
obs, info = envs.reset(seed=1)
for _ in range(20):
    obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
print(f"the last {len(envs.length_queue)} episodes took {sum(envs.length_queue) / len(envs.length_queue):.1f} steps")
envs.close()

"""A Gymnasium environment inside jax.lax.scan: python docs/envs/examples/gymnasium_in_scan.py"""

import jax
import jax.numpy as jnp

from cleanrl_utils.envs import gymnasium_callback
from cleanrl_utils.envs.wrappers import NormalizeObservation, RecordEpisodeStatistics

env = gymnasium_callback.make("Pendulum-v1", num_envs=8, seed=1)
env, timestep = env.with_wrappers(RecordEpisodeStatistics(), NormalizeObservation()).reset()


@jax.jit
def rollout(env, timestep, gain):
    def step(carry, _):
        env, timestep = carry
        action = -gain * timestep.obs[:, 2:]  # against the pendulum's velocity
        env, timestep = env.step(jnp.clip(action, -2.0, 2.0))
        return (env, timestep), timestep.reward

    return jax.lax.scan(step, (env, timestep), length=400)


(env, timestep), rewards = rollout(env, timestep, gain=1.0)
episodes, mean_return = env.wrappers[0].episode_count, rewards.sum(0).mean() / 2
print(f"{rewards.shape} rewards, {episodes} episodes, mean return {mean_return:.0f}")
env.close()

"""A Gymnasium environment inside jax.lax.scan: python docs/envs/examples/gymnasium_in_scan.py"""

import jax
import jax.numpy as jnp

from cleanrl_utils.envs import gymnasium_callback
from cleanrl_utils.envs.wrappers import NormalizeObservation


def step(carry, _):
    env, timestep = carry
    action = jnp.clip(-timestep.obs[:, 2:], -2.0, 2.0)  # against the pendulum's velocity
    env, timestep = env.step(action)
    return (env, timestep), timestep.reward


env = gymnasium_callback.make("Pendulum-v1", num_envs=8, seed=1).with_wrappers(NormalizeObservation())
(env, timestep), rewards = jax.jit(lambda *carry: jax.lax.scan(step, carry, length=400))(*env.reset())
print(f"{rewards.shape} rewards, mean return {rewards.sum(0).mean() / 2:.0f}")
env.close()

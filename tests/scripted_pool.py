"""A stand-in for EnvPool that plays back a trace written by hand, so that tests know every number."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo


class ScriptedPool:
    """Row k of the trace, [rows, num_envs, ...], is what the k-th step returns; row 0 is the reset; then again from 0.

    A trace whose last row is done is therefore endless: row 0 comes next as EnvPool's reset step.
    """

    def __init__(self, obs, reward=None, terminated=None, truncated=None, low=(-1.0,), high=(1.0,)):
        obs = np.asarray(obs, np.float32)
        self.rows, num_envs = obs.shape[:2]
        zeros = np.zeros((self.rows, num_envs))
        self.obs = jnp.asarray(obs)
        self.reward = jnp.asarray(zeros if reward is None else reward, jnp.float32)
        self.terminated = jnp.asarray(zeros if terminated is None else terminated, bool)
        self.truncated = jnp.asarray(zeros if truncated is None else truncated, bool)
        self.all_env_ids = np.arange(num_envs)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape[2:], np.float32)
        self.action_space = gym.spaces.Box(np.float32(low), np.float32(high))

    def reset(self):
        return np.asarray(self.obs[0]), {}

    def step(self, handle, action):
        row = (handle[0].astype(jnp.int32) + 1) % self.rows
        handle = jnp.append(row, action).astype(jnp.float32)
        return handle, (self.obs[row], self.reward[row], self.terminated[row], self.truncated[row])

    def last_action(self, env: ppo.VectorEnvWrapper) -> jax.Array:
        return env.handle[1:].reshape(env.action_shape)

    def make_env(self, *wrappers) -> ppo.VectorEnvWrapper:
        """The script's own VectorEnvWrapper around this pool; its handle is the row and the last action, flat."""
        num_envs = len(self.all_env_ids)
        handle = jnp.zeros(1 + num_envs * int(np.prod(self.action_space.shape)))
        return ppo.VectorEnvWrapper(handle, wrappers, self, lambda: self.reset()[0][None, None], self.step, num_envs)

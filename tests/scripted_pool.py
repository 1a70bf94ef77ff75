"""A stand-in for EnvPool that plays back a trace written by hand, so that tests know every number."""

import gymnasium as gym
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

    def send(self, handle, action):
        return {"row": handle["row"], "action": action}

    def recv(self, handle):
        row = (handle["row"] + 1) % self.rows
        outputs = (self.obs[row], self.reward[row], self.terminated[row], self.truncated[row], {})
        return {"row": row, "action": handle["action"]}, outputs

    def make_env(self, *wrappers) -> ppo.VectorEnvWrapper:
        """The script's own VectorEnvWrapper around this pool; `handle["action"]` is the last action it was sent."""
        action = jnp.zeros((len(self.all_env_ids), *self.action_space.shape))
        handle = {"row": jnp.array(0, jnp.int32), "action": action}
        return ppo.VectorEnvWrapper(handle, wrappers, self, self.send, self.recv)

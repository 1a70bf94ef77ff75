"""Environments made by hand, and what they return by the tables that were worked out by hand.

A time step's observation is [number of steps in the episode, last action], its reward 10 * number of steps + action;
an episode starts with [0, 0]. It ends after `length` steps, terminated or truncated, or is terminated by an action
below 0. There are two of them, with ACTIONS [8, 2].
"""

from dataclasses import dataclass

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from cleanrl_utils.envs.base import Backend, TimeStep
from cleanrl_utils.envs.jax_envs import JaxEnv

ACTIONS = np.array([[1, 1], [2, -2], [3, -3], [4, 4], [5, 5], [6, 6], [7, 7], [8, 8]], np.float32)


@dataclass(frozen=True)
class Table:
    """Of two environments through 8 steps, one line each; `final` is where it differs from `obs`."""

    obs: tuple
    reward: tuple
    terminated: tuple
    truncated: tuple
    final: tuple  # {step: final_obs}
    episodes: tuple  # {step: (return, length)}

    def final_obs(self) -> np.ndarray:
        final = np.array(self.obs, np.float32)
        for i, ends in enumerate(self.final):
            for step, obs in ends.items():
                final[i, step] = obs
        return final


NO = (0, 0, 0, 0, 0, 0, 0, 0)
FIRST = (0, 0)

# (length, how it ends, autoreset): in "next_step" the steps at index 3, 2, ... after an end ignore their action
TABLES = {
    (3, "terminated", "same_step"): Table(
        obs=(
            ((1, 1), (2, 2), FIRST, (1, 4), (2, 5), FIRST, (1, 7), (2, 8)),
            ((1, 1), FIRST, FIRST, (1, 4), (2, 5), FIRST, (1, 7), (2, 8)),
        ),
        reward=((11, 22, 33, 14, 25, 36, 17, 28), (11, 18, 7, 14, 25, 36, 17, 28)),
        terminated=((0, 0, 1, 0, 0, 1, 0, 0), (0, 1, 1, 0, 0, 1, 0, 0)),
        truncated=(NO, NO),
        final=({2: (3, 3), 5: (3, 6)}, {1: (2, -2), 2: (1, -3), 5: (3, 6)}),
        episodes=({2: (66, 3), 5: (75, 3)}, {1: (29, 2), 2: (7, 1), 5: (75, 3)}),
    ),
    (3, "terminated", "next_step"): Table(
        obs=(
            ((1, 1), (2, 2), (3, 3), FIRST, (1, 5), (2, 6), (3, 7), FIRST),
            ((1, 1), (2, -2), FIRST, (1, 4), (2, 5), (3, 6), FIRST, (1, 8)),
        ),
        reward=((11, 22, 33, 0, 15, 26, 37, 0), (11, 18, 0, 14, 25, 36, 0, 18)),
        terminated=((0, 0, 1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 0, 1, 0, 0)),
        truncated=(NO, NO),
        final=({}, {}),
        episodes=({2: (66, 3), 6: (78, 3)}, {1: (29, 2), 5: (75, 3)}),
    ),
    (5, "truncated", "same_step"): Table(
        obs=(
            ((1, 1), (2, 2), (3, 3), (4, 4), FIRST, (1, 6), (2, 7), (3, 8)),
            ((1, 1), FIRST, FIRST, (1, 4), (2, 5), (3, 6), (4, 7), FIRST),
        ),
        reward=((11, 22, 33, 44, 55, 16, 27, 38), (11, 18, 7, 14, 25, 36, 47, 58)),
        terminated=(NO, (0, 1, 1, 0, 0, 0, 0, 0)),
        truncated=((0, 0, 0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 1)),
        final=({4: (5, 5)}, {1: (2, -2), 2: (1, -3), 7: (5, 8)}),
        episodes=({4: (165, 5)}, {1: (29, 2), 2: (7, 1), 7: (180, 5)}),
    ),
    (5, "truncated", "next_step"): Table(
        obs=(
            ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), FIRST, (1, 7), (2, 8)),
            ((1, 1), (2, -2), FIRST, (1, 4), (2, 5), (3, 6), (4, 7), (5, 8)),
        ),
        reward=((11, 22, 33, 44, 55, 0, 17, 28), (11, 18, 0, 14, 25, 36, 47, 58)),
        terminated=(NO, (0, 1, 0, 0, 0, 0, 0, 0)),
        truncated=((0, 0, 0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 1)),
        final=({}, {}),
        episodes=({4: (165, 5)}, {1: (29, 2), 7: (180, 5)}),
    ),
}


class CountEnv(gym.Env):
    """One environment."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float64)
    action_space = gym.spaces.Box(-100, 100, (), np.float64)

    def __init__(self, length: int = 3, ends: str = "terminated", render_mode=None):
        self.length, self.ends, self.render_mode = length, ends, render_mode
        self.seeds = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.steps = 0
        return np.zeros(2), {"steps": -1.0}

    def step(self, action):
        self.steps += 1
        is_last = self.steps == self.length
        terminated = bool(action < 0) or (is_last and self.ends in ("terminated", "both"))
        truncated = is_last and self.ends in ("truncated", "both") and (self.ends == "both" or action >= 0)
        reward = 10 * self.steps + float(action)
        return np.array([self.steps, action]), reward, terminated, truncated, {"steps": float(self.steps)}


class CountVectorEnv(VectorEnv):
    """The same, vectorised by itself, which resets the environments it is asked to."""

    def __init__(self, num_envs: int, length: int, ends: str, autoreset_mode: AutoresetMode):
        self.num_envs, self.length, self.ends = num_envs, length, ends
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space, self.single_action_space = CountEnv.observation_space, CountEnv.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.obs = np.zeros((num_envs, 2))
        self.done = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        where = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.obs[where], self.done[where] = 0, False
        return self.obs.copy(), {}

    def step(self, actions):
        assert self.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP or not self.done.any()
        resets = self.done
        self.obs = np.stack([self.obs[:, 0] + 1, actions], axis=1)
        reward = 10 * self.obs[:, 0] + actions
        is_last = self.obs[:, 0] == self.length
        terminated = (actions < 0) | (is_last & (self.ends == "terminated"))
        truncated = is_last & (self.ends == "truncated") & ~terminated
        self.obs[resets], reward[resets], terminated[resets], truncated[resets] = 0, 0, False, False
        self.done = terminated | truncated
        return self.obs.copy(), reward, terminated, truncated, {}


class CountJaxEnv(JaxEnv):
    """The same, written in JAX. `make` sets the limit at which it is truncated."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gym.spaces.Box(-100, 100, (), np.float32)

    def __init__(self, length: int, ends: str):
        self.length = length if ends == "terminated" else np.inf
        self.max_episode_steps = length if ends == "truncated" else None

    def reset(self, key):
        return 0, jnp.zeros(2)

    def step(self, steps, action, key):
        steps += 1
        terminated = (action < 0) | (steps == self.length)
        return steps, TimeStep(jnp.stack([steps, action]), 10 * steps + action, terminated, truncated=False, info={})


class CountBackend(Backend):
    """The same in JAX, the smallest back end there is; its state is the steps of each episode and who was done."""

    single_observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    single_action_space = gym.spaces.Box(-100, 100, (), np.float32)

    def __init__(self, num_envs: int, length: int, ends: str, autoreset: str):
        self.num_envs, self.length, self.ends, self.autoreset = num_envs, length, ends, autoreset

    def reset(self, state, seed):
        zeros, no = jnp.full(self.num_envs, 0.0), jnp.zeros(self.num_envs, bool)  # `full` is weakly typed
        return (zeros, no), self.time_step(jnp.zeros((self.num_envs, 2)), no, zeros, no, no)

    def step(self, state, action):
        steps, was_done = state
        steps = jnp.where(was_done, 0, steps + 1)
        is_last = (steps == self.length) & (action >= 0)
        terminated = ~was_done & ((action < 0) | (is_last & (self.ends == "terminated")))
        truncated = is_last & (self.ends == "truncated")
        obs = jnp.where(was_done, 0, jnp.stack([steps, action])).T
        reward = jnp.where(was_done, 0, 10 * steps + action)
        done, same_step = terminated | truncated, self.autoreset == "same_step"
        timestep = self.time_step(obs, done & same_step, reward, terminated, truncated)
        return (jnp.where(done & same_step, 0, steps), done & (not same_step)), timestep

    def time_step(self, obs, starts_next, reward, terminated, truncated):
        info = {"final_obs": obs} if self.autoreset == "same_step" else {}
        return TimeStep(jnp.where(starts_next[:, None], 0, obs), reward, terminated, truncated, info)


class EchoEnv(gym.Env):
    """Returns its last action, of any space, as its observation; each episode starts with `first`."""

    def __init__(self, space: gym.Space, first, length: int = 3):
        self.observation_space = self.action_space = space
        self.first, self.length = first, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.first, {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        self.steps += 1
        return action, 0.0, self.steps == self.length, False, {}


class FaultyEnv(CountEnv):
    """Raises what a user's own code could raise, in the step whose action is 4."""

    def step(self, action):
        if action == 4:
            raise FaultyEnvError("the action is 4")
        return super().step(action)


class FaultyEnvError(Exception):
    pass


class InfoEnv(CountEnv):
    """Reports more in its info: a vector, a name, and a number only at odd steps."""

    def step(self, action):
        *values, info = super().step(action)
        info["position"] = np.array([self.steps, 2 * self.steps])
        info["name"] = f"step {self.steps}"
        if self.steps % 2:
            info["odd"] = self.steps
        return *values, info

"""Environments made by hand, and what they return by the tables that were worked out by hand.

A time step's observation is [number of steps in the episode, last action], its reward 10 * number of steps + action;
an episode starts with [0, 0]. It ends after `length` steps, terminated or truncated, or is terminated by an action
below 0. There are two of them, with ACTIONS [8, 2].
"""

from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.experimental.functional import FuncEnv
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
        self.done, info = terminated | truncated, {}
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and self.done.any():
            info = {"final_obs": self.obs.copy(), "_final_obs": self.done.copy()}
            self.obs[self.done], self.done[:] = 0, False
        return self.obs.copy(), reward, terminated, truncated, info


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


class CountBrax:
    """The same as one of Brax's environments: actions of its BraxEnv are [1]."""

    action_size = 1

    def __init__(self, env: CountJaxEnv):
        self.env, self.unwrapped = env, self

    def reset(self, key):
        from brax.envs.base import State

        steps, obs = self.env.reset(key)
        return State(steps, obs, reward=jnp.zeros(()), done=jnp.zeros(()))

    def step(self, state, action):
        steps, timestep = self.env.step(state.pipeline_state, action, None)
        done = timestep.terminated.astype(jnp.float32)
        return state.replace(pipeline_state=steps, obs=timestep.obs, reward=timestep.reward, done=done)


class CountGymnax:
    """The same as one of gymnax's, whose parameters hold its time limit."""

    def __init__(self, env: CountJaxEnv):
        self.env, self.default_params = env, {"max_steps_in_episode": env.max_episode_steps or 1000}

    def observation_space(self, params):
        return gymnax_box(self.env.observation_space)

    def action_space(self, params):
        return gymnax_box(self.env.action_space)

    def reset_env(self, key, params):
        return self.env.reset(key)[::-1]

    def step_env(self, key, state, action, params):
        state, timestep = self.env.step(state, action, key)
        return timestep.obs, state, timestep.reward, timestep.terminated, {}

    def is_truncated(self, state, params):
        return state >= params["max_steps_in_episode"]


def gymnax_box(space):
    from gymnax.environments.spaces import Box

    return Box(-100, 100, space.shape)


class CountFunctional(FuncEnv):
    """The same as one of Gymnasium's functional environments, of which the state is what is observed."""

    observation_space, action_space = CountJaxEnv.observation_space, CountJaxEnv.action_space

    def __init__(self, length: float):
        self.length = length

    def initial(self, rng, params=None):
        return jnp.zeros(2)

    def transition(self, state, action, rng, params=None):
        return jnp.stack([state[0] + 1, action])

    def observation(self, state, rng, params=None):
        return state

    def reward(self, state, action, next_state, rng, params=None):
        return 10 * next_state[0] + action

    def terminal(self, state, rng, params=None):
        return (state[1] < 0) | (state[0] == self.length)

    def transition_info(self, state, action, next_state, params=None):
        return {}


class CountPool:
    """The same behind the part of EnvPool's interface that is used; what is sent last is received first."""

    observation_space, action_space = CountJaxEnv.observation_space, CountJaxEnv.action_space
    spec = SimpleNamespace(action_array_spec={"action": action_space}, _action_keys=["action"])
    render_mode = None

    def __init__(self, num_envs: int, length: int, ends: str, batch_size: int):
        self.envs = [CountVectorEnv(1, length, ends, AutoresetMode.NEXT_STEP) for _ in range(num_envs)]
        self.all_env_ids, self.batch_size, self.sent = np.arange(num_envs, dtype=np.int32), batch_size, []

    def __len__(self):
        return len(self.envs)

    def xla(self):
        handle = np.zeros(1, np.int32)
        obs, *rest = (jax.ShapeDtypeStruct((self.batch_size,), dtype) for dtype in (np.float32, np.float32, bool, bool))
        obs, info = (
            jax.ShapeDtypeStruct((self.batch_size, 2), obs.dtype),
            {"env_id": self.all_env_ids[: self.batch_size]},
        )

        def xla_recv(handle):
            types = handle, (obs, *rest, info)
            return jax.experimental.io_callback(lambda handle: (np.asarray(handle), self.recv()), types, handle)

        def xla_send(*inputs):
            return jax.experimental.io_callback(self.send, inputs[0], *inputs)

        return handle, xla_recv, xla_send, None

    def send(self, handle, *inputs):
        for action, i in zip(*map(np.asarray, inputs), strict=True):
            *values, _ = self.envs[i].step(action[None])
            self.sent.append((i, *(x[0] for x in values)))
        return np.asarray(handle)

    def recv(self, reset: bool = False):
        received = sorted([self.sent.pop() for _ in range(self.batch_size)], key=lambda values: values[0])
        ids, obs, reward, terminated, truncated = (np.array(x) for x in zip(*received, strict=True))
        info, obs = {"env_id": ids.astype(np.int32)}, obs.astype(np.float32)
        return (obs, info) if reset else (obs, reward.astype(np.float32), terminated, truncated, info)

    def async_reset(self):
        self.sent = [(i, env.reset()[0][0], 0.0, False, False) for i, env in enumerate(self.envs)]

    def reset(self):
        self.async_reset()
        return self.recv(reset=True)


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


class HalvingEnv(EchoEnv):
    """Writes to its action."""

    def step(self, action):
        action *= 0.5
        return super().step(action)


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

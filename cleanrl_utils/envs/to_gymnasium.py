"""The way back: a functional environment with its wrappers as one of Gymnasium's, for training loops of any kind.

    envs = GymnasiumVectorEnv(jax_envs.make(jax_envs.BraxEnv("hopper"), num_envs=1024))
    obs, info = envs.reset(seed=1)
    obs, reward, terminated, truncated, info = envs.step(actions)

Arrays are JAX's and stay on the device; actions may be NumPy's or JAX's. From here on, without a copy (DLPack):

- torch: `gymnasium.wrappers.vector.JaxToTorch(envs)`, and `gymnasium.wrappers.JaxToTorch(env)` for a single one
- NumPy: `gymnasium.wrappers.vector.JaxToNumpy(envs)`; its arrays are read-only (from a GPU they are copies)
- TensorFlow: `to_tensorflow(...)` of what `reset` and `step` return

What a step costs beside one in a compiled scan is measured in docs/envs/index.md.

JAX counts on arrays not to change: a tensor that shares their memory is to be read, or cloned before it is written to.

`info` is the functional one. Where the autoreset is "same_step", `info["final_obs"]` of a step is one array of all
environments' last observations, and the mask `info["_final_obs"]` tells where there is one, as Gymnasium has it.
"""

import gymnasium as gym
import jax
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from cleanrl_utils.envs.base import Backend, FlattenedBackend, Fresh, TimeStep, VectorEnv

AUTORESET_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


class GymnasiumVectorEnv(gym.vector.VectorEnv):
    """The environments of `env`, whatever their back end, as `gymnasium.vector.VectorEnv`.

    They start from where `env` is: without a seed, the first `reset` is with the one that `env` was made with. With
    render_mode="rgb_array" `render` returns a picture of each environment, uint8 [height, width, 3]; EnvPool's and
    Gymnasium's are to be made with that mode, too.
    """

    def __init__(self, env: VectorEnv, render_mode: str | None = None):
        self.env, self.num_envs, self.render_mode = env, env.num_envs, render_mode
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**metadata(env, render_mode), "autoreset_mode": AUTORESET_MODES[env.autoreset]}
        self._step = jax.jit(lambda env, actions: step_and_info(env, actions))  # with a cache of its own

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if "reset_mask" in (options or {}):
            raise ValueError("these environments reset themselves, and `reset` all of them: leave reset_mask out")
        super().reset(seed=seed)
        self.env, timestep = self.env.reset(seed)
        return timestep.obs, {name: entry for name, entry in timestep.info.items() if name != "final_obs"}

    def step(self, actions):
        self.env, timestep, info = self._step(self.env, actions)
        return timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, info

    def render(self):
        return tuple(self.render_one(i) for i in range(self.num_envs)) if self.render_mode else None

    def render_one(self, i: int):
        """The picture of environment i."""
        return render(self.env, i)

    def close_extras(self, **kwargs):
        self.env.close()


class GymnasiumEnv(gym.Env):
    """The only environment of `env`, whatever its back end, as `gymnasium.Env`."""

    def __init__(self, env: VectorEnv, render_mode: str | None = None):
        if env.num_envs != 1:
            raise ValueError(
                f"these are {env.num_envs} environments: make them with num_envs=1, or use GymnasiumVectorEnv"
            )
        self.env, self.render_mode = env, render_mode
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.metadata = metadata(env, render_mode)
        self.has_ended = True
        self._step = jax.jit(lambda env, action: step_alone(env, action))

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.env, timestep = self.env.reset(seed)
        self.has_ended = False
        return alone(timestep.obs), alone({name: x for name, x in timestep.info.items() if name != "final_obs"})

    def step(self, action):
        if self.has_ended:
            raise RuntimeError("there is no episode, or it has ended: reset is next")
        self.env, obs, timestep = self._step(self.env, action)
        terminated, truncated = bool(timestep.terminated), bool(timestep.truncated)
        self.has_ended = terminated or truncated
        return obs, float(timestep.reward), terminated, truncated, timestep.info

    def render(self):
        return render(self.env, 0) if self.render_mode else None

    def close(self):
        self.env.close()


def step_and_info(env: VectorEnv, actions) -> tuple[VectorEnv, TimeStep, dict]:
    env, timestep = env.step(actions)
    masks = {"_final_obs": timestep.done} if "final_obs" in timestep.info else {}
    return env, timestep, {**timestep.info, **masks}


def step_alone(env: VectorEnv, action):
    """The env, what its only environment observed last in this episode, and the rest of its time step."""
    env, timestep = env.step(jax.tree.map(lambda x: x[None], action))
    info = {name: entry for name, entry in timestep.info.items() if name != "final_obs"}
    return env, alone(timestep.next_obs), alone(timestep.replace(obs=(), info=info))


def alone(tree):
    """The first of leaves [num_envs, ...]."""
    return jax.tree.map(lambda x: x[0], tree)


def to_tensorflow(tree):
    """JAX's arrays as tensors of TensorFlow's in the same memory (DLPack)."""
    import tensorflow as tf

    return jax.tree.map(lambda x: tf.experimental.dlpack.from_dlpack(x.__dlpack__()), tree)


def metadata(env: VectorEnv, render_mode: str | None) -> dict:
    """Gymnasium's; raises ValueError for a render mode that the back end has not."""
    backend = innermost(env.backend)
    modes = ["rgb_array"] if backend.can_render else []
    if render_mode not in (None, *modes):
        options = "'rgb_array' or None" if modes else "None, or environments that draw (render_mode='rgb_array')"
        raise ValueError(f"render_mode={render_mode!r}: pass {options}")
    return {"jax": True, "render_modes": modes, "render_fps": backend.render_fps}


def innermost(backend: Backend) -> Backend:
    return backend.backend if isinstance(backend, FlattenedBackend) else backend


def render(env: VectorEnv, i: int):
    if isinstance(env.state, Fresh):
        raise ValueError("these environments have no episodes yet: reset is next")
    jax.block_until_ready(env.state)  # not while a step is under way
    return innermost(env.backend).render(env.state, i)

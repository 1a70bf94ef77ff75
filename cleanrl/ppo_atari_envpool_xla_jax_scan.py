"""PPO from pixels, for Atari and Procgen: EnvPool's XLA interface and JAX, rollout and learning compiled.

    python cleanrl/ppo_atari_envpool_xla_jax_scan.py --env-id Pong-v5
    python cleanrl/ppo_atari_envpool_xla_jax_scan.py --env-id CoinrunEasy-v0 --network impala
    python cleanrl/ppo_atari_envpool_xla_jax_scan.py --help

Docs, logged metrics and results: docs/rl-algorithms/ppo.md#ppo_atari_envpool_xla_jax_scanpy
"""

import ctypes
import difflib
import logging
import math
import os
import shlex
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, NoReturn

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU's memory at once
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import flax
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.linen.initializers import constant, orthogonal
from flax.training.train_state import TrainState

with suppress(OSError):  # EnvPool 1.2.5 (Python 3.11) ends the process when it renders, unless libEGL came first
    ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
# EnvPool draws Jumanji's games with matplotlib, whose import takes a second: put off until one of them is made.
jumanji = sys.modules["envpool.jumanji"] = types.ModuleType("envpool.jumanji")
jumanji.__path__ = [os.path.join(*find_spec("envpool").submodule_search_locations, "jumanji")]
import envpool  # noqa: E402

del sys.modules["envpool.jumanji"]

warnings.filterwarnings("ignore", message=".*precision lowered by casting")  # by EnvPool's spaces


@dataclass(frozen=True)
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment: parameters, action noise and every environment's stream follow from it"""
    num_seeds: int = 1
    """train this many seeds side by side, from --seed on, each with environments and a run folder of its own"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "cleanRL"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to record the final evaluation's first episode (to the `videos` folder of the run)"""
    video_interval: int | None = None
    """with --capture-video: record at every k-th of the evaluations during training too"""
    save_model: bool = True
    """whether to save and evaluate the final agent (in the folder of the run)"""
    upload_model: bool = False
    """whether to upload the saved model to Hugging Face"""
    hf_entity: str | None = None
    """the user or org name of the model repository on the Hugging Face Hub; none given: the one logged in"""
    progress: bool = True
    """whether to show the progress of the training: one live line on a terminal, plain lines elsewhere"""
    compilation_cache: bool = True
    """whether to keep compiled functions for the next start (in ~/.cache/cleanrl/jax, 1 GiB at most)"""
    num_devices: int = 1
    """spread the environments and the learning over this many devices, of all processes together; 0: all there are"""
    num_processes: int | None = None
    """the number of processes, on one or several hosts, that train together; each runs this command"""
    process_id: int | None = None
    """the number of this process, from 0; on Slurm and other clusters that JAX knows it need not be given"""
    coordinator_address: str | None = None
    """host:port of process 0, where the processes meet; on clusters that JAX knows it need not be given"""
    checkpoint_interval: float = 3.0
    """minutes between the checkpoints, the last two of which are kept (in the folder of the run); 0: none"""
    resume: str | None = None
    """go on with the run of this folder; auto: with the newest unfinished one of this exp-name, env-id and seed"""
    skip_nonfinite_updates: bool = False
    """whether to leave out, and count, updates with values that are not finite, instead of ending the training"""

    # Algorithm specific arguments
    env_id: str = "Pong-v5"
    """the id of the environment"""
    total_timesteps: int = 10_000_000
    """total timesteps of the experiment, of four frames each on Atari"""
    learning_rate: float = 2.5e-4
    """the learning rate of the optimizer"""
    num_envs: int = 8
    """the number of parallel environments"""
    num_steps: int = 128
    """the number of steps to run in each environment per rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing, linear over the iterations"""
    gamma: float = 0.99
    """the discount factor gamma"""
    gae_lambda: float = 0.95
    """the lambda for the generalized advantage estimation"""
    network: Literal["nature", "impala"] = "nature"
    """the convolutions: of the Nature DQN (doi:10.1038/nature14236), or IMPALA's residual ones (arXiv:1802.01561)"""
    hidden_size: int = 512
    """the number of units of the layer between the convolutions and the heads"""
    bfloat16: bool = False
    """compute the convolutions and that layer in bfloat16; parameters and losses stay float32"""
    num_minibatches: int = 4
    """the number of mini-batches"""
    update_epochs: int = 4
    """the K epochs to update the policy"""
    norm_adv: bool = True
    """toggle advantage normalization, over the valid entries of each mini-batch"""
    norm_return: bool = False
    """toggle return normalization: the critic predicts returns divided by their running standard deviation"""
    recompute_advantage: bool = False
    """toggle computing the advantages anew at each epoch, with the critic as it is by then"""
    clip_coef: float = 0.1
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggle a clipped loss for the value function, as per the paper"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    vf_coef: float = 0.25
    """coefficient of the value function's squared error (the same as CleanRL's 0.5, which is of half of it)"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = None
    """the KL divergence (mean of an epoch) above which an iteration's remaining epochs are skipped"""
    eval_episodes: int = 10
    """the number of episodes of an evaluation"""
    eval_interval: int | None = None
    """save and evaluate the agent after every k-th iteration too, not only at the end"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    @property
    def axis_name(self) -> tuple[str, ...]:
        """What sums and means over all environments go over besides their own device's: empty if it is alone."""
        return ("devices",) if self.num_devices > 1 else ()


# ---------------------------------------------------------------- environment boundary
# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class TimeStep:
    """What the environments return, shapes [num_envs, ...]; `reset` and `recv` return the same type."""

    obs: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    info: dict[str, jax.Array]

    @property
    def done(self) -> jax.Array:
        return self.terminated | self.truncated


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class EnvWrapper:
    """Three pure functions: each returns the wrapper (its state may have changed) and what it passes on.

    Override the ones that change something. Statistics that belong to the trained agent go into a field
    called `stats`: they are saved with the model.
    """

    def reset(self, timestep: TimeStep):
        return self, timestep

    def send(self, action: jax.Array):
        return self, action

    def recv(self, timestep: TimeStep):
        return self, timestep


@flax.struct.dataclass
class VectorEnvWrapper:
    """The environments as a pytree, as TrainState is for the agent: functions are static, state is leaves."""

    handle: jax.Array  # EnvPool's token: threading it through the steps orders them
    wrappers: tuple[EnvWrapper, ...]  # listed from the environment outwards
    envs: Any = flax.struct.field(pytree_node=False)  # EnvPool's object, kept alive for the compiled functions
    reset_fn: Callable = flax.struct.field(pytree_node=False)  # () -> obs, [devices, lanes, num_envs, *obs_shape]
    step_fn: Callable = flax.struct.field(pytree_node=False)  # (handle, action) -> (handle, outputs)
    num_envs: int = flax.struct.field(pytree_node=False)  # of one seed on one device

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return obs_shape(self.envs)

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (self.num_envs, *self.envs.action_space.shape)

    def reset(self, obs=None):
        """Starts new episodes everywhere, or takes the observations of new ones; the wrappers keep their statistics."""
        obs = jnp.asarray(self.reset_fn()[0, 0]) if obs is None else obs
        no, zero = jnp.zeros(self.num_envs, bool), jnp.zeros(self.num_envs)
        timestep = TimeStep(obs, reward=zero, terminated=no, truncated=no, info={})
        wrappers = []
        for wrapper in self.wrappers:
            wrapper, timestep = wrapper.reset(timestep)
            wrappers.append(wrapper)
        return self.replace(wrappers=tuple(wrappers)), timestep

    def step(self, action: jax.Array):
        """Steps every environment. EnvPool resets a finished one in the step that follows, ignoring its action."""
        wrappers = list(self.wrappers)
        for i in reversed(range(len(wrappers))):  # the action travels inwards
            wrappers[i], action = wrappers[i].send(action)
        # EnvPool checks neither once compiled: another shape or type would be read as other numbers.
        if action.shape != self.action_shape or action.dtype != jnp.int32:
            raise ValueError(
                f"actions are {action.dtype}{action.shape}, the environment takes int32{self.action_shape}"
            )
        handle, (obs, reward, terminated, truncated, info) = self.step_fn(self.handle, action)
        timestep = TimeStep(obs, reward, terminated, truncated, info)
        for i in range(len(wrappers)):  # the observation travels outwards
            wrappers[i], timestep = wrappers[i].recv(timestep)
        return self.replace(handle=handle, wrappers=tuple(wrappers)), timestep

    def render(self) -> np.ndarray:
        """A picture of the first environment, uint8 [height, width, 3]."""
        return self.envs.render(env_ids=[0])[0]


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def masked_mean(x: jax.Array, mask: jax.Array, axis_name=()) -> jax.Array:
    """Mean over the leading axis of the entries of x, [n, ...], whose mask, [n], is 1; 0 if there are none.

    With the axis name of several devices, the mean over the entries of all of them.
    """
    mask = mask.reshape(-1, *[1] * (x.ndim - 1))
    total, count = jax.lax.psum(((x * mask).sum(0), mask.sum()), axis_name)
    return total / jnp.maximum(count, 1.0)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def masked_var(x: jax.Array, mask: jax.Array, axis_name=()) -> jax.Array:
    """Population variance over the leading axis, masked alike."""
    return masked_mean((x - masked_mean(x, mask, axis_name)) ** 2, mask, axis_name)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class RunningMeanStd:
    mean: jax.Array
    var: jax.Array
    count: jax.Array

    @classmethod
    def create(cls, shape=()):
        return cls(mean=jnp.zeros(shape), var=jnp.ones(shape), count=jnp.array(1e-4))

    def update(self, batch: jax.Array, mask: jax.Array | None = None, axis_name=()):
        """Adds the entries of batch, [n, *shape], whose mask, [n], is 1; those of all devices that the axis names.

        https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm
        """
        mask = jnp.ones(batch.shape[0]) if mask is None else mask.astype(jnp.float32)
        added = jax.lax.psum(mask.sum(), axis_name)
        count = self.count + added
        kept, share = self.count / count, added / count
        delta = masked_mean(batch, mask, axis_name) - self.mean
        batch_var = masked_var(batch, mask, axis_name)
        var = kept * self.var + share * batch_var + kept * share * delta**2
        return self.replace(mean=self.mean + share * delta, var=var, count=count)

    @property
    def std(self) -> jax.Array:
        return jnp.sqrt(self.var + 1e-8)


@flax.struct.dataclass
class VectorEnvEpisodeStats(EnvWrapper):
    """Score and length of the last finished game, [num_envs], in `info`; nan before the first.

    In training a lost life ends an episode of the agent, but not the game, and its rewards are clipped, the score not:
    the other scripts' wrapper of this name, and the library's, count the agent's episodes and rewards.
    """

    returns: jax.Array
    lengths: jax.Array
    episodic_return: jax.Array
    episodic_length: jax.Array
    lives: jax.Array
    done: jax.Array  # True where the next step is a reset, whose action is ignored
    new_game: jax.Array  # True where that reset begins a new game

    @classmethod
    def create(cls, num_envs: int):
        zeros, nans, no = jnp.zeros(num_envs), jnp.full(num_envs, jnp.nan), jnp.zeros(num_envs, bool)
        return cls(zeros, zeros, nans, nans, jnp.zeros(num_envs, jnp.int32), no, no)

    def reset(self, timestep):
        zeros, no = jnp.zeros_like(self.returns), jnp.zeros_like(self.done)
        return self.replace(returns=zeros, lengths=zeros, done=no, new_game=no), timestep

    def recv(self, timestep):
        returns = jnp.where(self.new_game, 0.0, self.returns + timestep.info["score"])
        lengths = jnp.where(self.new_game, 0.0, self.lengths + ~self.done)
        # After a lost life EnvPool waits up to 30 frames. Should the game end in these, it begins a new one, and only
        # the number of lives tells.
        restarted = self.done & ~self.new_game & (timestep.info["lives"] > self.lives)
        game_over = timestep.truncated | timestep.info["game_over"] | restarted
        info = {
            "game_over": game_over,
            "episodic_return": jnp.where(game_over, returns, self.episodic_return),
            "episodic_length": jnp.where(game_over, lengths, self.episodic_length),
        }
        wrapper = VectorEnvEpisodeStats(
            returns=jnp.where(restarted, 0.0, returns),
            lengths=jnp.where(restarted, 0.0, lengths),
            episodic_return=info["episodic_return"],
            episodic_length=info["episodic_length"],
            lives=timestep.info["lives"],
            done=timestep.done,
            new_game=game_over & timestep.done,
        )
        return wrapper, timestep.replace(info=info)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def space_leaves(space: gym.Space) -> list[gym.Space]:
    """The spaces inside nested Dict spaces, in alphabetical order."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for _, entry in sorted(space.items()) for leaf in space_leaves(entry)]
    return [space]


def are_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether pictures of this shape, [height, width, channels] or [channels, height, width], are of the first kind."""
    return shape[2] < shape[0]


def obs_shape(envs) -> tuple[int, ...]:
    """[height, width, channels], as convolutions on a CPU and on a GPU take it; EnvPool's Atari has channels first."""
    shape = envs.observation_space.shape
    return shape if are_channels_last(shape) else (*shape[1:], shape[0])


def to_channels_last(obs: jax.Array) -> jax.Array:
    """EnvPool's pictures, uint8 [num_envs, ...]. Bytes they stay up to the network."""
    return obs if are_channels_last(obs.shape[1:]) else obs.transpose(0, 2, 3, 1)


def game_info(reward: jax.Array, terminated: jax.Array, info: dict) -> dict[str, jax.Array]:
    """What is known of the game, [num_envs]: score of this step, whether it is over, and lives left.

    Atari tells it in `info`, where the reward is not clipped and a lost life is no end.
    """
    score, game_over = info.get("reward", reward), info.get("terminated", terminated)
    lives = info.get("lives", np.zeros(reward.shape))
    return {"score": score.astype(np.float32), "game_over": game_over.astype(bool), "lives": lives.astype(np.int32)}


def xla_step(envs):
    """EnvPool's token, and a step of all its environments, (handle, action) -> (handle, outputs), to be compiled.

    Where a buffer is 64-bit, as MuJoCo's are, EnvPool would overrun memory with a 32-bit one.
    """
    with jax.enable_x64(True):
        handle, recv, send, _ = envs.xla()
        state = jax.eval_shape(recv, handle)[1]
        handle = jnp.asarray(handle)
    num_envs = len(envs.all_env_ids)
    expected = [((num_envs, *envs.observation_space.shape), np.uint8)]
    declared = [(x.shape, x.dtype) for x in jax.tree.leaves(state[0])]
    if declared != expected or any(x.shape != (num_envs,) for x in state[1:4]):
        raise ValueError(f"EnvPool's XLA interface declares {state[:4]}, not {num_envs} x {envs.observation_space}")
    if envs.spec.action_array_spec["action"].dtype != np.int32:
        raise ValueError(f"EnvPool takes actions of {envs.spec.action_array_spec['action']}, not of int32")

    def step(handle, action):
        with jax.enable_x64(True):
            handle, (obs, reward, terminated, truncated, info) = recv(send(handle, action))
            info = game_info(reward, terminated, info)
            return handle, (to_channels_last(obs), reward.astype(jnp.float32), terminated, truncated, info)

    return handle, step


def host_step(envs):
    """The same by a callback to the host, for devices that EnvPool has no XLA target for."""
    print(f"EnvPool can't be compiled for {jax.default_backend()}: its steps are calls to the host", file=sys.stderr)
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # of an environment that raises `main` tells
    num_envs = len(envs.all_env_ids)
    float_shape = partial(jax.ShapeDtypeStruct, dtype=np.float32)
    flag = jax.ShapeDtypeStruct((num_envs,), bool)
    lives = jax.ShapeDtypeStruct((num_envs,), np.int32)
    info_shapes = {"score": float_shape((num_envs,)), "game_over": flag, "lives": lives}
    picture = jax.ShapeDtypeStruct((num_envs, *obs_shape(envs)), np.uint8)
    output_shapes = (picture, float_shape((num_envs,)), flag, flag, info_shapes)

    def step_on_host(handle, action):  # NumPy only: JAX can hang in a callback
        obs, reward, terminated, truncated, info = envs.step(np.asarray(action))
        info = game_info(reward, terminated, info)
        return np.asarray(handle), (to_channels_last(obs), reward.astype(np.float32), terminated, truncated, info)

    def step(handle, action):
        return jax.experimental.io_callback(step_on_host, (jax.typeof(handle), output_shapes), handle, action)

    return jnp.zeros(8, jnp.uint8), step


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def for_one_lane(function: Callable, num_lanes: int) -> Callable:
    """`function(handle, x)` of all lanes, x [num_lanes * num_envs, ...], as one of a lane, [num_envs, ...], to vmap.

    JAX has no rule to vmap a call into EnvPool. The rule here: one call for the environments of all lanes.
    """
    if num_lanes == 1:
        return function

    def call(handle, x):
        handle, y = function(handle, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x))
        return handle, jax.tree.map(lambda y: y.reshape(num_lanes, -1, *y.shape[1:]), y)

    @jax.custom_batching.custom_vmap
    def alone(handle, x):  # the other lanes' environments take the same actions
        handle, y = call(handle, jax.tree.map(lambda x: jnp.broadcast_to(x, (num_lanes, *x.shape)), x))
        return handle, jax.tree.map(lambda y: y[0], y)

    @alone.def_vmap
    def together(axis_size, in_batched, handle, x):
        if axis_size != num_lanes or not all(jax.tree.leaves(in_batched)):
            raise ValueError(f"these are the environments of {num_lanes} lanes: vmap over handle and actions of all")
        handle, y = call(handle[0], x)
        outputs = jnp.broadcast_to(handle, (num_lanes, *handle.shape)), y
        return outputs, jax.tree.map(lambda _: True, outputs)

    return alone


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def for_own_device(functions: list[Callable]) -> Callable:
    """Each device's own function, of its own EnvPool: one pool called from two devices would mix their steps up."""
    if len(functions) == 1:
        return functions[0]
    return lambda *inputs: jax.lax.switch(jax.lax.axis_index(MESH_AXES) % len(functions), functions, *inputs)


def make_env(*lanes: Args, evaluation: bool = False, iteration: int = 0) -> VectorEnvWrapper:
    """The environments with their wrappers, of one lane (a seed) on one device; call `reset` next.

    Each device of this process has an EnvPool, with its part of the environments of its lanes. For evaluation there
    are `eval_episodes` environments, of one lane on one device, seeded apart from training. On Atari, a lost life ends
    an episode and rewards are their signs in training; in evaluation an episode is a whole game, with its raw score.
    A training that goes on after some iterations has new environments: their streams are none that it has seen.
    """
    args = replace(lanes[0], num_seeds=len(lanes), num_devices=1 if evaluation else lanes[0].num_devices)
    num_envs = (args.eval_episodes if evaluation else args.num_envs) // args.num_devices
    # EnvPool gives environment i the seed `seed + i`, so that seeds 1 and 2 would share all streams but one.
    spawn_key = (int(evaluation), iteration) if iteration else (int(evaluation),)
    streams = [np.random.SeedSequence(lane.seed, spawn_key=spawn_key) for lane in lanes]
    env_seeds = np.array([stream.generate_state(args.num_devices * num_envs) >> 1 for stream in streams])
    mesh = training_mesh(args)
    lanes_on_device = len(lanes) // mesh.shape["lanes"]
    own_devices = [position for position, device in np.ndenumerate(mesh.devices) if device in jax.local_devices()]
    is_atari = "episodic_life" in envpool.make_spec(args.env_id).config._fields
    pools = [
        envpool.make(
            args.env_id,
            env_type="gymnasium",
            num_envs=lanes_on_device * num_envs,
            num_threads=max(1, num_cores() // len(own_devices)),
            env_seed=env_seeds[j * lanes_on_device :][:lanes_on_device, i * num_envs :][:, :num_envs].ravel().tolist(),
            render_mode="rgb_array" if evaluation and args.capture_video else None,
            **({"episodic_life": not evaluation, "reward_clip": not evaluation} if is_atari else {}),
        )
        for i, j in own_devices
    ]
    handles, steps = zip(*map(xla_step if jax.default_backend() in ("cpu", "gpu") else host_step, pools), strict=True)
    step_fn = for_one_lane(for_own_device(steps), lanes_on_device)

    def reset_fn():
        obs = np.stack([to_channels_last(pool.reset()[0]) for pool in pools])
        return obs.reshape(-1, len(lanes), num_envs, *obs.shape[2:])

    env = VectorEnvWrapper(handles[0], (), pools[0], reset_fn, step_fn, num_envs)
    return env.replace(wrappers=(VectorEnvEpisodeStats.create(num_envs),))


# ---------------------------------------------------------------- agent
def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Pictures [n, height, width, channels] by a kernel [size, size, channels, features], without padding.

    Raises ValueError unless the size is a multiple of the stride. On a CPU as a product of matrices: the gradient of
    XLA's own convolution takes many times as long there inside a loop.
    """
    if kernel.shape[0] % stride:
        raise ValueError(f"a kernel of size {kernel.shape[0]} is no multiple of the stride {stride}")
    if jax.default_backend() != "cpu":
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)
    size, _, channels, features = kernel.shape
    height, width = ((n - size) // stride + size // stride for n in x.shape[1:3])  # in blocks of stride x stride pixels
    x = x[:, : height * stride, : width * stride].reshape(-1, height, stride, width, stride, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, height, width, stride * stride * channels)
    size = size // stride
    kernel = kernel.reshape(size, stride, size, stride, -1).transpose(0, 2, 1, 3, 4).reshape(-1, features)
    height, width = height - size + 1, width - size + 1
    return jnp.concatenate([x[:, i:, j:][:, :height, :width] for i, j in np.ndindex(size, size)], axis=-1) @ kernel


class Conv(nn.Module):
    """A convolution of pictures [n, height, width, channels]; `size` is a multiple of `stride`."""

    features: int
    size: int
    stride: int
    padding: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", orthogonal(np.sqrt(2)), shape).astype(self.dtype)
        bias = self.param("bias", constant(0.0), (self.features,)).astype(self.dtype)
        edge = (self.padding, self.padding)
        return convolve(jnp.pad(x, ((0, 0), edge, edge, (0, 0))), kernel, self.stride) + bias


class NatureCNN(nn.Module):
    """https://doi.org/10.1038/nature14236: of pictures [n, 84, 84, channels] features [n, 7, 7, 64]."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        for features, size, stride in [(32, 8, 4), (64, 4, 2), (64, 3, 1)]:
            x = nn.relu(Conv(features, size, stride, padding=0, dtype=self.dtype)(x))
        return x


class ImpalaCNN(nn.Module):
    """https://arxiv.org/abs/1802.01561, figure 3, right: to features [n, ceil(height / 8), ceil(width / 8), 32]."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        for features in (16, 32, 32):
            x = Conv(features, 3, stride=1, padding=1, dtype=self.dtype)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                y = Conv(features, 3, stride=1, padding=1, dtype=self.dtype)(nn.relu(x))
                x = x + Conv(features, 3, stride=1, padding=1, dtype=self.dtype)(nn.relu(y))
        return nn.relu(x)


class Agent(nn.Module):
    num_actions: int
    hidden_size: int
    network: str
    dtype: Any

    @nn.compact
    def __call__(self, obs):
        """Logits [..., num_actions] of the actions, value [...], of pictures, uint8 [..., height, width, channels]."""
        x = obs.reshape(-1, *obs.shape[-3:]).astype(self.dtype) / 255
        x = {"nature": NatureCNN, "impala": ImpalaCNN}[self.network](self.dtype)(x)
        x = x.reshape(*obs.shape[:-3], -1)
        x = nn.Dense(self.hidden_size, dtype=self.dtype, kernel_init=orthogonal(np.sqrt(2)), bias_init=constant(0.0))(x)
        x = nn.relu(x).astype(jnp.float32)
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01), bias_init=constant(0.0))(x)
        value = nn.Dense(1, kernel_init=orthogonal(1.0), bias_init=constant(0.0))(x).squeeze(-1)
        return logits, value


def make_agent(args: Args, env: VectorEnvWrapper, key: jax.Array) -> TrainState:
    dtype = jnp.bfloat16 if args.bfloat16 else jnp.float32
    agent = Agent(int(env.envs.action_space.n), args.hidden_size, args.network, dtype)
    tx = optax.inject_hyperparams(
        lambda learning_rate, max_grad_norm: optax.chain(
            optax.clip_by_global_norm(max_grad_norm), optax.adam(learning_rate, eps=1e-5)
        )
    )(learning_rate=args.learning_rate, max_grad_norm=args.max_grad_norm)
    return TrainState.create(apply_fn=agent.apply, params=agent.init(key, jnp.zeros(env.obs_shape, jnp.uint8)), tx=tx)


# copied from ppo_envpool_xla_jax_scan.py
def categorical_log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Log-probability, [...], of the actions, [...], under their logits, [..., num_actions]."""
    return jnp.take_along_axis(nn.log_softmax(logits), action[..., None], axis=-1).squeeze(-1)


# copied from ppo_envpool_xla_jax_scan.py
def categorical_entropy(logits: jax.Array) -> jax.Array:
    log_probs = nn.log_softmax(logits)
    return -(jnp.exp(log_probs) * log_probs).sum(-1)


# copied from ppo_envpool_xla_jax_scan.py
def get_action(agent: TrainState, obs: jax.Array, key: jax.Array, deterministic: bool = False):
    """The policy, in the rollout and in evaluation: actions [num_envs] and their log-probability."""
    logits, _ = agent.apply_fn(agent.params, obs)
    action = jnp.argmax(logits, axis=-1) if deterministic else jax.random.categorical(key, logits)
    return action, categorical_log_prob(logits, action)


# copied from ppo_envpool_xla_jax_scan.py
def get_value(agent: TrainState, obs: jax.Array) -> jax.Array:
    """The critic's prediction, in units of the returns' running standard deviation."""
    _, value = agent.apply_fn(agent.params, obs)
    return value


# ---------------------------------------------------------------- training state
# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class Transition:
    """One step of every environment; a rollout stacks them to [num_steps, num_envs, ...]."""

    obs: jax.Array
    action: jax.Array  # as sampled
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array  # 0 on the step of a reset, where the action was ignored, else 1
    info: dict[str, jax.Array]


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class Targets:
    """What the losses aim at, [num_steps, num_envs]; returns and values in the critic's units."""

    advantage: jax.Array
    returns: jax.Array
    old_value: jax.Array  # as predicted before the first epoch


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class Learner:
    """What the epochs over one rollout change."""

    agent: TrainState
    return_stats: RunningMeanStd
    targets: Targets
    approx_kl: jax.Array  # mean over the last epoch


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@flax.struct.dataclass
class RunnerState:
    """Everything that changes during training, of one lane on one device."""

    agent: TrainState
    env: VectorEnvWrapper
    timestep: TimeStep
    return_stats: RunningMeanStd
    iteration: jax.Array
    key: jax.Array
    hyperparameters: dict[str, jax.Array]  # of `Args`, what differs between the lanes


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def init_state(args: Args, env: VectorEnvWrapper, obs=None, checkpoint: dict | None = None) -> RunnerState:
    """Of a new training, or of one that goes on from what `checkpointed` was of it, with new episodes."""
    key, agent_key = jax.random.split(jax.random.PRNGKey(args.seed))
    if args.axis_name:  # the devices share the agent, not the noise
        key = jax.random.fold_in(key, jax.lax.axis_index(args.axis_name))
    agent = make_agent(args, env, agent_key)
    state = RunnerState(agent, env, None, RunningMeanStd.create(), jnp.array(0), key, hyperparameters={})
    if checkpoint is not None:
        saved = flax.serialization.from_state_dict(checkpointed(state), checkpoint)
        stats, episodes = saved.pop("wrapper_stats"), saved.pop("episodes")
        names = {type(wrapper).__name__: wrapper for wrapper in env.wrappers}
        wrappers = (w.replace(stats=stats[name]) if name in stats else episodes[name] for name, w in names.items())
        env, state = env.replace(wrappers=tuple(wrappers)), state.replace(**saved)
    env, timestep = env.reset(obs)
    state = state.replace(env=env, timestep=timestep)
    # Copies, since a buffer can be donated but once; of explicit dtype, since a weak one would compile twice.
    return jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), state)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def checkpointed(state: RunnerState) -> dict:
    """Of what changes, all that a training goes on from: EnvPool's environments can't be saved."""
    wrappers = {type(wrapper).__name__: wrapper for wrapper in state.env.wrappers}
    return {
        "agent": state.agent,
        "return_stats": state.return_stats,
        "wrapper_stats": {name: wrapper.stats for name, wrapper in wrappers.items() if hasattr(wrapper, "stats")},
        "episodes": {name: wrapper for name, wrapper in wrappers.items() if not hasattr(wrapper, "stats")},
        "iteration": state.iteration,
        "key": state.key,
    }


# ---------------------------------------------------------------- algorithm
# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def rollout(args: Args, state: RunnerState) -> tuple[RunnerState, Transition]:
    def step(state, _):
        key, action_key = jax.random.split(state.key)
        action, log_prob = get_action(state.agent, state.timestep.obs, action_key)
        env, timestep = state.env.step(action.reshape(state.env.action_shape))
        transition = Transition(
            obs=state.timestep.obs,
            action=action,
            log_prob=log_prob,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=1.0 - state.timestep.done,
            info=timestep.info,
        )
        return state.replace(env=env, timestep=timestep.replace(info={}), key=key), transition

    return jax.lax.scan(step, state, None, length=args.num_steps)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def shuffled_indices(key: jax.Array, n: int) -> jax.Array:
    """The numbers 0 to n - 1 in random order.

    On a CPU, sorting one array of random bits with the indices below them takes a tenth of the time of
    `jax.random.permutation`, which was 15% of the time of `update`.
    """
    bits = jax.random.bits(key, (n,))
    with jax.enable_x64(True):
        return jnp.sort((bits.astype(jnp.uint64) << 32) + jnp.arange(n, dtype=jnp.uint64)).astype(jnp.uint32)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def compute_gae(rewards, values, last_value, terminated, truncated, gamma, gae_lambda):
    """Advantages and returns, [num_steps, num_envs], by generalized advantage estimation (arXiv:1506.02438).

    All inputs are [num_steps, num_envs] but last_value, [num_envs]. Where step t is done, the next value is that
    of the terminal observation: truncation bootstraps from it, termination does not, and both end the trace.
    """

    def step(advantage, transition):
        reward, value, next_value, terminated, truncated = transition
        delta = reward + gamma * next_value * (1.0 - terminated) - value
        advantage = delta + gamma * gae_lambda * (1.0 - (terminated | truncated)) * advantage
        return advantage, advantage

    next_values = jnp.concatenate([values[1:], last_value[None]])
    transitions = (rewards, values, next_values, terminated, truncated)
    _, advantages = jax.lax.scan(step, jnp.zeros_like(last_value), transitions, reverse=True)
    return advantages, advantages + values


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def compute_targets(args, agent, return_stats, batch, last_obs):
    """Advantages and scaled returns by the critic as it is now, and the statistics with these returns added.

    The values are scaled to raw returns before GAE, and the statistics see raw returns (tianshou's scheme).
    """
    std = return_stats.std
    scaled_values = get_value(agent, jnp.concatenate([batch.obs, last_obs[None]]))
    values = scaled_values * std
    advantages, returns = compute_gae(
        batch.reward, values[:-1], values[-1], batch.terminated, batch.truncated, args.gamma, args.gae_lambda
    )
    if args.norm_return:
        return_stats = return_stats.update(returns.reshape(-1), batch.valid.reshape(-1), args.axis_name)
    return Targets(advantages, returns / std, scaled_values[:-1]), return_stats


# copied from ppo_envpool_xla_jax_scan.py
def ppo_loss(params, apply_fn, args: Args, batch: Transition, targets: Targets):
    """The loss of a minibatch [minibatch_size, ...], and what is logged of it. https://arxiv.org/abs/1707.06347"""
    logits, value = apply_fn(params, batch.obs)
    log_ratio = categorical_log_prob(logits, batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    mean_over_valid = partial(masked_mean, mask=batch.valid, axis_name=args.axis_name)

    advantage = targets.advantage
    if args.norm_adv:
        std = jnp.sqrt(masked_var(advantage, batch.valid, args.axis_name))
        advantage = (advantage - mean_over_valid(advantage)) / (std + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -mean_over_valid(jnp.minimum(advantage * ratio, advantage * clipped_ratio))

    value_error = (value - targets.returns) ** 2
    if args.clip_vloss:
        clipped_value = targets.old_value + jnp.clip(value - targets.old_value, -args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (clipped_value - targets.returns) ** 2)
    value_loss = mean_over_valid(value_error)

    entropy = mean_over_valid(categorical_entropy(logits))
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/loss": loss,
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/old_approx_kl": mean_over_valid(-log_ratio),
        "losses/approx_kl": mean_over_valid(ratio - 1 - log_ratio),  # http://joschu.net/blog/kl-approx.html
        "losses/clipfrac": mean_over_valid(1.0 * (jnp.abs(ratio - 1) > args.clip_coef)),
    }


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def update_minibatch(args: Args, agent: TrainState, minibatch: tuple[Transition, Targets]):
    grads, metrics = jax.grad(ppo_loss, has_aux=True)(agent.params, agent.apply_fn, args, *minibatch)
    grads = jax.lax.pmean(grads, args.axis_name)
    return agent.apply_gradients(grads=grads), metrics


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def update_epoch(args: Args, agent: TrainState, batch: Transition, targets: Targets, key: jax.Array):
    """One pass over the rollout in shuffled minibatches."""
    order = shuffled_indices(key, batch.reward.size).reshape(args.num_minibatches, -1)
    minibatches = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[order], (batch, targets))
    agent, metrics = jax.lax.scan(partial(update_minibatch, args), agent, minibatches)
    return agent, jax.tree.map(jnp.mean, metrics)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def update(args: Args, state: RunnerState, batch: Transition, key: jax.Array):
    """Learns from a rollout in several epochs; returns the learner and the metrics (means over the minibatches).

    The targets are computed before the first epoch and, if recomputed, after each: the last time for the statistics.
    """

    def epoch(learner, key):
        agent, metrics = update_epoch(args, learner.agent, batch.replace(info={}), learner.targets, key)
        learner = learner.replace(agent=agent, approx_kl=metrics["losses/approx_kl"])
        if args.recompute_advantage:
            targets, return_stats = compute_targets(args, agent, learner.return_stats, batch, state.timestep.obs)
            targets = targets.replace(old_value=first_targets.old_value)
            learner = learner.replace(targets=targets, return_stats=return_stats)
        return learner, (metrics, 1.0)

    def epoch_unless_stopped(learner, key):
        return jax.lax.cond(learner.approx_kl <= args.target_kl, epoch, skip_epoch, learner, key)

    def skip_epoch(learner, key):
        _, metrics_and_weight = jax.eval_shape(epoch, learner, key)
        return learner, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics_and_weight)

    first_targets, return_stats = compute_targets(args, state.agent, state.return_stats, batch, state.timestep.obs)
    learner = Learner(state.agent, return_stats, first_targets, approx_kl=jnp.zeros(()))
    learner, (metrics, weight) = jax.lax.scan(
        epoch if args.target_kl is None else epoch_unless_stopped, learner, jax.random.split(key, args.update_epochs)
    )
    metrics = {name: masked_mean(values, weight) for name, values in metrics.items()}
    valid, returns, values = (x.reshape(-1) for x in (batch.valid, first_targets.returns, first_targets.old_value))
    unexplained, var = (masked_var(x, valid, args.axis_name) for x in (returns - values, returns))
    metrics["losses/explained_variance"] = 1.0 - unexplained / var
    return learner, metrics


def episode_metrics(args: Args, batch: Transition) -> dict[str, jax.Array]:
    """Scores and lengths of whole games, nan where there is nothing to average over."""

    def mean(x, where):
        total, count = jax.lax.psum((x.sum(where=where), where.sum()), args.axis_name)
        return total / count

    ended = batch.info["game_over"]
    returns, lengths = batch.info["episodic_return"], batch.info["episodic_length"]
    any_ended = ~jnp.isnan(returns[-1])
    return {
        "charts/episodes": jax.lax.psum(ended.sum(), args.axis_name),
        "charts/episodic_return": mean(returns, ended),
        "charts/episodic_length": mean(lengths, ended),
        "charts/avg_episodic_return": mean(returns[-1], any_ended),
        "charts/avg_episodic_length": mean(lengths[-1], any_ended),
    }


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def learn(args: Args, state: RunnerState, batch: Transition) -> tuple[RunnerState, dict[str, jax.Array]]:
    args = replace(args, **state.hyperparameters)
    remaining = 1.0 - state.iteration / args.num_iterations
    learning_rate = args.learning_rate * remaining if args.anneal_lr else jnp.array(args.learning_rate)
    hyperparams = {"learning_rate": learning_rate, "max_grad_norm": jnp.array(args.max_grad_norm)}
    agent = state.agent.replace(opt_state=state.agent.opt_state._replace(hyperparams=hyperparams))

    key, update_key = jax.random.split(state.key)
    learner, metrics = update(args, state.replace(agent=agent), batch, update_key)
    finite = are_finite(args, state, batch, learner, metrics["losses/loss"])
    learned = {"agent": learner.agent, "return_stats": learner.return_stats}
    if args.skip_nonfinite_updates:
        before = {"agent": agent, "return_stats": state.return_stats}
        all_finite = jnp.array(list(finite.values())).all()
        learned = jax.tree.map(partial(jnp.where, all_finite), learned, before)
        metrics["charts/skipped_updates"] = 1.0 - all_finite
    metrics = {"charts/learning_rate": learning_rate, **episode_metrics(args, batch), **metrics, **finite}
    return state.replace(**learned, iteration=state.iteration + 1, key=key), metrics


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def are_finite(args: Args, state: RunnerState, batch: Transition, learner: Learner, loss) -> dict[str, jax.Array]:
    """Of each quantity whether all its values, on all devices, are finite."""

    def finite(tree):
        all_finite = jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
        return jax.lax.psum(1 - all_finite, args.axis_name) == 0

    return {
        "finite/observation": finite((batch.obs, state.timestep.obs)),
        "finite/reward": finite(batch.reward),
        "finite/loss": finite(loss),
        "finite/gradient": finite(learner.agent.params),  # Adam passes it on to them
    }


# ---------------------------------------------------------------- many lanes on many devices
# A lane is a training of its own, with its seed, or with learning rate and the like of its own. All lanes on all
# devices are one program: arrays gain the leading axes [num_devices, num_lanes]. Where one device trains each lane
# (--num-devices 1), the lanes are spread over the devices that there are; on a CPU, `start_jax` makes each core one.
MAY_DIFFER = ("seed", "learning_rate", "gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm")


MESH_AXES = ("devices", "lanes")  # each lane's environments are spread over the one, the lanes over the other


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def training_mesh(args: Args) -> jax.sharding.Mesh:
    if args.num_devices > 1:  # as many of each process
        n = args.num_devices // jax.process_count()
        devices = [jax.local_devices(process_index=i)[:n] for i in range(jax.process_count())]
        return jax.sharding.Mesh(np.array(devices).reshape(-1, 1), MESH_AXES)
    n = largest_divisor(args.num_seeds, jax.local_device_count())
    return jax.sharding.Mesh(np.array(jax.local_devices()[:n]).reshape(1, -1), MESH_AXES)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def largest_divisor(n: int, limit: int) -> int:
    return max(i for i in range(1, limit + 1) if n % i == 0)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def num_cores() -> int:
    """Of this machine, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def without_axis(function: Callable) -> Callable:
    """`function` for arrays with one more axis in front, of length 1."""

    def call(*inputs):
        outputs = function(*jax.tree.map(lambda x: x[0], inputs))
        return jax.tree.map(lambda x: x[None], outputs)

    return call


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def one_after_another(function: Callable) -> Callable:
    """Like `jax.vmap`, in turn: on a CPU the small matrices of several lanes together are slower than one by one."""
    return lambda *inputs: jax.lax.map(lambda inputs: function(*inputs), inputs)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def parallel(function: Callable, args: Args, in_turn: bool = False) -> Callable:
    """`function` of one lane on one device, compiled for all: its arrays are [num_devices, num_seeds, ...]."""
    mesh, spec = training_mesh(args), jax.sharding.PartitionSpec(*MESH_AXES)
    if args.num_seeds == mesh.shape["lanes"]:
        function = without_axis(function)
    elif in_turn and jax.default_backend() == "cpu":
        function = one_after_another(function)
    else:
        function = jax.vmap(function)
    function = without_axis(function)
    if mesh.size > 1:
        function = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    # JAX never forgets the type of what it was donated, which holds the environments: on a CPU nothing is gained by it.
    return jax.jit(function, donate_argnums=() if jax.default_backend() == "cpu" else 0)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
@lru_cache
def compiled(function: Callable, args: Args) -> Callable:
    return parallel(partial(function, args), args, in_turn=function is learn)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def init_lanes(lanes: list[Args], env: VectorEnvWrapper, restore: Callable | None = None) -> RunnerState:
    """Of new trainings, or of those whose checkpoints `restore` makes one of, shaped like the one it gets."""
    args = replace(lanes[0], num_seeds=len(lanes))
    values = {name: [getattr(lane, name) for lane in lanes] for name in MAY_DIFFER}
    dtypes = {name: np.uint32 if name == "seed" else np.float32 for name in MAY_DIFFER}
    values = {name: np.array(x, dtypes[name]) for name, x in values.items() if len(set(x)) > 1}

    def init(handle, obs, hyperparameters, checkpoint=None):
        state = init_state(replace(args, **hyperparameters), env.replace(handle=handle), obs, checkpoint)
        return state.replace(hyperparameters=hyperparameters)

    obs = env.reset_fn()
    handle = np.broadcast_to(env.handle, (*obs.shape[:2], *env.handle.shape))
    values = {name: np.broadcast_to(x, obs.shape[:2]) for name, x in values.items()}
    inputs = for_all_processes(args, (handle, obs, values))
    # In turn, as JAX's QR decomposition of a batch, for orthogonal weights, waits for threads that may all wait alike.
    init_all = parallel(init, args, in_turn=True)
    if restore is None:
        return init_all(*inputs)
    template = checkpointed(jax.eval_shape(init_all, *inputs))
    checkpoint = restore(flax.serialization.to_state_dict(template))
    first = jax.process_index() * len(obs)
    checkpoint = jax.tree.map(lambda x: x[first : first + len(obs)], checkpoint)
    return init_all(*inputs, for_all_processes(args, checkpoint))


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def for_all_processes(args: Args, tree):
    """Arrays [devices of this process, num_lanes, ...] as those of all devices: the other processes bring theirs."""
    if jax.process_count() == 1:
        return tree
    sharding = jax.sharding.NamedSharding(training_mesh(args), jax.sharding.PartitionSpec(*MESH_AXES))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), tree)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def train_iteration(args: Args, state: RunnerState) -> tuple[RunnerState, dict[str, jax.Array]]:
    """Two compiled calls, since JAX's compilation cache can keep the second: the first holds EnvPool's address."""
    state, batch = compiled(rollout, args)(state)
    return compiled(learn, args)(state, batch)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def fetch(tree):
    """NumPy arrays [num_seeds, ...], as they are on the first device that has them in this process."""
    own = jax.tree.map(lambda x: x if x.is_fully_addressable else x.addressable_data(0), tree)
    return jax.tree.map(lambda x: x[0], jax.device_get(own))


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def fetch_all(tree):
    """NumPy arrays [num_devices, num_seeds, ...], of all processes; each of them has to call this."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


# ---------------------------------------------------------------- run
# copied from cleanrl_utils/errors.py
def usage_error(message: str) -> NoReturn:
    """A user's mistake: one line that says what is wrong and what to do, exit code 2."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


# copied from ppo_envpool_xla_jax_scan.py
def check_args(args: Args) -> None:
    """Ends the program (see `usage_error`) if a value is out of range or the sizes don't fit together."""
    tiny, huge = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    for names, low, high, allowed in [
        ("seed", 0, 2**32 - 1, "0 to 4294967295"),
        ("total_timesteps num_minibatches update_epochs eval_interval video_interval", 1, np.inf, "1 or more"),
        ("num_envs num_steps", 1, 1_000_000, "1 or more, up to 1,000,000"),
        ("eval_episodes hidden_size num_seeds num_processes", 1, 10_000, "1 or more, up to 10,000"),
        ("num_devices process_id", 0, 10_000, "0 or more, up to 10,000"),
        ("learning_rate max_grad_norm target_kl", tiny, huge, "a number above 0"),
        ("checkpoint_interval", 0, huge, "a number of minutes, or 0 for no checkpoints"),
        ("clip_coef", tiny, 1, "a number above 0, up to 1"),
        ("gamma gae_lambda", 0, 1, "a number from 0 to 1"),
        ("ent_coef vf_coef", 0, huge, "0 or more"),
    ]:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:
                usage_error(f"--{name.replace('_', '-')} {value}: give {allowed}")
    name = args.exp_name
    if not name.isprintable() or not 0 < len(name.encode()) <= 100 or "/" in name or name.startswith("."):
        usage_error(f"--exp-name {name!r}: it names files, so give 1 to 100 bytes of printable text without '/'")
    if args.batch_size % args.num_minibatches:
        divisors = [n for n in range(1, math.isqrt(args.batch_size) + 1) if args.batch_size % n == 0]
        divisors += [args.batch_size // n for n in divisors]
        below = [max(n for n in divisors if n < args.num_minibatches)]
        above = sorted(n for n in divisors if n > args.num_minibatches)[:1]
        usage_error(
            f"--num-minibatches {args.num_minibatches} does not divide --num-envs x --num-steps = {args.num_envs} x "
            f"{args.num_steps} = {args.batch_size}: the nearest to do so: {' and '.join(map(str, below + above))}"
        )
    if not args.save_model and (args.capture_video or args.upload_model or args.eval_interval):
        usage_error("--capture-video, --upload-model and --eval-interval save the model: leave out --no-save-model")
    if args.upload_model:
        from cleanrl_utils.hub import check_repository_name

        check_repository_name(args)
    if args.video_interval and not (args.capture_video and args.eval_interval):
        usage_error("--video-interval counts evaluations to record: give --capture-video and --eval-interval too")
    if args.total_timesteps < args.batch_size:
        usage_error(
            f"--total-timesteps {args.total_timesteps} is less than one rollout of --num-envs x --num-steps = "
            f"{args.batch_size} steps: give {args.batch_size} or more"
        )
    if args.seed + args.num_seeds > 2**32:
        usage_error(f"--seed {args.seed} with --num-seeds {args.num_seeds} goes beyond 4294967295: give a smaller seed")
    if args.num_processes is None and (args.process_id is not None or args.coordinator_address is not None):
        usage_error("--process-id and --coordinator-address are of several processes: give --num-processes too")
    if args.num_iterations >= 2**31:
        usage_error(f"--total-timesteps {args.total_timesteps} is more than {2**31 - 1} rollouts: give fewer")


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def are_vectors(obs_space: gym.Space) -> bool:
    """Whether the observations are vectors of numbers, or integers of a Discrete space: neither pixels nor bits."""
    leaves = space_leaves(obs_space)
    are_numbers = all(isinstance(x, gym.spaces.Box | gym.spaces.Discrete) and x.dtype != np.uint8 for x in leaves)
    return are_numbers and all(len(x.shape) < 3 for x in leaves)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def are_pixels(obs_space: gym.Space) -> bool:
    """Whether the observations are pictures, as bytes."""
    return isinstance(obs_space, gym.spaces.Box) and obs_space.dtype == np.uint8 and len(obs_space.shape) == 3


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def serving_script(action_space: gym.Space, obs_space: gym.Space) -> str:
    """The end of a line that refuses such an environment: which script serves those that EnvPool has."""
    if are_vectors(obs_space) and isinstance(action_space, gym.spaces.Discrete):
        return "and cleanrl/ppo_envpool_xla_jax_scan.py serves EnvPool's with Discrete actions"
    if are_pixels(obs_space) and isinstance(action_space, gym.spaces.Discrete):
        return "and cleanrl/ppo_atari_envpool_xla_jax_scan.py serves EnvPool's with Discrete actions and pixels"
    are_floats = are_vectors(obs_space) and all(x.dtype.kind == "f" for x in space_leaves(obs_space))
    if are_floats and isinstance(action_space, gym.spaces.Box):
        return "and cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py serves EnvPool's with a Box of actions"
    return "and none serves it yet"


def check_env_id(env_id: str) -> None:
    """Ends the program (see `usage_error`) unless env_id has a Discrete action space and pixels."""
    all_ids = envpool.list_all_envs()
    if env_id not in all_ids:
        close = difflib.get_close_matches(env_id, all_ids) or ["none that is close; envpool.list_all_envs() lists all"]
        usage_error(f"--env-id {env_id}: EnvPool has no such environment; there is {', '.join(close)}")
    try:
        spec = envpool.make_spec(env_id)
    except Exception as error:
        usage_error(f"--env-id {env_id}: EnvPool can't make it: {' '.join(str(error).split())}")
    action_space, obs_space = spec.gymnasium_action_space, spec.gymnasium_observation_space
    which_serves = serving_script(action_space, obs_space)
    if not isinstance(action_space, gym.spaces.Discrete):
        usage_error(f"--env-id {env_id} takes {action_space} actions; this script needs Discrete ones, {which_serves}")
    if action_space.start != 0:
        usage_error(f"--env-id {env_id} counts its actions from {action_space.start}; this script counts from 0")
    if not are_pixels(obs_space):
        usage_error(f"--env-id {env_id} returns no pictures; this script needs pixels, {which_serves}")
    if spec.config.max_num_players > 1:
        usage_error(f"--env-id {env_id} has several players; this script trains one, and none serves it yet")


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def start_jax(args: Args) -> Args:
    """Joins the processes and switches the compilation cache on; returns the arguments with the number of devices."""
    if args.compilation_cache and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache_folder = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cleanrl", "jax"
        )
        jax.config.update("jax_compilation_cache_dir", cache_folder)
        jax.config.update("jax_compilation_cache_max_size", 2**30)
        # The rollout, which would never be found again as it holds EnvPool's address, compiles in less.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.5)
    cpu_devices = args.num_devices or int(os.environ.get("JAX_NUM_CPU_DEVICES", 1))
    if args.num_devices == 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        cpu_devices = largest_divisor(args.num_seeds, num_cores())
        with suppress(RuntimeError):  # JAX has started already: this is not the first training of this process
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    if args.num_processes is not None:
        try:
            jax.distributed.initialize(
                args.coordinator_address, args.num_processes, args.process_id, heartbeat_timeout_seconds=10
            )
        except (RuntimeError, ValueError) as error:
            usage_error(
                f"the {args.num_processes} processes can't meet ({' '.join(str(error).split())}): give each its "
                "--process-id, and all the same --coordinator-address host:port, of process 0"
            )
    # How many threads XLA has on a CPU. They spin while they wait, at the expense of EnvPool's: with small networks
    # one a device is fastest, by a fifth. Devices that share a training need one more, or may wait for each other.
    threads = cpu_devices + (cpu_devices > 1 and args.num_devices != 1)
    if cpu_devices == 1 and args.hidden_size > 128:
        threads = num_cores()
    users_choice = os.environ.get("NPROC")
    os.environ.setdefault("NPROC", str(threads))
    num_devices = args.num_devices or jax.device_count()
    jax.block_until_ready(jnp.zeros(()) + 1)  # with it JAX has started its threads
    if users_choice is None:
        del os.environ["NPROC"]  # it is not for the processes that this one may start
    if num_devices > jax.device_count():
        usage_error(
            f"--num-devices {num_devices}: JAX sees {jax.device_count()} {jax.default_backend()} device(s); "
            f"JAX_NUM_CPU_DEVICES={num_devices} in the environment makes as many of a CPU"
        )
    if num_devices % jax.process_count():
        usage_error(f"--num-devices {num_devices} is not a multiple of the {jax.process_count()} processes")
    if args.num_envs % num_devices or args.batch_size // num_devices % args.num_minibatches:
        usage_error(
            f"--num-devices {num_devices} has to divide --num-envs {args.num_envs}, and --num-minibatches "
            f"{args.num_minibatches} the {args.batch_size // num_devices} steps that each device collects"
        )
    return replace(args, num_devices=num_devices)


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def script_name() -> str:
    return os.path.basename(__file__)[: -len(".py")]


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def versions() -> dict[str, str]:
    return {package: version(package) for package in ("envpool", "flax", "jax", "numpy")}


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def save_model(path: str, args: Args, state: RunnerState) -> None:
    """Arguments, parameters and wrapper statistics as msgpack: data with names, nothing executable."""
    from cleanrl_utils.models import packed
    from cleanrl_utils.running import evaluation_path, write_file

    with suppress(FileNotFoundError):
        os.remove(evaluation_path(path))  # it was of the model before
    model = {
        "script": script_name(),
        "args": asdict(args),
        "params": state.agent.params,
        "wrappers": {type(w).__name__: w.stats for w in state.env.wrappers if hasattr(w, "stats")},
        "versions": versions(),
    }
    write_file(path, packed(model))


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def train(lanes: list[Args]) -> list:
    """Trains the lanes side by side, see `MAY_DIFFER`; each leaves what it would have left alone: a `running.Run`."""
    from cleanrl_utils import checkpoints, running

    args = replace(lanes[0], num_seeds=len(lanes))
    for name in asdict(args).keys() - {*MAY_DIFFER, "exp_name", "num_seeds", "resume"}:
        if any(getattr(lane, name) != getattr(args, name) for lane in lanes):
            raise ValueError(f"{name} can't differ between lanes: train those with another {name} apart")
    loaded, restore, done, seconds = [], None, 0, 0.0  # done: the iterations that a run that goes on has behind it
    if args.resume:
        loaded = checkpoints.load(lanes, script_name())
        restore = partial(checkpoints.restore_states, checkpoints=loaded, folders=[lane.resume for lane in lanes])
        done, seconds = loaded[0]["global_step"] // args.batch_size, loaded[0]["seconds"]

    with running.stop_signals() as (stop_signals_received, collect_stop_signals), ExitStack() as at_exit:
        at_exit.callback(jax.clear_caches)  # the compiled functions hold the environments
        at_exit.callback(compiled.cache_clear)
        state = init_lanes(lanes, make_env(*lanes, iteration=done), restore)
        runs = running.make_runs(sys.modules[__name__], lanes, stop_signals_received, loaded)
        for run in runs:
            at_exit.callback(run.close)
        checkpoint_writer = at_exit.enter_context(closing(checkpoints.CheckpointWriter()))
        progress = running.Progress(args, len(lanes), args.progress and bool(runs), done)
        start_time = time.monotonic() - seconds
        checkpoint_time = time.monotonic()
        global_step, stopped = done * args.batch_size, False
        for iteration in range(done + 1, args.num_iterations + 1):
            iteration_start_time = time.monotonic()
            state, metrics = train_iteration(args, state)
            metrics = fetch(metrics)  # the one wait for the device
            collect_stop_signals()  # until the first iteration, which compiles, there is nothing to save
            global_step = iteration * args.batch_size
            seconds = time.monotonic() - start_time
            speeds = {
                "charts/SPS": global_step / seconds,
                "charts/SPS_update": args.batch_size / (time.monotonic() - iteration_start_time),
            }
            finite = {name: metrics.pop(name) for name in list(metrics) if name.startswith("finite/")}
            progress.update(args, metrics)
            for i, run in enumerate(runs):
                run.log({name: values[i] for name, values in metrics.items()} | speeds, global_step)
                run.check_finite({name: values[i] for name, values in finite.items()}, global_step)
            if not args.skip_nonfinite_updates and not np.all(list(finite.values()), axis=0).any():
                sys.exit(1)  # all lanes have diverged

            is_last = iteration == args.num_iterations
            minutes = (time.monotonic() - checkpoint_time) / 60
            is_due = minutes > args.checkpoint_interval and not checkpoint_writer.is_busy
            stopped, checkpoint_due = running.agree(bool(stop_signals_received), is_due)
            evaluation_due = args.eval_interval and iteration % args.eval_interval == 0
            if evaluation_due and not stopped and not is_last:
                evaluation_start_time = time.monotonic()
                recorded = args.video_interval and iteration // args.eval_interval % args.video_interval == 0
                running.save_models(runs, fetch(state))
                running.evaluate_models(runs, global_step, f"-step{global_step}" if recorded else None)
                start_time += time.monotonic() - evaluation_start_time  # so that SPS is the training's
                (stopped,) = running.agree(bool(stop_signals_received))
            if args.checkpoint_interval and (checkpoint_due or stopped or is_last):
                running.save_checkpoints(runs, checkpoint_writer, fetch_all(checkpointed(state)), global_step, seconds)
                checkpoint_time = time.monotonic()
            if stopped:
                break
        progress.close()
        if args.save_model:
            running.save_models(runs, fetch(state), is_last=True)
        running.print_summary(runs, global_step, seconds, stopped)
        if args.save_model and not stopped:
            running.evaluate_models(runs, global_step, "" if args.capture_video else None)
            running.agree(False)  # no process leaves while the first one evaluates
    if stopped or stop_signals_received:
        sys.exit(128 + (stop_signals_received[0][0] if stop_signals_received else signal.SIGTERM))
    if any(run.diverged or run.model_lost for run in runs):
        sys.exit(1)
    return runs


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def parse_args(argv: list[str] | None = None) -> Args:
    """From the command line; what it leaves out is, of a run that goes on, as it was."""
    args = tyro.cli(Args, args=argv)
    if args.resume is None:
        return args
    from cleanrl_utils.checkpoints import args_to_go_on_with

    return tyro.cli(Args, args=argv, default=args_to_go_on_with(args))


# copied from ppo_continuous_action_envpool_xla_jax_scan.py
def main(args: Args) -> None:
    check_args(args)
    args = start_jax(args)
    check_env_id(args.env_id)
    from cleanrl_utils.running import lanes_of, reason_of, say

    try:
        runs = train(lanes_of(args))
    except jax.errors.JaxRuntimeError as error:
        reason = reason_of(error)
        if jax.process_count() == 1:
            print(f"error: the training failed: {reason}", file=sys.stderr)
            sys.exit(1)
        print(f"a process that trains with this one is gone: start all anew ({reason})", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly exit would wait for the process that is gone, and abort
    if args.upload_model:
        from cleanrl_utils.huggingface import push_to_hub

        for run in runs:
            push_to_hub(run.folder, args.hf_entity)
    if runs:
        uv_run = "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""
        say("next:")
        say(f"  {uv_run}tensorboard --logdir runs")
        if args.save_model:
            exp_name = shlex.quote(args.exp_name)
            say(f"  {uv_run}python -m cleanrl_utils.enjoy --exp-name {exp_name} --env-id {args.env_id}")


if __name__ == "__main__":
    main(parse_args())

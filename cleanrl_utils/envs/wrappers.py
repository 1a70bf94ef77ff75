"""Gymnasium's wrappers as pure functions, of whatever arrays come in: NumPy's, JAX's (also traced) or torch's.

    wrappers = (RecordEpisodeStatistics(), NormalizeObservation(), RescaleAction.create(space), ClipAction(-1.0, 1.0))
    env = env.with_wrappers(*wrappers)  # listed from the environment outwards

A wrapper that carries state gets it, zeros on the device of the arrays, from its first `reset`; from then on its
types stay, and it can be carried by `jax.lax.scan`. Later resets keep the statistics. The autoreset mode is read off
the time step: with `info["final_obs"]` it is "same_step", without it "next_step".

Where the names and the numbers are Gymnasium's, so is the behaviour: https://gymnasium.farama.org/api/wrappers/table
Flags that depart from it are off by default. Docs: docs/envs/wrappers.md
"""

import math
from collections.abc import Callable
from functools import cache, partial, singledispatch
from typing import Any

import array_api_compat
import flax
import gymnasium as gym
import jax
import numpy as np
from gymnasium.spaces import Box

from cleanrl_utils.envs.base import EnvWrapper, TimeStep, inwards, outwards

static = partial(flax.struct.field, pytree_node=False)


# ---------------------------------------------------------------- arrays of any kind
@singledispatch
def array_namespace(x):
    """The module of functions for arrays like x, named as in the Python array API standard.

    NumPy's, JAX's, torch's and all others that array-api-compat knows or that have `__array_namespace__` need
    nothing. For another class of arrays: `array_namespace.register(ItsClass, lambda x: its_functions)`. Raises
    TypeError for what is no array, such as a dict observation.
    """
    try:
        return array_api_compat.array_namespace(x)
    except TypeError:
        raise TypeError(
            f"{type(x).__name__} is no array: flatten dict observations, or register another class of arrays with "
            "cleanrl_utils.envs.wrappers.array_namespace.register"
        ) from None


def array_like(x, like, dtype=None):
    """The numbers x as an array of the kind, the dtype if none is given, and the device of another one."""
    device = {} if array_api_compat.is_jax_array(like) else {"device": getattr(like, "device", None)}  # JAX knows best
    return array_namespace(like).asarray(x, dtype=like.dtype if dtype is None else dtype, **device)


def where_rows(mask, x, y):
    """x, [n, ...], where the mask, [n], is True, and y, such an array or a number, where it is not."""
    xp = array_namespace(x)
    return xp.where(xp.reshape(mask, (mask.shape[0], *[1] * (x.ndim - 1))), x, y)


def psum(x, axis_name):
    """The sum over all devices, or lanes of `jax.vmap`, that the axis names; x if it names none."""
    return jax.lax.psum(x, axis_name) if axis_name else x


def in_same_step(timestep: TimeStep) -> bool:
    return "final_obs" in timestep.info


def resets_next(timestep: TimeStep):
    """Where the next step only resets the environment and is no experience, [num_envs]."""
    done = timestep.done
    return array_namespace(done).zeros_like(done) if in_same_step(timestep) else done


def check_was_reset(wrapper: EnvWrapper, state) -> None:
    """Raises ValueError if the wrapper has none of the state that its `reset` makes."""
    if state is None:
        raise ValueError(f"{type(wrapper).__name__} has seen no reset yet: hand it the first time step by `reset`")


def map_obs(func: Callable, timestep: TimeStep) -> TimeStep:
    """The time step with `func` of its observations, the last ones of episodes under same-step included."""
    info = timestep.info
    if in_same_step(timestep):
        info = {**info, "final_obs": func(info["final_obs"])}
    return timestep.replace(obs=func(timestep.obs), info=info)


@flax.struct.dataclass
class Compose(EnvWrapper):
    """Several wrappers as one, listed from the environment outwards: for loops without a `VectorEnv`."""

    wrappers: tuple[EnvWrapper, ...]

    def reset(self, timestep):
        wrappers, timestep = outwards(self.wrappers, "reset", timestep)
        return self.replace(wrappers=wrappers), timestep

    def send(self, action):
        wrappers, action = inwards(self.wrappers, action)
        return self.replace(wrappers=wrappers), action

    def recv(self, timestep):
        wrappers, timestep = outwards(self.wrappers, "recv", timestep)
        return self.replace(wrappers=wrappers), timestep

    def observation_space(self, space):
        for wrapper in self.wrappers:
            space = wrapper.observation_space(space)
        return space

    def action_space(self, space):
        for wrapper in self.wrappers:
            space = wrapper.action_space(space)
        return space


# ---------------------------------------------------------------- statistics
@flax.struct.dataclass
class RunningMeanStd:
    """Mean and population variance of all entries so far, float32.

    The count, too, is float32: from 2**24 batches on, new ones weigh 1 / 2**24 of all.
    """

    mean: Any
    var: Any
    count: Any

    @classmethod
    def create(cls, example, axis_name=()):
        """For entries like the example: as if 1e-4 of mean 0 and variance 1 had been seen, Gymnasium's start."""
        xp = array_namespace(example)
        zeros = psum(xp.zeros_like(example, dtype=xp.float32), axis_name)  # shard_map is to see that all have the same
        return cls(mean=zeros, var=zeros + 1.0, count=xp.sum(zeros) + 1e-4)

    def update(self, batch, mask=None, axis_name=()):
        """Adds the entries of batch, [n, *shape], whose mask, [n], is True; those of all devices that the axis names.

        https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm
        """
        xp = array_namespace(batch)
        batch = xp.astype(batch, xp.float32)
        mask = xp.ones_like(xp.reshape(batch, (batch.shape[0], -1))[:, 0], dtype=xp.bool) if mask is None else mask
        added = psum(xp.sum(xp.astype(mask, xp.float32)), axis_name)
        divisor = xp.where(added > 0, added, xp.ones_like(added))
        batch_mean = psum(xp.sum(where_rows(mask, batch, 0.0), axis=0), axis_name) / divisor
        batch_var = psum(xp.sum(where_rows(mask, (batch - batch_mean) ** 2, 0.0), axis=0), axis_name) / divisor
        count = self.count + added
        old_share, new_share = self.count / count, added / count
        delta = batch_mean - self.mean
        var = old_share * self.var + new_share * batch_var + old_share * new_share * delta**2
        return self.replace(mean=self.mean + new_share * delta, var=var, count=count)

    def std(self, epsilon=1e-8):
        return array_namespace(self.var).sqrt(self.var + epsilon)

    def check_shape(self, shape, what: str) -> None:
        """Raises ValueError if these are not statistics of entries of that shape, to which they would be broadcast."""
        found, wanted = tuple(np.shape(self.mean)), tuple(shape)
        if found != wanted:
            raise ValueError(f"the statistics are of {what}s {list(found)}, one {what} is {list(wanted)}: pass its own")


@flax.struct.dataclass
class RecordEpisodeStatistics(EnvWrapper):
    """Return and length of the episodes that end: `info["episode"]`, "r" float32 and "l" int32, both [num_envs].

    The mask `info["_episode"]` says in which environments one did; in the others both are 0. Both are always there,
    whether or not an episode ended. There is no "t": compiled code has no clock. `return_queue` and `length_queue`,
    [buffer_length], end with those of the last `episode_count` episodes, oldest first; with buffer_length 0 they cost
    nothing. Rewards are summed as they arrive: put it inside of what changes them. Raises ValueError where `info` has
    that name already.
    """

    returns: Any = None
    lengths: Any = None
    reset_due: Any = None
    episode_count: Any = None
    return_queue: Any = None
    length_queue: Any = None
    buffer_length: int = static(default=100)
    stats_key: str = static(default="episode")

    def reset(self, timestep):
        reward = timestep.reward
        xp = array_namespace(reward)
        returns, lengths = (xp.zeros_like(reward, dtype=dtype) for dtype in (xp.float32, xp.int32))
        wrapper = self.replace(returns=returns, lengths=lengths, reset_due=xp.zeros_like(timestep.done))
        if self.episode_count is None:
            empty = xp.zeros_like(xp.broadcast_to(reward[:1], (self.buffer_length,)), dtype=xp.float32)
            count = xp.sum(lengths, dtype=xp.int32)
            wrapper = wrapper.replace(episode_count=count, return_queue=empty, length_queue=xp.astype(empty, xp.int32))
        return wrapper, self.with_episode(timestep, returns, lengths)

    def recv(self, timestep):
        check_was_reset(self, self.returns)
        xp, done = array_namespace(timestep.reward), timestep.done
        returns = where_rows(~self.reset_due, self.returns + xp.astype(timestep.reward, xp.float32), 0.0)
        lengths = where_rows(~self.reset_due, self.lengths + 1, 0)
        # The queue's next entries: the last ones of those that it has and of the ended episodes, in their order.
        rank = xp.cumulative_sum(xp.concat([xp.ones_like(self.length_queue), xp.astype(done, xp.int32)]))
        order = xp.searchsorted(rank, rank[: self.buffer_length] + rank[-1] - self.buffer_length)
        wrapper = self.replace(
            returns=where_rows(~done, returns, 0.0),
            lengths=where_rows(~done, lengths, 0),
            reset_due=resets_next(timestep),
            episode_count=self.episode_count + xp.sum(done, dtype=xp.int32),
            return_queue=xp.take(xp.concat([self.return_queue, returns]), order, axis=0),
            length_queue=xp.take(xp.concat([self.length_queue, lengths]), order, axis=0),
        )
        return wrapper, self.with_episode(timestep, returns, lengths)

    def with_episode(self, timestep, returns, lengths):
        key, done, info = self.stats_key, timestep.done, timestep.info
        if key in info or f"_{key}" in info:
            raise ValueError(f"info has {key!r} already: pass another stats_key to RecordEpisodeStatistics")
        episode = {"r": where_rows(done, returns, 0.0), "l": where_rows(done, lengths, 0)}
        return timestep.replace(info={**info, key: episode, f"_{key}": done})


@flax.struct.dataclass
class NormalizeObservation(EnvWrapper):
    """Observations less their running mean, over their running standard deviation, float32.

    The statistics, shapes of one observation, see every observation once before it is normalised: those of resets and
    the last ones of episodes as well. `training=False` freezes them, for evaluation, and needs them:
    `NormalizeObservation(stats, training=False)`; it raises ValueError without.

    epsilon: added to the variance.
    clip: bounds the normalised observations to [-clip, clip].
    skip_nonfinite: leave observations with a nan or an infinity out of the statistics, and pass them on as nan.
    axis_name: the statistics are those of all devices, or lanes of `jax.vmap`, that the axis names (JAX only).
    """

    stats: RunningMeanStd | None = None
    training: bool = static(default=True)
    epsilon: float = static(default=1e-8)
    clip: float | None = static(default=None)
    skip_nonfinite: bool = static(default=False)
    axis_name: str | tuple[str, ...] = static(default=())

    def recv(self, timestep):
        stats, (seen, mask) = self.stats, self.seen(timestep)
        if stats is None and not self.training:
            raise ValueError("frozen statistics are to be given: NormalizeObservation(stats, training=False)")
        if stats is None:
            stats = RunningMeanStd.create(seen[0, ...], self.axis_name)
        stats.check_shape(seen.shape[1:], "observation")
        if self.training:
            stats = stats.update(seen, mask, self.axis_name)
        return self.replace(stats=stats), map_obs(partial(self.normalize, stats), timestep)

    reset = recv

    def seen(self, timestep):
        """The observations of this step, [n, ...], and which of them count, [n]."""
        obs, done = timestep.obs, timestep.done
        xp = array_namespace(obs)
        mask = xp.ones_like(done)
        if in_same_step(timestep):
            obs, mask = xp.concat([obs, timestep.info["final_obs"]]), xp.concat([mask, done])
        return obs, mask & finite_rows(obs) if self.skip_nonfinite else mask

    def normalize(self, stats, obs):
        xp = array_namespace(obs)
        normalized = (xp.astype(obs, xp.float32) - stats.mean) / stats.std(self.epsilon)
        if self.clip is not None:
            normalized = xp.clip(normalized, -self.clip, self.clip)
        return where_rows(finite_rows(obs), normalized, math.nan) if self.skip_nonfinite else normalized

    def observation_space(self, space):
        bound = np.inf if self.clip is None else self.clip
        return Box(-bound, bound, space.shape, np.float32)


def finite_rows(x):
    """Which rows of x, [n, ...], hold finite numbers only, [n]."""
    xp = array_namespace(x)
    return xp.all(xp.reshape(xp.isfinite(xp.astype(x, xp.float32)), (x.shape[0], -1)), axis=1)


@flax.struct.dataclass
class NormalizeReward(EnvWrapper):
    """Rewards over the running standard deviation of the discounted return, float32; neither centred nor clipped.

    As in Gymnasium the return forgets what came before a terminal reward, which next-step autoreset carries into the
    next episode, and it survives truncation: `returns * gamma * (1 - terminated) + reward`.

    per_episode: the return is that of one episode, its last reward included: it starts at 0 after either end.
    training, stats, epsilon, axis_name: as in NormalizeObservation.
    """

    stats: RunningMeanStd | None = None
    returns: Any = None  # discounted, [num_envs]
    reset_due: Any = None
    gamma: float = static(default=0.99)
    epsilon: float = static(default=1e-8)
    training: bool = static(default=True)
    per_episode: bool = static(default=False)
    axis_name: str | tuple[str, ...] = static(default=())

    def reset(self, timestep):
        stats = self.stats
        if stats is None and not self.training:
            raise ValueError("frozen statistics are to be given: NormalizeReward(stats, training=False)")
        xp = array_namespace(timestep.reward)
        returns = xp.zeros_like(timestep.reward, dtype=xp.float32)
        if stats is None:
            stats = RunningMeanStd.create(returns[0, ...], self.axis_name)
        stats.check_shape((), "reward")
        wrapper = self.replace(stats=stats, returns=returns, reset_due=xp.zeros_like(timestep.done))
        return wrapper, timestep.replace(reward=xp.astype(timestep.reward, xp.float32))

    def recv(self, timestep):
        check_was_reset(self, self.returns)
        xp = array_namespace(timestep.reward)
        reward = xp.astype(timestep.reward, xp.float32)
        before = self.returns if self.per_episode else where_rows(~timestep.terminated, self.returns, 0.0)
        returns = where_rows(self.reset_due, self.returns, self.gamma * before + reward)
        stats = self.stats.update(returns, ~self.reset_due, self.axis_name) if self.training else self.stats
        if self.per_episode or in_same_step(timestep):
            returns = where_rows(~timestep.done, returns, 0.0)
        wrapper = self.replace(stats=stats, returns=returns, reset_due=resets_next(timestep))
        return wrapper, timestep.replace(reward=reward / stats.std(self.epsilon))


# ---------------------------------------------------------------- functions of rewards and observations
@flax.struct.dataclass
class TransformReward(EnvWrapper):
    """`func` of the rewards, [num_envs], except of those that `reset` returns.

    skip_reset_step: under next-step autoreset, leave the reward 0 of the step that only resets as it is.
    """

    func: Callable = static()
    skip_reset_step: bool = static(default=False)
    reset_due: Any = None

    def reset(self, timestep):
        reset_due = array_namespace(timestep.done).zeros_like(timestep.done)
        return self.replace(reset_due=reset_due if self.skip_reset_step else None), timestep

    def recv(self, timestep):
        reward = self.func(timestep.reward)
        if not self.skip_reset_step:
            return self, timestep.replace(reward=reward)
        check_was_reset(self, self.reset_due)
        reward = where_rows(self.reset_due, timestep.reward, reward)
        return self.replace(reset_due=resets_next(timestep)), timestep.replace(reward=reward)


@flax.struct.dataclass
class TransformObservation(EnvWrapper):
    """`func` of the observations of all environments, [num_envs, ...], the last ones of episodes included.

    new_space: one environment's new observation space, as a function of the old one, if it changes.
    """

    func: Callable = static()
    new_space: Callable[[gym.Space], gym.Space] = static(default=lambda space: space)

    def recv(self, timestep):
        return self, map_obs(self.func, timestep)

    reset = recv

    def observation_space(self, space):
        return self.new_space(space)


@flax.struct.dataclass
class GrayscaleObservation(EnvWrapper):
    """RGB images, uint8 [num_envs, height, width, 3], as their luminance, uint8 [num_envs, height, width].

    The weights are Gymnasium's, 0.2125, 0.7154 and 0.0721, rounded down, in integers: exact, whereas Gymnasium's
    64-bit sum falls below the whole number in 63 of the 2**24 colours and is 1 less. Raises TypeError for other
    shapes or dtypes.

    keep_dim: [num_envs, height, width, 1].
    """

    keep_dim: bool = static(default=False)

    def recv(self, timestep):
        return self, map_obs(self.gray, timestep)

    reset = recv

    def gray(self, obs):
        xp = array_namespace(obs)
        check_image(obs.shape[1:], obs.dtype, xp.uint8, channels=3)
        rgb = xp.astype(obs, xp.int32)
        gray = (2125 * rgb[..., 0] + 7154 * rgb[..., 1] + 721 * rgb[..., 2]) // 10000
        return xp.astype(gray[..., None] if self.keep_dim else gray, xp.uint8)

    def observation_space(self, space):
        check_image(space.shape, space.dtype, np.uint8, channels=3)
        return Box(0, 255, (*space.shape[:2], 1) if self.keep_dim else space.shape[:2], np.uint8)


@flax.struct.dataclass
class ResizeObservation(EnvWrapper):
    """Images, uint8 [num_envs, height, width] or [..., channels], resized to `shape`, (height, width), uint8.

    What OpenCV's INTER_AREA does, which is Gymnasium's: each new pixel is the mean of the old ones below it, weighted
    by how much of them is; if either side grows, both are interpolated linearly between two pixels. Raises TypeError
    for other shapes or dtypes.
    """

    shape: tuple[int, int] = static()

    def recv(self, timestep):
        return self, map_obs(self.resize, timestep)

    reset = recv

    def resize(self, obs):
        xp = array_namespace(obs)
        check_image(obs.shape[1:], obs.dtype, xp.uint8)
        sizes = obs.shape[1:3]
        shrinks = all(new <= old for old, new in zip(sizes, self.shape, strict=True))
        resized = xp.astype(obs, xp.float32)
        for axis in (2, 1):
            taps = (area_taps if shrinks else linear_taps)(obs.shape[axis], self.shape[axis - 1])
            resized = weighted_sum(resized, axis, *taps)
        if shrinks:  # by the area at last, so that sums of whole pixels are exact
            resized = resized * float(math.prod(self.shape) / math.prod(sizes))
        halved = sizes == (2 * self.shape[0], 2 * self.shape[1])
        # OpenCV rounds halves up where both sides are halved, and to the even number elsewhere.
        return xp.astype(xp.floor(resized + 0.5) if halved else xp.round(resized), xp.uint8)

    def observation_space(self, space):
        check_image(space.shape, space.dtype, np.uint8)
        return Box(0, 255, (*self.shape, *space.shape[2:]), np.uint8)


def check_image(shape, dtype, uint8, channels=None):
    ok = len(shape) in (2, 3) if channels is None else len(shape) == 3 and shape[2] == channels
    if not ok or dtype != uint8:
        expected = "[height, width] or [height, width, channels]" if channels is None else "[height, width, 3]"
        raise TypeError(f"observations are {dtype}{list(shape)}, not images, uint8{expected}")


def weighted_sum(x, axis, indices, weights):
    """sum_k weights[:, k] * x[indices[:, k]] along the axis."""
    xp, total = array_namespace(x), 0.0
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    for k in range(indices.shape[1]):
        taken = xp.take(x, array_like(indices[:, k], x, xp.int32), axis=axis)
        total = total + taken * xp.reshape(array_like(weights[:, k], x), shape)
    return total


@cache
def area_taps(old: int, new: int):
    """Which of the old pixels lie below each of the fewer new ones, and how much of each does: [new, most] both."""
    cells = np.arange(new)[:, None] * old // new + np.arange(-(-old // new) + 1)
    start, end = np.arange(new)[:, None] * old, np.arange(1, new + 1)[:, None] * old  # in 1 / new of an old pixel
    overlap = np.maximum(np.minimum(end, (cells + 1) * new) - np.maximum(start, cells * new), 0)
    used = overlap.any(axis=0)
    return np.minimum(cells, old - 1)[:, used], overlap[:, used] / new


@cache
def linear_taps(old: int, new: int):
    """The two old pixels between which each new one lies, and their weights, [new, 2] both, as INTER_AREA has them.

    With OpenCV's rounding errors: in some sizes a whole number falls below itself, and its pixel is the one before.
    """
    factor = new / old
    left = np.floor(np.arange(new) * (1 / factor)).astype(int)
    weight = (np.arange(1, new + 1) - (left + 1) * factor).astype(np.float32)
    weight = np.where((weight <= 0) | (left >= old - 1), 0.0, weight % 1.0)
    return np.stack([left, np.minimum(left + 1, old - 1)], axis=1), np.stack([1 - weight, weight], axis=1)


@flax.struct.dataclass
class FrameStackObservation(EnvWrapper):
    """The last `stack_size` observations, [num_envs, stack_size, ...], the newest last.

    An episode starts with its first observation behind padding: with padding_type "reset" that observation itself,
    with "zero" zeros, unless `padding`, one observation, is given. Raises ValueError for another padding_type.
    """

    stack_size: int = static()
    padding_type: str = static(default="reset")
    padding: Any = None
    frames: Any = None
    reset_due: Any = None

    def reset(self, timestep):
        wrapper = self.replace(
            frames=self.first_frames(timestep.obs),
            reset_due=array_namespace(timestep.done).zeros_like(timestep.done),
        )
        return wrapper, map_obs(self.first_frames, timestep)

    def recv(self, timestep):
        check_was_reset(self, self.frames)
        xp = array_namespace(timestep.obs)
        stacked = xp.concat([self.frames[:, 1:, ...], timestep.next_obs[:, None, ...]], axis=1)
        first = timestep.done if in_same_step(timestep) else self.reset_due
        frames = where_rows(first, self.first_frames(timestep.obs), stacked)
        info = {**timestep.info, "final_obs": stacked} if in_same_step(timestep) else timestep.info
        wrapper = self.replace(frames=frames, reset_due=resets_next(timestep))
        return wrapper, timestep.replace(obs=frames, info=info)

    def first_frames(self, obs):
        xp = array_namespace(obs)
        if self.padding is not None:
            padding = array_like(self.padding, obs)
        elif self.padding_type in ("reset", "zero"):
            padding = obs[:, None, ...] if self.padding_type == "reset" else xp.zeros_like(obs[:, None, ...])
        else:
            raise ValueError(f'padding_type is "reset" or "zero", not {self.padding_type!r}; or pass a padding')
        padding = xp.broadcast_to(padding, (obs.shape[0], self.stack_size - 1, *obs.shape[1:]))
        return xp.concat([padding, obs[:, None, ...]], axis=1)

    def observation_space(self, space):
        return gym.vector.utils.batch_space(space, self.stack_size)


# ---------------------------------------------------------------- actions
@flax.struct.dataclass
class ClipAction(EnvWrapper):
    """Actions, [num_envs, ...], are clipped to the bounds, of which one action has the shape, or which are numbers.

    replace_nan: an action that is nan becomes 0, before it is clipped, instead of reaching the environment.
    """

    low: Any
    high: Any
    replace_nan: bool = static(default=False)

    @classmethod
    def create(cls, space: gym.Space, **kwargs):
        """To the bounds of a space, of the actions just inside of this wrapper; raises TypeError if it is no Box.

        `env.single_action_space` is that space before `env.with_wrappers(ClipAction.create(...))`: next to the
        environment its own, outside of `RescaleAction` the rescaled one, that is `ClipAction(-1.0, 1.0)`.
        """
        check_box(space)
        return cls(space.low, space.high, **kwargs)

    def send(self, action):
        xp = array_namespace(action)
        if self.replace_nan:
            action = xp.where(xp.isnan(action), xp.zeros_like(action), action)
        return self, xp.clip(action, array_like(self.low, action), array_like(self.high, action))

    def action_space(self, space):
        return Box(-np.inf, np.inf, space.shape, space.dtype)


@flax.struct.dataclass
class RescaleAction(EnvWrapper):
    """Actions between `min_action` and `max_action` are mapped linearly to the bounds of the environment's."""

    scale: Any
    offset: Any
    min_action: Any = static()
    max_action: Any = static()

    @classmethod
    def create(cls, space: gym.Space, min_action=-1.0, max_action=1.0):
        """To the bounds of the environment's action space, from numbers or arrays like one action.

        Where the space has no bound, the new one is to be that infinity, and the action is only shifted to the other
        bound, as in Gymnasium. Raises TypeError if the space is no Box, ValueError for bounds that don't fit.
        """
        check_box(space)
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        new_low, new_high = (np.broadcast_to(np.float64(bound), space.shape) for bound in (min_action, max_action))
        if not (new_low < new_high).all():
            raise ValueError(f"min_action {min_action} is not below max_action {max_action}")
        unbounded_low = ~(np.isfinite(low) & np.isfinite(new_low))
        unbounded_high = ~(np.isfinite(high) & np.isfinite(new_high))
        if not ((low == new_low)[unbounded_low].all() and (high == new_high)[unbounded_high].all()):
            raise ValueError(f"where {space} has no bound, min_action or max_action is to be that infinity")
        with np.errstate(invalid="ignore"):
            scale = np.where(unbounded_low | unbounded_high, 1.0, (high - low) / (new_high - new_low))
            offset = np.where(unbounded_low, high - new_high, low - new_low * scale)
        offset = np.where(unbounded_low & unbounded_high, 0.0, offset)
        bounds = (hashable(bound) for bound in (min_action, max_action))
        return cls(scale.astype(np.float32), offset.astype(np.float32), *bounds)

    def send(self, action):
        return self, action * array_like(self.scale, action) + array_like(self.offset, action)

    def action_space(self, space):
        bounds = (np.broadcast_to(np.asarray(x, space.dtype), space.shape) for x in (self.min_action, self.max_action))
        return Box(*bounds, dtype=space.dtype)


def check_box(space):
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(f"continuous actions are clipped and rescaled, those of a Box of floats, not of {space}")


def hashable(x):
    """A number, or an array as nested tuples of them, to be static for `jax.jit`."""
    return tuple(map(hashable, x)) if np.ndim(x) else float(x)

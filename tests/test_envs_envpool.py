"""EnvPool's environments in compiled code against EnvPool's own steps, in plain NumPy."""

import os
import subprocess
import sys
from functools import partial

import envpool
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanrl_utils.envs.base import VectorEnv
from cleanrl_utils.envs.envpool_xla import from_pool, make

pytestmark = pytest.mark.usefixtures("compile_fast")

NUM_ENVS, NUM_STEPS = 3, 40


@jax.jit
def scan_steps(env, actions):
    return jax.lax.scan(lambda env, action: env.step(action), env, actions)


def rollout(env, actions):
    env, first = env.reset()
    _, timesteps = scan_steps(env, actions)
    return first, timesteps


def sample_actions(env_id, n=NUM_ENVS):
    space = envpool.make(env_id, env_type="gymnasium", num_envs=1).action_space
    rng = np.random.default_rng(1)
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(0, space.n, (NUM_STEPS, n)).astype(np.int32)
    return rng.uniform(space.low, space.high, (NUM_STEPS, n, *space.shape)).astype(np.float32)


def env_seeds(seed, n=NUM_ENVS):
    return (np.random.SeedSequence(seed).generate_state(n) >> 1).tolist()


def float32(tree):
    return jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tree)


# ---------------------------------------------------------------- steps
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Hopper-v4", "CheetahRun-v1"])
def test_next_step_is_envpools_own_loop_bit_for_bit(env_id):
    actions, limit = sample_actions(env_id), 15
    env = make(env_id, NUM_ENVS, seed=3, info_keys=["elapsed_step"], max_episode_steps=limit)
    first, timesteps = rollout(env, actions)

    options = {"env_type": "gymnasium", "num_envs": NUM_ENVS, "env_seed": env_seeds(3), "max_episode_steps": limit}
    pool = envpool.make(env_id, **options)
    jax.tree.map(np.testing.assert_array_equal, first.obs, float32(pool.reset()[0]))
    for k, action in enumerate(actions):
        obs, reward, terminated, truncated, info = pool.step(action)
        expected = float32((obs, reward, terminated, truncated, info["elapsed_step"]))
        timestep = jax.tree.map(lambda x, k=k: x[k], timesteps)
        returned = timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, timestep.info["elapsed_step"]
        jax.tree.map(np.testing.assert_array_equal, returned, expected)
    assert timesteps.done.any()
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("env_id", ["CartPole-v1", "CheetahRun-v1"])
def test_same_step_is_next_step_without_the_steps_that_reset(env_id):
    """With the same action at each step: where an environment is reset in a step of its own, the others go on."""
    actions = np.repeat(sample_actions(env_id)[:1] * 0 + 1, NUM_STEPS, axis=0)
    options = {"seed": 3, "info_keys": ["elapsed_step"], "max_episode_steps": 12}
    first, after = rollout(make(env_id, NUM_ENVS, autoreset="next_step", **options), actions)
    same_first, same = rollout(make(env_id, NUM_ENVS, autoreset="same_step", **options), actions)
    jax.tree.map(np.testing.assert_array_equal, same_first.obs, first.obs)
    jax.tree.map(np.testing.assert_array_equal, same_first.info["final_obs"], first.obs)
    for i in range(NUM_ENVS):
        resets = np.append(False, after.done[:-1, i])
        num_kept, num_resets = (~resets).sum(), resets.sum()
        for name in ("reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(same, name)[:num_kept, i], getattr(after, name)[~resets, i])
        np.testing.assert_array_equal(same.info["elapsed_step"][:num_kept, i], after.info["elapsed_step"][~resets, i])
        np.testing.assert_array_equal(joined(same.next_obs)[:num_kept, i], joined(after.obs)[~resets, i])
        ends = np.asarray(same.done[:, i])
        assert num_resets >= 2
        np.testing.assert_array_equal(joined(same.obs)[ends, i][:num_resets], joined(after.obs)[resets, i])
        np.testing.assert_array_equal(joined(same.obs)[~ends, i], joined(same.next_obs)[~ends, i])


def joined(obs):
    return np.concatenate(jax.tree.leaves(obs), axis=-1)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_steps_outside_of_compiled_code_and_resets_within_it(autoreset):
    actions = sample_actions("Pendulum-v1")[:4]
    _, expected = rollout(make("Pendulum-v1", NUM_ENVS, autoreset=autoreset), actions)
    env, first = jax.jit(lambda env: env.reset())(make("Pendulum-v1", NUM_ENVS, autoreset=autoreset))
    for k, action in enumerate(actions):
        env, timestep = env.send(action).recv()
        jax.tree.map(lambda x, xs, k=k: np.testing.assert_array_equal(x, xs[k]), timestep, expected)
    env, second = env.reset()
    assert (np.asarray(second.obs) != first.obs).any(axis=-1).all(), "the streams go on"
    types = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (first, timestep))
    assert types[0] == types[1]


def test_one_environment_resets_in_the_same_step_too():
    _, timesteps = rollout(make("CartPole-v1", 1, autoreset="same_step", max_episode_steps=5), np.ones((12, 1), int))
    np.testing.assert_array_equal(np.flatnonzero(timesteps.truncated), [4, 9])
    assert (np.abs(np.asarray(timesteps.obs)[[4, 9]]) <= 0.05).all()


def test_dict_observations_are_kept_or_flattened_on_request():
    actions = sample_actions("CheetahRun-v1")[:5]
    _, kept = rollout(make("CheetahRun-v1", NUM_ENVS, autoreset="same_step"), actions)
    flat_env = make("CheetahRun-v1", NUM_ENVS, autoreset="same_step", flatten_obs=True)
    _, flat = rollout(flat_env, actions)
    assert flat_env.single_observation_space.shape == (17,)
    np.testing.assert_array_equal(flat.obs, np.concatenate([kept.obs["position"], kept.obs["velocity"]], axis=-1))
    np.testing.assert_array_equal(flat.next_obs, flat.obs)


def test_spaces_hold_what_comes_with_its_dtypes():
    for env_id in ("CartPole-v1", "Hopper-v4", "CheetahRun-v1"):
        env = make(env_id, NUM_ENVS)
        _, timestep = env.reset()
        for i in range(NUM_ENVS):
            obs = jax.tree.map(lambda x, i=i: np.asarray(x)[i], timestep.obs)
            assert env.single_observation_space.contains(obs), env_id


# ---------------------------------------------------------------- seeds and devices
def test_seeds_share_no_stream():
    obs = np.concatenate([make("Pendulum-v1", 8, seed=seed).reset()[1].obs for seed in (1, 2, 3)])
    assert len(np.unique(obs, axis=0)) == 24
    np.testing.assert_array_equal(obs[:8], make("Pendulum-v1", 8, seed=1).reset()[1].obs)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_vmap_over_seeds_is_each_seed_alone(autoreset):
    actions = np.stack([sample_actions("Hopper-v4"), sample_actions("Hopper-v4")[::-1]])
    both = make("Hopper-v4", NUM_ENVS, seed=(5, 6), autoreset=autoreset, max_episode_steps=15)
    env, first = jax.vmap(VectorEnv.reset)(both)
    _, timesteps = jax.vmap(scan_steps)(env, actions)
    assert timesteps.done.any()
    for i, seed in enumerate((5, 6)):
        alone = make("Hopper-v4", NUM_ENVS, seed=seed, autoreset=autoreset, max_episode_steps=15)
        of_lane = jax.tree.map(lambda x, i=i: x[i], (first, timesteps))
        jax.tree.map(np.testing.assert_array_equal, of_lane, rollout(alone, actions[i]))


DEVICES = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from cleanrl_utils.envs.envpool_xla import make

def rollout(env, actions):
    env, first = env.reset()
    return first, jax.lax.scan(lambda env, action: env.step(action), env, actions)[1]

def on_device(env, actions):
    env, actions = jax.tree.map(lambda x: x[0], (env, actions))
    return jax.tree.map(lambda x: x[None], jax.vmap(rollout)(env, actions))

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
spec = jax.sharding.PartitionSpec("devices")
actions = np.random.default_rng(1).integers(0, 2, (2, 2, 30, 3))  # [num_devices, num_seeds, num_steps, num_envs]
for autoreset in ("next_step", "same_step"):
    env = make("CartPole-v1", 3, seed=(5, 6), autoreset=autoreset, num_devices=2)
    split = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(env, actions)
    for i, seed in enumerate((5, 6)):
        one_pool = make("CartPole-v1", 6, seed=seed, autoreset=autoreset)
        first, timesteps = jax.jit(rollout)(one_pool, np.concatenate(actions[:, i], axis=-1))
        assert timesteps.done.any()
        for expected, of_devices, axis in ((first, split[0], 0), (timesteps, split[1], 1)):
            joined = jax.tree.map(lambda x: np.concatenate(np.asarray(x[:, i]), axis=axis), of_devices)
            jax.tree.map(np.testing.assert_array_equal, joined, expected)
"""


def test_each_device_has_a_pool_of_its_own():
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    result = subprocess.run([sys.executable, "-c", DEVICES], env=environ, timeout=300, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- pools of one's own, and what is refused
@pytest.mark.parametrize("autoreset, batch_size", [("next_step", NUM_ENVS), ("same_step", 1)])
def test_a_pool_of_ones_own(autoreset, batch_size):
    make_pool = partial(envpool.make, "Pendulum-v1", env_type="gymnasium", num_envs=NUM_ENVS, env_seed=env_seeds(4))
    env = from_pool(make_pool(batch_size=batch_size))
    assert env.autoreset == autoreset
    actions = sample_actions("Pendulum-v1")[:5]
    expected = rollout(make("Pendulum-v1", NUM_ENVS, seed=4, autoreset=autoreset), actions)
    jax.tree.map(np.testing.assert_array_equal, rollout(env, actions), expected)


def reset(env_id):
    return make(env_id, 4).reset()[0]


def pool(**kwargs):
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, **kwargs)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: from_pool(gym.wrappers.vector.RecordEpisodeStatistics(pool())),
            "go past what wraps this pool: pass p",
        ),
        (lambda: from_pool(gym.make("CartPole-v1")), "this is no EnvPool: see envpool.make"),
        (lambda: from_pool(pool(batch_size=2)), "batch_size=2 of 4"),
        (lambda: from_pool(envpool.make("CartPole-v1", env_type="dm", num_envs=4)), "env_type='gymnasium'"),
        (lambda: make("CartPole-v1", 0), "num_envs=0: pass 1 or more"),
        (lambda: make("CartPole-v1", 4, autoreset="never"), "autoreset='never': pass one of 'next_step', 'same_step'"),
        (
            lambda: make("CartPole-v1", 4, info_keys=["lives"]),
            "info_keys='lives': EnvPool's info of this .* elapsed_step",
        ),
        (lambda: make("CartPole-v1", 4).reset(seed=1), "EnvPool takes its seed when it is made: pass it to"),
        (lambda: make("CartPole-v1", 4, seed=(1, 2)).reset(), r"leading axes \(2,\): use it under vmap over the seeds"),
        (lambda: make("Hoper-v4", 4), "EnvPool has no environment 'Hoper-v4': did you mean Hopper-v4"),
        (lambda: make("x", 4), r"EnvPool has no environment 'x': did you mean ([^,]*, ){20}\.\.\.\?"),
        (lambda: make("CartPole-v1", 4).step(jnp.zeros(4, int)), "no episodes yet: reset is next"),
        (lambda: from_pool(pool()).step(jnp.zeros(4, int)), "no episodes yet: reset is next"),
        (lambda: reset("CartPole-v1").step(jnp.zeros(3, int)), r"actions are int32\(3,\), the environment takes int"),
        (lambda: reset("Hopper-v4").step(jnp.zeros((4, 3), jnp.bfloat16)), r"bfloat16\(4, 3\), .* float32\(4, 3\)"),
        (
            lambda: jax.vmap(lambda action: reset("CartPole-v1").step(action))(jnp.zeros((2, 4), int)),
            "these are the environments of 1 seed.*: give make a tuple of seeds",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_pass(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)

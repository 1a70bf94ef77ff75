"""Environments written in JAX: a hand-made one with every kind of episode end, and those of the libraries."""

import subprocess
import sys
import textwrap
from importlib.util import find_spec

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.phys2d.pendulum import PendulumFunctional
from gymnasium.spaces import Box

from cleanrl_utils.envs import jax_envs
from cleanrl_utils.envs.base import TimeStep

pytestmark = pytest.mark.usefixtures("compile_fast")
autoresets = pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
no_gymnax = pytest.mark.skipif(find_spec("gymnax") is None, reason="gymnax is not installed")
no_playground = pytest.mark.skipif(find_spec("mujoco_playground") is None, reason="MuJoCo Playground is not installed")


class Count(jax_envs.JaxEnv):
    """Counts its steps, of which the action tells the last one; what it observes tells one episode from another."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Box(0.0, 1.0, (), np.float32)

    def reset(self, key):
        state = {"episode": jax.random.uniform(key), "count": 0, "noise": 0.0}  # Python's numbers: weakly typed
        return state, jnp.stack([state["episode"], 0.0])

    def step(self, state, action, key):
        state = {**state, "count": state["count"] + 1, "noise": jax.random.uniform(key)}
        obs = jnp.stack([state["episode"], state["count"]])
        return state, TimeStep(obs, 10 * state["count"], action > 0.5, False, {"count": state["count"], **state})


def make(num_envs=3, max_episode_steps=5, **kwargs):
    return jax_envs.make(Count(), num_envs, max_episode_steps=max_episode_steps, **kwargs)


def steps(env, actions):
    """Resets, and steps through the actions, [n, num_envs, ...], in one scan: the env and the n + 1 time steps."""

    def run(env, actions):
        env, first = env.reset()
        env, timesteps = jax.lax.scan(lambda env, action: env.step(action), env, actions)
        return env, jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, timesteps)

    return jax.device_get(jax.jit(run)(env, actions))


def equal(tree, other) -> bool:
    same = jax.tree.map(np.array_equal, jax.device_get(tree), jax.device_get(other))
    return all(jax.tree.leaves(same))


# The first environment terminates at its third step, the second is truncated after five, and the third terminates at
# the last step that it has. test_envs_conformance.py has the tables of all numbers.
LAST_ACTIONS = {0: (3, 4, 6, 7), 1: (), 2: (5,)}


def table_actions(num_steps):
    return np.array([[t in LAST_ACTIONS[i] for i in range(3)] for t in range(1, num_steps + 1)], np.float32)


@pytest.mark.parametrize(("autoreset", "num_episodes"), [("next_step", 3 + 2 + 2), ("same_step", 5 + 2 + 2)])
def test_episodes_start_from_states_of_their_own(autoreset, num_episodes):
    _, timestep = steps(make(autoreset=autoreset), table_actions(8))
    assert len(np.unique(timestep.obs[..., 0])) == num_episodes
    last, first = timestep.next_obs[1:, :, 0], timestep.obs[:-1, :, 0]
    goes_on = timestep.obs[1:, :, 1] > 0 if autoreset == "next_step" else np.full_like(last, True, bool)
    np.testing.assert_array_equal(last[goes_on], first[goes_on])  # the last observation is of the same episode
    np.testing.assert_array_equal(timestep.truncated[5], [False, True, False])  # the third one terminated


@autoresets
def test_streams_depend_on_the_seed_alone(autoreset):
    """Not on the number of environments, nor on how many are reset together, nor on what the others do."""
    actions = np.random.default_rng(1).random((20, 7)).astype(np.float32) < 0.3
    actions = actions.astype(np.float32)
    _, many = steps(make(7, seed=5, autoreset=autoreset, reset_batch_size=7, info_keys=["noise"]), actions)
    _, one_by_one = steps(make(7, seed=5, autoreset=autoreset, reset_batch_size=1, info_keys=["noise"]), actions)
    _, few = steps(make(3, seed=5, autoreset=autoreset, info_keys=["noise"]), actions[:, :3])
    assert equal(many, one_by_one)
    assert equal(jax.tree.map(lambda x: x[:, :3], many), few)
    noise = many.info["noise"][many.info["noise"] != 0]
    assert len(np.unique(noise)) == len(noise) > 100  # steps share no random number, nor do environments
    _, other = steps(make(7, seed=6, autoreset=autoreset), actions)
    assert not np.isin(other.obs[..., 0], many.obs[..., 0]).any()


def test_seeds():
    env = make(seed=4)
    first, second = (make().reset(seed=4)[1] for _ in range(2))
    assert equal(first, second) and equal(first, env.reset()[1])
    env, _ = env.reset()
    again = env.reset()[1]
    assert not np.isin(again.obs[:, 0], first.obs[:, 0]).any()  # without a seed the streams go on
    assert equal(env.reset(seed=4)[1], first)
    each = env.reset(seed=np.array([4, 9, 4]))[1].obs[:, 0]  # per environment
    assert each[0] == each[2] != each[1]
    assert equal(env.reset(seed=2**32 - 1)[1], env.reset(seed=2**32 - 1)[1])
    both = make(seed=(2**31 + 5, 2**32 - 1))
    assert equal(jax.vmap(lambda env: env.reset()[1].obs)(both)[1], env.reset(seed=2**32 - 1)[1].obs)
    for call in (both.reset, lambda: both.reset(seed=1)):
        with pytest.raises(ValueError, match=r"env has the leading axes \(2,\): use it under vmap over the seeds"):
            call()
    with pytest.raises(ValueError, match="2 seeds for 3 environments: pass one for each, or one for all"):
        env.reset(seed=[1, 2])


def test_many_seeds_under_vmap_are_each_seed_alone():
    actions = np.stack([table_actions(8), 1 - table_actions(8)])
    together = jax.vmap(steps_traced)(make(seed=(3, 8)), actions)
    by_traced_seed = jax.vmap(lambda seed, actions: steps_traced(make(), actions, seed))(jnp.array([3, 8]), actions)
    for i, seed in enumerate((3, 8)):
        alone = steps(make(seed=seed), actions[i])
        assert equal(jax.tree.map(lambda x, i=i: x[i], together), alone[1])
        assert equal(jax.tree.map(lambda x, i=i: x[i], by_traced_seed), alone[1])


def steps_traced(env, actions, seed=None):
    env, first = env.reset(seed)
    _, timesteps = jax.lax.scan(lambda env, action: env.step(action), env, actions)
    return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, timesteps)


def test_nothing_compiles_twice():
    env = make(info_keys=["count"])
    step = jax.jit(lambda env, action: env.step(action))
    env, timestep = env.reset()
    for _ in range(3):
        env, timestep = step(env, timestep.obs[:, 0])
    env, timestep = env.reset(seed=1)
    env, timestep = step(env, timestep.obs[:, 0])
    assert step._cache_size() == env.backend._reset._cache_size() == 1


def test_info_keys():
    _, timestep = steps(make(info_keys=["count"]), table_actions(5))
    assert timestep.info["count"].dtype == np.int32
    np.testing.assert_array_equal(timestep.info["count"][:, 0], [0, 1, 2, 3, 0, 1])  # 0: nothing happened in a reset
    assert not make().backend.info_types


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"autoreset": "SameStep"}, "autoreset='SameStep': pass one of 'next_step', 'same_step'"),
        ({"num_envs": 0}, "num_envs=0: pass 1 or more"),
        ({"max_episode_steps": -1}, "max_episode_steps=-1: pass 1 or more, or 0 for no limit"),
        ({"reset_batch_size": 4}, "reset_batch_size=4: pass 1 to num_envs=3"),
        ({"info_keys": ["x"]}, "info_keys='x': the info of this environment has count, episode, noise"),
    ],
)
def test_bad_arguments(kwargs, line):
    with pytest.raises(ValueError) as error:
        make(**kwargs)
    assert str(error.value) == line


def test_bad_environments():
    class Growing(Count):
        def step(self, state, action, key):
            _, timestep = super().step(state | {"count": jnp.sum(state["count"])}, action, key)
            return state | {"count": jnp.append(state["count"], 1)}, timestep

    class Forgetful(Count):
        def step(self, state, action, key):
            state, timestep = super().step(state, action, key)
            return {name: state[name] for name in ("episode", "count")}, timestep

    class Misshapen(Count):
        observation_space = Box(0, 1, (3,))

    class Fractional(Count):
        observation_space = Box(0, 255, (2,), np.uint8)

    with pytest.raises(TypeError, match="each step changes the types of the state"):
        jax_envs.make(Growing(), 2).reset()
    with pytest.raises(TypeError, match=r"the states of reset and step differ in \['noise'\]: return the same in both"):
        jax_envs.make(Forgetful(), 2).reset()
    with pytest.raises(TypeError, match=r"JaxBackend returns obs float32\(2, 2\) instead of float32\(2, 3\)"):
        jax_envs.make(Misshapen(), 2).reset()
    with pytest.raises(TypeError, match="observations are float32, their space says uint8: make both the same"):
        jax_envs.make(Fractional(), 2).reset()
    with pytest.raises(ValueError, match="PendulumFunctional is no JaxEnv: pass one of BraxEnv"):
        jax_envs.make(PendulumFunctional(), 2)
    with pytest.raises(ValueError, match="reset is next"):
        make().step(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"actions are float32\(2,\), the environment takes float32\(3,\)"):
        make().reset()[0].step(jnp.zeros(2))


def test_whole_numbers_of_another_size_and_pythons_are_cast():
    class Whole(Count):
        observation_space = Box(0, 255, (), np.uint8)

        def reset(self, key):
            return super().reset(key)[0], 0

        def step(self, state, action, key):
            state, timestep = super().step(state, action, key)
            return state, timestep.replace(obs=state["count"])

    _, timestep = steps(jax_envs.make(Whole(), 2), np.zeros((3, 2), np.float32))
    np.testing.assert_array_equal(timestep.obs[:, 0], [0, 1, 2, 3])
    assert timestep.obs.dtype == np.uint8


def test_two_devices():
    """Each has environments of its own, which are those of its seed."""
    program = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    from test_envs_jax import make, steps_traced, table_actions

    mesh = jax.sharding.Mesh(jax.devices(), ("devices",))
    actions = np.concatenate([table_actions(8), 1 - table_actions(8)], axis=1)

    def run(actions):
        return steps_traced(make(), actions, seed=4 + jax.lax.axis_index("devices"))

    shard_map = jax.shard_map(run, mesh=mesh, in_specs=P(None, "devices"), out_specs=P(None, "devices"))
    found = jax.jit(shard_map)(actions)
    for i in range(2):
        alone = jax.jit(lambda actions: steps_traced(make(), actions, seed=4 + i))(actions[:, 3 * i : 3 * i + 3])
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, 3 * i : 3 * i + 3], y), found, alone)
    """
    flags = "--xla_force_host_platform_device_count=2"
    code = (
        f"import os, sys; os.environ['XLA_FLAGS'] = '{flags}'; sys.path.insert(0, 'tests')\n{textwrap.dedent(program)}"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- Gymnasium's functional environments
@pytest.mark.parametrize("env_id", ["phys2d/CartPole-v1", "phys2d/Pendulum-v0"])
def test_functional_against_gymnasium(env_id):
    """One step of Gymnasium's own FunctionalJaxEnv from the same state."""
    env = jax_envs.make(jax_envs.FunctionalEnv(env_id), 4, seed=2)
    assert env.backend.max_episode_steps == gym.spec(env_id).max_episode_steps
    env, _ = env.reset()
    actions = np.array([env.single_action_space.sample() for _ in range(4)])
    next_env, timestep = env.step(actions)
    original = gym.make(env_id).unwrapped
    original.reset()
    for i in range(4):
        original.state = env.state.env[i]
        obs, reward, terminated, _, _ = original.step(actions[i])
        np.testing.assert_allclose(timestep.obs[i], obs, rtol=1e-6)
        np.testing.assert_allclose(timestep.reward[i], reward, rtol=1e-6)
        assert timestep.terminated[i] == terminated
        np.testing.assert_allclose(next_env.state.env[i], original.state, rtol=1e-6)


def test_functional_environment_whose_reset_returns_other_types():
    """CliffWalking's first state holds Python's numbers, and a scalar that becomes an array at the first step."""
    env = jax_envs.make(jax_envs.FunctionalEnv("tabular/CliffWalking-v0"), 2, max_episode_steps=20)
    actions = np.stack([[0, *[1] * 11, 2, 3], [1] * 14], axis=1)[..., None].astype(
        np.int32
    )  # around, and over the edge
    _, timestep = steps(env, actions)
    np.testing.assert_array_equal(timestep.terminated[:, 0], [0] * 13 + [1, 0])
    np.testing.assert_array_equal(timestep.obs[-2:, 0, 0], [47, 36])
    np.testing.assert_array_equal(timestep.reward[1:, 1], [-100] * 14)


def test_functional_env_of_another_kind():
    with pytest.raises(
        ValueError, match="CartPole-v1 is no functional environment .* pass it to gymnasium_callback.make"
    ):
        jax_envs.FunctionalEnv("CartPole-v1")


# ---------------------------------------------------------------- Brax
@pytest.fixture(scope="module")
def pendulum():
    """A Brax environment that falls within some ten steps, in the middle of its episodes, and its actions."""
    return jax_envs.BraxEnv("inverted_pendulum", backend="spring")


@pytest.fixture(scope="module")
def pendulum_run(pendulum):
    env = jax_envs.make(pendulum, 4, seed=1, autoreset="same_step", max_episode_steps=12)
    first, _ = env.reset()
    actions = jax.random.uniform(jax.random.key(0), (40, 4, 1), minval=-1.0)
    env, timestep = steps(env, actions)
    return first, actions, env, timestep


def test_brax_steps_are_its_own(pendulum, pendulum_run):
    first, actions, _, timestep = pendulum_run
    state = jax.tree.map(lambda x: x[0], first.state.env)
    step = jax.jit(pendulum.env.step)
    for t in range(5):
        state = step(state, actions[t, 0])
        np.testing.assert_allclose(timestep.info["final_obs"][t + 1, 0], state.obs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(timestep.reward[t + 1, 0], state.reward)


def test_brax_episodes(pendulum_run):
    """Fresh random first states, which Brax's own wrapper lacks; last ones kept; flags apart."""
    *_, timestep = pendulum_run
    angle = np.abs(timestep.info["final_obs"][1:, :, 1])
    np.testing.assert_array_equal(timestep.terminated[1:], angle > 0.2)  # Brax's own condition
    assert timestep.terminated.any() and timestep.truncated.any()
    assert not (timestep.terminated & timestep.truncated).any()
    first_obs = np.concatenate([timestep.obs[0], timestep.obs[timestep.done]])
    assert len(np.unique(first_obs, axis=0)) == len(first_obs) > 8
    assert (np.abs(first_obs) < 0.02).all()  # Brax draws them from +-0.01


def test_brax_dict_observations_and_no_limit():
    env = jax_envs.BraxEnv("fast", obs_mode="dict_pixels_state")
    assert set(env.observation_space) == {"state", "pixels/view_0", "pixels/view_1"}
    flat = jax_envs.make(env, 2, flatten_obs=True, max_episode_steps=0)
    assert flat.single_observation_space.shape == (2 + 2 * 48,)
    _, timestep = steps(flat, np.ones((1200, 2, 1), np.float32))
    assert not timestep.done.any()  # by default it ends after 1000
    assert env.max_episode_steps == 1000


@pytest.mark.parametrize("backend", ["positional", "generalized", "mjx"])
def test_brax_has_other_physics(backend):
    env = jax_envs.make(jax_envs.BraxEnv("inverted_pendulum", backend=backend), 2, seed=1, autoreset="same_step")
    step = jax.jit(lambda env, action: env.step(action))
    env, timestep = env.reset()
    for _ in range(3):
        before = timestep.obs
        env, timestep = step(env, jnp.full((2, 1), 0.5))
        assert timestep.obs.shape == (2, 4) and timestep.reward.shape == (2,)
        assert np.isfinite(timestep.obs).all() and (timestep.obs != before).any(axis=1).all()
    assert step._cache_size() == 1


def test_brax_misuse(pendulum):
    from brax import envs
    from brax.envs.wrappers.training import EpisodeWrapper

    with pytest.raises(ValueError, match="EpisodeWrapper is a wrapper of Brax's, .* pass env.unwrapped"):
        jax_envs.BraxEnv(EpisodeWrapper(envs.get_environment("fast"), 10, 1))
    with pytest.raises(ValueError, match="Brax has no environment 'hoper': did you mean hopper?"):
        jax_envs.BraxEnv("hoper")


# ---------------------------------------------------------------- gymnax
@no_gymnax
def test_gymnax():
    """Its own steps; its time limit is a truncation."""
    import gymnax

    env = jax_envs.make(jax_envs.GymnaxEnv("CartPole-v1"), 3, seed=1, autoreset="same_step")
    original, params = gymnax.make("CartPole-v1")
    env, _ = env.reset()
    actions = np.array([0, 1, 1], np.int32)
    _, timestep = env.step(actions)
    step = jax.vmap(lambda state, action: original.step_env(jax.random.key(0), state, action, params))
    obs, _, reward, terminated, _ = step(env.state.env, actions)
    np.testing.assert_allclose(timestep.info["final_obs"], obs)
    np.testing.assert_allclose(timestep.reward, reward)

    short = jax_envs.GymnaxEnv(original, params.replace(max_steps_in_episode=4))
    _, timestep = steps(jax_envs.make(short, 2), np.array([[0, 1]] * 6, np.int32))
    np.testing.assert_array_equal(timestep.truncated[:, 0], [0, 0, 0, 0, 1, 0, 0])
    assert not timestep.terminated.any()
    with pytest.raises(ValueError, match="gymnax has no environment 'CartPole': did you mean CartPole-v1?"):
        jax_envs.GymnaxEnv("CartPole")


# ---------------------------------------------------------------- MuJoCo Playground
@no_playground
def test_playground():
    env = jax_envs.PlaygroundEnv("CartpoleBalance", config_overrides={"impl": "jax"})
    assert env.max_episode_steps == 1000  # of its configuration
    env = jax_envs.make(env, 2, autoreset="same_step", max_episode_steps=3)
    _, timestep = steps(env, np.zeros((7, 2, 1), np.float32))
    np.testing.assert_array_equal(timestep.truncated[:, 0], [0, 0, 0, 1, 0, 0, 1, 0])
    first_obs = timestep.obs[[0, 3, 6]].reshape(6, -1)
    assert len(np.unique(first_obs, axis=0)) == 6

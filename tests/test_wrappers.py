"""The environment boundary: wrappers, one by one and together, and EnvPool behind them."""

from functools import partial

import envpool
import flax
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_pool import ScriptedPool

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo

PENDULUM = ppo.Args(env_id="Pendulum-v1", num_envs=4, eval_episodes=3)


def time_step(obs, reward=0.0, terminated=False, truncated=False):
    obs = jnp.asarray(obs, jnp.float32)
    full = partial(jnp.full, obs.shape[0])
    return ppo.TimeStep(obs, full(reward), full(terminated), full(truncated), info={})


def scan_steps(env, actions):
    """Steps through actions [n, num_envs, action_dim] inside jit and scan: the env and the stacked time steps."""
    return jax.jit(lambda env, actions: jax.lax.scan(lambda env, action: env.step(action), env, actions))(env, actions)


def make_env(monkeypatch, args, evaluation=False):
    """The script's `make_env`, and the seeds that it gave EnvPool."""
    seeds = []

    def make(*args, env_seed, **kwargs):
        seeds.extend(env_seed)
        return make_pool(*args, env_seed=env_seed, **kwargs)

    make_pool = envpool.make
    with monkeypatch.context() as patch:
        patch.setattr(ppo.envpool, "make", make)
        return ppo.make_env(args, evaluation=evaluation), seeds


# ---------------------------------------------------------------- the protocol
def test_the_base_wrapper_is_the_identity():
    wrapper, timestep, action = ppo.EnvWrapper(), time_step([[1.0]]), jnp.ones((1, 1))
    assert wrapper.reset(timestep) == (wrapper, timestep)
    assert wrapper.recv(timestep) == (wrapper, timestep)
    assert wrapper.send(action) == (wrapper, action)


@flax.struct.dataclass
class Affine(ppo.EnvWrapper):
    """Multiplies and adds, so that the order shows in the result; counts its calls, so that lost state shows."""

    calls: jax.Array
    factor: float = flax.struct.field(pytree_node=False)
    offset: float = flax.struct.field(pytree_node=False)

    def send(self, action):
        return self.replace(calls=self.calls + 1), action * self.factor + self.offset

    def recv(self, timestep):
        obs = timestep.obs * self.factor + self.offset
        return self.replace(calls=self.calls + 100), timestep.replace(obs=obs)

    def reset(self, timestep):
        wrapper, timestep = self.recv(timestep)
        return wrapper.replace(calls=self.calls + 10_000), timestep


def test_reset_and_recv_run_from_the_environment_outwards_and_send_inwards():
    pool = ScriptedPool(obs=[[[3.0]], [[4.0]]], low=[-9.0], high=[9.0])
    inner, outer = Affine(jnp.array(0), factor=2.0, offset=0.0), Affine(jnp.array(0), factor=1.0, offset=1.0)
    env, timestep = pool.make_env(inner, outer).reset()
    assert timestep.obs == 3 * 2 + 1  # the other way round it would be (3 + 1) * 2 = 8
    env, timestep = env.step(jnp.array([[5.0]]))
    assert timestep.obs == 4 * 2 + 1
    assert pool.last_action(env) == (5 + 1) * 2  # the outer wrapper is the first to see the action
    assert [int(wrapper.calls) for wrapper in env.wrappers] == [10_101, 10_101]


@pytest.mark.parametrize(
    "wrapper",
    [
        ppo.EnvWrapper(),
        ppo.VectorEnvEpisodeStats.create(2),
        ppo.VectorEnvNormObs(ppo.RunningMeanStd.create(3)),
        ppo.VectorEnvNormObs(ppo.RunningMeanStd.create(3), training=False),
        ppo.VectorEnvClipAct(jnp.array([-2.0]), jnp.array([2.0])),
    ],
    ids=lambda wrapper: type(wrapper).__name__,
)
def test_reset_send_and_recv_keep_the_types_of_the_carried_state(wrapper):
    """Otherwise the wrapper can't be carried by `lax.scan`."""

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    timestep = time_step(np.ones((2, 3)))
    after_reset, from_reset = wrapper.reset(timestep)
    after_recv, from_recv = after_reset.recv(timestep)
    after_send, _ = after_recv.send(jnp.ones((2, 1)))
    assert types(after_reset) == types(after_recv) == types(after_send)
    assert types(from_reset.obs) == types(from_recv.obs)


# ---------------------------------------------------------------- running statistics
@pytest.mark.parametrize("seed", range(3))
def test_running_mean_std_equals_numpy_over_all_masked_chunks(seed):
    rng = np.random.default_rng(seed)
    stats, seen = ppo.RunningMeanStd.create(2), []
    for scale in (1.0, 100.0, 0.1):
        batch = rng.normal(scale, scale, size=(50, 2)).astype(np.float32)
        mask = rng.random(50) < 0.7
        stats = stats.update(jnp.asarray(np.where(mask[:, None], batch, 1e6)), jnp.asarray(mask))
        seen.append(batch[mask])
    seen = np.concatenate(seen)
    np.testing.assert_allclose(stats.mean, seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(stats.var, seen.var(0), rtol=1e-4)
    np.testing.assert_allclose(stats.count, len(seen), rtol=1e-5)


def test_running_mean_std_without_a_mask_adds_everything_and_with_an_empty_one_nothing():
    stats = ppo.RunningMeanStd.create().update(jnp.array([1.0, 2.0, 6.0]))
    np.testing.assert_allclose([stats.mean, stats.var], [3, 14 / 3], rtol=1e-4)
    same = stats.update(jnp.full(3, 1e6), jnp.zeros(3))
    assert jax.tree.leaves(same) == jax.tree.leaves(stats)


def test_running_std_starts_at_one_and_is_never_zero():
    np.testing.assert_allclose(ppo.RunningMeanStd.create().std, 1.0, rtol=1e-6)
    np.testing.assert_allclose(ppo.RunningMeanStd(jnp.zeros(()), jnp.zeros(()), jnp.ones(())).std, 1e-4, rtol=1e-4)


# ---------------------------------------------------------------- episode statistics
def test_episode_stats_are_exact_and_leave_out_the_reset_step():
    nan = np.nan
    # Three environments: one terminates at step 2, one is truncated at step 3, one is done at steps 1 and 3. EnvPool
    # gives reward 0 in the step after; here it is 100, which must not be counted. Row 0 is what reset returns.
    reward = [[0, 0, 0], [1, 10, 5], [2, 10, 100], [100, 10, 7], [4, 100, 100], [5, 10, 1]]
    terminated = [[0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    truncated = [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0]]
    pool = ScriptedPool(np.zeros((6, 3, 1)), reward, terminated, truncated)
    env, _ = pool.make_env(ppo.VectorEnvEpisodeStats.create(3)).reset()
    _, timesteps = scan_steps(env, jnp.zeros((5, 3, 1)))
    returns, lengths = timesteps.info["episodic_return"], timesteps.info["episodic_length"]
    np.testing.assert_array_equal(returns, [[nan, nan, 5], [3, nan, 5], [3, 30, 7], [3, 30, 7], [9, 30, 7]])
    np.testing.assert_array_equal(lengths, [[nan, nan, 1], [2, nan, 1], [2, 3, 1], [2, 3, 1], [2, 3, 1]])


def test_reset_starts_new_episodes_and_keeps_the_last_finished_ones():
    pool = ScriptedPool(np.zeros((3, 1, 1)), reward=[[0], [1], [1]], truncated=[[0], [0], [1]])
    env, _ = pool.make_env(ppo.VectorEnvEpisodeStats.create(1)).reset()
    env, _ = scan_steps(env, jnp.zeros((2, 1, 1)))  # an episode of two steps; the next would be EnvPool's reset step
    env, _ = env.reset()
    env = env.replace(handle=pool.make_env().handle)
    env, timesteps = scan_steps(env, jnp.zeros((2, 1, 1)))
    np.testing.assert_array_equal(timesteps.info["episodic_length"], [[2], [2]])
    np.testing.assert_array_equal(env.wrappers[0].lengths, [2])
    np.testing.assert_array_equal(timesteps.info["episodic_return"], [[2], [2]])


# ---------------------------------------------------------------- observation normalisation
def norm_obs(stats, **kwargs):
    return ppo.VectorEnvNormObs(stats, **kwargs)


def test_norm_obs_equals_numpy_over_all_raw_observations_seen():
    raw = np.random.default_rng(0).normal([5.0, -50.0, 0.0], [1.0, 20.0, 0.1], size=(6, 4, 3)).astype(np.float32)
    done = np.zeros((6, 4))
    done[2, 1] = done[4, 3] = 1  # terminal observations and those of the reset step count as well
    pool = ScriptedPool(raw, terminated=done, truncated=done[::-1])
    env, timestep = pool.make_env(norm_obs(ppo.RunningMeanStd.create(3))).reset()
    outputs = [timestep.obs]
    env, timesteps = scan_steps(env, jnp.zeros((5, 4, 1)))
    outputs.extend(timesteps.obs)
    for k, obs in enumerate(outputs):
        seen = raw[: k + 1].reshape(-1, 3).astype(np.float64)  # up to now and including now, all environments alike
        np.testing.assert_allclose(obs, (raw[k] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(env.wrappers[0].stats.mean, seen.mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(env.wrappers[0].stats.var, seen.var(0), rtol=1e-2)
    np.testing.assert_allclose(env.wrappers[0].stats.count, 24, rtol=1e-4)


def test_norm_obs_treats_reset_and_recv_alike():
    timestep = time_step([[1.0, 2.0], [3.0, 5.0]])
    wrapper = norm_obs(ppo.RunningMeanStd.create(2))
    jax.tree.map(np.testing.assert_array_equal, wrapper.reset(timestep), wrapper.recv(timestep))


def test_norm_obs_clips_at_ten():
    stats = ppo.RunningMeanStd(jnp.zeros(1), jnp.ones(1), jnp.array(1e9))
    for wrapper in (norm_obs(stats), norm_obs(stats, training=False)):
        _, timestep = wrapper.recv(time_step([[-50.0], [-9.0], [9.0], [50.0]]))
        np.testing.assert_allclose(timestep.obs[:, 0], [-10, -9, 9, 10], rtol=1e-5)


def test_norm_obs_is_frozen_when_not_training():
    stats = ppo.RunningMeanStd(jnp.array([2.0]), jnp.array([4.0]), jnp.array(100.0))
    env, timestep = ScriptedPool([[[8.0]], [[0.0]]]).make_env(norm_obs(stats, training=False)).reset()
    np.testing.assert_allclose(timestep.obs, [[3.0]], rtol=1e-6)
    env, timestep = env.step(jnp.zeros((1, 1)))
    np.testing.assert_allclose(timestep.obs, [[-1.0]], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, env.wrappers[0].stats, stats)


def test_evaluation_freezes_the_statistics_and_training_does_not():
    for evaluation in (True, False):
        env = ppo.make_env(PENDULUM, evaluation=evaluation)
        counts = [stats_of(env).count]
        env, _ = env.reset()
        counts.append(stats_of(env).count)
        env, _ = env.step(jnp.zeros(env.action_shape))
        counts.append(stats_of(env).count)
        new = 0 if evaluation else env.num_envs
        np.testing.assert_allclose(np.diff(counts), [new, new], rtol=1e-4)


def stats_of(env):
    (stats,) = (wrapper.stats for wrapper in env.wrappers if hasattr(wrapper, "stats"))
    return stats


# ---------------------------------------------------------------- actions
def test_clip_act_reaches_both_bounds_and_goes_no_further():
    low, high = jnp.array([-2.0, 0.0, -1.0]), jnp.array([2.0, 10.0, 1.0])
    wrapper, action = ppo.VectorEnvClipAct(low, high).send(
        jnp.array([[-100.0] * 3, [-1.0] * 3, [0.0] * 3, [0.5] * 3, [1.0] * 3, [100.0] * 3])
    )
    middle, upper = [0.0, 5.0, 0.0], [1.0, 7.5, 0.5]
    np.testing.assert_allclose(action, [low, low, middle, upper, high, high], rtol=1e-6)


def test_the_environment_receives_the_clipped_and_rescaled_action():
    pool = ScriptedPool(np.zeros((2, 3, 1)), low=[-2.0], high=[2.0])
    env, _ = pool.make_env(ppo.VectorEnvClipAct(jnp.array([-2.0]), jnp.array([2.0]))).reset()
    env, _ = env.step(jnp.array([[-7.0], [0.25], [7.0]]))
    np.testing.assert_allclose(pool.last_action(env), [[-2.0], [0.5], [2.0]])


def test_make_env_scales_actions_to_pendulums_bounds(monkeypatch):
    env, seeds = make_env(monkeypatch, PENDULUM)
    env, _ = env.reset()
    env, timestep = env.step(jnp.array([[-7.0], [-0.5], [0.5], [7.0]]))
    pool = envpool.make("Pendulum-v1", env_type="gymnasium", num_envs=4, env_seed=seeds)
    pool.reset()
    _, reward, *_ = pool.step(np.array([[-2.0], [-1.0], [1.0], [2.0]], np.float32))
    np.testing.assert_array_equal(timestep.reward, reward.astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 1), (5, 1), (4,), (4, 2), (1, 4), (4, 1, 1)])
def test_a_wrong_action_shape_is_an_error_when_traced(shape):
    env = ppo.make_env(PENDULUM).replace(wrappers=())
    with pytest.raises(ValueError, match=r"float32\(4, 1\)"):
        jax.eval_shape(env.step, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32])
def test_a_wrong_action_dtype_is_an_error_when_traced(dtype):
    env = ppo.make_env(PENDULUM).replace(wrappers=())
    with pytest.raises(ValueError, match=jnp.dtype(dtype).name):
        jax.eval_shape(env.step, jax.ShapeDtypeStruct((4, 1), dtype))


# ---------------------------------------------------------------- EnvPool
def alphabetical(obs):
    """The documented flattening, in NumPy."""
    if not isinstance(obs, dict):
        return obs
    return np.concatenate([obs[name].reshape(len(obs[name]), -1) for name in sorted(obs)], axis=1)


@pytest.mark.parametrize("env_id", ["Hopper-v4", "Pendulum-v1", "WalkerWalk-v1"])
def test_xla_equals_numpy_bit_for_bit(monkeypatch, env_id):
    env, seeds = make_env(monkeypatch, ppo.Args(env_id=env_id, num_envs=3))
    env, first = env.replace(wrappers=()).reset()
    bounds = env.envs.action_space
    actions = np.random.default_rng(0).uniform(bounds.low, bounds.high, size=(300, *env.action_shape))
    actions = actions.astype(np.float32)
    _, timesteps = scan_steps(env, actions)

    pool = envpool.make(env_id, env_type="gymnasium", num_envs=3, env_seed=seeds)
    obs, _ = pool.reset()
    np.testing.assert_array_equal(first.obs, alphabetical(obs).astype(np.float32))
    for step, action in enumerate(actions):
        obs, reward, terminated, truncated, _ = pool.step(action.astype(bounds.dtype))
        np.testing.assert_array_equal(timesteps.obs[step], alphabetical(obs).astype(np.float32))
        np.testing.assert_array_equal(timesteps.reward[step], reward.astype(np.float32))
        np.testing.assert_array_equal(timesteps.terminated[step], terminated)
        np.testing.assert_array_equal(timesteps.truncated[step], truncated)
    assert timesteps.obs.dtype == timesteps.reward.dtype == jnp.float32
    assert first.obs.shape == (3, env.obs_dim)
    assert not jax.config.jax_enable_x64


def test_dict_observations_are_flattened_in_alphabetical_order():
    env = ppo.make_env(ppo.Args(env_id="WalkerWalk-v1", num_envs=2)).replace(wrappers=())
    sizes = {name: np.prod(space.shape) for name, space in env.envs.observation_space.items()}
    assert sizes == {"height": 1, "orientations": 14, "velocity": 9}
    assert env.obs_dim == 24
    obs = {"velocity": np.full((2, 9), 3.0), "orientations": np.full((2, 14), 2.0), "height": np.full(2, 1.0)}
    np.testing.assert_array_equal(ppo.flatten_obs(obs), [[1.0] + [2.0] * 14 + [3.0] * 9] * 2)
    assert ppo.flatten_obs(obs).dtype == jnp.float32
    nested = {"b": np.full((1, 1), 3.0), "a": {"d": np.full((1, 1), 2.0), "c": np.full((1, 1), 1.0)}}
    np.testing.assert_array_equal(ppo.flatten_obs(nested), [[1.0, 2.0, 3.0]])
    space = gym.spaces.Dict(b=gym.spaces.Box(0, 1, (2,)), a=gym.spaces.Dict(c=gym.spaces.Box(0, 1)))
    assert [leaf.shape for leaf in ppo.space_leaves(space)] in ([(1,), (2,)], [(2,), (1,)])


def test_seeds_share_no_stream_between_themselves_nor_with_evaluation(monkeypatch):
    args = [ppo.Args(env_id="Pendulum-v1", num_envs=64, eval_episodes=64, seed=seed) for seed in (1, 2, 3)]
    pools = [make_env(monkeypatch, a, evaluation) for a in args for evaluation in (False, True)]
    seeds = [seed for _, seeds in pools for seed in seeds]
    # EnvPool could still add the environment's index to a seed: no two may be closer than there are environments.
    assert min(np.diff(sorted(seeds))) > 64
    assert min(seeds) >= 0 and max(seeds) < 2**31
    first_obs = np.concatenate([env.replace(wrappers=()).reset()[1].obs for env, _ in pools])
    assert len(np.unique(first_obs, axis=0)) == len(first_obs) == 6 * 64


def test_the_same_seed_gives_the_same_streams_one_per_environment(monkeypatch):
    (env, seeds), (same, same_seeds) = make_env(monkeypatch, PENDULUM), make_env(monkeypatch, PENDULUM)
    assert seeds == same_seeds and len(seeds) == 4
    first_obs = env.replace(wrappers=()).reset()[1].obs
    np.testing.assert_array_equal(first_obs, same.replace(wrappers=()).reset()[1].obs)
    for i, seed in enumerate(seeds):
        alone = envpool.make("Pendulum-v1", env_type="gymnasium", num_envs=1, env_seed=[seed])
        np.testing.assert_array_equal(first_obs[i], alone.reset()[0][0])


def test_make_env_sizes_and_wrappers_follow_the_arguments():
    assert ppo.make_env(PENDULUM).num_envs == 4
    assert ppo.make_env(PENDULUM, evaluation=True).num_envs == 3
    assert ppo.make_env(ppo.Args(env_id="Pendulum-v1", num_envs=2)).obs_dim == 3
    assert ppo.make_env(ppo.Args(env_id="Hopper-v4", num_envs=2)).obs_dim == 11
    for on in (True, False):
        wrappers = ppo.make_env(ppo.Args(env_id="Pendulum-v1", num_envs=2, norm_obs=on)).wrappers
        assert any(isinstance(wrapper, ppo.VectorEnvNormObs) for wrapper in wrappers) == on


def test_full_pendulum_episodes_have_200_steps_and_the_reset_step_is_marked():
    args = ppo.Args(env_id="Pendulum-v1", num_envs=3, num_steps=403)
    state = ppo.init_state(args, ppo.make_env(args))
    _, batch = jax.device_get(jax.jit(ppo.rollout, static_argnums=0)(args, state))
    # Steps 0 to 199 are an episode, 200 is EnvPool's reset step, 201 to 400 an episode, 401 a reset step.
    expected = np.zeros((403, 3), bool)
    expected[[199, 400]] = True
    np.testing.assert_array_equal(batch.truncated, expected)
    assert not batch.terminated.any()
    np.testing.assert_array_equal(batch.valid[1:], 1.0 - expected[:-1])
    np.testing.assert_array_equal(batch.valid[0], 1.0)
    np.testing.assert_array_equal(batch.reward[[200, 401]], 0.0)
    np.testing.assert_array_equal(batch.info["episodic_length"][expected], 200.0)
    returns = np.stack([batch.reward[:200].sum(0), batch.reward[201:401].sum(0)])  # raw rewards
    np.testing.assert_allclose(batch.info["episodic_return"][[199, 400]], returns, rtol=1e-5)


def test_after_reset_the_next_step_is_no_reset_step():
    """Also when the episodes had just ended, so that EnvPool's reset step was due."""
    env, _ = ppo.make_env(PENDULUM).reset()
    env, timesteps = scan_steps(env, jnp.zeros((200, 4, 1)))
    assert timesteps.done[-1].all()
    env, timestep = env.reset()
    assert not timestep.done.any()
    env, timesteps = scan_steps(env, jnp.zeros((200, 4, 1)))
    assert timesteps.truncated[-1].all() and (timesteps.reward[0] != 0).all()
    np.testing.assert_array_equal(timesteps.info["episodic_length"][-1], 200)

"""PPO's arithmetic against numbers worked out by hand, closed forms and NumPy; then whole iterations."""

import ast
import dataclasses
import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scripted_pool import ScriptedPool

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import running

pytestmark = pytest.mark.usefixtures("compile_fast")

# Two minibatches, two epochs, four iterations; a clip range that a few gradient steps of 3e-3 do reach.
SMALL = ppo.Args(
    env_id="Pendulum-v1",
    num_envs=4,
    num_steps=8,
    num_minibatches=2,
    update_epochs=2,
    total_timesteps=4 * 32,
    learning_rate=3e-3,
    clip_coef=0.01,
)

# ---------------------------------------------------------------- advantages
NO = jnp.zeros((6, 1), bool)


def at(*rows):
    return NO.at[np.array(rows)].set(True)


def test_gae_by_hand():
    rewards = jnp.array([[1.0], [2.0], [0.0], [3.0], [0.0], [1.0]])
    values = jnp.array([[2.0], [4.0], [6.0], [8.0], [10.0], [2.0]])
    advantages, returns = ppo.compute_gae(rewards, values, jnp.array([4.0]), at(3), at(1), gamma=0.5, gae_lambda=0.5)
    expected = [
        1.25,  # 1 + 0.5*4 - 2 = 1, and 0.25 * the next advantage, 1
        1.0,  # truncated: 2 + 0.5*6 - 4 = 1 with the terminal observation's value, 6; the trace ends
        -3.25,  # EnvPool's reset step, of weight zero: 0 + 0.5*8 - 6 = -2, and 0.25 * -5
        -5.0,  # terminated: 3 - 8, no next value; the trace ends
        -8.75,  # the other reset step: 0 + 0.5*2 - 10 = -9, and 0.25 * 1
        1.0,  # 1 + 0.5*4 - 2
    ]
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-6)


def numpy_gae(rewards, values, last_value, terminated, truncated, gamma, gae_lambda):
    """Each advantage on its own, as the sum of discounted errors up to the end of the episode or of the rollout."""
    values = np.append(values, last_value[None], axis=0)
    num_steps, num_envs = rewards.shape
    advantages = np.zeros(rewards.shape)
    for env in range(num_envs):
        for start in range(num_steps):
            for step in range(start, num_steps):
                bootstrap = 0.0 if terminated[step, env] else gamma * values[step + 1, env]
                error = rewards[step, env] + bootstrap - values[step, env]
                advantages[start, env] += (gamma * gae_lambda) ** (step - start) * error
                if terminated[step, env] or truncated[step, env]:
                    break
    return advantages


@pytest.mark.parametrize("seed", range(5))
def test_gae_equals_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    gamma, gae_lambda = [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5), (0.5, 1.0)][seed]
    rewards, values, last_value = rng.normal(size=(20, 3)), rng.normal(size=(20, 3)), rng.normal(size=3)
    terminated, truncated = rng.random((2, 20, 3)) < 0.15  # sometimes both at once: terminated decides
    expected = numpy_gae(rewards, values, last_value, terminated, truncated, gamma, gae_lambda)
    inputs = [jnp.asarray(x) for x in (rewards, values, last_value, terminated, truncated)]
    advantages, returns = ppo.compute_gae(*inputs, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99])
def test_an_endless_reward_of_one_is_worth_one_over_one_minus_gamma(gamma):
    """At that value there is nothing left to learn, truncations (at 1 and 3) or not."""
    values = jnp.full((6, 1), 1 / (1 - gamma))
    for truncated, valid in ((NO, ~NO), (at(1, 3), ~at(2, 4))):
        rewards = jnp.where(valid, 1.0, 0.0)
        advantages, returns = ppo.compute_gae(rewards, values, values[-1], NO, truncated, gamma, 0.95)
        np.testing.assert_allclose(advantages[valid], 0.0, atol=1e-4)
        np.testing.assert_allclose(returns[valid], values[valid], rtol=1e-5)


# ---------------------------------------------------------------- losses
def linear_agent(params, obs):
    """An agent whose outputs are easy to work out: mean and value are multiples of the observation's first entry."""
    return params["mean"] * obs[..., :1], params["log_std"], params["value"] * obs[..., 0]


PARAMS = {"mean": jnp.array(0.5), "log_std": jnp.array([-0.3]), "value": jnp.array(2.0)}


def linear_train_state(tx=None):
    return ppo.TrainState.create(apply_fn=linear_agent, params=PARAMS, tx=tx or optax.identity())


def assert_close(a, b, **tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, **{"rtol": 0, "atol": 0, **tolerance}), a, b)


def same_arrays(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def minibatch(size=12, invalid=(2, 7), seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    no = jnp.zeros(size, bool)
    valid = jnp.ones(size).at[np.array(invalid, int)].set(0.0)
    batch = ppo.Transition(normal(size, 1), normal(size, 1), normal(size) - 1, normal(size), no, no, valid, info={})
    return batch, ppo.Targets(normal(size), normal(size), normal(size))


def numpy_loss(args, batch, targets):
    """The loss and its parts over the valid entries alone, in float64, as the PPO paper writes them."""
    keep = np.asarray(batch.valid) == 1
    obs, action, log_prob, advantage, returns, old_value = (
        np.asarray(x, np.float64)[keep]
        for x in (batch.obs[:, 0], batch.action[:, 0], batch.log_prob, *jax.tree.leaves(targets))
    )
    mean, std, value = 0.5 * obs, np.exp(-0.3), 2.0 * obs
    new_log_prob = np.log(np.exp(-(((action - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi)))
    ratio = np.exp(new_log_prob - log_prob)
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / advantage.std()
    clipped = np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -np.minimum(ratio * advantage, clipped * advantage).mean()
    errors = (value - returns) ** 2
    if args.clip_vloss:
        near = old_value + np.clip(value - old_value, -args.clip_coef, args.clip_coef)
        errors = np.maximum(errors, (near - returns) ** 2)
    value_loss = errors.mean()
    entropy = 0.5 * np.log(2 * np.pi * np.e * std**2)
    return {
        "losses/loss": policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy,
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/old_approx_kl": (log_prob - new_log_prob).mean(),
        "losses/approx_kl": ((ratio - 1) - np.log(ratio)).mean(),
        "losses/clipfrac": (np.abs(ratio - 1) > args.clip_coef).mean(),
    }


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_adv": False},
        {"clip_vloss": True},
        {"ent_coef": 0.3, "vf_coef": 2.0, "clip_coef": 0.7},
    ],
    ids=str,
)
def test_the_loss_equals_numpy_over_the_valid_entries(flags):
    args, (batch, targets) = ppo.Args(**flags), minibatch()
    loss, metrics = ppo.ppo_loss(PARAMS, linear_agent, args, batch, targets)
    expected = numpy_loss(args, batch, targets)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(loss, expected["losses/loss"], rtol=1e-4)


def jitted_gradient(args):
    """(loss, metrics), gradient of a minibatch and its targets."""
    gradient = jax.value_and_grad(ppo.ppo_loss, has_aux=True)
    return jax.jit(lambda batch, targets: gradient(PARAMS, linear_agent, args, batch, targets))


@pytest.mark.parametrize("norm_adv", [True, False])
def test_what_the_reset_step_holds_changes_neither_loss_nor_gradient(norm_adv):
    args, (batch, targets) = ppo.Args(norm_adv=norm_adv, clip_vloss=True), minibatch(invalid=[3])
    loss_and_gradient = jitted_gradient(args)
    spoil = lambda x: x.at[3].set(5.0 if x.dtype == jnp.float32 else True)  # noqa: E731
    spoiled_batch = jax.tree.map(spoil, batch).replace(valid=batch.valid)
    (loss, metrics), gradient = loss_and_gradient(batch, targets)
    (same_loss, same_metrics), same_gradient = loss_and_gradient(spoiled_batch, jax.tree.map(spoil, targets))
    assert (loss, metrics, gradient) == (same_loss, same_metrics, same_gradient)

    all_valid = spoiled_batch.replace(valid=jnp.ones(12))  # the same content does matter where it is experience
    (other_loss, _), other_gradient = loss_and_gradient(all_valid, jax.tree.map(spoil, targets))
    assert loss != other_loss and gradient != other_gradient


def test_a_minibatch_of_reset_steps_alone_teaches_nothing():
    batch, targets = minibatch(size=2, invalid=(0, 1))
    (loss, _), gradient = jitted_gradient(ppo.Args())(batch, targets)
    assert loss == 0 and not any(jnp.any(x) for x in jax.tree.leaves(gradient))


def rollout_of(batch, targets, num_steps=3, num_envs=4):
    reshape = lambda x: x.reshape(num_steps, num_envs, *x.shape[1:])  # noqa: E731
    return jax.tree.map(reshape, batch), jax.tree.map(reshape, targets)


@pytest.mark.parametrize("num_minibatches", [1, 3, 6])
def test_an_epoch_visits_every_step_once_and_logs_the_mean_over_its_minibatches(num_minibatches):
    args = ppo.Args(num_envs=4, num_steps=3, num_minibatches=num_minibatches, norm_adv=False)
    batch, targets = minibatch(invalid=())
    _, expected = ppo.ppo_loss(PARAMS, linear_agent, args, batch, targets)
    agent = linear_train_state(optax.set_to_zero())  # learns nothing: the parameters of all minibatches are the same
    agent, metrics = ppo.update_epoch(args, agent, *rollout_of(batch, targets), jax.random.PRNGKey(0))
    assert agent.step == num_minibatches
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 65_537])
def test_shuffled_indices_are_a_permutation_that_follows_from_its_key(n):
    keys = [jax.random.PRNGKey(seed) for seed in (0, 0, 1)]
    orders = [np.asarray(ppo.shuffled_indices(key, n)) for key in keys]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(n))
    assert np.array_equal(orders[0], orders[1])
    assert n < 7 or not np.array_equal(orders[0], orders[2])


def test_all_orders_are_equally_likely():
    """By Pearson's chi-square, which for uniform orders has mean k - 1 and variance 2 (k - 1) with k outcomes."""
    n, draws = 4, 24_000
    keys = jax.random.split(jax.random.PRNGKey(0), draws)
    orders = np.asarray(jax.jit(jax.vmap(partial(ppo.shuffled_indices, n=n)))(keys))
    positions = [np.bincount(orders[:, position], minlength=n) for position in range(n)]
    _, whole_orders = np.unique(orders, axis=0, return_counts=True)
    assert len(whole_orders) == 24
    for counts in (*positions, whole_orders):
        expected = draws / len(counts)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        freedom = len(counts) - 1
        assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_the_order_of_an_epoch_follows_from_its_key():
    args = ppo.Args(num_envs=4, num_steps=3, num_minibatches=3)
    learned = []
    for seed in (0, 0, 1):
        rollout = rollout_of(*minibatch())
        agent, _ = ppo.update_epoch(args, linear_train_state(optax.sgd(0.1)), *rollout, jax.random.PRNGKey(seed))
        learned.append(agent.params)
    assert same_arrays(learned[0], learned[1]) and not same_arrays(learned[0], learned[2])


# ---------------------------------------------------------------- targets and return statistics
def trace(reward_of_the_reset_step=0.0):
    """Six steps of two environments; the first is truncated at step 1 and terminated at step 4; and the last obs."""
    rng = np.random.default_rng(0)
    obs = jnp.asarray(rng.normal(size=(7, 2, 1)), jnp.float32)
    terminated, truncated = jnp.zeros((2, 6, 2), bool).at[[0, 1], [4, 1], 0].set(True)
    valid = jnp.ones((6, 2)).at[np.array([2, 5]), 0].set(0.0)
    reward = jnp.where(valid == 1, jnp.asarray(rng.normal(3, 10, size=(6, 2))), reward_of_the_reset_step)
    zeros = jnp.zeros((6, 2))
    return ppo.Transition(obs[:-1], zeros[..., None], zeros, reward, terminated, truncated, valid, {}), obs[-1]


def test_return_statistics_are_fed_unnormalised_returns_of_valid_steps():
    batch, last_obs = trace()
    args = ppo.Args(gamma=0.9, gae_lambda=0.8)
    stats = ppo.RunningMeanStd(mean=jnp.zeros(()), var=jnp.array(25.0), count=jnp.array(1e-4))  # std 5, no weight
    targets, new_stats = ppo.compute_targets(args, linear_train_state(), stats, batch, last_obs)

    values = 2.0 * np.append(batch.obs, last_obs[None], axis=0)[..., 0]  # the critic's, in units of std
    advantages = numpy_gae(batch.reward, 5 * values[:-1], 5 * values[-1], batch.terminated, batch.truncated, 0.9, 0.8)
    returns = advantages + 5 * values[:-1]
    valid = np.asarray(batch.valid, bool)
    np.testing.assert_allclose(targets.advantage, advantages, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(targets.returns, returns / 5, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(targets.old_value, values[:-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(new_stats.mean, returns[valid].mean(), rtol=1e-3)
    np.testing.assert_allclose(new_stats.var, returns[valid].var(), rtol=1e-3)
    np.testing.assert_allclose(new_stats.count, 10, rtol=1e-3)


def test_what_the_reset_step_holds_changes_no_return_statistics_and_no_valid_target():
    results = []
    for reward in (0.0, 1e4):
        batch, last_obs = trace(reward)
        targets, stats = ppo.compute_targets(
            ppo.Args(), linear_train_state(), ppo.RunningMeanStd.create(), batch, last_obs
        )
        valid_targets = [x[batch.valid == 1] for x in jax.tree.leaves(targets)]
        results.append(jax.device_get([valid_targets, stats]))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_without_norm_return_the_critic_predicts_raw_returns():
    batch, last_obs = trace()
    stats = ppo.RunningMeanStd.create()
    args = ppo.Args(norm_return=False)
    targets, new_stats = ppo.compute_targets(args, linear_train_state(), stats, batch, last_obs)
    assert new_stats.std == stats.std
    np.testing.assert_allclose(new_stats.std, 1.0, rtol=1e-6)
    np.testing.assert_allclose(targets.returns, targets.advantage + targets.old_value, rtol=1e-5, atol=1e-5)


def test_an_update_is_so_many_epochs_over_targets_computed_anew():
    sizes = {"num_envs": 2, "num_steps": 6, "num_minibatches": 3, "update_epochs": 3}
    args = ppo.Args(**sizes, clip_vloss=True, clip_coef=0.05)
    (batch, last_obs), key = trace(), jax.random.PRNGKey(0)
    stats = ppo.RunningMeanStd(mean=jnp.zeros(()), var=jnp.array(100.0), count=jnp.array(10.0))
    agent = linear_train_state(optax.sgd(0.1))
    timestep = ppo.TimeStep(last_obs, *3 * [jnp.zeros(2)], info={})
    state = ppo.RunnerState(agent, None, timestep, stats, jnp.array(0), key, hyperparameters={})
    learner, metrics = jax.jit(ppo.update, static_argnums=0)(args, state, batch, key)

    first, stats = ppo.compute_targets(args, agent, stats, batch, last_obs)
    epoch, targets, expected = jax.jit(ppo.update_epoch, static_argnums=0), first, []
    for epoch_key in jax.random.split(key, 3):
        agent, epoch_metrics = epoch(args, agent, batch, targets, epoch_key)
        expected.append(epoch_metrics)
        targets, stats = ppo.compute_targets(args, agent, stats, batch, last_obs)
        targets = targets.replace(old_value=first.old_value)  # the loss is clipped around the rollout's values
    assert_close([learner.agent.params, learner.return_stats], [agent.params, stats], rtol=1e-4)
    assert first.old_value[0, 0] != ppo.get_value(agent, batch.obs)[0, 0]
    for name in expected[0]:
        np.testing.assert_allclose(metrics[name], np.mean([m[name] for m in expected]), rtol=1e-3, atol=1e-6)
    returns, values = (np.asarray(x)[batch.valid == 1] for x in (first.returns, first.old_value))
    explained_variance = 1 - np.var(returns - values) / np.var(returns)
    np.testing.assert_allclose(metrics["losses/explained_variance"], explained_variance, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- policy and logged episodes
def test_log_prob_equals_numpy_and_deterministic_actions_are_the_mean():
    agent = linear_train_state()
    obs = jnp.array([[1.0], [-2.0]])
    action, log_prob = ppo.get_action(agent, obs, jax.random.PRNGKey(0))
    mean, std = np.array([[0.5], [-1.0]]), np.exp(-0.3)
    density = np.exp(-(((np.asarray(action) - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(log_prob, np.log(density).sum(-1), rtol=1e-5)
    assert (action != mean).all()
    np.testing.assert_allclose(ppo.get_action(agent, obs, jax.random.PRNGKey(0), deterministic=True)[0], mean)
    np.testing.assert_allclose(ppo.get_value(agent, obs), [2.0, -4.0])

    many, _ = ppo.get_action(agent, jnp.ones((100_000, 1)), jax.random.PRNGKey(1))
    np.testing.assert_allclose([many.mean(), many.std()], [0.5, std], atol=0.01)
    two_dimensional = ppo.gaussian_log_prob(jnp.zeros((3, 2)), jnp.zeros(2), jnp.ones((3, 2)))
    np.testing.assert_allclose(two_dimensional, [-1 - np.log(2 * np.pi)] * 3, rtol=1e-5)


def test_the_bound_of_the_log_standard_deviations_falls_from_minus_1():
    tx = ppo.bound_log_std(min_log_std=-3.0, num_updates=4)
    params = {"params": {"log_std": jnp.array([-0.5, -0.5, -2.0]), "actor": jnp.ones(2)}}
    steps = {"params": {"log_std": jnp.array([-9.0, -0.2, 0.1]), "actor": jnp.full(2, -7.0)}}
    state = tx.init(params)
    for expected in [[-1.0, -0.7, -1.0], [-1.5, -0.9, -0.9], [-2.0, -1.1, -0.8], [-2.5, -1.3, -0.7], [-3, -1.5, -0.6]]:
        updates, state = tx.update(steps, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["params"]["log_std"], expected, rtol=1e-6)
        np.testing.assert_array_equal(updates["params"]["actor"], -7.0)


def test_episode_metrics_by_hand():
    nan = jnp.nan
    batch = minibatch(size=2)[0].replace(
        terminated=jnp.array([[False, True, False], [False, False, False]]),
        truncated=jnp.array([[False, False, False], [True, False, False]]),
        info={
            "episodic_return": jnp.array([[7.0, 4.0, nan], [10.0, 4.0, nan]]),
            "episodic_length": jnp.array([[8.0, 1.0, nan], [2.0, 1.0, nan]]),
        },
    )
    metrics = ppo.episode_metrics(SMALL, batch)
    assert metrics["charts/episodes"] == 2
    assert metrics["charts/episodic_return"] == 7  # of the two that ended here: (4 + 10) / 2
    assert metrics["charts/episodic_length"] == 1.5
    assert metrics["charts/avg_episodic_return"] == 7  # of the two environments that have finished one
    assert metrics["charts/avg_episodic_length"] == 1.5

    none_ended = batch.replace(terminated=jnp.zeros((2, 3), bool), truncated=jnp.zeros((2, 3), bool))
    metrics = ppo.episode_metrics(SMALL, none_ended)
    assert metrics["charts/episodes"] == 0
    assert np.isnan(metrics["charts/episodic_return"]) and np.isnan(metrics["charts/episodic_length"])
    assert metrics["charts/avg_episodic_return"] == 7
    none_yet = none_ended.replace(info=jax.tree.map(lambda x: jnp.full((2, 3), nan), batch.info))
    assert np.isnan(ppo.episode_metrics(SMALL, none_yet)["charts/avg_episodic_return"])


# ---------------------------------------------------------------- whole iterations
def only_lane(tree):
    """NumPy arrays without the leading axes, [num_devices, num_seeds], which are 1."""
    assert {x.shape[:2] for x in jax.tree.leaves(tree)} == {(1, 1)}
    return jax.tree.map(lambda x: np.asarray(x[0]), ppo.fetch(tree))


def train(args, iterations=2):
    """The state after each iteration, and the metrics, [iterations] for each name; all of it in NumPy arrays."""
    state, states, metrics = ppo.init_lanes([args], ppo.make_env(args)), [], []
    for _ in range(iterations):
        state, iteration_metrics = ppo.train_iteration(args, state)
        states.append(only_lane(state))
        metrics.append(only_lane(iteration_metrics))
    return states, {name: np.array([m[name] for m in metrics]) for name in metrics[0]}


@cache
def train_once(iterations=2, **flags):
    """The same, but the tests share the runs."""
    return train(dataclasses.replace(SMALL, **flags), iterations)


def test_the_same_seed_is_bit_identical_and_compiled_once():
    halves = [ppo.compiled(function, SMALL) for function in (ppo.rollout, ppo.learn)]
    programs = [half._cache_size() for half in halves]
    states, metrics = train(SMALL, iterations=3)
    assert [half._cache_size() for half in halves] == [n + 1 for n in programs]
    same_states, same_metrics = train_once(iterations=4)
    assert same_arrays(metrics, {name: values[:3] for name, values in same_metrics.items()})
    assert same_arrays(states[2].agent, same_states[2].agent)
    assert same_arrays(states[2].timestep, same_states[2].timestep)


def test_the_seed_decides_parameters_and_action_noise():
    """Of the environments there is one set here; test_wrappers.py has their seeds."""
    env = probe_pool().make_env()
    one, same, two = (ppo.init_state(dataclasses.replace(SMALL, seed=seed), env) for seed in (1, 1, 2))
    assert same_arrays([one.agent, one.key], [same.agent, same.key])
    assert not same_arrays(one.agent.params, two.agent.params)
    assert not same_arrays(one.key, two.key)


def test_every_action_has_its_own_noise():
    """In every environment, step and rollout; the observations are the same throughout."""
    args = dataclasses.replace(SMALL, num_envs=3)
    state = ppo.init_state(args, ScriptedPool(np.ones((1, 3, 1))).make_env())
    rollout, actions = jax.jit(ppo.rollout, static_argnums=0), []
    for _ in range(2):
        state, batch = rollout(args, state)
        actions.append(batch.action)
    assert len(np.unique(actions)) == 2 * args.num_steps * 3


def test_no_random_key_is_used_twice():
    """The key that an iteration leaves is none of those that its rollout split."""
    key, used = ppo.init_state(SMALL, ppo.make_env(SMALL)).key, []
    for _ in range(SMALL.num_steps + 1):
        used.append(key.tolist())
        key, _ = jax.random.split(key)
    assert train_once(iterations=4)[0][0].key.tolist() not in used


def test_nothing_has_64_bits():
    states, metrics = train_once(iterations=4)
    wide = {
        jax.tree_util.keystr(path): leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path((states, metrics))
        if leaf.dtype.itemsize > 4
    }
    assert not wide
    assert not jax.config.jax_enable_x64


def test_metrics_are_exactly_the_documented_tags():
    """Those of one compiled iteration, and what is checked but not logged; main adds SPS, SPS_update and eval."""
    _, metrics = train_once(iterations=4)
    charts = "episodes episodic_return episodic_length avg_episodic_return avg_episodic_length learning_rate"
    losses = "loss value_loss policy_loss entropy approx_kl old_approx_kl clipfrac explained_variance"
    tags = {f"charts/{x}" for x in charts.split()} | {f"losses/{x}" for x in losses.split()}
    assert metrics.keys() == tags | {f"finite/{x}" for x in ("observation", "reward", "loss", "gradient")}
    assert all(np.isfinite(value).all() for name, value in metrics.items() if name.startswith("losses/"))


def test_the_learning_rate_falls_linearly_and_is_never_zero():
    states, metrics = train_once(iterations=4)
    expected = 3e-3 * np.array([1.0, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(metrics["charts/learning_rate"], expected, rtol=1e-6)
    used = [state.agent.opt_state.hyperparams["learning_rate"] for state in states]
    np.testing.assert_allclose(used, expected, rtol=1e-6)
    assert states[-1].iteration == SMALL.num_iterations == 4
    _, metrics = train_once(anneal_lr=False)
    np.testing.assert_allclose(metrics["charts/learning_rate"], [3e-3] * 2, rtol=1e-6)


def test_return_statistics_have_seen_returns_of_pendulums_size():
    states, _ = train_once(iterations=4)
    assert states[-1].return_stats.mean < -10 and states[-1].return_stats.std > 5  # rewards reach -16 a step
    states, _ = train_once(norm_return=False)
    np.testing.assert_allclose(states[-1].return_stats.std, 1.0, rtol=1e-6)


# For every algorithm flag a value that must change what is learned within two iterations.
FLAGS = {
    "seed": 2,
    "learning_rate": 1e-3,
    "anneal_lr": False,
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "hidden_size": 32,
    "min_log_std": 2.0,
    "update_epochs": 1,
    "norm_adv": False,
    "norm_obs": False,
    "norm_return": False,
    "recompute_advantage": False,
    "clip_coef": 0.3,
    "clip_vloss": True,
    "ent_coef": 0.1,
    "vf_coef": 2.0,
    "max_grad_norm": 1e-3,
    "target_kl": 1e-12,
}
SIZES = {
    "env_id": "MountainCarContinuous-v0",
    "num_envs": 2,
    "num_steps": 4,
    "num_minibatches": 1,
    "total_timesteps": 2 * 32,
}
TESTED_ELSEWHERE = {  # in test_cli.py and test_checkpoints.py, but eval_episodes: in test_wrappers.py
    *("checkpoint_interval", "resume", "skip_nonfinite_updates"),
    *("exp_name", "track", "wandb_project_name", "wandb_entity", "capture_video", "progress"),
    *("save_model", "upload_model", "hf_entity", "eval_episodes", "eval_interval", "video_interval"),
    *("num_seeds", "compilation_cache", "num_devices", "num_processes", "process_id", "coordinator_address"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_changes_what_is_learned(name):
    states, metrics = train_once(iterations=4)
    other_states, other_metrics = train_once(**{name: FLAGS[name]})
    assert not same_arrays(states[1].agent.params, other_states[1].agent.params)
    assert not same_arrays({name: values[:2] for name, values in metrics.items()}, other_metrics)


@pytest.mark.parametrize("name", SIZES)
def test_every_size_changes_the_shapes(name):
    def shapes(args):
        state = ppo.init_state(args, ppo.make_env(args))
        _, batch = jax.eval_shape(partial(ppo.rollout, args), state)
        assert batch.obs.shape == (args.num_steps, args.num_envs, state.env.obs_dim)
        return [batch.obs.shape, args.batch_size // args.num_minibatches, args.num_iterations]

    assert shapes(SMALL) != shapes(dataclasses.replace(SMALL, **{name: SIZES[name]}))


def test_every_field_has_a_test_of_its_effect():
    assert {field.name for field in dataclasses.fields(ppo.Args)} == {*FLAGS, *SIZES, *TESTED_ELSEWHERE}


def test_every_field_is_read_and_explained():
    tree = ast.parse(inspect.getsource(ppo))
    (args_class,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    fields = [node.target.id for node in args_class.body if isinstance(node, ast.AnnAssign)]
    explained = [
        node.target.id
        for node, text in zip(args_class.body, args_class.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value.value, str)
    ]
    assert explained == fields == [field.name for field in dataclasses.fields(ppo.Args)]

    # Outside check_args, which reads them only to refuse them; the properties of Args read `self`.
    readers = [node for node in tree.body if getattr(node, "name", "") != "check_args"]
    readers += ast.parse(inspect.getsource(running)).body  # what surrounds a training
    read = {
        node.attr
        for reader in readers
        for node in ast.walk(reader)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("args", "self")
    }
    assert set(fields) <= read, f"nothing reads {set(fields) - read}"


def gradient_steps(states):
    for state in states:  # Adam's own count, and that of the bound
        counts = optax.tree_utils.tree_get_all_with_path(state.agent.opt_state.inner_state, "count")
        assert [int(count) for _, count in counts] == [int(state.agent.step)] * 2
    return [int(state.agent.step) for state in states]


def test_epochs_and_minibatches_count_the_gradient_steps():
    assert gradient_steps(train_once(iterations=4)[0]) == [4, 8, 12, 16]
    assert gradient_steps(train_once(update_epochs=1)[0]) == [2, 4]


def test_a_tiny_target_kl_stops_after_the_first_epoch():
    states, metrics = train_once(target_kl=1e-12)
    one_epoch_states, one_epoch_metrics = train_once(update_epochs=1)
    assert gradient_steps(states) == [2, 4]
    assert_close(states[-1].agent.params, one_epoch_states[-1].agent.params, rtol=1e-4, atol=1e-6)
    assert_close(metrics, one_epoch_metrics, rtol=1e-3, atol=1e-5)  # means over the epoch that ran
    np.testing.assert_allclose(metrics["charts/learning_rate"], [3e-3, 2.25e-3], rtol=1e-6)


def test_a_target_kl_between_the_epochs_divergences_stops_after_the_second():
    """And metrics are means over the two that ran, not over three."""
    states, metrics = train_once(iterations=4)  # two epochs
    first = train_once(update_epochs=1)[1]["losses/approx_kl"][0]
    second = 2 * metrics["losses/approx_kl"][0] - first
    assert 0 < first < second / 1.1
    stopped_states, stopped = train_once(iterations=1, update_epochs=3, target_kl=float((first + second) / 2))
    assert gradient_steps(stopped_states) == [4]
    assert_close(stopped_states[0].agent.params, states[0].agent.params, rtol=1e-4, atol=1e-6)
    assert_close(stopped, {name: values[:1] for name, values in metrics.items()}, rtol=1e-3, atol=1e-5)


def test_the_ratio_is_one_on_the_rollouts_own_batch():
    """To float32 accuracy, though the statistics that normalise the observations change at every step."""
    state = ppo.init_state(SMALL, ppo.make_env(SMALL))
    rollout, loss = jax.jit(ppo.rollout, static_argnums=0), jax.jit(ppo.ppo_loss, static_argnums=(1, 2))
    for _ in range(2):
        before = jax.tree.leaves(state.env.wrappers)
        state, batch = rollout(SMALL, state)
        assert not same_arrays(before, jax.tree.leaves(state.env.wrappers))
        targets, _ = ppo.compute_targets(SMALL, state.agent, state.return_stats, batch, state.timestep.obs)
        flat_batch, flat_targets = jax.tree.map(
            lambda x: x.reshape(SMALL.batch_size, *x.shape[2:]), (batch.replace(info={}), targets)
        )
        _, metrics = loss(state.agent.params, state.agent.apply_fn, SMALL, flat_batch, flat_targets)
        assert abs(metrics["losses/approx_kl"]) < 1e-6 and abs(metrics["losses/old_approx_kl"]) < 1e-5
        assert metrics["losses/clipfrac"] == 0
        # normalised advantages: with ratio 1 the policy loss is their mean
        np.testing.assert_allclose(metrics["losses/policy_loss"], 0.0, atol=1e-5)
        np.testing.assert_allclose(metrics["losses/entropy"], -0.5 + 0.5 * np.log(2 * np.pi * np.e), rtol=1e-5)


def test_the_ratio_is_one_on_the_first_minibatch_of_the_first_epoch():
    _, metrics = train_once(num_minibatches=1, update_epochs=1)
    np.testing.assert_allclose(metrics["losses/approx_kl"], 0.0, atol=1e-6)
    np.testing.assert_array_equal(metrics["losses/clipfrac"], 0.0)


# ---------------------------------------------------------------- learning
GAMMA = 0.9


def probe_pool():
    """Four lanes whose values are known, over and over, whatever the actions.

    A reward of 1 for ever; the same, truncated every five steps; -1 for ever; and 1 a step, terminated after five.
    In the second and fourth, row 0 is EnvPool's reset step: its reward, 50, is not part of any episode.
    """
    obs = np.zeros((6, 4, 9))
    obs[:, [0, 1, 2], [0, 1, 2]] = 1  # one observation for each endless lane
    obs[range(6), 3, range(3, 9)] = 1  # and the time in the one that terminates
    reward = np.ones((6, 4))
    reward[:, 2] = -1
    reward[0, [1, 3]] = 50
    last = np.arange(6)[:, None] == 5
    return ScriptedPool(obs, reward, terminated=last & [[0, 0, 0, 1]], truncated=last & [[0, 1, 0, 0]])


def test_learned_values_are_the_true_ones():
    """Fails if truncation is not bootstrapped, if a trace leaks, if the reset step counts, if units are mixed."""
    args = ppo.Args(
        num_envs=4,
        num_steps=18,
        num_minibatches=3,
        update_epochs=5,
        total_timesteps=100 * 4 * 18,
        learning_rate=1e-2,
        gamma=GAMMA,
        vf_coef=1.0,
    )
    pool = probe_pool()
    state = ppo.init_lanes([args], pool.make_env(ppo.VectorEnvEpisodeStats.create(4)))
    for _ in range(args.num_iterations):
        state, metrics = ppo.train_iteration(args, state)
    state, metrics = only_lane(state), only_lane(metrics)
    clock = 1 - GAMMA ** np.arange(5, 0, -1)
    expected = np.array([1, 1, -1, *clock]) / (1 - GAMMA)
    values = ppo.get_value(state.agent, jnp.eye(9)) * state.return_stats.std
    np.testing.assert_allclose(values[:8], expected, rtol=0.005)  # the ninth is terminal: no value is learned
    assert metrics["losses/explained_variance"] > 0.99
    np.testing.assert_allclose(metrics["charts/avg_episodic_length"], 5)
    np.testing.assert_allclose(metrics["charts/avg_episodic_return"], 5)
    assert state.return_stats.std > 2  # so that the critic's units are not those of the rewards

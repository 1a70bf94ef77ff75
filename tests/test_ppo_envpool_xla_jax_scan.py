"""The script for discrete actions: what differs from the continuous one, which has tests for what they share."""

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import envpool
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    SMALL,
    assert_evaluated_alike_in_another_process,
    assert_refused,
    learning_program,
    train_in_one_call,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as continuous
import cleanrl.ppo_envpool_xla_jax_scan as ppo
from cleanrl_utils.evals import ppo_envpool_jax_eval
from cleanrl_utils.evals.ppo_envpool_jax_eval import load_agent
from cleanrl_utils.models import read_model

pytestmark = pytest.mark.usefixtures("compile_fast", "in_folder")

NAME = "ppo_envpool_xla_jax_scan"
ARGS = ppo.Args(**SMALL)


# ---------------------------------------------------------------- policy and loss
LOGITS = np.array([[0.0, 0.0, 0.0], [1.0, 2.0, -3.0], [80.0, 0.0, -80.0]])
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def table_agent(params, obs):
    """Its logits and value are those of the row that the observation's first entry names."""
    row = obs[..., 0].astype(jnp.int32)
    return params["logits"][row], params["value"][row]


PARAMS = {"logits": jnp.asarray(LOGITS, jnp.float32), "value": jnp.array([1.0, -2.0, 0.5])}
AGENT = SimpleNamespace(apply_fn=table_agent, params=PARAMS)


def test_log_probs_and_entropy_equal_numpy():
    for action in range(3):
        log_prob = ppo.categorical_log_prob(PARAMS["logits"], jnp.full(3, action))
        np.testing.assert_allclose(log_prob, np.log(PROBS[:, action]), rtol=1e-5, atol=1e-6)
    entropy = [np.log(3), -(PROBS[1] * np.log(PROBS[1])).sum(), 0.0]
    np.testing.assert_allclose(ppo.categorical_entropy(PARAMS["logits"]), entropy, rtol=1e-5, atol=1e-6)
    shaped = ppo.categorical_log_prob(jnp.zeros((5, 2, 4)), jnp.zeros((5, 2), jnp.int32))
    np.testing.assert_allclose(shaped, np.full((5, 2), -np.log(4)), rtol=1e-6)


def test_actions_are_drawn_as_often_as_they_are_probable_and_evaluation_takes_the_likeliest():
    obs = jnp.arange(3.0)[:, None]
    action, log_prob = ppo.get_action(AGENT, obs, jax.random.PRNGKey(0), deterministic=True)
    np.testing.assert_array_equal(action, [0, 1, 0])
    assert action.dtype == jnp.int32
    np.testing.assert_allclose(log_prob, np.log(PROBS[range(3), [0, 1, 0]]), rtol=1e-5, atol=1e-6)
    many = jnp.repeat(obs, 100_000, axis=0)
    action, log_prob = ppo.get_action(AGENT, many, jax.random.PRNGKey(1))
    assert action.dtype == jnp.int32
    drawn = np.stack([np.bincount(x, minlength=3) for x in np.asarray(action).reshape(3, -1)]) / 100_000
    np.testing.assert_allclose(drawn, PROBS, atol=0.006)  # four standard deviations
    rows = np.repeat(np.arange(3), 100_000)
    np.testing.assert_allclose(log_prob, np.log(PROBS[rows, action]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flags", [{}, {"norm_adv": False, "clip_vloss": True, "ent_coef": 0.3, "clip_coef": 0.7}])
def test_the_loss_equals_numpy_over_the_valid_entries(flags):
    args, rng, n = replace(ARGS, **flags), np.random.default_rng(0), 12
    rows, action, valid = rng.integers(0, 2, n), rng.integers(0, 3, n), np.ones(n)
    valid[[2, 7]] = rows[[2, 7]] = 0  # where the entropy is not that of the others
    old_log_prob, advantage, returns, old_value = rng.normal(size=(4, n))
    old_log_prob -= 1
    arrays = [jnp.asarray(x, jnp.float32) for x in (rows[:, None], old_log_prob, valid, advantage, returns, old_value)]
    no = jnp.zeros(n, bool)
    batch = ppo.Transition(arrays[0], jnp.asarray(action), arrays[1], jnp.zeros(n), no, no, arrays[2], info={})
    loss, metrics = ppo.ppo_loss(PARAMS, table_agent, args, batch, ppo.Targets(*arrays[3:]))

    keep = valid == 1
    rows, action, old_log_prob, advantage, returns, old_value = (
        x[keep] for x in (rows, action, old_log_prob, advantage, returns, old_value)
    )
    log_ratio = np.log(PROBS[rows, action]) - old_log_prob
    ratio, value = np.exp(log_ratio), np.array([1.0, -2.0])[rows]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / advantage.std()
    clipped = np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    errors = (value - returns) ** 2
    if args.clip_vloss:
        near = old_value + np.clip(value - old_value, -args.clip_coef, args.clip_coef)
        errors = np.maximum(errors, (near - returns) ** 2)
    entropy = -(PROBS[rows] * np.log(PROBS[rows])).sum(-1).mean()
    policy_loss = -np.minimum(ratio * advantage, clipped * advantage).mean()
    expected = {
        "losses/loss": policy_loss + args.vf_coef * errors.mean() - args.ent_coef * entropy,
        "losses/policy_loss": policy_loss,
        "losses/value_loss": errors.mean(),
        "losses/entropy": entropy,
        "losses/old_approx_kl": -log_ratio.mean(),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clipfrac": (np.abs(ratio - 1) > args.clip_coef).mean(),
    }
    assert metrics.keys() == expected.keys() and loss == metrics["losses/loss"]
    for name, x in expected.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------- environment boundary
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "LunarLander-v3", "Catch-v0"])
def test_xla_equals_numpy_bit_for_bit(env_id):
    """An integer of a Discrete space as a one-hot vector, all else flat."""
    args = replace(ARGS, env_id=env_id, norm_obs=False)
    env = ppo.make_env(args)
    n = int(env.envs.action_space.n)
    actions = np.random.default_rng(0).integers(0, n, (120, 4)).astype(np.int32)
    env, first = env.reset()
    _, steps = jax.jit(partial(jax.lax.scan, ppo.VectorEnvWrapper.step))(env, actions)

    seeds = (np.random.SeedSequence(args.seed, spawn_key=(0,)).generate_state(4) >> 1).tolist()
    pool = envpool.make(env_id, env_type="gymnasium", num_envs=4, env_seed=seeds)
    space = pool.observation_space

    def as_vector(obs):
        if isinstance(space, gym.spaces.Discrete):
            return np.eye(space.n, dtype=np.float32)[obs]
        return obs.reshape(4, -1).astype(np.float32)

    np.testing.assert_array_equal(first.obs, as_vector(pool.reset()[0]))
    for t, action in enumerate(actions):
        obs, reward, terminated, truncated, _ = pool.step(action)
        np.testing.assert_array_equal(steps.obs[t], as_vector(obs))
        np.testing.assert_array_equal(steps.reward[t], reward.astype(np.float32))
        np.testing.assert_array_equal(steps.terminated[t], terminated)
        np.testing.assert_array_equal(steps.truncated[t], truncated)
    assert np.asarray(steps.done).any()


def test_discrete_spaces_inside_a_dict_are_one_hot_in_alphabetical_order_from_their_start():
    space = gym.spaces.Dict({"b": gym.spaces.Discrete(3, start=-1), "a": gym.spaces.Box(0, 9, (2,), np.int32)})
    obs = {"b": np.array([-1, 1]), "a": np.array([[4, 5], [6, 7]], np.int32)}
    expected = [[4, 5, 1, 0, 0], [6, 7, 0, 0, 1]]
    for xp in (np, jnp):
        vectors = ppo.flatten_obs(obs, space, xp)
        np.testing.assert_array_equal(vectors, expected)
        assert vectors.dtype == np.float32
    assert ppo.obs_dim(SimpleNamespace(observation_space=space)) == 5


@pytest.mark.parametrize(
    "action", [jnp.zeros(4), jnp.zeros(4, jnp.int8), jnp.zeros(3, int), jnp.zeros((4, 1), int)], ids=str
)
def test_a_wrong_action_is_an_error_when_traced(action):
    env = ppo.make_env(ARGS)
    with pytest.raises(ValueError, match=r"the environment takes int32\(4,\)"):
        jax.eval_shape(env.step, action)


@pytest.mark.parametrize("spoil", ["observation", "action"])
def test_buffers_of_another_type_are_refused(spoil, monkeypatch):
    pool = envpool.make("FrozenLake-v1", env_type="gymnasium", num_envs=2)
    spec = SimpleNamespace(action_array_spec={"action": SimpleNamespace(dtype=np.int64)})
    spaces = {"observation_space": gym.spaces.Box(0, 1, (), np.float32)} if spoil == "observation" else {"spec": spec}
    names = {"xla": pool.xla, "all_env_ids": pool.all_env_ids, "observation_space": pool.observation_space}
    with pytest.raises(ValueError, match="EnvPool's XLA interface declares|EnvPool takes actions of"):
        ppo.xla_step(SimpleNamespace(**{**names, "spec": pool.spec, **spaces}))


def test_episodes_at_their_time_limit_are_truncated_and_the_reset_step_has_no_weight():
    """MountainCar's last 200 steps; the policy at the start does not reach the top."""
    args = replace(ARGS, env_id="MountainCar-v0", num_steps=410)
    state = ppo.init_lanes([args], ppo.make_env(args))
    state, batch = ppo.compiled(ppo.rollout, args)(state)
    batch = jax.tree.map(lambda x: np.asarray(x[0, 0]), batch)
    ends = np.arange(410) % 201 == 199
    np.testing.assert_array_equal(batch.truncated, np.repeat(ends[:, None], 4, axis=1))
    assert not batch.terminated.any()
    np.testing.assert_array_equal(batch.valid[1:], 1.0 - ends[:-1, None] * np.ones(4))
    np.testing.assert_array_equal(batch.reward[1:], -batch.valid[1:])
    np.testing.assert_array_equal(batch.info["episodic_return"][ends], np.full((2, 4), -200))
    assert batch.action.dtype == np.int32 and set(np.unique(batch.action)) == {0, 1, 2}


# ---------------------------------------------------------------- learning
def trained(*lanes):
    args = replace(lanes[0], num_seeds=len(lanes))
    state = ppo.init_lanes(list(lanes), ppo.make_env(*lanes))
    for _ in range(args.num_iterations):
        state, metrics = ppo.train_iteration(args, state)
    return ppo.fetch(state), ppo.fetch(metrics)


def test_lanes_are_what_each_would_be_alone_and_each_own_value_counts():
    grid = {"learning_rate": 1e-2, "gamma": 0.5, "gae_lambda": 0.5, "clip_coef": 1e-3, "ent_coef": 1.0}
    grid |= {"vf_coef": 5.0, "max_grad_norm": 1e-3, "seed": 2}
    assert grid.keys() == set(ppo.MAY_DIFFER)
    base = replace(ARGS, learning_rate=3e-3)
    lanes = [base, *(replace(base, **{name: value}) for name, value in grid.items())]
    state, metrics = trained(*lanes)
    alone, metrics_alone = trained(lanes[-1])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[-1], y[0]), state.timestep, alone.timestep)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[-1], y[0], rtol=2e-3, atol=2e-5),
        (state.agent.params, metrics),
        (alone.agent.params, metrics_alone),
    )
    for i, name in enumerate(grid, start=1):
        changes = jax.tree.map(lambda x, i=i: np.abs(x[i] - x[0]).max(), state.agent.params)
        assert max(jax.tree.leaves(changes)) > 1e-4, name


FLAGS = {"anneal_lr": False, "update_epochs": 1, "norm_adv": False, "norm_return": False, "clip_vloss": True}
FLAGS |= {"recompute_advantage": False, "target_kl": 0.1, "norm_obs": False, "hidden_size": 9}


def test_every_other_flag_changes_the_program():
    """Of the functions that read them, all but the loss are copies, tested by values where they are copied from."""

    learning = learning_program(ppo, ARGS)
    assert learning_program(ppo, ARGS) == learning
    for name, value in FLAGS.items():
        assert learning_program(ppo, replace(ARGS, **{name: value})) != learning, name
    raw, normalised = (ppo.make_env(replace(ARGS, norm_obs=on)).reset()[1].obs for on in (False, True))
    assert np.abs(raw).max() <= 0.05 < 1 < np.abs(normalised).max()


def test_the_arguments_are_the_first_scripts_but_for_the_deviation_of_actions():
    """Whose tests are of all the others."""
    names = [field.name for field in fields(ppo.Args)]
    assert [field.name for field in fields(continuous.Args) if field.name != "min_log_std"] == names


class Bandit:
    """Observes one of three signs, and pays 1 for the action of that number one step later; episodes of 8 steps."""

    observation_space, action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(3)

    def make_env(self, num_envs):
        def step(handle, action):
            time, signs, owed, keys = handle
            reward = jnp.where(time % 9 == 0, 0.0, owed)  # step 8 of each 9 resets
            keys = jax.vmap(lambda key: jax.random.fold_in(key, time))(keys)
            new = jax.vmap(lambda key: jax.random.randint(key, (), 0, 3))(keys)
            owed, done = (action == signs).astype(jnp.float32), jnp.full(num_envs, time % 9 == 8)
            return (time + 1, new, owed, keys), (jax.nn.one_hot(new, 3), reward, done, jnp.zeros(num_envs, bool))

        keys = jax.random.split(jax.random.PRNGKey(7), num_envs)
        zeros = jnp.zeros(num_envs)
        handle = (jnp.array(0), zeros.astype(jnp.int32), zeros, keys)
        stats = ppo.VectorEnvEpisodeStats.create(num_envs)
        first_obs = jax.nn.one_hot(handle[1], 3)
        return ppo.VectorEnvWrapper(handle, (stats,), self, lambda: first_obs[None, None], step, num_envs)


def test_a_task_with_a_late_reward_is_learned():
    args = replace(ARGS, num_envs=8, num_steps=32, update_epochs=4, learning_rate=1e-2, gamma=0.9)
    args = replace(args, total_timesteps=40 * args.batch_size)
    env = Bandit().make_env(args.num_envs)
    state, metrics = train_in_one_call(ppo, args, env)
    returns, entropy = metrics["charts/avg_episodic_return"], metrics["losses/entropy"]
    assert returns[1] < 4.5 and returns[-1] > 7.0 * 7 / 8  # the last reward of eight is not paid any more
    assert entropy[0] > 0.9 * np.log(3) and entropy[-1] < 0.5
    action, _ = ppo.get_action(state.agent, jnp.eye(3), jax.random.PRNGKey(0), deterministic=True)
    np.testing.assert_array_equal(action, [0, 1, 2])


# ---------------------------------------------------------------- whole runs
def test_a_run_of_two_devices_is_evaluated_alike_in_another_process_and_watched(capfd):
    assert_evaluated_alike_in_another_process(ppo, "Acrobot-v1", 192, capfd, "--update-epochs", "2")
    (path,) = Path("runs").rglob("*.cleanrl_model")
    stats = read_model(str(path))["wrappers"]["VectorEnvNormObs"]
    assert stats["count"] == pytest.approx(3 * 64 + 4, abs=0.01)  # of both devices


def test_a_run_goes_on_and_an_evaluation_without_end_ends(monkeypatch, capfd):
    monkeypatch.setattr(ppo_envpool_jax_eval, "MAX_LENGTH", 50)
    ppo.main(replace(ARGS, env_id="CliffWalking-v1"))
    (folder,) = Path("runs").iterdir()
    out, err = capfd.readouterr()
    assert "length 50 at step 192" in out and "2 of the episodes did not end within 50 steps" in err
    ppo.main(ppo.parse_args(["--resume", str(folder), "--total-timesteps", str(5 * 64), "--no-progress"]))
    env, _ = load_agent(str(folder / f"{NAME}.cleanrl_model"), ppo)
    assert env.wrappers[1].stats.count == pytest.approx(5 * 64 + 8, abs=0.01)  # a second start, with new episodes
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["global_step"] == 320 and evaluation["episodic_length"] == [50, 50]
    assert max(evaluation["episodic_return"]) <= -50
    curves = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in curves.Scalars("losses/entropy")] == [64, 128, 192, 256, 320]


# ---------------------------------------------------------------- bad input
CONTINUOUS = "cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py serves EnvPool's with a Box of actions"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"env_id": "CartPoll-v1"}, ["no such environment", "CartPole-v1"]),
        ({"env_id": "Pendulum-v1"}, ["needs Discrete", CONTINUOUS]),
        ({"env_id": "Hopper-v4"}, ["needs Discrete", CONTINUOUS]),
        ({"env_id": "CarRacing-v3"}, ["needs Discrete", "none serves it yet"]),
        ({"env_id": "Pong-v5"}, ["pixels", "cleanrl/ppo_atari_envpool_xla_jax_scan.py serves"]),
        ({"env_id": "MiniGrid-Empty-5x5-v0"}, ["pixels", "none serves it yet"]),
        ({"env_id": "KuhnPoker-v1"}, ["bits", "none serves it yet"]),
        ({"env_id": "IntersectionMultiAgent-v0"}, ["several players"]),
        ({"num_minibatches": 3}, ["--num-minibatches 3", "2 and 4"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line(changes, words, capfd):
    assert_refused(lambda: ppo.main(replace(ARGS, **changes)), capfd, *words)


def test_actions_that_do_not_start_at_0_are_refused(monkeypatch, capfd):
    spec = SimpleNamespace(gymnasium_action_space=gym.spaces.Discrete(3, start=1))
    spec.gymnasium_observation_space = gym.spaces.Box(0, 1, (2,))
    monkeypatch.setattr(envpool, "make_spec", lambda env_id: spec)
    assert_refused(lambda: ppo.check_env_id("CartPole-v1"), capfd, "counts its actions from 1")

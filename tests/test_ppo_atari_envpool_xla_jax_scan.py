"""The script for pixels: what differs from the discrete one, which has tests for what they share."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from glob import glob
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

import cleanrl.ppo_atari_envpool_xla_jax_scan as ppo
import cleanrl.ppo_envpool_xla_jax_scan as discrete
from cleanrl_utils.evals import ppo_envpool_jax_eval

pytestmark = pytest.mark.usefixtures("compile_fast", "in_folder")

ARGS = ppo.Args(env_id="Breakout-v5", **SMALL)


def env_seeds(args, num_envs, evaluation=False):
    return (np.random.SeedSequence(args.seed, spawn_key=(int(evaluation),)).generate_state(num_envs) >> 1).tolist()


# ---------------------------------------------------------------- environment boundary
@pytest.mark.parametrize("evaluation", [False, True])
def test_xla_equals_numpy_bit_for_bit_and_statistics_are_of_whole_games(evaluation):
    """Space Invaders, whose shots pay 5 to 30: clipped rewards and lives in training, neither in evaluation."""
    args = replace(ARGS, env_id="SpaceInvaders-v5", num_envs=4, eval_episodes=4)
    env = ppo.make_env(args, evaluation=evaluation)
    actions = np.random.default_rng(0).integers(0, 6, (800, 4)).astype(np.int32)
    env, first = env.reset()

    def step(env, action):
        env, timestep = env.step(action)
        return env, (timestep.replace(obs=timestep.obs[:, ::9, ::9]), timestep.obs.astype(jnp.float32).sum())

    _, (steps, sums) = jax.jit(partial(jax.lax.scan, step))(env, actions)
    steps = jax.tree.map(np.asarray, steps)

    seeds = env_seeds(args, 4, evaluation)
    pool = envpool.make(args.env_id, env_type="gymnasium", num_envs=4, env_seed=seeds, episodic_life=not evaluation)
    assert first.obs.dtype == np.uint8 and first.obs.shape == (4, 84, 84, 4)
    np.testing.assert_array_equal(first.obs, pool.reset()[0].transpose(0, 2, 3, 1))
    score, length = np.zeros(4), np.zeros(4)
    games, lives, game_over = [], 0, np.zeros(4, bool)
    resets = np.zeros(4, bool)  # where this step starts an episode, and ignores its action
    for t, action in enumerate(actions):
        obs, reward, terminated, truncated, info = pool.step(action)
        obs = obs.transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(steps.obs[t], obs[:, ::9, ::9])
        assert sums[t] == obs.astype(np.float32).sum()
        np.testing.assert_array_equal(steps.reward[t], reward if evaluation else np.sign(reward))
        np.testing.assert_array_equal(steps.terminated[t], terminated)
        np.testing.assert_array_equal(steps.truncated[t], truncated)
        score, length = np.where(game_over, 0, score + reward), np.where(game_over, 0, length + ~resets)
        lives += (terminated & (info["lives"] > 0)).sum()
        resets, game_over = terminated | truncated, info["terminated"].astype(bool)
        np.testing.assert_array_equal(steps.info["game_over"][t], game_over)
        for i in np.flatnonzero(game_over):
            assert info["lives"][i] == 0
            games.append((score[i], length[i]))
            assert (steps.info["episodic_return"][t, i], steps.info["episodic_length"][t, i]) == games[-1]
    assert len(games) >= 3 and max(games)[0] > 30
    assert (lives > 0) == (not evaluation)


def game(score, lives=3, lost_life=False, game_over=False, truncated=False):
    """What the environment of two games says after a step: the first as given, the second goes on without points."""
    one = lambda x: jnp.array([x, 0], jnp.float32)  # noqa: E731
    flag = lambda x: jnp.array([x, False])  # noqa: E731
    return ppo.TimeStep(
        obs=jnp.zeros((2, 1, 1, 1), jnp.uint8),
        reward=jnp.sign(one(score)),
        terminated=flag(lost_life or game_over),
        truncated=flag(truncated),
        info={"score": one(score), "game_over": flag(game_over), "lives": jnp.array([lives, 3])},
    )


def played(steps):
    """Of the first game, after each step: whether it is over, and return and length of the last one that was."""
    wrapper, _ = ppo.VectorEnvEpisodeStats.create(2).reset(game(0))
    recv, seen = jax.jit(lambda w, x: w.recv(x)), []
    for x in steps:
        wrapper, timestep = recv(wrapper, x)
        np.testing.assert_array_equal(timestep.reward, jnp.sign(x.info["score"]))
        seen.append([float(timestep.info[name][0]) for name in ("game_over", "episodic_return", "episodic_length")])
        assert np.isnan(timestep.info["episodic_return"][1]) and not timestep.info["game_over"][1]
    assert wrapper.lengths[1] == len(steps)
    return seen


NO = [0, np.nan, np.nan]


@pytest.mark.parametrize("end", ["game_over", "truncated"])
def test_a_game_goes_on_after_a_lost_life_and_ends_when_it_is_over_or_cut_off(end):
    steps = [game(7), game(0, 2, lost_life=True), game(0, 2), game(30, 2), game(5, 2, **{end: True}), game(0), game(2)]
    seen = played([*steps, game(1, game_over=True)])
    # The third and the sixth step are resets: no steps of a game.
    np.testing.assert_array_equal(seen, [NO, NO, NO, NO, [1, 42, 4], [0, 42, 4], [0, 42, 4], [1, 3, 2]])


def test_a_game_that_ends_unseen_while_envpool_waits_after_a_lost_life_is_told_by_its_lives():
    """The reset step has three lives where one was left: a new game."""
    steps = [game(7, 2), game(0, 1, lost_life=True), game(0, 3), game(4), game(5, lives=0, game_over=True)]
    np.testing.assert_array_equal(played(steps), [NO, NO, [1, 7, 2], [0, 7, 2], [1, 9, 2]])
    # A life that is won while the game is played does not end it.
    steps = [game(7, 2), game(9, 3), game(0, 0, game_over=True), game(0, 3), game(4), game(0, 0, game_over=True)]
    np.testing.assert_array_equal(played(steps), [NO, NO, [1, 16, 3], [0, 16, 3], [0, 16, 3], [1, 4, 2]])


def test_a_game_that_is_cut_off_after_a_lost_life_is_over_and_the_next_one_counts_from_0(monkeypatch):
    monkeypatch.setattr(envpool, "make", partial(envpool.make, max_episode_steps=100))
    env, _ = ppo.make_env(ARGS).reset()
    actions = np.random.default_rng(0).integers(0, 4, (400, 4)).astype(np.int32)
    _, steps = jax.jit(partial(jax.lax.scan, ppo.VectorEnvWrapper.step))(env, actions)
    steps = jax.tree.map(np.asarray, steps)
    cut_off_late = steps.truncated & (np.cumsum(steps.terminated, axis=0) > 0)
    assert cut_off_late.any() and steps.info["game_over"][steps.truncated].all()
    np.testing.assert_array_equal(steps.info["episodic_length"][steps.truncated], 100)  # without the reset steps
    assert (steps.info["episodic_length"][-1] <= 100).all()


def test_logged_returns_are_of_the_games_that_ended_not_of_lives():
    nan = np.nan
    info = {
        "game_over": jnp.array([[False, False], [True, False], [False, False]]),
        "episodic_return": jnp.array([[nan, nan], [42.0, nan], [42.0, nan]]),
        "episodic_length": jnp.array([[nan, nan], [4.0, nan], [4.0, nan]]),
    }
    batch = SimpleNamespace(info=info, terminated=jnp.ones((3, 2), bool), truncated=jnp.zeros((3, 2), bool))
    metrics = ppo.episode_metrics(ARGS, batch)
    assert metrics.pop("charts/episodes") == 1
    lengths = {name: float(x) for name, x in metrics.items() if "length" in name}
    returns = {name: float(x) for name, x in metrics.items() if "return" in name}
    assert len(lengths) == len(returns) == 2 and {*lengths.values()} == {4.0} and {*returns.values()} == {42.0}


def test_a_games_limit_is_27000_steps_of_four_frames_and_the_actions_are_never_repeated_at_random():
    for evaluation in (False, True):
        config = ppo.make_env(ARGS, evaluation=evaluation).envs.spec.config
        assert (config.max_episode_steps, config.frame_skip, config.stack_num) == (27_000, 4, 4)
        assert (config.noop_max, config.repeat_action_probability, config.use_fire_reset) == (30, 0.0, True)
        assert config.episodic_life == config.reward_clip == (not evaluation)


def test_pictures_have_their_channels_last_whichever_way_they_come():
    first = np.arange(2 * 3 * 64 * 60, dtype=np.uint8).reshape(2, 3, 64, 60)
    last = first.transpose(0, 2, 3, 1)
    for pictures in (first, last):
        np.testing.assert_array_equal(ppo.to_channels_last(pictures), last)
        space = gym.spaces.Box(0, 255, pictures.shape[1:], np.uint8)
        assert ppo.obs_shape(SimpleNamespace(observation_space=space)) == (64, 60, 3)


def test_a_buffer_of_another_type_or_shape_is_refused():
    with pytest.raises(ValueError, match="EnvPool's XLA interface declares"):
        ppo.xla_step(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2))
    pool = envpool.make("Pong-v5", env_type="gymnasium", num_envs=2)
    names = {"xla": pool.xla, "all_env_ids": pool.all_env_ids, "observation_space": pool.observation_space}
    ppo.xla_step(SimpleNamespace(**names, spec=pool.spec))
    with pytest.raises(ValueError, match="EnvPool's XLA interface declares"):
        space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        ppo.xla_step(SimpleNamespace(**{**names, "observation_space": space}, spec=pool.spec))
    with pytest.raises(ValueError, match="EnvPool takes actions of"):
        spec = SimpleNamespace(action_array_spec={"action": SimpleNamespace(dtype=np.int64)})
        ppo.xla_step(SimpleNamespace(**names, spec=spec))


def test_procgen_has_pictures_of_64_by_64_and_episodes_of_one_life():
    try:
        envpool.make_spec("StarpilotEasy-v0")
    except ImportError:
        pytest.skip("Qt 5 is not installed")
    args = replace(ARGS, env_id="StarpilotEasy-v0")
    env = ppo.make_env(args)
    actions = np.random.default_rng(0).integers(0, 15, (300, 4)).astype(np.int32)
    env, first = env.reset()
    _, steps = jax.jit(partial(jax.lax.scan, ppo.VectorEnvWrapper.step))(env, actions)
    pool = envpool.make(args.env_id, env_type="gymnasium", num_envs=4, env_seed=env_seeds(args, 4))
    assert first.obs.shape == (4, 64, 64, 3)
    np.testing.assert_array_equal(first.obs, pool.reset()[0].transpose(0, 2, 3, 1))
    score, done, scores = np.zeros(4), np.zeros(4, bool), []
    for t, action in enumerate(actions):
        obs, reward, terminated, truncated, _ = pool.step(action)
        np.testing.assert_array_equal(steps.obs[t], obs.transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(steps.reward[t], reward)
        score, done = np.where(done, 0, score + reward), terminated | truncated
        np.testing.assert_array_equal(steps.info["game_over"][t], done)
        np.testing.assert_array_equal(steps.info["episodic_return"][t][done], score[done])
        scores += score[done].tolist()
    assert len(scores) >= 4 and max(scores) > 0

    flags = {"network": "impala", "num_envs": 2, "num_steps": 4, "update_epochs": 1, "total_timesteps": 8}
    ppo.main(replace(args, **flags, eval_episodes=1, bfloat16=True))
    (evaluation,) = glob("runs/*/evaluation.json")
    assert json.loads(Path(evaluation).read_text())["episodic_length"][0] > 1


def test_two_lanes_roll_out_as_each_would_alone():
    lanes = [replace(ARGS, num_steps=4, seed=seed) for seed in (1, 2)]

    def rollout(*lanes):
        state = ppo.init_lanes(list(lanes), ppo.make_env(*lanes))
        return jax.device_get(ppo.compiled(ppo.rollout, replace(lanes[0], num_seeds=len(lanes)))(state)[1])

    together, alone = rollout(*lanes), [rollout(lane) for lane in lanes]
    assert (together.obs[0, 0] != together.obs[0, 1]).any()
    for i in range(2):
        np.testing.assert_array_equal(together.obs[0, i], alone[i].obs[0, 0])
        np.testing.assert_array_equal(together.action[0, i], alone[i].action[0, 0])


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_host_step_steps_as_xla_step(num_lanes, monkeypatch, capsys):
    lanes, backend = [replace(ARGS, num_envs=2, seed=seed) for seed in range(num_lanes)], jax.default_backend()

    def play(name):
        monkeypatch.setattr(jax, "default_backend", lambda: name)
        env = ppo.make_env(*lanes)
        monkeypatch.undo()
        actions = np.random.default_rng(0).integers(0, 4, (150, num_lanes, 2)).astype(np.int32)
        handle = jnp.array(np.broadcast_to(env.handle, (num_lanes, *env.handle.shape)))
        step = jax.vmap(env.step_fn) if num_lanes > 1 else ppo.without_axis(env.step_fn)
        first_obs = env.reset_fn()
        return jax.device_get((first_obs, jax.jit(lambda handle: jax.lax.scan(step, handle, actions)[1])(handle)))

    compiled, on_host = play(backend), play("tpu")
    assert "its steps are calls to the host" in capsys.readouterr().err
    terminated, info = compiled[1][2], compiled[1][4]
    assert terminated.any() and len(np.unique(info["lives"])) > 1
    for x, y in zip(jax.tree.leaves(compiled), jax.tree.leaves(on_host), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- networks
@pytest.mark.parametrize("size, stride, picture", [(8, 4, 84), (4, 2, 21), (3, 1, 9), (8, 4, 83), (4, 2, 20)])
def test_the_product_of_matrices_equals_xlas_convolution_and_so_does_its_gradient(size, stride, picture, monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, picture, picture + stride, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(size, size, 3, 5)), jnp.float32)

    def outputs_and_gradients():
        y, pull_back = jax.vjp(partial(ppo.convolve, stride=stride), x, kernel)
        return y, *pull_back(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    ours = outputs_and_gradients()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for x, expected in zip(ours, outputs_and_gradients(), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-3, atol=2e-3)
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        with pytest.raises(ValueError, match="no multiple of the stride"):
            ppo.convolve(x, kernel, size + 1)


def make_agent(network, shape, **flags):
    args = replace(ARGS, network=network, **flags)
    env = SimpleNamespace(envs=SimpleNamespace(action_space=gym.spaces.Discrete(6)), obs_shape=shape)
    return ppo.make_agent(args, env, jax.random.PRNGKey(0))


def test_the_networks_are_the_published_ones():
    """Sizes worked out by hand: kernel height x width x channels x features + biases."""

    def params_of(*network_and_shape):
        return jax.eval_shape(partial(make_agent, *network_and_shape, hidden_size=512)).params["params"]

    params = params_of("nature", (84, 84, 4))
    sizes = [sum(x.size for x in jax.tree.leaves(params["NatureCNN_0"][f"Conv_{i}"])) for i in range(3)]
    assert sizes == [8 * 8 * 4 * 32 + 32, 4 * 4 * 32 * 64 + 64, 3 * 3 * 64 * 64 + 64]
    assert params["Dense_0"]["kernel"].shape == (7 * 7 * 64, 512)
    assert params["Dense_1"]["kernel"].shape == (512, 6) and params["Dense_2"]["kernel"].shape == (512, 1)

    params = params_of("impala", (64, 64, 3))
    channels = [(3, 16), *[(16, 16)] * 4, (16, 32), *[(32, 32)] * 9]
    convolutions = [params["ImpalaCNN_0"][f"Conv_{i}"]["kernel"].shape for i in range(15)]
    assert convolutions == [(3, 3, *pair) for pair in channels] and len(params["ImpalaCNN_0"]) == 15
    assert params["Dense_0"]["kernel"].shape == (8 * 8 * 32, 512)
    assert params_of("impala", (84, 84, 4))["Dense_0"]["kernel"].shape == (11 * 11 * 32, 512)


@pytest.mark.parametrize("network", ["nature", "impala"])
def test_layers_start_orthogonal_with_cleanrls_gains_and_bytes_are_divided_by_255(network):
    """And bfloat16 comes close to float32."""
    shape = (44, 40, 3)
    agent = jax.jit(partial(make_agent, network, shape))()
    leaves = jax.tree_util.tree_leaves_with_path(agent.params["params"])
    gains = {"Dense_0": np.sqrt(2), "Dense_1": 0.01, "Dense_2": 1.0}
    for path, x in leaves:
        name = path[-2].key
        if path[-1].key == "bias":
            np.testing.assert_array_equal(x, 0, err_msg=name)
        else:
            singular = np.linalg.svd(x.reshape(-1, x.shape[-1]), compute_uv=False)
            np.testing.assert_allclose(singular, gains.get(name, np.sqrt(2)), rtol=1e-3, err_msg=name)

    obs = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 3, *shape)), jnp.uint8)
    logits, value = jax.jit(agent.apply_fn)(agent.params, obs)
    assert logits.shape == (2, 3, 6) and value.shape == (2, 3)
    params = jax.tree.map(np.asarray, agent.params["params"])
    cnn = {"nature": ppo.NatureCNN, "impala": ppo.ImpalaCNN}[network](jnp.float32)
    (name,) = (name for name in params if "CNN" in name)
    features = jax.jit(cnn.apply)({"params": params[name]}, jnp.asarray(np.asarray(obs[1]) / 255, jnp.float32))
    assert features.min() == 0 < features.max()
    hidden = np.maximum(np.asarray(features).reshape(3, -1) @ params["Dense_0"]["kernel"], 0)
    np.testing.assert_allclose(hidden @ params["Dense_1"]["kernel"], logits[1], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(hidden @ params["Dense_2"]["kernel"][:, 0], value[1], rtol=1e-3, atol=1e-4)

    half = jax.eval_shape(partial(make_agent, network, shape, bfloat16=True))
    assert {x.dtype for x in jax.tree.leaves(half.params)} == {jnp.dtype("float32")}
    products = re.findall(r":(\w+)\[\S+ = dot_general", str(jax.make_jaxpr(half.apply_fn)(agent.params, obs)))
    assert products == ["bf16"] * ({"nature": 3, "impala": 15}[network] + 1) + ["f32"] * 2  # the heads
    half_logits, half_value = jax.jit(half.apply_fn)(agent.params, obs)
    assert half_logits.dtype == half_value.dtype == jnp.float32
    np.testing.assert_allclose(half_value, value, rtol=0.05, atol=0.05)
    assert np.abs(half_value - value).max() > 0


def test_adams_eps_is_cleanrls():
    agent = jax.jit(partial(make_agent, "nature", (36, 36, 1)))()
    size = sum(x.size for x in jax.tree.leaves(agent.params))
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-5), agent.params)
    assert 1e-5 * np.sqrt(size) < ARGS.max_grad_norm  # nothing is clipped
    updates = agent.tx.update(grads, agent.opt_state)[0]
    for x in jax.tree.leaves(updates):  # a gradient of the size of eps: half a step
        np.testing.assert_allclose(x, -2.5e-4 / 2, rtol=1e-3)


# ---------------------------------------------------------------- learning
FLAGS = {"network": "impala", "bfloat16": True, "hidden_size": 9, "norm_return": True, "clip_vloss": False}
FLAGS |= {"recompute_advantage": True, "norm_adv": False, "anneal_lr": False, "update_epochs": 1, "target_kl": 0.1}


def test_every_flag_changes_the_program():
    learning = learning_program(ppo, ARGS)
    assert learning_program(ppo, ARGS) == learning
    for name, value in FLAGS.items():
        assert learning_program(ppo, replace(ARGS, **{name: value})) != learning, name


def test_the_defaults_are_cleanrls():
    expected = {"num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 2.5e-4}
    expected |= {"anneal_lr": True, "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.1, "clip_vloss": True}
    expected |= {"ent_coef": 0.01, "vf_coef": 0.5 / 2, "max_grad_norm": 0.5, "norm_adv": True, "norm_return": False}
    expected |= {"network": "nature", "hidden_size": 512, "total_timesteps": 10_000_000, "recompute_advantage": False}
    assert {name: getattr(ppo.Args(), name) for name in expected} == expected


def test_the_arguments_are_the_discrete_scripts_but_for_the_network():
    names = [field.name for field in fields(ppo.Args) if field.name not in ("network", "bfloat16")]
    assert [field.name for field in fields(discrete.Args) if field.name != "norm_obs"] == names


class Lamps:
    """A lamp on the left, or on the right: pays 1 for the action of its side, one step later; episodes of 8 steps."""

    observation_space, action_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8), gym.spaces.Discrete(2)

    def make_env(self, num_envs):
        def picture(side):
            return jnp.zeros((num_envs, 36, 36, 1), jnp.uint8).at[jnp.arange(num_envs), 8:16, 8 + 20 * side].set(255)

        def step(handle, action):
            time, side, owed, keys = handle
            reward = jnp.where(time % 9 == 0, 0.0, owed)  # step 8 of each 9 resets
            keys = jax.vmap(lambda key: jax.random.fold_in(key, time))(keys)
            new = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys)
            owed, done = (action == side).astype(jnp.float32), jnp.full(num_envs, time % 9 == 8)
            # Every second episode is a life, not a game.
            info = {"score": 3 * reward, "game_over": done & (time % 18 == 17), "lives": jnp.zeros(num_envs, int)}
            return (time + 1, new, owed, keys), (picture(new), reward, done, jnp.zeros(num_envs, bool), info)

        keys = jax.random.split(jax.random.PRNGKey(7), num_envs)
        side = jnp.arange(num_envs) % 2
        handle = (jnp.array(0), side, jnp.zeros(num_envs), keys)
        stats = ppo.VectorEnvEpisodeStats.create(num_envs)
        return ppo.VectorEnvWrapper(handle, (stats,), self, lambda: picture(side)[None, None], step, num_envs)


def test_a_task_of_pictures_with_a_late_reward_is_learned():
    args = replace(ARGS, num_envs=8, num_steps=32, update_epochs=4, learning_rate=1e-3, gamma=0.9)
    args = replace(args, hidden_size=16, total_timesteps=20 * args.batch_size)
    env = Lamps().make_env(args.num_envs)
    state, metrics = train_in_one_call(ppo, args, env)
    returns = metrics["charts/avg_episodic_return"]
    assert returns[1] < 3 * 10 and returns[-1] > 3 * 13  # of 2 x 7 rewards at most: the eighth is not paid any more
    obs = env.reset_fn()[0, 0]
    action, _ = ppo.get_action(state.agent, obs, jax.random.PRNGKey(0), deterministic=True)
    np.testing.assert_array_equal(action, np.arange(8) % 2)


# ---------------------------------------------------------------- whole runs
def test_a_run_of_two_devices_is_evaluated_alike_in_another_process_and_watched(tmp_path, capfd):
    flags = ("--update-epochs", "1", "--capture-video")
    assert_evaluated_alike_in_another_process(ppo, "SpaceInvaders-v5", 128, capfd, *flags)
    (video,) = tmp_path.glob("runs/*/videos/*.mp4")
    assert video.stat().st_size > 1000


def test_a_run_goes_on_and_evaluation_counts_whole_games_by_their_score():
    ppo.main(replace(ARGS, env_id="SpaceInvaders-v5", total_timesteps=64))
    (folder,) = os.listdir("runs")
    more = ["--resume", f"runs/{folder}", "--total-timesteps", "128", "--no-progress"]
    ppo.main(ppo.parse_args(more))
    (path,) = (os.path.join(folder, name) for folder, _, names in os.walk("runs") for name in names if "model" in name)
    returns, lengths = ppo_envpool_jax_eval.evaluate(path, ppo)
    env, agent = ppo_envpool_jax_eval.load_agent(path, ppo)
    pool = envpool.make("SpaceInvaders-v5", env_type="gymnasium", num_envs=2, env_seed=env_seeds(ARGS, 2, True))
    obs, score, steps, running = pool.reset()[0], np.zeros(2), np.zeros(2), np.ones(2, bool)
    act = jax.jit(lambda obs: ppo.get_action(agent, obs, jax.random.PRNGKey(0), deterministic=True)[0])
    while running.any():
        obs, reward, terminated, truncated, _ = pool.step(np.asarray(act(obs.transpose(0, 2, 3, 1))))
        score, steps = score + reward * running, steps + running
        running &= ~(terminated | truncated)
    np.testing.assert_array_equal(returns, score)
    np.testing.assert_array_equal(lengths, steps)


# ---------------------------------------------------------------- bad input
VECTORS = "cleanrl/ppo_envpool_xla_jax_scan.py serves EnvPool's with Discrete actions"
CONTINUOUS = "cleanrl/ppo_continuous_action_envpool_xla_jax_scan.py serves EnvPool's with a Box of actions"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"env_id": "Pong-v4"}, ["no such environment", "Pong-v5"]),
        ({"env_id": "CartPole-v1"}, ["needs pixels", VECTORS]),
        ({"env_id": "LunarLander-v3"}, ["needs pixels", VECTORS]),
        ({"env_id": "Hopper-v4"}, ["needs Discrete", CONTINUOUS]),
        ({"env_id": "CarRacing-v3"}, ["needs Discrete", "none serves it yet"]),
        ({"env_id": "MiniGrid-Empty-5x5-v0"}, ["needs pixels", "none serves it yet"]),
        ({"num_minibatches": 3}, ["--num-minibatches 3", "2 and 4"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line(changes, words, capfd):
    assert_refused(lambda: ppo.main(replace(ARGS, **changes)), capfd, *words)


def test_a_missing_system_library_is_named(monkeypatch, capfd):
    def make_spec(env_id):  # what EnvPool 1.2.5 raises
        raise ImportError(
            "EnvPool Procgen requires the system Qt 5 runtime on Linux. Install the Qt5 Core/Gui shared libraries, for "
            "example via `apt install qtbase5-dev` or `dnf install qt5-qtbase`."
        )

    monkeypatch.setattr(envpool, "make_spec", make_spec)
    assert_refused(lambda: ppo.check_env_id("CoinrunEasy-v0"), capfd, "apt install qtbase5-dev")


def test_an_unknown_network_is_refused():
    command = [sys.executable, ppo.__file__, "--network", "resnet"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "impala" in result.stderr and "Traceback" not in result.stderr

"""Saving, loading, evaluating and watching a model; and that a damaged or hostile file costs one line."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from scripted_pool import ScriptedPool
from video_frames import frames_of

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import enjoy, video
from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate, load_agent, make_evaluator
from cleanrl_utils.models import MAX_FILE_SIZE, find_model, read_model, restore, restore_args

pytestmark = pytest.mark.usefixtures("compile_fast")

ROOT = Path(__file__).resolve().parents[1]
ARGS = ppo.Args(
    env_id="Hopper-v4", exp_name="hop", num_envs=4, num_steps=32, num_minibatches=4, update_epochs=2, eval_episodes=3
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a short training has left its model, and the training's state."""
    state = ppo.init_lanes([ARGS], ppo.make_env(ARGS))
    for _ in range(2):
        state, _ = ppo.train_iteration(ARGS, state)
    state = jax.tree.map(lambda x: np.asarray(x[0]), ppo.fetch(state))
    cwd = tmp_path_factory.mktemp("trained")
    path = cwd / "runs" / "Hopper-v4__hop__1__1700000000" / "hop.cleanrl_model"
    path.parent.mkdir(parents=True)
    ppo.save_model(str(path), ARGS, state)
    return SimpleNamespace(cwd=cwd, path=path, state=state)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """An untrained model of Pendulum-v1, whose episodes take 200 steps each."""
    args = ppo.Args(env_id="Pendulum-v1", exp_name="pendulum", num_envs=2, eval_episodes=2)
    path = str(tmp_path_factory.mktemp("pendulum") / "pendulum.cleanrl_model")
    ppo.save_model(path, args, ppo.init_state(args, ppo.make_env(args)))
    return path


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """A working folder of its own with a copy of that model; returns the path, below it, of the model."""
    monkeypatch.chdir(tmp_path)
    path = trained.path.relative_to(trained.cwd)
    path.parent.mkdir(parents=True)
    path.write_bytes(trained.path.read_bytes())
    return path


def saved_dict(path):
    """Without the checksum, which files of earlier versions have not: what is edited goes past it."""
    model = flax.serialization.msgpack_restore(Path(path).read_bytes())
    del model["checksum"]
    return model


def write_model(path, model):
    Path(path).write_bytes(flax.serialization.msgpack_serialize(model))
    return str(path)


def one_line(capfd, call, *args, **kwargs):
    """The call ends the program with exit code 2 and one line, which is returned."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call(*args, **kwargs)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert len(err) < 1000 and out == ""
    return err


# ---------------------------------------------------------------- save, load
def deterministic_actions(env, agent, raw_obs):
    """What the environment is sent for raw observations, [n, obs_dim], with the wrappers' statistics as they are."""
    timestep = ppo.TimeStep(jnp.asarray(raw_obs), None, None, None, info={})
    for wrapper in env.wrappers:
        if isinstance(wrapper, ppo.VectorEnvNormObs):
            _, timestep = wrapper.replace(training=False).recv(timestep)
    action, _ = ppo.get_action(agent, timestep.obs, jax.random.PRNGKey(0), deterministic=True)
    for wrapper in reversed(env.wrappers):
        _, action = wrapper.send(action)
    return np.asarray(action)


NEW_PROCESS = """
import sys
import jax, numpy as np
from test_models import deterministic_actions, load_agent, ppo
jax.config.update("jax_disable_most_optimizations", True)
env, agent = load_agent("runs/Hopper-v4__hop__1__1700000000/hop.cleanrl_model", ppo)
np.save("actions.npy", deterministic_actions(env, agent, np.load("obs.npy")))
"""


def test_a_new_process_acts_as_the_training_process_did(trained, runs):
    raw_obs = np.random.default_rng(0).normal(1.0, 2.0, (64, 11)).astype(np.float32)
    np.save("obs.npy", raw_obs)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    result = subprocess.run([sys.executable, "-c", NEW_PROCESS], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = deterministic_actions(trained.state.env, trained.state.agent, raw_obs)
    assert np.std(expected, axis=0).min() > 1e-3  # they do depend on the observation
    assert np.array_equal(np.load("actions.npy"), expected)

    unnormalised = trained.state.env.replace(wrappers=(trained.state.env.wrappers[-1],))
    assert not np.allclose(deterministic_actions(unnormalised, trained.state.agent, raw_obs), expected)


def test_a_model_holds_what_the_training_ended_with(trained):
    model = read_model(str(trained.path))
    assert model.keys() == {"script", "args", "params", "wrappers", "versions"}
    assert model["args"] == vars(ARGS) and restore_args(ppo.Args, model["args"], "") == ARGS
    assert jax.tree.all(jax.tree.map(np.array_equal, model["params"], jax.device_get(trained.state.agent.params)))
    assert model["wrappers"].keys() == {"VectorEnvNormObs"}
    stats = trained.state.env.wrappers[1].stats
    assert stats.count > 200
    for name in ("mean", "var", "count"):
        assert np.array_equal(model["wrappers"]["VectorEnvNormObs"][name], getattr(stats, name))
    assert os.listdir(trained.path.parent) == ["hop.cleanrl_model"]  # and no temporary file


def test_a_model_without_observation_statistics(tmp_path, trained):
    model = saved_dict(trained.path)
    model["args"]["norm_obs"], model["wrappers"] = False, {}
    env, _ = load_agent(write_model(tmp_path / "m", model), ppo)
    assert not any(hasattr(wrapper, "stats") for wrapper in env.wrappers)


def test_an_argument_that_the_saved_version_did_not_have_keeps_its_default(trained):
    model = saved_dict(trained.path)
    del model["args"]["gamma"]
    assert restore_args(ppo.Args, model["args"], "").gamma == 0.99


# ---------------------------------------------------------------- evaluation
def test_evaluation_is_repeatable_and_changes_nothing(trained):
    before = trained.path.read_bytes()
    returns, lengths = evaluate(str(trained.path), ppo)
    again = evaluate(str(trained.path), ppo)
    assert np.array_equal(returns, again[0]) and np.array_equal(lengths, again[1])
    assert returns.shape == lengths.shape == (3,) and len(set(returns)) == 3  # streams of their own
    other_returns, _ = evaluate(str(trained.path), ppo, seed=2, eval_episodes=2)
    assert len(other_returns) == 2 and not np.array_equal(other_returns, returns[:2])
    assert trained.path.read_bytes() == before and os.listdir(trained.path.parent) == ["hop.cleanrl_model"]


def test_statistics_are_frozen(trained):
    env, _ = load_agent(str(trained.path), ppo)
    env, _ = env.reset()
    env, timestep = env.step(jnp.full(env.action_shape, 0.5))
    stats = env.wrappers[1].stats
    saved = saved_dict(trained.path)["wrappers"]["VectorEnvNormObs"]
    assert all(np.array_equal(getattr(stats, name), saved[name]) for name in ("mean", "var", "count"))


def test_returns_are_those_of_a_plain_loop_over_envpool(trained):
    """Raw rewards, actions of the restored policy, the same environment streams."""
    returns, lengths = evaluate(str(trained.path), ppo)
    env, agent = load_agent(str(trained.path), ppo)
    seeds = (np.random.SeedSequence(1, spawn_key=(1,)).generate_state(3) >> 1).tolist()
    pool = ppo.envpool.make("Hopper-v4", env_type="gymnasium", num_envs=3, env_seed=seeds)
    obs, _ = pool.reset()
    rewards, running = np.zeros(3), np.ones(3, bool)
    steps = np.zeros(3, int)
    while running.any():
        action = deterministic_actions(env, agent, obs.astype(np.float32))
        obs, reward, terminated, truncated, _ = pool.step(action.astype(np.float64))
        rewards += reward * running
        steps += running
        running &= ~(terminated | truncated)
    assert np.array_equal(lengths, steps)
    np.testing.assert_allclose(returns, rewards, rtol=1e-4)


def scripted_model(path, monkeypatch, **trace):
    """A saved model whose environments play back a trace, [rows, num_envs]."""
    obs = np.zeros((*trace["reward"].shape, 3))
    pool = ScriptedPool(obs, **trace)
    num_envs = obs.shape[1]
    args = ppo.Args(env_id="Pendulum-v1", exp_name="scripted", eval_episodes=num_envs)
    env = pool.make_env(
        ppo.VectorEnvEpisodeStats.create(num_envs),
        ppo.VectorEnvNormObs(ppo.RunningMeanStd.create(3), training=False),
        ppo.VectorEnvClipAct(jnp.array([-1.0]), jnp.array([1.0])),
    )
    monkeypatch.setattr(ppo, "make_env", lambda args, evaluation: env)
    agent = ppo.make_agent(args, env, jax.random.PRNGKey(0))
    ppo.save_model(str(path), args, SimpleNamespace(agent=agent, env=env))
    return str(path)


def test_the_first_episode_of_each_environment_counts_and_no_other(tmp_path, monkeypatch):
    # Environment 0 finishes three episodes before environment 2 finishes its first, and 1 is cut by a time limit.
    #                   reset
    reward = np.array([[0, 1, 1, 0, 50, 0, 70, 0], [0, 1, 2, 3, 4, 0, 9, 9], [0, 5, 5, 5, 5, 5, 5, 5]]).T
    terminated = np.array([[0, 0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]]).T
    truncated = np.array([[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]).T
    path = scripted_model(tmp_path / "m", monkeypatch, reward=reward, terminated=terminated, truncated=truncated)
    returns, lengths = evaluate(path, ppo)
    assert returns.tolist() == [2, 10, 35]
    assert lengths.tolist() == [2, 4, 7]


def test_truncation_ends_an_episode(pendulum):
    returns, lengths = evaluate(pendulum, ppo, eval_episodes=3)
    assert lengths.tolist() == [200, 200, 200] and (returns < 0).all()


def test_one_evaluator_serves_many_models(pendulum, tmp_path):
    """Pendulum's episodes have one length: the n-th evaluation has the same first states whatever came before."""
    paths = [pendulum]
    for part, changed in [("params", "log_std"), ("params", "actor"), ("wrappers", "VectorEnvNormObs")]:
        model = saved_dict(pendulum)
        tree = model["params"]["params"] if part == "params" else model["wrappers"]
        tree[changed] = jax.tree.map(lambda x: np.asarray(x * 3 + 1, x.dtype), tree[changed])
        paths.append(write_model(tmp_path / changed, model))
    same, noise, actor, stats = paths
    used, *fresh = (make_evaluator(pendulum, ppo) for _ in range(4))
    first, second, third = used(same), used(actor), used(stats)
    for evaluator, path, position, expected in [(fresh[0], actor, 1, second), (fresh[1], stats, 2, third)]:
        for _ in range(position):
            evaluator(path)
        np.testing.assert_array_equal(evaluator(path), expected)
    assert not np.array_equal(second, fresh[2](same)) and np.array_equal(first, evaluate(noise, ppo))


def test_the_video_is_of_the_first_environment_and_ends_with_its_episode(trained, tmp_path, monkeypatch):
    evaluator = make_evaluator(str(trained.path), ppo, capture_video=True)
    rendered, render = [], evaluator.env.envs.render
    monkeypatch.setattr(evaluator.env.envs, "render", lambda env_ids: rendered.append(env_ids) or render(env_ids))
    lengths = []
    for i in range(4):
        path = tmp_path / f"{i}.mp4"
        lengths.append(evaluator(str(trained.path), str(path))[1])
        assert len(frames_of(path)) == lengths[-1][0]
    assert any(x.max() > x[0] for x in lengths)
    assert rendered == [[0]] * sum(x[0] for x in lengths)


def test_an_older_video_is_not_taken_for_one_that_failed(pendulum, tmp_path, capfd):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"an older one")
    (tmp_path / "v.mp4.tmp").mkdir()
    evaluate(pendulum, ppo, video_path=str(path))
    assert capfd.readouterr().err.startswith("no video: ") and not path.exists()


def test_actions_that_are_not_finite_are_an_error(tmp_path, trained, capfd):
    model = saved_dict(trained.path)  # every value is finite, but their products are not
    model["params"]["params"]["actor"]["Dense_2"]["kernel"] = np.full((64, 3), 3e38, np.float32)
    model["params"]["params"]["actor"]["Dense_1"]["bias"] = np.linspace(-9, 9, 64).astype(np.float32)
    assert "not finite" in one_line(capfd, evaluate, write_model(tmp_path / "m", model), ppo)


# ---------------------------------------------------------------- enjoy
def test_enjoy_as_a_command(runs):
    command = [sys.executable, "-m", "cleanrl_utils.enjoy", "--exp-name", "hop", "--env-id", "Hopper-v4"]
    environ = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command += ["--eval-episodes", "2", "--capture-video"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"Hopper-v4, {runs}"
    for i in (1, 2):
        assert re.fullmatch(rf"  episode +{i}   return +[\d.]+   length +\d+", lines[i]), lines
    assert re.fullmatch(r"  mean ± std    return +[\d.]+ ± [\d.]+   length [\d.]+", lines[3])
    path = runs.parent / "videos" / "Hopper-v4-hop-seed1.mp4"
    assert lines[4].split() == ["video", str(path)] and len(lines) == 5
    assert sorted(os.listdir(runs.parent)) == ["hop.cleanrl_model", "videos"] and os.listdir() == ["runs"]

    assert os.listdir(path.parent) == [path.name]
    frames = frames_of(path)
    assert len(frames) == int(lines[1].split()[-1])  # of the first episode
    assert frames.std(axis=(1, 2, 3)).min() > 5  # none is blank
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 30  # it moves


def test_enjoy_takes_the_newest_model_of_that_name_and_environment(runs, monkeypatch):
    def add(run_dir, seconds_later, exp_name="hop"):
        path = Path("runs") / run_dir / f"{exp_name}.cleanrl_model"
        path.parent.mkdir()
        path.write_bytes(runs.read_bytes())
        os.utime(path, (1e9 + seconds_later, 1e9 + seconds_later))
        return str(path)

    os.utime(runs, (1e9, 1e9))
    add("Hopper-v4__hop__2__1600000000", 1)
    newest = add("Hopper-v4__hop__1__1650000000", 2)
    add("Hopper-v4__hop__1__1660000000", -1)
    add("Walker2d-v4__hop__1__1700000001", 3)
    add("Hopper-v4__hop__hop__1__1700000001", 4, "hop__hop")
    add("Hopper-v4__skip__1__1700000001", 5, "skip")
    (Path("runs") / "Hopper-v4__hop__3__1700000009").mkdir()  # a run that has saved none
    assert find_model("hop", "Hopper-v4") == newest
    played = []
    monkeypatch.setattr(
        "cleanrl_utils.evals.ppo_envpool_jax_eval.evaluate",
        lambda path, *_, **__: played.append(path) or (np.ones(1), np.ones(1, int)),
    )
    enjoy.main(enjoy.Args(env_id="Hopper-v4", exp_name="hop"))
    enjoy.main(enjoy.Args(env_id="Hopper-v4", exp_name="hop", model_path=str(runs)))
    assert played == [newest, str(runs)]


def test_enjoy_finds_names_with_the_characters_of_patterns(runs):
    for exp_name in ("[a]*", "a.b+c"):
        path = Path("runs") / f"phys2d-Pendulum-v0__{exp_name}__1__1700000000" / f"{exp_name}.cleanrl_model"
        path.parent.mkdir()
        path.write_bytes(b"")
        assert find_model(exp_name, "phys2d/Pendulum-v0") == str(path)


@pytest.mark.parametrize(
    "args, words",
    [
        ({"exp_name": "none"}, ["no model of none for Hopper-v4", "train one"]),
        ({"env_id": "Walker2d-v4"}, ["no model of hop for Walker2d-v4"]),
        ({"env_id": "*"}, ["no model of hop for *"]),
        ({"model_path": "missing"}, ["missing", "No such file"]),
        ({"model_path": "runs"}, ["runs", "directory"]),
        ({"model_path": "M", "exp_name": "other"}, ["--exp-name 'hop'", "other"]),
        ({"model_path": "M", "env_id": "Walker2d-v4"}, ["--env-id 'Hopper-v4'", "Walker2d-v4"]),
        ({"eval_episodes": 0}, ["--eval-episodes 0", "1 or more"]),
        ({"eval_episodes": -2}, ["--eval-episodes -2", "1 or more"]),
        ({"seed": -1}, ["--seed -1"]),
    ],
)
def test_enjoy_with_bad_input(runs, capfd, args, words):
    os.symlink(runs, "M")
    before = sorted(Path().rglob("*"))
    error = one_line(capfd, enjoy.main, enjoy.Args(**{"env_id": "Hopper-v4", "exp_name": "hop", **args}))
    assert [word for word in words if word not in error] == [], error
    assert sorted(Path().rglob("*")) == before


# ---------------------------------------------------------------- videos
def test_the_video_shows_the_first_episode(pendulum, tmp_path, capfd):
    path = tmp_path / "videos" / "v.mp4"
    returns, _ = evaluate(pendulum, ppo, video_path=str(path))
    assert capfd.readouterr() == ("", "")
    assert np.array_equal(returns, evaluate(pendulum, ppo)[0])  # being watched changes nothing
    frames = frames_of(path)
    assert len(frames) == 200
    assert frames.std(axis=(1, 2, 3)).min() > 5
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 30


def raise_os_error(*_):
    raise OSError("libEGL.so.1: cannot open shared object file")


def raise_runtime_error(*_, **__):
    raise RuntimeError("no display\nat all")


def test_without_libegl_there_is_no_video_of_mujoco_but_of_others(trained, pendulum, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(video.ctypes, "CDLL", raise_os_error)
    returns, _ = evaluate(str(trained.path), ppo, video_path=str(tmp_path / "hopper.mp4"))
    assert np.isfinite(returns).all()
    assert capfd.readouterr() == ("", "no video: libEGL.so.1 is missing (apt-get install libegl1)\n")
    evaluate(pendulum, ppo, video_path=str(tmp_path / "pendulum.mp4"))
    assert capfd.readouterr() == ("", "") and os.listdir(tmp_path) == ["pendulum.mp4"]


@pytest.mark.parametrize("what", ["no imageio-ffmpeg", "no ffmpeg", "ffmpeg fails", "no folder", "no picture"])
def test_without_video_the_evaluation_goes_on(pendulum, tmp_path, monkeypatch, capfd, what):
    path = tmp_path / "videos" / "v.mp4"
    words = what
    if what == "no imageio-ffmpeg":
        monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
        words = "pip install"
    elif what == "no ffmpeg":
        monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", raise_runtime_error)
        words = "no display at all"
    elif what == "ffmpeg fails":
        monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: "false")
        words = ""
    elif what == "no folder":
        path.parent.write_text("a file")
        words = "File exists"
    elif what == "no picture":
        make_env = ppo.make_env

        def make_blind_env(*args, **kwargs):
            env = make_env(*args, **kwargs)
            monkeypatch.setattr(env.envs, "render", raise_runtime_error)
            return env

        monkeypatch.setattr(ppo, "make_env", make_blind_env)
        words = "no display at all"
    returns, _ = evaluate(pendulum, ppo, video_path=str(path))
    assert np.isfinite(returns).all()
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("no video: ") and words in err and err.count("\n") == 1, err
    assert list(tmp_path.rglob("*.mp4*")) == []


# ---------------------------------------------------------------- files that are no models
def load(path):
    """What `load_agent` reads, without making environments: those of Hopper-v4 serve every file."""
    model = read_model(str(path))
    args = restore_args(ppo.Args, model["args"], str(path))
    stats = restore(ppo.RunningMeanStd.create(11), model["wrappers"].get("VectorEnvNormObs", {}), str(path), "obs")
    return args, stats, restore(load.params, model["params"], str(path), "params")


@pytest.fixture
def load_file(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "params", jax.device_get(trained.state.agent.params), raising=False)

    def load_data(data):
        path = tmp_path / "m.cleanrl_model"
        path.write_bytes(data)
        return load(path)

    return load_data


def damaged(data, rng):
    """A copy with one byte changed, one bit flipped, or cut off."""
    data = bytearray(data)
    # Most of the bytes are weights: look at the others, between them, too.
    at = int(rng.integers(len(data)) if rng.random() < 0.5 else rng.choice(damaged.names))
    match rng.integers(3):
        case 0:
            data[at] = rng.integers(256)
        case 1:
            data[at] ^= 1 << int(rng.integers(8))
        case 2:
            del data[at:]
    return bytes(data)


def test_random_damage_is_a_line_or_a_whole_model(trained, load_file, capfd):
    whole = flax.serialization.msgpack_serialize(saved_dict(trained.path))
    args, stats, params = load_file(whole)
    is_text = re.finditer(rb"[\x20-\x7e]{4,}", whole)
    damaged.names = [i for match in is_text for i in range(match.start() - 6, match.end() + 1) if 0 <= i < len(whole)]
    assert len(damaged.names) > 1000
    rng = np.random.default_rng(0)
    outcomes = {"line": 0, "model": 0}
    for _ in range(300):
        data = damaged(whole, rng)
        try:
            loaded_args, *loaded = load_file(data)
        except SystemExit as stopped:
            assert stopped.code == 2
            err = capfd.readouterr().err
            assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1000, err
            outcomes["line"] += 1
        else:
            assert isinstance(loaded_args, ppo.Args)
            assert jax.tree.structure(loaded) == jax.tree.structure([stats, params])
            leaves = zip(jax.tree.leaves(loaded), jax.tree.leaves([stats, params]), strict=True)
            assert all(x.shape == y.shape and x.dtype == y.dtype and np.isfinite(x).all() for x, y in leaves)
            outcomes["model"] += 1
    assert outcomes["line"] > 100 and outcomes["model"] > 20, outcomes


def array(shape, dtype, buffer, code=1):
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, buffer)))


def nested(depth):
    tree = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def model_with(**parts):
    """The parts of a model, plain and empty but for the given ones."""
    empty = {"script": ppo.__name__.split(".")[-1], "args": {}, "params": {}, "wrappers": {}, "versions": {}}
    return msgpack.packb({**empty, **parts}, strict_types=False)


NOT_MODELS = {
    "empty": b"",
    "text": b"not a model",
    "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x07echo hi\x85R.",
    "a number": msgpack.packb(5),
    "a list": msgpack.packb([1, 2]),
    "an empty dict": msgpack.packb({}),
    "parts of other kinds": model_with(params=[1, 2]),
    "trailing bytes": model_with() + b"\x00",
    "a dict that claims 4 billion entries": b"\xdf\xff\xff\xff\xff",
    "a list that claims 4 billion entries": b"\xdd\xff\xff\xff\xff",
    "bytes that claim 4 GB": b"\xc6\xff\xff\xff\xff",
    "an array that claims 4 GB": b"\xc9\xff\xff\xff\xff\x01",
    "deep": model_with(params=nested(400)),
    "deeper": b"\x81\xa1a" * 900 + b"\x80",
    "deepest": b"\x81\xa1a" * 200_000 + b"\x80",
    "deep lists": b"\x91" * 100_000 + b"\x90",
    "numbers for names": model_with(params={1: 2}),
    "numbers and names": model_with(params={1: 2, "a": 3}),
    "bytes for names": msgpack.packb({b"params": 1, "a": 3}),
    "unhashable names": b"\x81\x90\x01",
    "names that are no UTF-8": b"\x81\xa2\xff\xfe\x01",
    "an array of objects": model_with(params={"a": array((1,), "object", b"12345678")}),
    "an array of pointers": model_with(params={"a": array((1,), "O", b"12345678")}),
    "an array of records": model_with(params={"a": array((1,), "f4,f4", b"12345678")}),
    "an array of strings": model_with(params={"a": array((1,), "U2", b"12345678")}),
    "an array of times": model_with(params={"a": array((1,), "M8[ns]", b"12345678")}),
    "an array of an outdated type": model_with(params={"a": array((1,), "a8", b"12345678")}),
    "an array of no type": model_with(params={"a": array((1,), "float33", b"12345678")}),
    "an array of a type that is code": model_with(params={"a": array((1,), "__import__('os')", b"12345678")}),
    "an array of huge items": model_with(params={"a": array((1,), "V2000000000", b"12345678")}),
    "a shape below zero": model_with(params={"a": array((-3, -1), "float32", b"12345678")}),
    "an inferred shape": model_with(params={"a": array((-1,), "float32", b"12345678")}),
    "a huge shape": model_with(params={"a": array((2**62, 4), "float32", b"12345678")}),
    "a shape that is a string": model_with(params={"a": array("xy", "float32", b"12345678")}),
    "half an array": model_with(params={"a": msgpack.ExtType(1, b"\x93")}),
    "an unknown extension": model_with(params={"a": msgpack.ExtType(99, b"12")}),
    "a time stamp": model_with(params={"a": msgpack.Timestamp(1, 1)}),
    "a complex number": model_with(params={"a": msgpack.ExtType(2, msgpack.packb((1.0, 2.0)))}),
    "half a complex number": model_with(params={"a": msgpack.ExtType(2, msgpack.packb((1.0,)))}),
    "chunks of nothing": model_with(params={"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}),
    "chunks of what": model_with(params={"a": {"__msgpack_chunked_array__": True}}),
    "chunks without end": model_with(
        params={"a": {"__msgpack_chunked_array__": True, "shape": {"0": -1}, "chunks": 5}}
    ),
}


@pytest.mark.parametrize("what", NOT_MODELS)
def test_a_file_that_is_no_model_is_a_line(what, load_file, capfd):
    error = one_line(capfd, load_file, NOT_MODELS[what])
    assert "m.cleanrl_model" in error


def test_a_huge_file_is_not_read(tmp_path, capfd):
    with open(tmp_path / "huge", "wb") as f:
        f.truncate(MAX_FILE_SIZE * 1000)
    assert "larger than 1024 MiB" in one_line(capfd, read_model, str(tmp_path / "huge"))
    assert "not a file" in one_line(capfd, read_model, "/dev/zero")


EDITS = {  # what is wrong with an otherwise whole model -> the edit, words of the line
    "no params": (lambda m: m.pop("params"), ["is not a model"]),
    "an unknown argument": (lambda m: m["args"].update(new=1), ["'new'", "version"]),
    "an argument with a name of two lines": (lambda m: m["args"].update({"a\nb" * 999: 1}), ["version"]),
    "an argument of another type": (lambda m: m["args"].update(seed="1"), ["seed", "'1'"]),
    "a bool for a number": (lambda m: m["args"].update(num_envs=True), ["num_envs", "True"]),
    "a long argument": (lambda m: m["args"].update(seed="1" * 10**6), ["seed"]),
    "a dict for an argument": (lambda m: m["args"].update(env_id={}), ["env_id"]),
    "an array for an argument": (lambda m: m["args"].update(gamma=np.ones(9)), ["gamma"]),
    "an argument out of range": (lambda m: m["args"].update(gamma=float("nan")), ["--gamma nan"]),
    "an unknown environment": (lambda m: m["args"].update(env_id="Hoper-v4"), ["Hoper-v4", "Hopper-v4"]),
    "another environment": (lambda m: m["args"].update(env_id="Walker2d-v4"), ["[11]", "another environment"]),
    "a discrete environment": (lambda m: m["args"].update(env_id="CartPole-v1"), ["CartPole-v1"]),
    "another script": (lambda m: m.update(script="dqn"), ["'dqn'", ppo.__name__.split(".")[-1]]),
    "a script that is a path": (lambda m: m.update(script="../../tmp/x\n" * 999), ["script"]),
    "a layer missing": (lambda m: m["params"]["params"].pop("critic"), ["['critic']", "missing"]),
    "a layer more": (lambda m: m["params"].update(more=np.ones(3)), ["['more']", "none"]),
    "an empty layer more": (lambda m: m["params"].update(more={}), ["['more']", "none"]),
    "a null more": (lambda m: m["wrappers"]["VectorEnvNormObs"].update(more=None), ["['more']", "none"]),
    "a layer with a long name": (lambda m: m["params"].update({"\n" * 10**5: np.ones(3)}), ["none"]),
    "a number for a layer": (lambda m: m["params"]["params"].update(log_std=0.5), ["log_std"]),
    "a text for a layer": (lambda m: m["params"]["params"].update(log_std="0.5"), ["log_std"]),
    "64 bits": (lambda m: m["params"]["params"].update(log_std=np.zeros(3)), ["log_std", "float64", "float32"]),
    "another shape": (
        lambda m: m["params"]["params"].update(log_std=np.zeros(4, np.float32)),
        ["log_std", "float32[4]"],
    ),
    "nan": (lambda m: m["params"]["params"].update(log_std=np.full(3, np.nan, np.float32)), ["not finite"]),
    "no statistics": (lambda m: m.update(wrappers={}), ["VectorEnvNormObs", "missing"]),
    "statistics that are text": (lambda m: m["wrappers"].update(VectorEnvNormObs="x"), ["VectorEnvNormObs"]),
    "statistics that lack one": (lambda m: m["wrappers"]["VectorEnvNormObs"].pop("var"), ["var", "missing"]),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_model_that_does_not_fit_is_a_line(what, runs, capfd):
    edit, words = EDITS[what]
    model = saved_dict(runs)
    edit(model)
    before = sorted(Path().rglob("*"))
    error = one_line(capfd, load_agent, write_model(runs, model), ppo)
    assert [word for word in words if word not in error] == [], error
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("name", ["dqn", "../tests/test_models", "__init__", "os", "", "a\nb", "x" * 10**6])
def test_enjoy_runs_no_code_but_the_scripts(runs, capfd, name):
    model = saved_dict(runs)
    model["script"] = name
    write_model(runs, model)
    error = one_line(capfd, enjoy.main, enjoy.Args(env_id="Hopper-v4", exp_name="hop"))
    assert "there is no script" in error and ppo.__name__.split(".")[-1] in error


def test_truncated_and_flipped_files_through_enjoy(runs, capfd):
    whole = runs.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:-1], bytes([whole[0] ^ 4]) + whole[1:], b""):
        runs.write_bytes(data)
        assert "damaged" in one_line(capfd, enjoy.main, enjoy.Args(env_id="Hopper-v4", exp_name="hop"))


# ---------------------------------------------------------------- models are data
def test_nothing_unpickles_or_evaluates():
    modules = {"pickle", "cPickle", "joblib", "dill", "cloudpickle", "marshal", "shelve"}
    paths = [*ROOT.glob("cleanrl/**/*.py"), *ROOT.glob("cleanrl_utils/**/*.py")]
    assert len(paths) > 8
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & {"eval", "exec", "compile", "__import__"}
                assert not names, f"{path}:{node.lineno}"
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                raise AssertionError(f"{path}:{node.value.lineno}")
            else:
                continue
            assert not names & modules, f"{path}:{node.lineno}"

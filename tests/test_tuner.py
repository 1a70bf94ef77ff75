"""The search with a stand-in for training, then one real population, two processes at once, and the commands."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import learning_rate_grid
import numpy as np
import optuna
import pytest
import tyro
from optuna.trial import TrialState

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import tuner
from cleanrl_utils.files import write_file

LEARNING_RATE, GAMMA = "learning_rate log 1e-4 1e-2", "gamma 0.9 0.999"
SIZES = ["--num-envs", "4", "--num-steps", "50", "--num-minibatches", "2", "--update-epochs", "1"]
SIZES += ["--total-timesteps", "2000"]  # ten iterations; an episode of the pendulum has 200 steps
SMALL = {"env_ids": ("Pendulum-v1",), "population": 4, "num_seeds": 2, "num_reports": 5, "study_name": "test"}


def best_at_0_95(lane, env_id, report):
    """A return that only depends on gamma."""
    return -abs(lane.gamma - 0.95)


@pytest.fixture(autouse=True)
def commands_are_for_python(monkeypatch):
    """Also where uv runs the tests."""
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Trainings whose returns are `stub.returns(lane, env_id, report)`; `stub.calls` holds the lanes of each."""
    monkeypatch.chdir(tmp_path)
    stub = SimpleNamespace(returns=best_at_0_95, finite=lambda lane, report: True, calls=[], reports=[])

    def reports(script_name, lanes, env_ids, num_reports):
        stub.calls.append(lanes)
        stub.reports.append(0)
        for report in range(1, num_reports + 1):
            returns = [[stub.returns(lane, env_id, report) for lane in lanes] for env_id in env_ids]
            stub.reports[-1] += 1
            yield np.array(returns), np.array([stub.finite(lane, report) for lane in lanes])

    monkeypatch.setattr(tuner, "reports", reports)
    return stub


def tune(*params, script_argv=(), **values):
    """The exit code, and the trials."""
    args = tuner.Args(**{**SMALL, "params": params, **values})
    exit_code = tuner.main(args, list(script_argv))
    return exit_code, load(args).trials


def load(args):
    return optuna.load_study(study_name=tuner.study_name(args), storage=tuner.open_storage(args))


def states(trials):
    return [trial.state.name for trial in trials]


# ---------------------------------------------------------------- what is searched
@pytest.mark.parametrize(
    "text, expected",
    [
        ("gamma 0.9 1", tuner.Param("gamma", "uniform", (0.9, 1.0))),
        ("--learning-rate log 1e-5 1e-2", tuner.Param("learning_rate", "log", (1e-5, 1e-2))),
        ("update_epochs 1 10", tuner.Param("update_epochs", "uniform", (1, 10))),
        ("num_steps choice 16 32", tuner.Param("num_steps", "choice", (16, 32))),
        ("norm_adv choice True False", tuner.Param("norm_adv", "choice", (True, False))),
        ("target_kl choice None 0.02", tuner.Param("target_kl", "choice", (None, 0.02))),
    ],
)
def test_a_hyperparameter_to_search(text, expected):
    param = tuner.parse_param(text, ppo.Args)
    assert param == expected and [type(x) for x in param.values] == [type(x) for x in expected.values]
    trial = optuna.create_study().ask({param.name: param.distribution})
    assert param.contains(trial.params[param.name])


MISTAKES = [
    ({"params": ()}, "nothing to search"),
    ({"params": ("learnin_rate 0 1",)}, "no argument learnin_rate; did you mean learning_rate?"),
    ({"params": ("gamma low 1",)}, "low is not of type float"),
    ({"params": ("update_epochs 1 2.5",)}, "2.5 is not of type int"),
    ({"params": ("gamma 0.9",)}, "give a lower and a higher bound"),
    ({"params": ("gamma 0.9 0.8",)}, "give a lower and a higher bound"),
    ({"params": ("ent_coef log 0 1",)}, "bound above 0"),
    ({"params": ("norm_adv 0 1",)}, "norm_adv is no number"),
    ({"params": ("num_steps choice 16",)}, "two or more different values"),
    ({"params": ("seed 1 5",)}, "seed is no hyperparameter"),
    ({"params": ("gamma 0.9 1.1",)}, "--gamma 1.1: give a number from 0 to 1"),
    ({"params": ("num_minibatches choice 2 3",), "script_argv": ()}, "does not divide"),
    ({"params": (GAMMA, GAMMA)}, "twice"),
    ({"env_ids": ("Pendulum-v2",)}, "there is Pendulum-v1"),
    ({"env_ids": ("Pendulum-v1", "Hopper-v4")}, '--target-scores "Pendulum-v1 LOW HIGH" "Hopper-v4 LOW HIGH"'),
    ({"target_scores": ("Pendulum-v1 0",)}, "ENV_ID LOW HIGH"),
    ({"target_scores": ("Pendulum-v1 1 0",)}, "lower"),
    ({"target_scores": ("Pendulum-v0 0 1",)}, "did you mean Pendulum-v1?"),
    ({"num_reports": 11}, "10 iterations, fewer than --num-reports 11"),
    ({"population": 0}, "--population 0: give 1 or more"),
    ({"num_trials": -1}, "--num-trials -1"),
    ({"study_name": "a/b"}, "--study-name 'a/b'"),
    ({"script": "ppp"}, "there is no script 'ppp'"),
    ({"storage": "nosql://here"}, "can't open the storage nosql://here"),
    ({"script_argv": [*SIZES, "--env-id", "Hopper-v4"]}, "--env-ids sets it"),
    ({"script_argv": [*SIZES, "--track"]}, "--track after `--`"),
    ({"script_argv": [*SIZES, "--gamma", "0.9"]}, "--gamma after `--` is searched"),
]


@pytest.mark.parametrize("values, message", MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(stub, tmp_path, capsys, values, message):
    values = {"params": (GAMMA,), "script_argv": SIZES, **values}
    with pytest.raises(SystemExit) as exit_:
        tune(*values.pop("params"), **values)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not stub.calls and not list(tmp_path.iterdir())


def test_scores_by_hand():
    args = tuner.Args(env_ids=("A", "B"), aggregation="min")
    targets = {"A": (0.0, 100.0), "B": (-200.0, 0.0)}
    returns = np.array([[[50.0, 100.0], [0.0, np.nan]], [[-100.0, -50.0], [0.0, 0.0]]])  # 2 envs, 2 trials, 2 seeds
    scores = tuner.scores_of(returns, args, targets)
    np.testing.assert_allclose(scores, [(0.5 + 0.75) / 2, np.nan])
    scores = tuner.scores_of(returns, replace(args, aggregation="max"), targets)
    np.testing.assert_allclose(scores, [(0.5 + 1.0) / 2, np.nan])
    np.testing.assert_allclose(tuner.scores_of(returns[:1], replace(args, env_ids=("A",)), {}), [75.0, np.nan])


# ---------------------------------------------------------------- the search
def test_it_finds_what_is_best_and_says_how_to_train_it(stub, capsys):
    script_argv = [*SIZES, "--no-anneal-lr"]
    exit_code, trials = tune(GAMMA, num_trials=32, pruner="none", script_argv=script_argv)
    assert exit_code == 0 and states(trials) == ["COMPLETE"] * 32
    assert trials[0].params == {"gamma": ppo.Args().gamma}  # the defaults come first
    best = max(trials, key=lambda trial: trial.value)
    assert abs(best.params["gamma"] - 0.95) < 0.005
    near = [abs(trial.params["gamma"] - 0.95) for trial in trials]
    assert np.median(near[20:]) < np.median(near[:10])  # it learned from the first ones
    *_, command = capsys.readouterr().out.splitlines()
    program, script, *argv = shlex.split(command)
    assert program == "python" and (Path(tuner.__file__).parents[1] / script).samefile(ppo.__file__)
    expected = replace(tyro.cli(ppo.Args, args=script_argv), env_id="Pendulum-v1", num_seeds=2, **best.params)
    assert tyro.cli(ppo.Args, args=argv) == expected


def test_the_same_seed_searches_the_same(stub):
    searches = [
        tune(GAMMA, num_trials=16, study_name=name, seed=seed)[1] for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    ]
    a, b, c = ([trial.params for trial in trials] for trials in searches)
    assert a == b and a != c


def test_trials_are_side_by_side_where_they_may_be(stub):
    _, trials = tune(LEARNING_RATE, "num_steps choice 50 100", num_trials=4)
    assert len(stub.calls) == len({trial.params["num_steps"] for trial in trials}) == 2
    for lanes in stub.calls:
        assert len({lane.num_steps for lane in lanes}) == 1
    lanes = sorted((lane.learning_rate, lane.num_steps, lane.seed) for lane in itertools.chain(*stub.calls))
    params = [(trial.params["learning_rate"], trial.params["num_steps"]) for trial in trials]
    assert lanes == sorted((*p, seed) for p in params for seed in (1, 2))
    stub.calls.clear()
    tune(LEARNING_RATE, GAMMA, num_trials=4, study_name="other")
    assert [len(lanes) for lanes in stub.calls] == [8]


def test_bad_trials_are_pruned_and_count_no_more(stub):
    """The first five trials are complete; after that what is below their median ends, and its late glory is ignored."""
    stub.returns = lambda lane, env_id, report: 1000.0 if report == 5 and len(stub.calls) > 1 else lane.gamma
    _, trials = tune(GAMMA, num_trials=11, population=5, pruner="median")
    assert states(trials)[:5] == ["COMPLETE"] * 5
    median = np.median([trial.params["gamma"] for trial in trials[:5]])
    second = trials[5:10]
    assert {True, False} == {trial.params["gamma"] < median for trial in second}
    for trial in second:
        if trial.params["gamma"] < median:  # the first report can't prune: num_reports // 5 is 1
            assert trial.state == TrialState.PRUNED and trial.last_step == 2 and trial.value == trial.params["gamma"]
        else:
            assert trial.state == TrialState.COMPLETE and trial.value == 1000.0


def test_a_training_ends_when_all_its_trials_are_pruned(stub):
    stub.returns = lambda lane, env_id, report: -float(len(stub.calls))
    _, trials = tune(GAMMA, num_trials=10, population=5)
    assert states(trials) == ["COMPLETE"] * 5 + ["PRUNED"] * 5
    assert stub.reports == [5, 2]


def test_halving_keeps_the_better_half(stub):
    stub.returns = lambda lane, env_id, report: lane.gamma
    _, trials = tune(GAMMA, num_trials=8, population=8, pruner="halving")
    assert stub.calls and 0 < states(trials).count("COMPLETE") <= 4
    assert max(trials, key=lambda trial: trial.params["gamma"]).state == TrialState.COMPLETE


def test_what_diverges_or_ends_no_episode_fails_alone(stub, capsys):
    stub.finite = lambda lane, report: not (lane.gamma < 0.95 and lane.seed == 2 and report >= 3)
    stub.returns = lambda lane, env_id, report: np.nan if lane.gamma > 0.98 else lane.gamma
    _, trials = tune(GAMMA, num_trials=12, pruner="none")
    assert set(states(trials)) == {"COMPLETE", "FAIL"}
    for trial in trials:
        gamma = trial.params["gamma"]
        expected = "diverged before report 3" if gamma < 0.95 else "no episode has ended" if gamma > 0.98 else "None"
        assert str(trial.user_attrs.get("error")).startswith(expected)
        assert trial.state == (TrialState.COMPLETE if expected == "None" else TrialState.FAIL)
    assert "failed: diverged" in capsys.readouterr().out


def test_a_process_that_dies_fails_its_trials_and_the_study_goes_on(stub, monkeypatch):
    training = tuner.reports

    def reports(*inputs):
        yield next(training(*inputs))
        if len(stub.calls) == 1:
            raise tuner.TrainingDied("its process ended with exit code -9")
        yield from training(*inputs)

    monkeypatch.setattr(tuner, "reports", reports)
    _, trials = tune(GAMMA, num_trials=8, pruner="none")
    assert states(trials) == ["FAIL"] * 4 + ["COMPLETE"] * 4
    assert trials[0].user_attrs["error"] == "its process ended with exit code -9"


def test_an_interrupted_study_goes_on(stub, capsys):
    def interrupt(lane, env_id, report):
        if len(stub.calls) == 2 and report == 3:
            raise KeyboardInterrupt
        return lane.gamma

    stub.returns = interrupt
    exit_code, before = tune(GAMMA, num_trials=12, pruner="none")
    assert exit_code == 130 and "the same command goes on" in capsys.readouterr().err
    assert states(before) == ["COMPLETE"] * 4 + ["FAIL"] * 4 + ["WAITING"] * 4
    exit_code, after = tune(GAMMA, num_trials=12, pruner="none")
    assert exit_code == 0 and states(after) == ["COMPLETE"] * 4 + ["FAIL"] * 4 + ["COMPLETE"] * 8
    assert [trial.params for trial in after[8:12]] == [trial.params for trial in before[4:8]]
    assert [trial.value for trial in after[:4]] == [trial.value for trial in before[:4]]
    calls = len(stub.calls)
    assert tune(GAMMA, num_trials=12)[0] == 0 and len(stub.calls) == calls  # only the report


def test_what_a_killed_process_left_is_tried_again(stub):
    dead = subprocess.Popen(["true"])
    dead.wait()
    tune(GAMMA, num_trials=1)
    args = tuner.Args(**SMALL)
    left = load(args).ask({"gamma": optuna.distributions.FloatDistribution(0.9, 0.999)})
    left.set_user_attr("process", f"{tuner.socket.gethostname()}:{dead.pid}")
    _, trials = tune(GAMMA, num_trials=2)
    assert states(trials) == ["COMPLETE", "FAIL", "COMPLETE"] and trials[2].params == left.params


@pytest.mark.parametrize("values", [{"seed": 2}, {"num_seeds": 1}, {"script_argv": ["--num-steps", "16"]}])
def test_another_question_needs_another_study(stub, capsys, values):
    tune(GAMMA, num_trials=1)
    with pytest.raises(SystemExit, match="2"):
        tune(GAMMA, num_trials=2, **values)
    error = capsys.readouterr().err
    assert "give the same, or another --study-name" in error and error.count("\n") == 1
    assert len(load(tuner.Args(**SMALL)).trials) == 1


def test_the_report(stub, tmp_path):
    stub.finite = lambda lane, report: lane.gamma > 0.92
    stub.returns = lambda lane, env_id, report: {"Pendulum-v1": 100.0, "Hopper-v4": 1000.0}[env_id] * lane.gamma
    env_ids, targets = ("Pendulum-v1", "Hopper-v4"), ("Pendulum-v1 0 100", "Hopper-v4 0 500")
    params = (GAMMA, "norm_adv choice True False")
    _, trials = tune(*params, env_ids=env_ids, target_scores=targets, num_trials=16)
    page = (tmp_path / "tuning/test/report.md").read_text()
    rows = [row.split(" | ") for row in page.splitlines() if re.match(r"\| \d", row)]
    assert sorted(int(row[0].strip("| ")) for row in rows) == list(range(16))
    best = max((t for t in trials if t.state == TrialState.COMPLETE), key=lambda trial: trial.value)
    gamma = best.params["gamma"]
    assert best.value == pytest.approx((gamma + 2 * gamma) / 2)
    expected = [f"| {best.number}", f"{1.5 * gamma:.4g}", f"{100 * gamma:.1f}", f"{1000 * gamma:.1f}", f"{gamma:.4g}"]
    assert rows[0][:5] == expected
    assert page.count("python cleanrl/ppo") == 2 and f"--gamma {gamma}" in page
    assert (tmp_path / "tuning/test/report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "tuning/test").iterdir()) == [
        "journal.log",
        "report.md",
        "report.png",
    ]


# ---------------------------------------------------------------- processes
STUB_PROGRAM = """
import sys, time
import numpy as np
from cleanrl_utils import tuner

def reports(script_name, lanes, env_ids, num_reports):
    for _ in range(num_reports):
        time.sleep(0.05)
        yield np.array([[lane.gamma for lane in lanes]]), np.ones(len(lanes), bool)

tuner.reports = reports
sys.exit(tuner.main(tuner.tyro.cli(tuner.Args), []))
"""


def test_processes_that_write_the_report_at_the_same_moment_do_not_disturb_each_other(tmp_path, monkeypatch):
    """Two did: the file that one was about to rename was the other's, renamed already."""
    path, fsync = tmp_path / "report.md", os.fsync

    def other_writes(descriptor):
        program = f"from cleanrl_utils.files import write_file; write_file({str(path)!r}, b'of the other')"
        subprocess.run([sys.executable, "-c", program], check=True)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", other_writes)
    write_file(str(path), b"of this one")
    assert path.read_bytes() == b"of this one" and os.listdir(tmp_path) == ["report.md"]


@pytest.mark.parametrize("storage", ["journal.log", "sqlite:///study.db"])
def test_processes_share_a_study(tmp_path, storage):
    flags = ["--storage", storage, "--study-name", "shared", "--env-ids", "Pendulum-v1", "--params", GAMMA]
    flags += ["--num-trials", "16", "--population", "2", "--pruner", "none"]
    command = [sys.executable, "-c", STUB_PROGRAM, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=tmp_path, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    url = storage if "://" in storage else str(tmp_path / storage)
    url = url.replace(":///", f":///{tmp_path}/")
    trials = load(tuner.Args(study_name="shared", storage=url)).trials
    assert set(states(trials)) == {"COMPLETE"}
    assert 16 <= len(trials) <= 18  # both may ask for the last ones at the same moment
    assert len({trial.user_attrs["process"] for trial in trials}) == 2
    gammas = [trial.params["gamma"] for trial in trials]
    found = [gamma for gamma in gammas if gamma != ppo.Args().gamma]
    assert len(set(found)) == len(found)
    assert len(gammas) - len(found) in (1, 2)  # both may have found the study empty, and begun with the defaults


def test_a_population_learns_as_its_trials_would_alone(compile_fast):
    """The reports are the means over an equal share of the iterations."""
    fixed = tyro.cli(ppo.Args, args=[*SIZES, "--no-compilation-cache"])
    lanes = [replace(fixed, learning_rate=lr, gamma=g, seed=s) for lr, g in [(1e-3, 0.9), (1e-2, 0.99)] for s in (1, 2)]
    sent = []
    tuner.train(SimpleNamespace(send=sent.append), ppo.__name__.split(".")[1], lanes, ("Pendulum-v1",), 5)
    returns, finite = map(np.array, zip(*sent, strict=True))
    assert returns.shape == (5, 1, 4) and finite.shape == (5, 4) and finite.all()
    alone, averages = replace(lanes[3], env_id="Pendulum-v1"), []
    state = ppo.init_lanes([alone], ppo.make_env(alone))
    for _ in range(10):
        state, metrics = ppo.train_iteration(alone, state)
        averages.append(ppo.fetch(metrics)["charts/avg_episodic_return"][0])
    expected = np.array(averages).reshape(5, 2)
    assert np.isnan(expected[0]).all() and np.isnan(expected[1, 0])  # the first episodes end in iteration 4
    np.testing.assert_allclose(returns[1:, 0, 3], [expected[1, 1], *expected[2:].mean(1)], rtol=1e-4)
    assert np.isnan(returns[0]).all() and len(set(returns[-1, 0])) == 4


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "cleanrl_utils.tuner", "--env-ids", "Pendulum-v1", "--params", LEARNING_RATE]
    command += ["--num-trials", "2", "--num-seeds", "1", "--num-reports", "2", "--", *SIZES]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "trial 0, 1: 2 lanes in one program" in result.stdout
    name = "Pendulum-v1__ppo_continuous_action_envpool_xla_jax_scan"
    assert f"report      tuning/{name}/report.md\nbest        trial " in result.stdout
    assert "--num-minibatches 2" in result.stdout.splitlines()[-1]
    assert (tmp_path / "tuning" / name / "report.md").exists() and not (tmp_path / "runs").exists()


def test_without_optuna_a_line_says_what_to_install():
    program = "import sys; sys.modules['optuna'] = None; import cleanrl_utils.tuner"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "error: tuning needs Optuna: pip install '.[tune]'\n")


def test_a_grid_of_learning_rates(tmp_path, monkeypatch, compile_fast):
    monkeypatch.chdir(tmp_path)
    flags = [*SIZES, "--env-id", "Pendulum-v1", "--no-compilation-cache", "--no-progress", "--no-save-model"]
    runs = learning_rate_grid.main(tyro.cli(ppo.Args, args=flags))
    assert [run.args.learning_rate for run in runs] == list(learning_rate_grid.LEARNING_RATES)
    assert len({run.folder for run in runs}) == 3 and all((tmp_path / run.folder).is_dir() for run in runs)

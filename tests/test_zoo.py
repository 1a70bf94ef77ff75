"""The zoo: models that come with the package, and the page that shows them."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from video_frames import frames_of

from cleanrl_utils import models, zoo
from cleanrl_utils.evals.ppo_envpool_jax_eval import load_agent
from cleanrl_utils.models import find_model, load_script, read_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "get-started" / "zoo"
SCRIPT = "ppo_continuous_action_envpool_xla_jax_scan"


@pytest.mark.parametrize("path", [pytest.param(path, id=Path(path).parent.name) for path in zoo.zoo_models()])
def test_each_model_is_small_and_loads(path):
    assert os.path.getsize(path) < zoo.MAX_MODEL_SIZE
    model = read_model(path)
    args = model["args"]
    assert path == models.zoo_path(args["exp_name"], args["env_id"])
    load_agent(path, load_script(model["script"]), eval_episodes=1)  # ends the program if it doesn't fit
    evaluation = json.loads(Path(zoo.scores_path(path)).read_text())
    assert evaluation["run"].startswith(f"{args['env_id']}__{args['exp_name']}__{args['seed']}__")
    assert len(evaluation["episodic_return"]) == len(evaluation["episodic_length"]) == zoo.EVALUATION["eval_episodes"]
    assert (PAGE / zoo.video_name(args)).is_file()


def test_a_fresh_folder_can_watch(tmp_path):
    command = [sys.executable, "-m", "cleanrl_utils.enjoy", "--env-id", "InvertedPendulum-v4"]
    command += ["--eval-episodes", "2", "--capture-video"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    path = models.zoo_path(SCRIPT, "InvertedPendulum-v4")
    video = f"videos/InvertedPendulum-v4-{SCRIPT}-seed1.mp4"
    first, *_, mean, last = result.stdout.splitlines()
    assert first == f"InvertedPendulum-v4, {path}" and last.split() == ["video", video]
    assert float(re.search(r"return +([\d.]+)", mean)[1]) > 900
    assert len(frames_of(tmp_path / video)) > 900
    assert sorted(os.listdir(tmp_path)) == ["videos"] and os.listdir(tmp_path / "videos") == [os.path.basename(video)]


def test_runs_come_before_the_zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundled = models.zoo_path(SCRIPT, "Hopper-v4")
    assert find_model(SCRIPT, "Hopper-v4") == bundled
    local = tmp_path / "runs" / f"Hopper-v4__{SCRIPT}__1__1700000000" / f"{SCRIPT}.cleanrl_model"
    local.parent.mkdir(parents=True)
    shutil.copy(bundled, local)
    assert find_model(SCRIPT, "Hopper-v4") == str(local.relative_to(tmp_path))
    assert find_model(SCRIPT, "Hopper-v4", runs=None) == bundled


def test_the_page_is_made_from_the_files():
    assert (PAGE / "models.md").read_text() == zoo.models_markdown()
    assert "{! get-started/zoo/models.md !}" in (PAGE / "index.md").read_text()
    assert len(zoo.zoo_models()) == len(list(PAGE.glob("*.mp4"))) == zoo.models_markdown().count("<video ")


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name.split("-ppo")[0]) for path in PAGE.glob("*.mp4")])
def test_the_videos_of_the_page_show_something_that_moves(path):
    frames = frames_of(path)
    assert path.stat().st_size < 300_000
    assert 30 <= len(frames) <= zoo.SECONDS_SHOWN * 30 and frames.shape[1] == zoo.HEIGHT
    assert frames.std(axis=(1, 2, 3)).min() > 5
    assert np.ptp(frames, axis=0).max() > 20


@pytest.fixture
def small_zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "ZOO_FOLDER", str(tmp_path / "zoo"))
    monkeypatch.setattr(zoo, "ZOO_FOLDER", str(tmp_path / "zoo"))
    return tmp_path


def test_the_best_of_the_runs_joins(small_zoo, monkeypatch):
    returns = {"a": [5.0, 1.0], "b": [4.0, 3.0], "c": [-1.0, 0.0]}
    for name in returns:
        (small_zoo / name).mkdir()
        shutil.copy(ROOT / "cleanrl_utils" / "zoo_models" / "Hopper-v4" / f"{SCRIPT}.cleanrl_model", small_zoo / name)
        (small_zoo / name / f"{SCRIPT}.cleanrl_model").touch()

    def evaluate(path, video_path=None):
        return np.array(returns[os.path.basename(os.path.dirname(path))]), np.array([7, 9])

    monkeypatch.setattr(zoo, "evaluate_model", evaluate)
    zoo.add_best(zoo.find_models(("a", "b", "c")))
    (path,) = zoo.zoo_models()
    assert path == str(small_zoo / "zoo" / "Hopper-v4" / f"{SCRIPT}.cleanrl_model")
    assert json.loads(Path(zoo.scores_path(path)).read_text()) == {
        "episodic_return": [4.0, 3.0],
        "episodic_length": [7, 9],
        "run": "b",
    }
    assert "Return **3.5 ± 0.5**, length 8 (" in zoo.models_markdown()


@pytest.mark.parametrize(
    "what, words", [("no run", "no model in a"), ("large", "more than the 200,000"), ("no docs", "checkout's root")]
)
def test_what_cannot_join_is_a_line(small_zoo, capfd, what, words):
    run_dir = small_zoo / "a"
    run_dir.mkdir()
    if what != "no run":
        (run_dir / "m.cleanrl_model").write_bytes(bytes(300_000))
    (small_zoo / "docs").mkdir()
    with pytest.raises(SystemExit) as stopped:
        zoo.main(zoo.Args(run_dirs=("a",), docs="nowhere/docs" if what == "no docs" else "docs/zoo"))
    assert stopped.value.code == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1
    assert sorted(os.listdir(small_zoo)) == ["a", "docs"] and os.listdir("docs") == []


@pytest.mark.skipif(not shutil.which("uv"), reason="uv, which builds the package, is not installed")
def test_the_models_are_in_the_package(tmp_path):
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = [os.path.relpath(path, ROOT) for path in zoo.zoo_models()]
    assert expected and set(expected) | {zoo.scores_path(name) for name in expected} <= set(names)

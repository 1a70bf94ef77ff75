"""Environments of other packages: made once, whole or not at all."""

import os
import shutil
import subprocess
import sys

import pytest

from cleanrl_utils import python_environments

SMALL = "tqdm==4.67.3"  # the project pins another
UV = shutil.which("uv")
ROOT = os.path.dirname(os.path.dirname(python_environments.__file__))


def find_environment(tmp_path, monkeypatch, requirement):
    (tmp_path / "requirements.txt").write_text(requirement)
    monkeypatch.setattr(python_environments, "cache_folder", lambda: f"{tmp_path}/cache/cleanrl")
    return python_environments.find_environment("small", f"{tmp_path}/requirements.txt")


def skip_without_registry(tmp_path):
    install = [UV, "pip", "install", "--python", sys.executable] if UV else [sys.executable, "-m", "pip", "install"]
    command = [*install, "--target", f"{tmp_path}/probe", SMALL]
    if subprocess.run(command, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("the package registry doesn't answer: not even one small package can be installed")


@pytest.mark.parametrize("with_uv", [True, False])
def test_an_environment_is_made_once(tmp_path, monkeypatch, capfd, with_uv):
    if not with_uv:
        monkeypatch.setattr(python_environments.shutil, "which", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.chdir(ROOT)  # where uv sees the project's pins
    try:
        environment = find_environment(tmp_path, monkeypatch, SMALL)
    except SystemExit:
        skip_without_registry(tmp_path)
        raise
    command = [f"{environment}/bin/python", "-I", "-c", "import tqdm; print(tqdm.__version__)"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "4.67.3\n"
    assert "once" in capfd.readouterr().err
    assert find_environment(tmp_path, monkeypatch, SMALL) == environment
    assert capfd.readouterr() == ("", "")
    os.unlink(f"{environment}/bin/python")  # as when its Python was removed
    assert find_environment(tmp_path, monkeypatch, SMALL) == environment
    assert os.path.exists(f"{environment}/bin/python")
    assert find_environment(tmp_path, monkeypatch, SMALL + "\n# others") != environment


@pytest.mark.parametrize("with_uv", [True, False])
def test_a_failed_installation_ends_in_one_line_and_leaves_no_environment(tmp_path, monkeypatch, capfd, with_uv):
    if not with_uv:
        monkeypatch.setattr(python_environments.shutil, "which", lambda name: None)
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            find_environment(tmp_path, monkeypatch, "small @ file:///nowhere.whl\n")
        assert stopped.value.code == 2
        progress, error = capfd.readouterr().err.splitlines()
        assert error.startswith("error: can't install small, which needs the package registry once: ")
        assert [path.name.endswith(".lock") for path in (tmp_path / "cache/cleanrl").iterdir()] == [True]


def test_an_environment_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("")
    with pytest.raises(SystemExit) as stopped:
        find_environment(tmp_path, monkeypatch, "")
    assert stopped.value.code == 2
    assert f"can't write {tmp_path}/cache/cleanrl: Not a directory; XDG_CACHE_HOME" in capsys.readouterr().err

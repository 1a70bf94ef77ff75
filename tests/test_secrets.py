"""Tokens and passwords of the environment and the home folder: a training leaves, sends and prints none."""

import base64
import gzip
import os
import shlex
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_stub import TOKEN, HubStub
from test_cli import SCRIPT, SECONDS, SIZES, flags_of

ROOT = Path(__file__).resolve().parents[1]
SECRETS = {  # where it is -> what nobody may see
    "WANDB_API_KEY": "3f6b" * 10,
    "HF_TOKEN": TOKEN,
    "HUGGING_FACE_HUB_TOKEN": "hf_anotherTokenThatNobodyMaySee",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "GITHUB_TOKEN": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "MY_SECRET": "correct-horse-battery-staple",
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.slurm.signature",
    ".netrc": "5e7d" * 10,
    ".cache/huggingface/token": "hf_theTokenOfTheFileInTheHomeFolder",
    ".cache/huggingface/stored_tokens": "hf_theStoredTokenOfTheHomeFolder",
    ".git": "ghp_theTokenOfTheRemoteRepository0123456",
}
IN_ENVIRONMENT = {name: value for name, value in SECRETS.items() if name.isupper()}


def secret_files(home):
    """The files of the home folder and the repository that hold a secret each."""
    return {
        home / ".netrc": f"machine api.wandb.ai\n  login user\n  password {SECRETS['.netrc']}\n",
        home / ".cache/huggingface/token": SECRETS[".cache/huggingface/token"],
        home / ".cache/huggingface/stored_tokens": f"[a]\nhf_token = {SECRETS['.cache/huggingface/stored_tokens']}\n",
    }


def forms(data):
    """The bytes, and what they unpack to."""
    yield data
    for unpack in (gzip.decompress, zlib.decompress):
        with suppress(Exception):
            yield unpack(data)


def files_with_secrets(folder):
    """Path of a file -> names of the secrets in it, or of half of one (files may cut it), plain or as base64."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        contents = list(forms(path.read_bytes()))
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        if names := secrets_in(*contents, str(path).encode()):
            found[path] = names
    return found


def secrets_in(*contents):
    names = set()
    for name, secret in SECRETS.items():
        halves = secret[: len(secret) // 2 + 1], secret[len(secret) // 2 :]
        parts = [half.encode() for half in halves] + [base64.b64encode(secret.encode()).rstrip(b"=")[:-2]]
        if any(part in content for part in parts for content in contents):
            names.add(name)
    return names


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training with all that leaves or sends something, run by the benchmark in a repository of the user's."""
    home = tmp_path_factory.mktemp("home")
    cwd = home / "project"
    cwd.mkdir()
    for path, content in secret_files(home).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (home / ".netrc").chmod(0o600)
    (home / "tmp").mkdir()
    remote = f"https://user:{SECRETS['.git']}@github.com/user/project.git"
    for command in ("init -q", f"remote add origin {remote}", "commit -q --allow-empty -m first"):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *command.split()], cwd=cwd, check=True, env={**os.environ, "HOME": str(home)})

    hub = HubStub()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_", "UV_", "XLA_", "XDG_", "JAX_"))}
    environ = {**kept, **IN_ENVIRONMENT, "HOME": str(home), "TMPDIR": str(home / "tmp"), "HF_ENDPOINT": hub.url}
    environ |= {"WANDB_MODE": "offline", "SLURM_JOB_ID": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environ |= {"PYTHONPATH": str(ROOT)}
    flags = flags_of(total_timesteps=512, **SIZES, exp_name="mine", track=True, upload_model=True)
    training = shlex.join(["python", str(SCRIPT), *flags])
    command = [sys.executable, "-m", "cleanrl_utils.benchmark", "--env-ids", "Pendulum-v1", "--num-seeds", "1"]
    result = subprocess.run(
        [*command, "--command", training], cwd=cwd, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    yield SimpleNamespace(home=home, cwd=cwd, hub=hub, result=result)
    hub.close()


def test_the_training_leaves_and_sends_all_that_is_searched(trained):
    assert trained.result.returncode == 0, trained.result.stdout + trained.result.stderr
    names = {path.name.partition(".")[2] or path.name for path in trained.home.rglob("*") if path.is_file()}
    assert {"cleanrl_model", "json", "log"} <= names
    assert list(trained.cwd.glob("wandb/offline-run-*/run-*.wandb")) and list(trained.cwd.glob("runs/*/events.*"))
    assert "README.md" in trained.hub.repositories["alice/Pendulum-v1-mine-seed1"]
    assert len(list((trained.home / ".cache" / "cleanrl").rglob("*"))) > 0


def test_the_search_finds_what_is_there(trained, tmp_path):
    found = files_with_secrets(trained.home)
    for path, name in zip(secret_files(trained.home), [name for name in SECRETS if name[0] == "."][:3], strict=True):
        assert found[path] == {name}
    secret = SECRETS["MY_SECRET"].encode()
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" + secret))
    (tmp_path / "b").write_bytes(zlib.compress(b"x" + secret))
    (tmp_path / "c").write_bytes(base64.b64encode(secret))
    with zipfile.ZipFile(tmp_path / "d.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("e", secret)
    assert {path.name for path in files_with_secrets(tmp_path)} == {"a.gz", "b", "c", "d.zip"}


def leaks(trained):
    """Names of the secrets that are in other files than the user's own."""
    own = {*secret_files(trained.home), trained.cwd / ".git" / "config"}
    found = files_with_secrets(trained.home)
    return {name for path, names in found.items() if path not in own for name in names}


def test_no_secret_is_in_a_file(trained):
    assert leaks(trained) == set()


def test_no_secret_is_printed(trained):
    assert secrets_in((trained.result.stdout + trained.result.stderr).encode()) == set()


def test_no_secret_is_uploaded(trained):
    assert trained.hub.commits == 1
    files = trained.hub.repositories["alice/Pendulum-v1-mine-seed1"]
    assert secrets_in(*trained.hub.received, *files.values(), *trained.hub.store.values()) == set()

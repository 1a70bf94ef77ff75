"""Uploads to and downloads from a stub of the Hugging Face Hub, through the real client."""

import importlib
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from importlib.metadata import requires, version
from pathlib import Path

import flax
import huggingface_hub
import jax
import numpy as np
import pytest
import tyro
from hub_stub import TOKEN, Fault, HubStub
from huggingface_hub import ModelCard, constants
from tensorboardX import SummaryWriter

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
import cleanrl_utils.hub
from cleanrl_utils import enjoy, huggingface
from cleanrl_utils.models import packed

pytestmark = pytest.mark.usefixtures("compile_fast")

SCRIPT = Path(ppo.__file__)
SIZES = {"num_envs": 4, "num_steps": 32, "num_minibatches": 4, "update_epochs": 2, "eval_episodes": 2}
ARGS = ppo.Args(env_id="Pendulum-v1", exp_name="mine", seed=3, total_timesteps=512, gamma=0.9, norm_adv=False, **SIZES)
REPOSITORY = "alice/Pendulum-v1-mine-seed3"
MODEL = "mine.cleanrl_model"
EVALUATION = {"global_step": 512, "episodic_return": [-1000.0, -1200.0], "episodic_length": [200, 200]}
SECONDS = 200  # a process takes 10 of them; on a machine that does other things too, many more
TRIES = 1 + len(cleanrl_utils.hub.PAUSES)


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / MODEL
    ppo.save_model(str(path), ARGS, ppo.init_state(ARGS, ppo.make_env(ARGS)))
    return path.read_bytes()


@pytest.fixture
def run_dir(tmp_path, monkeypatch, model_bytes):
    """The folder of a finished run, below the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)  # `uv run pytest` sets it
    path = Path("runs/Pendulum-v1__mine__3__1700000000")
    writer = SummaryWriter(str(path))
    for step in (128, 256, 384, 512):
        metrics = {"charts/episodes": 4.0, "charts/episodic_return": -1500.0 + step}
        for name, value in {**metrics, "charts/avg_episodic_return": -1500.0 + step}.items():
            writer.add_scalar(name, value, step)
    writer.close()
    (path / "args.json").write_text(json.dumps(asdict(ARGS)))
    (path / MODEL).write_bytes(model_bytes)
    (path / "evaluation.json").write_text(json.dumps(EVALUATION))
    (path / "videos").mkdir()
    (path / "videos" / "old.mp4").write_bytes(b"an old video")
    (path / "videos" / "new.mp4").write_bytes(b"a new video")
    os.utime(path / "videos" / "old.mp4", (1, 1))
    return str(path)


@pytest.fixture
def hub(monkeypatch):
    """A hub, after whose faults no pause is made."""
    server = HubStub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(cleanrl_utils.hub, "PAUSES", (0.0,) * len(cleanrl_utils.hub.PAUSES))
    yield server
    server.close()


@pytest.fixture
def plain_picture(monkeypatch):
    monkeypatch.setattr(huggingface, "learning_curve", lambda *_: b"a picture")


def environ(hub, home):
    """For a process of its own, without the tester's account."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "UV_"))}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HOME": str(home), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def snapshot(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def assert_one_line(error, start, *words):
    assert error.startswith(start) and error.count("\n") == 1 and error.endswith("\n"), error
    assert [word for word in words if word not in error] == [], error
    assert TOKEN.lower() not in error.lower()


def assert_not_uploaded(run_dir, capfd, *words, hf_entity=None):
    """One line with these words and the command; returns after how many seconds."""
    before, started = snapshot(run_dir), time.monotonic()
    assert huggingface.push_to_hub(run_dir, hf_entity) is False
    seconds = time.monotonic() - started
    out, err = capfd.readouterr()
    entity = f" --hf-entity {hf_entity}" if hf_entity else ""
    command = f"; push it again with: python -m cleanrl_utils.huggingface {shlex.quote(run_dir)}{entity}\n"
    assert out == "" and err.endswith(command), err
    assert_one_line(err, "not uploaded: ", *words)
    assert snapshot(run_dir) == before
    return seconds


# ---------------------------------------------------------------- an upload that succeeds
def test_every_file_arrives(run_dir, hub, capfd):
    assert huggingface.push_to_hub(run_dir) is True
    assert capfd.readouterr() == (f"  hub         {hub.url}/{REPOSITORY}\n", "")
    files = hub.repositories[REPOSITORY]
    (events,) = Path(run_dir).glob("events.*")
    for name in (MODEL, "args.json", "evaluation.json", events.name):
        assert files.pop(name) == (Path(run_dir) / name).read_bytes(), name
    assert files.pop("replay.mp4") == b"a new video"
    assert files.pop(SCRIPT.name) == SCRIPT.read_bytes()
    assert files.pop("learning_curve.png").startswith(b"\x89PNG")
    pins = dict(line.split("==") for line in files.pop("requirements.txt").decode().splitlines())
    assert pins == {name: version(name) for name in pins} and {"jax", "envpool", "tensorboardx"} <= pins.keys()
    assert len(pins) == len([requirement for requirement in requires("cleanrl") if "extra" not in requirement])
    assert files.keys() == {"README.md"}
    everything = b"".join(hub.received)
    assert TOKEN.encode() not in everything and os.getcwd().encode() not in everything


def test_the_card(run_dir, hub, tmp_path):
    assert huggingface.push_to_hub(run_dir)
    (tmp_path / "README.md").write_bytes(hub.repositories[REPOSITORY]["README.md"])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "cleanrl" and "Pendulum-v1" in card.data.tags
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == (
        "Pendulum-v1",
        "mean_reward",
        "-1100.00 +/- 100.00",
    )
    assert huggingface_hub.metadata_load(tmp_path / "README.md")["model-index"][0]["name"] == "mine"

    assert "(learning_curve.png)" in card.text and "-1100.0 ± 100.0" in card.text and "(2 episodes" in card.text
    assert json.loads(re.search(r"```json\n(.*?)```", card.text, re.DOTALL)[1]) == asdict(ARGS)
    watch, train = (shlex.split(line) for line in card.text.splitlines() if line.startswith("python"))
    assert watch[:3] == ["python", "-m", "cleanrl_utils.enjoy"]
    expected = enjoy.Args(env_id="Pendulum-v1", exp_name="mine", hf_repository=REPOSITORY)
    assert tyro.cli(enjoy.Args, args=watch[3:]) == expected
    assert train[:2] == ["python", f"cleanrl/{SCRIPT.name}"]
    assert tyro.cli(ppo.Args, args=train[2:]) == ARGS
    assert "--num-envs" in train and "--ent-coef" not in train  # what differs from the defaults, no more


@pytest.mark.parametrize(
    "exp_name", ["a`b|c", "```", "--- #", "<b>*a*_b", "{mean}: 'x' \"y\"", "[a](b)", "- a", "größe"]
)
def test_a_card_of_any_name_can_be_read(exp_name, tmp_path):
    args = {**asdict(ARGS), "exp_name": exp_name, "upload_model": True, "hf_entity": "bob", "wandb_entity": "bob"}
    (tmp_path / "README.md").write_text(huggingface.model_card(args, EVALUATION, ppo, "alice/a", ""))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.model_name == exp_name and len(card.data.eval_results) == 1
    (title,) = re.findall(r"^# (.*)", card.text, re.MULTILINE)
    assert re.sub(r"\\(.)", r"\1", title) == f"{exp_name} on Pendulum-v1"
    assert not re.search(r"(?<!\\)[`*_<>\[\]{}|]", title)
    assert json.loads(re.search(r"```json\n(.*?)\n```\n", card.text + "\n", re.DOTALL)[1]) == args
    commands = [shlex.split(line) for line in card.text.splitlines() if line.startswith("python")]
    assert [exp_name in command for command in commands] == [True, True]
    assert [word for command in commands for word in command if word in ("bob", "--upload-model")] == []


def test_pushing_again_changes_nothing_until_a_file_changes(run_dir, hub, capfd, plain_picture):
    assert huggingface.push_to_hub(run_dir) and huggingface.push_to_hub(run_dir)
    assert hub.commits == 1
    Path(run_dir, "evaluation.json").write_text(json.dumps({**EVALUATION, "global_step": 384}))
    assert huggingface.push_to_hub(run_dir)
    assert hub.commits == 2 and b"384 steps" in hub.repositories[REPOSITORY]["README.md"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("what", ["damaged", "missing", "no episode"])
def test_without_a_learning_curve(what, run_dir, hub, capfd):
    (events,) = Path(run_dir).glob("events.*")
    if what == "damaged":
        events.write_bytes(bytes(byte ^ 0xFF for byte in events.read_bytes()))
    else:
        events.unlink()
    if what == "no episode":
        writer = SummaryWriter(run_dir)
        writer.add_scalar("charts/episodes", 0.0, 128)
        writer.close()
    assert huggingface.push_to_hub(run_dir)
    assert capfd.readouterr().err == ""
    files = hub.repositories[REPOSITORY]
    assert "learning_curve.png" not in files and b"learning_curve" not in files["README.md"]


def test_a_run_without_a_video_in_a_folder_of_odd_name(run_dir, hub, plain_picture):
    for video in Path(run_dir, "videos").iterdir():
        video.unlink()
    odd = Path(run_dir).rename("runs/[a] b*")
    assert huggingface.push_to_hub(str(odd))
    files = hub.repositories[REPOSITORY]
    assert "replay.mp4" not in files and [name for name in files if name.startswith("events.")]


def test_a_token_that_may_write_but_not_create(run_dir, hub, plain_picture):
    hub.repositories["team/Pendulum-v1-mine-seed3"] = {}
    hub.faults["create"] = Fault(403)
    assert huggingface.push_to_hub(run_dir, "team")
    assert MODEL in hub.repositories["team/Pendulum-v1-mine-seed3"] and "whoami" not in hub.calls


# ---------------------------------------------------------------- uploads that fail
TEMPORARY = [429, 500, 503, "hang", "cut", "half"]
WORDS = {401: "hf auth login", 403: "token", 404: "404", 409: "409", 413: "too large", 429: "too many", 503: "503"}
WORDS |= {500: "500", "hang": "did not answer in 0.4 seconds", "cut": "disconnected", "half": "closed"}


FAULTS = [(kind, endpoint) for kind in WORDS for endpoint in ("create", "preupload", "store", "commit")]
FAULTS += [(kind, endpoint) for kind in (403, 503, "hang") for endpoint in ("whoami", "validate", "batch")]


@pytest.mark.parametrize("kind, endpoint", FAULTS)
def test_a_fault_is_a_line_and_is_retried_where_that_can_help(
    kind, endpoint, run_dir, hub, capfd, monkeypatch, plain_picture
):
    if kind == "hang":
        monkeypatch.setattr(cleanrl_utils.hub, "SECONDS_TO_ANSWER", 0.4)
    hub.faults[endpoint] = Fault(kind)
    words = [
        "404" if (kind, endpoint) == (409, "create") else WORDS[kind]
    ]  # it says that there is one, but there isn't
    if isinstance(kind, int) and (kind, endpoint) != (409, "create"):
        words.append("not for None" if endpoint == "store" else "not for Bearer ***")
    assert_not_uploaded(run_dir, capfd, *words)
    tries = TRIES if kind in TEMPORARY else 1
    large_files = 2 if endpoint == "store" else 1  # they travel side by side: one failure may end both
    assert tries <= hub.calls.count(endpoint) <= large_files * tries
    assert hub.commits == 0 and not hub.repositories.get(REPOSITORY)


@pytest.mark.parametrize("endpoint", ["whoami", "create", "preupload", "store", "commit"])
@pytest.mark.parametrize("kind", [429, 500, "cut"])
def test_a_fault_that_passes_costs_nothing(kind, endpoint, run_dir, hub, capfd, plain_picture):
    hub.faults[endpoint] = Fault(kind, times=2)
    assert huggingface.push_to_hub(run_dir)
    assert capfd.readouterr().err == ""
    assert hub.commits == 1 and len(hub.repositories[REPOSITORY]) == 9


def test_the_pause_is_the_one_asked_for(run_dir, hub, capfd, plain_picture):
    hub.faults["commit"] = Fault(429, times=1, headers={"Retry-After": "1"})
    started = time.monotonic()
    assert huggingface.push_to_hub(run_dir) and time.monotonic() - started >= 1.0
    hub.faults["whoami"] = Fault(503, headers={"Retry-After": "3600"})
    hub.calls.clear()
    capfd.readouterr()
    assert_not_uploaded(run_dir, capfd, "503")
    assert hub.calls == ["whoami"]


def test_pauses_grow_between_retries(run_dir, hub, capfd, monkeypatch, plain_picture):
    monkeypatch.setattr(cleanrl_utils.hub, "PAUSES", (0.1, 0.2, 0.4))
    hub.faults["whoami"] = Fault(500)
    assert assert_not_uploaded(run_dir, capfd, "500") >= 0.7


def assert_given_up(hub):
    """Nothing goes on behind the line that says that the upload failed."""
    for thread in threading.enumerate():
        if thread.name == "hub":
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert hub.commits == 0 and hub.calls.count("validate") == hub.calls.count("preupload") == 1


def test_a_hub_that_drips_has_an_end(run_dir, hub, capfd, monkeypatch, plain_picture):
    monkeypatch.setattr(cleanrl_utils.hub, "SECONDS_IN_ALL", 1.5)
    hub.faults["preupload"] = Fault("drip")
    assert assert_not_uploaded(run_dir, capfd, "took more than 1.5 seconds") < 10
    assert_given_up(hub)


def test_a_conflict_for_which_the_client_itself_would_ask_for_ever(run_dir, hub, capfd, plain_picture):
    message = b'{"error": "Cannot create repo: another conflicting operation is in progress"}'
    hub.faults["create"] = Fault(409, body=message)
    assert_not_uploaded(run_dir, capfd, "409", "conflicting")
    assert hub.calls.count("create") == 1


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b"\xff"])
@pytest.mark.parametrize("endpoint", ["whoami", "validate", "preupload", "batch", "commit"])
def test_nonsense_from_the_hub_is_a_line(endpoint, body, run_dir, hub, capfd, plain_picture):
    hub.faults[endpoint] = Fault(200, body=body)
    assert_not_uploaded(run_dir, capfd)


@pytest.mark.parametrize(
    "what", ["refused", "no host", "offline", "no token", "control characters", "bad name", "no file"]
)
def test_what_else_can_be_wrong_is_a_line(what, run_dir, hub, capfd, monkeypatch, plain_picture):
    entity, words = "bob", []
    if what == "refused":
        with socket.create_server(("127.0.0.1", 0)) as free:
            monkeypatch.setattr(constants, "ENDPOINT", f"http://user:password@127.0.0.1:{free.getsockname()[1]}")
        words = ["no connection to 127.0.0.1"]
    elif what == "no host":
        monkeypatch.setattr(constants, "ENDPOINT", "http://nowhere.invalid")
        words = ["no connection to nowhere.invalid"]
    elif what == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        words = ["HF_HUB_OFFLINE"]
    elif what == "no token":
        monkeypatch.delenv("HF_TOKEN")
        entity, words = None, ["hf auth login"]
    elif what == "control characters":
        monkeypatch.setenv("HF_TOKEN", f"{TOKEN[:9]}\x01{TOKEN[9:]}")
    elif what == "bad name":
        entity, words = "a b", ["no such name"]
    elif what == "no file":
        Path(run_dir, "evaluation.json").unlink()
        words = [f"{run_dir}/evaluation.json", "No such file"]
    before = snapshot(run_dir)
    assert huggingface.push_to_hub(run_dir, entity) is False
    out, err = capfd.readouterr()
    assert_one_line(err, "not uploaded: ", run_dir, *words)
    assert out == "" and "password" not in err and TOKEN[9:] not in err and snapshot(run_dir) == before


def test_a_token_of_another_kind_is_hidden_too(run_dir, hub, capfd, monkeypatch, plain_picture):
    monkeypatch.setenv("HF_TOKEN", "eyJ.another-kind_of.token")
    hub.faults["whoami"] = Fault(403, headers={"X-Error-Message": "no eyJ.another-kind_of.token, no"})
    assert_not_uploaded(run_dir, capfd, ": no ***, no;")


def test_ctrl_c_during_the_upload_ends_in_the_line(run_dir, hub, capfd, plain_picture):
    hub.faults["commit"] = Fault("hang")

    def press():
        while "commit" not in hub.calls:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert assert_not_uploaded(run_dir, capfd, "interrupted") < 10
    hub.closing.set()  # the hub hangs up
    assert_given_up(hub)


def test_a_damaged_client_is_a_line(run_dir, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "cleanrl_utils.hub", None)
    monkeypatch.delattr("cleanrl_utils.hub")
    assert_not_uploaded(run_dir, capfd, "cleanrl_utils.hub", hf_entity="bob")


def test_the_command_is_uvs_under_uv(run_dir, hub, capfd, monkeypatch):
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    hub.faults["whoami"] = Fault(401)
    assert not huggingface.push_to_hub(run_dir)
    assert "again with: uv run python -m cleanrl_utils.huggingface runs/" in capfd.readouterr().err


# ---------------------------------------------------------------- the command
def command(run_dir, **args):
    with pytest.raises(SystemExit) as stopped:
        huggingface.main(huggingface.Args(run_dir, **args))
    return stopped.value.code


def test_the_command_evaluates_an_interrupted_run(run_dir, hub, capfd):
    path = Path(run_dir, "evaluation.json")
    path.unlink()
    assert command(run_dir + "/", hf_entity="team") == 0
    evaluation = json.loads(path.read_text())
    assert evaluation["global_step"] == 512 and evaluation["episodic_length"] == [200, 200]
    assert all(-2000 < value < 0 for value in evaluation["episodic_return"])
    files = hub.repositories["team/Pendulum-v1-mine-seed3"]
    assert files["evaluation.json"] == path.read_bytes()
    assert f"{np.mean(evaluation['episodic_return']):.2f} +/- " in files["README.md"].decode()
    assert capfd.readouterr().err == ""


def test_the_command_ends_with_1_when_the_hub_fails(run_dir, hub, capfd):
    hub.faults["create"] = Fault(413)
    assert command(run_dir) == 1
    assert_one_line(capfd.readouterr().err, "not uploaded: ", "413", run_dir)


MISTAKES = {  # what is wrong -> file of the run, its content (None: it is missing), words of the line
    "no folder": (".", None, ["no folder"]),
    "no arguments": ("args.json", None, ["args.json", "No such file"]),
    "damaged arguments": ("args.json", b'{"exp_name": ', ["args.json", "damaged"]),
    "arguments that are no text": ("args.json", b"\xff\xfe", ["args.json", "damaged"]),
    "a list of arguments": ("args.json", b"[1]", ["args.json", "exp_name"]),
    "arguments of another version": ("args.json", json.dumps({**asdict(ARGS), "new": 1}).encode(), ["'new'"]),
    "an argument of another type": ("args.json", json.dumps({**asdict(ARGS), "seed": "1"}).encode(), ["seed"]),
    "a name above": ("args.json", json.dumps({**asdict(ARGS), "exp_name": "../x"}).encode(), ["../x"]),
    "no model": (MODEL, None, [MODEL, "No such file"]),
    "a damaged model": (MODEL, b"damaged", [MODEL, "damaged"]),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_a_line_and_exit_code_2(what, run_dir, hub, capfd):
    name, content, words = MISTAKES[what]
    if name == ".":
        run_dir += "0"
    elif content is None:
        Path(run_dir, name).unlink()
    else:
        Path(run_dir, name).write_bytes(content)
    assert command(run_dir) == 2
    out, err = capfd.readouterr()
    assert out == "" and hub.calls == []
    assert_one_line(err, "error: ", run_dir, *words)


@pytest.mark.parametrize("damaged", [b"", b"[]", b'{"global_step": 1}', b'{"global_step": 1, "episodic_return": []}'])
def test_a_damaged_evaluation_is_none(damaged, tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(EVALUATION))
    assert huggingface.is_evaluation(path)
    path.write_bytes(damaged)
    assert not huggingface.is_evaluation(path)


# ---------------------------------------------------------------- enjoy
def test_processes_push_a_model_and_act_as_the_local_one(run_dir, hub, tmp_path, capfd):
    assert huggingface.push_to_hub(run_dir)
    flags = {"env_id": "Pendulum-v1", "exp_name": "mine", "seed": 3, "eval_episodes": 2}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    (tmp_path / "elsewhere").mkdir()

    def start(*command, cwd):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environ(hub, tmp_path)}
        return subprocess.Popen([sys.executable, "-m", *command], cwd=cwd, **pipes)

    push = start("cleanrl_utils.huggingface", run_dir, "--hf-entity", "team", cwd=".")
    remote = ["cleanrl_utils.enjoy", *words, "--hf-entity", "alice", "--capture-video"]
    remote = start(*remote, cwd=tmp_path / "elsewhere")
    capfd.readouterr()
    enjoy.main(enjoy.Args(**flags, model_path=os.path.join(run_dir, MODEL)))
    local_out = capfd.readouterr().out

    out, err = push.communicate(timeout=SECONDS)
    assert (push.returncode, out, err) == (0, f"  hub         {hub.url}/team/Pendulum-v1-mine-seed3\n", "")
    out, err = remote.communicate(timeout=SECONDS)
    assert remote.returncode == 0, err
    video = "videos/Pendulum-v1-mine-seed3.mp4"
    assert out.splitlines()[1:] == [*local_out.splitlines()[1:], f"  video         {video}"]
    assert f"{REPOSITORY}/{MODEL}" in out.splitlines()[0]
    assert list(snapshot(tmp_path / "elsewhere")) == [tmp_path / "elsewhere" / video]
    assert TOKEN not in out + err
    assert [path for path, data in snapshot(tmp_path).items() if TOKEN.encode() in data] == []


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def model_with(model_bytes, **changed):
    model = {**flax.serialization.msgpack_restore(model_bytes), **changed}
    del model["checksum"]
    return packed(model)


def grown(model_bytes):
    params = flax.serialization.msgpack_restore(model_bytes)["params"]
    return model_with(model_bytes, params=jax.tree.map(lambda x: np.concatenate([x, x]), params))


HOSTILE = {  # what is in the repository -> its bytes, words of the line
    "pickle": (lambda model: pickle.dumps(Trap()), ["damaged or not a model"]),
    "half a model": (lambda model: model[:-100], ["damaged or not a model"]),
    "nothing": (lambda model: b"", ["damaged or not a model"]),
    "a web page": (lambda model: b"<html></html>", ["not a model"]),
    "too large": (lambda model: bytes(2**20 + 1), ["larger than 1 MiB"]),
    "another script": (lambda model: model_with(model, script="os"), ["no script 'os'"]),
    "a script elsewhere": (lambda model: model_with(model, script="../tests/hub_stub"), ["no script"]),
    "another environment": (lambda model: model_with(model, args={**asdict(ARGS), "env_id": "x"}), ["--env-id 'x'"]),
    "no such environment": (lambda model: model_with(model, args={**asdict(ARGS), "num_envs": -1}), ["--num-envs -1"]),
    "other shapes": (grown, ["params", "another environment"]),
}


@pytest.fixture
def watch(tmp_path, monkeypatch, hub, capfd):
    """Watches alice's model in an empty folder; returns the exit code and the one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(enjoy, "MAX_FILE_SIZE", 2**20)

    def run(**args):
        with pytest.raises(SystemExit) as stopped:
            enjoy.main(enjoy.Args(**{"env_id": "Pendulum-v1", "exp_name": "mine", "hf_repository": REPOSITORY, **args}))
        out, err = capfd.readouterr()
        assert out == "" and os.listdir(tmp_path) == []
        assert_one_line(err, "error: ")
        return stopped.value.code, err

    return run


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_a_line(what, watch, hub, model_bytes):
    make, words = HOSTILE[what]
    hub.repositories[REPOSITORY] = {MODEL: make(model_bytes)}
    code, error = watch()
    assert code == 2 and [word for word in words if word not in error] == [], error


DOWNLOADS = {  # what the hub does instead -> fault, exit code, words of the line, calls
    "endless": (Fault("endless"), 2, "larger than 1 MiB", 1),
    "a size that is a lie": (Fault("file", body=b"a", headers={"Content-Length": str(10**12)}), 2, "larger", 1),
    "packed": (Fault("file", body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}), 2, "not a model", 1),
    "round in circles": (Fault(302, headers={"Location": f"/{REPOSITORY}/resolve/main/{MODEL}"}), 2, "redirects", 21),
    "private": (Fault(401), 2, "hf auth login", 1),
    "forbidden": (Fault(403), 2, "token", 1),
    "gone": (Fault(404, headers={"X-Error-Message": f"no {TOKEN}"}), 2, "no such repository or file): no ***", 1),
    "busy": (Fault(429), 1, "too many requests", TRIES),
    "broken": (Fault(503), 1, "503", TRIES),
    "silent": (Fault("hang"), 1, "did not answer", TRIES),
    "cut": (Fault("cut"), 1, "disconnected", TRIES),
    "cut within the file": (Fault("half"), 1, "closed", TRIES),
    "dripping": (Fault("drip"), 1, "took more than 1.5 seconds", 1),
}


@pytest.mark.parametrize("what", DOWNLOADS)
def test_a_download_that_fails_is_a_line(what, watch, hub, monkeypatch):
    if what == "dripping":
        monkeypatch.setattr(cleanrl_utils.hub, "SECONDS_IN_ALL", 1.5)
    if what == "silent":
        monkeypatch.setattr(cleanrl_utils.hub, "SECONDS_TO_ANSWER", 0.4)
    hub.faults["resolve"], expected_code, words, calls = DOWNLOADS[what]
    code, error = watch()
    assert code == expected_code and words in error and REPOSITORY in error or what == "packed", error
    assert hub.calls.count("resolve") == calls


@pytest.mark.parametrize(
    "args, words",
    [
        ({"hf_repository": "a/b/c"}, "no such name"),
        ({"hf_repository": "../../etc"}, "no such name"),
        ({"hf_repository": "alice/other"}, "no such repository or file"),
        ({"hf_repository": None, "hf_entity": "bob"}, "bob/Pendulum-v1-mine-seed1"),
        ({"hf_repository": None, "hf_entity": "bob", "env_id": "phys2d/Pendulum-v0"}, "bob/phys2d-Pendulum-v0-mine-"),
        ({"model_path": "a"}, "--model-path"),
    ],
)
def test_a_repository_that_is_not_there_is_a_line(args, words, watch):
    code, error = watch(**args)
    assert code == 2 and words in error


# ---------------------------------------------------------------- the other scripts
OTHERS = {
    "ppo_envpool_xla_jax_scan": {"env_id": "CartPole-v1"},
    "ppo_atari_envpool_xla_jax_scan": {"env_id": "SpaceInvaders-v5", "hidden_size": 8},
    "ppo_continuous_action_gymnasium_jax_scan": {"env_id": "Pendulum-v1"},
    "ppo_continuous_action_brax_jax_scan": {"env_id": "fast", "iterations_per_call": 1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_script_is_uploaded_and_watched(name, hub, tmp_path, monkeypatch, capfd, plain_picture):
    if "brax" in name:
        pytest.importorskip("brax")
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(f"cleanrl.{name}")
    sizes = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 16}
    args = script.Args(**{**sizes, **OTHERS[name]}, eval_episodes=2, progress=False, compilation_cache=False)
    script.main(replace(args, upload_model=True))
    repository = f"alice/{args.env_id}-{name}-seed1"
    out = capfd.readouterr().out
    assert f"  hub         {hub.url}/{repository}\n" in out
    files = hub.repositories[repository]
    assert files[f"{name}.py"] == Path(script.__file__).read_bytes()
    shutil.rmtree("runs")
    enjoy.main(enjoy.Args(env_id=args.env_id, exp_name=name, hf_entity="alice", eval_episodes=2))
    watched = re.search(r"mean ± std +return +(\S+ ± \S+) +length (\d+)", capfd.readouterr().out)
    assert f"evaluation  return {watched[1]}, length {watched[2]} at step 16 (2" in out

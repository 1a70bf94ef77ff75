"""Damaged and hostile files: one line, exit code 2, little memory, nothing raw on the terminal. See test_models too."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import flax
import jax
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils import checkpoints, enjoy, errors, events, huggingface, models, report, results, untrusted_json, zoo
from cleanrl_utils.evals.ppo_envpool_jax_eval import check_script, make_evaluator
from cleanrl_utils.models import MAX_FILE_SIZE, find_model, read_model, read_msgpack, restore_args
from cleanrl_utils.untrusted import MAX_JSON_SIZE, read_json, unpack

pytestmark = pytest.mark.usefixtures("compile_fast")

ARGS = ppo.Args(env_id="Pendulum-v1", exp_name="small", num_envs=2, num_minibatches=2, hidden_size=8, eval_episodes=2)
ESCAPE = "\x1b]0;title\x07\x1b[2J\r\nerror: \u202e\x9b"
TREES = dict(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a model."""
    path = tmp_path_factory.mktemp("model") / "small.cleanrl_model"
    ppo.save_model(str(path), ARGS, ppo.init_state(ARGS, ppo.make_env(ARGS)))
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(saved):
    """A model without its checksum, as earlier versions saved it: what is edited here goes past the checksum."""
    model = flax.serialization.msgpack_restore(saved)
    del model["checksum"]
    return flax.serialization.to_bytes(model)


@pytest.fixture(scope="module")
def load(whole, tmp_path_factory):
    """All that an evaluation makes of a model's bytes, but for the environments: those of `whole` serve every file.

    Returns the arguments and arrays, or the line with which the program ends.
    """
    path = tmp_path_factory.mktemp("load") / "small.cleanrl_model"
    path.write_bytes(whole)
    evaluator = make_evaluator(str(path), ppo)

    def load_bytes(data):
        with (
            contextlib.redirect_stderr(io.StringIO()) as err,
            contextlib.redirect_stdout(err),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(models, "read_file", lambda *_: data)  # the disk would take most of the time
            try:
                model = read_model(str(path))
                check_script(ppo, model, str(path))
                args = restore_args(ppo.Args, model["args"], str(path))
                ppo.check_args(args)
                env, agent = evaluator.load(str(path))
            except SystemExit as stopped:
                assert stopped.code == 2
                assert_line(err.getvalue())
                return err.getvalue()
        assert err.getvalue() == ""
        return args, (agent.params, env.wrappers[1].stats)

    return load_bytes


def assert_line(err):
    assert err.startswith("error: ") and err.endswith("\n") and len(err) < 2500, err
    assert err[:-1].isprintable(), repr(err)


def is_line(outcome, expected):
    """Whether it is one, or else arrays that fit."""
    if isinstance(outcome, str):
        return True
    assert jax.tree.structure(outcome[1]) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(outcome[1]), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and np.isfinite(x).all()
    return False


def one_line(capfd, call, *args):
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call(*args)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and out == ""
    assert_line(err)
    return err


def edited(whole, **parts):
    """The model with each part changed by a function."""
    model = flax.serialization.msgpack_restore(whole)
    for name, edit in parts.items():
        edit(model[name])
    return flax.serialization.msgpack_serialize(model)


# ---------------------------------------------------------------- damage
def test_a_file_that_is_cut_anywhere_is_a_line(whole, load):
    assert not isinstance(load(whole), str)
    for length in range(len(whole)):
        assert "damaged" in load(whole[:length]), length


def mutated(data, rng):
    data, at, length = bytearray(data), int(rng.integers(len(data))), int(rng.integers(1, 9))
    match rng.integers(6):
        case 0:
            data[at] ^= 1 << int(rng.integers(8))
        case 1:
            data[at : at + length] = rng.bytes(length)
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = data[at : at + 64]
        case 4:
            data[at : at + 512] = bytes(512)  # a sector of a disk
        case 5:
            for i in rng.integers(len(data), size=length):
                data[i] = rng.integers(256)
    return bytes(data)


def test_random_damage_of_what_is_saved_is_always_a_line(saved, load):
    assert not isinstance(load(saved), str)
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        data = mutated(saved, rng)
        assert data == saved or isinstance(load(data), str)


def test_random_damage_is_a_line_or_a_whole_model(whole, load):
    expected = load(whole)[1]
    rng = np.random.default_rng(0)
    lines = [is_line(load(mutated(whole, rng)), expected) for _ in range(10_000)]
    assert 0.2 < np.mean(lines) < 0.98, np.mean(lines)


# ---------------------------------------------------------------- what is no file
def no_files(folder):
    """Name -> path of what can't be read, words of the line."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("missing")
    (folder / "folder").mkdir()
    with open(folder / "sparse", "wb") as f:
        f.truncate(2**40)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "socket"))
    words = {"pipe": "not a file", "loop": "symbolic links", "nowhere": "No such file", "folder": "directory"}
    return words | {"sparse": "larger than", "socket": "", "/dev/zero": "not a file", "/dev/stdin/x": "Not a directory"}


def test_what_is_no_file_is_a_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    for path, words in no_files(tmp_path).items():
        for call in (read_model, lambda path: enjoy.main(enjoy.Args("Pendulum-v1", model_path=path))):
            assert words in one_line(capfd, call, path), path
        with pytest.raises(OSError):
            read_json(path)
    assert time.monotonic() - started < 20
    assert "larger than 1 MiB" in one_line(capfd, read_msgpack, "sparse", 2**20)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_a_line(tmp_path, capfd):
    (tmp_path / "m").touch(mode=0)
    assert "Permission denied" in one_line(capfd, read_model, str(tmp_path / "m"))


def test_links_to_nowhere_are_not_the_newest_model(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        path = Path(f"runs/Pendulum-v1__small__{seed}__1700000000/small.cleanrl_model")
        path.parent.mkdir(parents=True)
        path.symlink_to("small.cleanrl_model")
    assert "no model of small" in one_line(capfd, find_model, "small", "Pendulum-v1")
    assert "bytes" not in one_line(capfd, zoo.add_best, [str(path)])


# ---------------------------------------------------------------- hostile models
def array(shape=(1,), dtype="float32", buffer=b"1234", code=1):
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, buffer)))


LEAVES = {  # in the place of a weight
    "strings": array(dtype="S1000000000"),
    "an empty dtype": array(dtype=""),
    "big endian": array(dtype=">f4"),
    "bfloat16": array(shape=(2,), dtype="bfloat16"),
    "complex": array(dtype="complex64", buffer=bytes(8)),
    "long double": array(dtype="float128", buffer=bytes(16)),
    "a dtype that is no text": array(dtype=4),
    "a dtype that is a list": array(dtype=[("a", "f4")]),
    "a huge square": array(shape=(2**31, 2**31)),
    "nothing, hugely": array(shape=(0, 2**62), buffer=b""),
    "nothing, too hugely": array(shape=(0, 2**63), buffer=b""),
    "33 dimensions": array(shape=(1,) * 33),
    "a shape of floats": array(shape=(1.0,)),
    "a shape of bools": array(shape=(True,)),
    "nan for a dimension": array(shape=(float("nan"),)),
    "an array in an array": array(buffer=array()),
    "a number for bytes": array(buffer=4),
    "a dict in an array": array(shape={}),
    "one byte too many": array(buffer=b"12345"),
    "a scalar": array(shape=(), code=3),
    "an extension of an extension": msgpack.ExtType(1, msgpack.packb(msgpack.ExtType(1, b""))),
    "only a shape": msgpack.ExtType(1, msgpack.packb((1, 2))),
    "lists in lists": msgpack.ExtType(1, b"\x91" * 100_000 + b"\x90"),
    "infinity": array(shape=(1,), buffer=np.float32(np.inf).tobytes()),
    "a number": 1.0,
    "a large number": 2**64 - 1,
    "bytes": b"1234",
    "a list": [1.0],
    "an empty list": [],
    "a time": msgpack.Timestamp(0),
    "a dict": {"a": {}},
}


@pytest.mark.parametrize("what", LEAVES)
def test_a_hostile_leaf_is_a_line(what, whole, load):
    model = msgpack.unpackb(whole, strict_map_key=False)
    assert model["params"]["params"]["log_std"].code == 1
    for good, expected in [(True, tuple), (False, str)]:
        leaf = array(buffer=np.float32(0.5).tobytes()) if good else LEAVES[what]
        model["params"]["params"]["log_std"] = leaf
        assert isinstance(load(msgpack.packb(model)), expected)


def test_a_name_that_is_there_twice_is_a_line(whole, load):
    for name in (b"\xa6script", b"\xa4seed", b"\xa7log_std"):
        at = whole.index(name)
        map_at = max(i for i in range(at) if msgpack_size(whole, i) and map_holds(whole, i, name))
        size = msgpack_size(whole, map_at)
        header = b"\xde" + (size[0] + 1).to_bytes(2, "big")
        start = map_at + size[1]
        twice = whole[:map_at] + header + name + b"\x01" + whole[start:]
        assert len(msgpack.unpackb(twice, strict_map_key=False)) == 5  # msgpack itself takes it
        assert "damaged" in load(twice)


def msgpack_size(data, at):
    """Number of entries and length of the header of the map that begins there, if one does."""
    if data[at] & 0xF0 == 0x80:
        return data[at] & 0xF, 1
    return (int.from_bytes(data[at + 1 : at + 3], "big"), 3) if data[at] == 0xDE else None


def map_holds(data, at, name):
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data[at:])
    with contextlib.suppress(Exception):
        tree = unpacker.unpack()
        return isinstance(tree, dict) and name[1:].decode() in tree
    return False


DEEP = {
    "maps": b"\x81\xa1a" * 33 + b"\x80",
    "maps within what msgpack takes": b"\x81\xa1a" * 1000 + b"\x80",
    "more maps": b"\x81\xa1a" * 100_000 + b"\x80",
    "lists": b"\x91" * 100_000 + b"\x90",
    "a huge map": b"\xdf\xff\xff\xff\xff\xa1a\x80",
    "a huge list": b"\xdd\xff\xff\xff\xff\x80",
    "huge bytes": b"\xc6\xff\xff\xff\xff1",
    "huge text": b"\xdb\xff\xff\xff\xff1",
    "a huge extension": b"\xc9\xff\xff\xff\xff\x011",
}


@pytest.mark.parametrize("what", DEEP)
@pytest.mark.parametrize("part", ["args", "params", "wrappers", "versions", "other"])
def test_deep_and_huge_parts_are_a_line(what, part, whole, load):
    others = [b"\xa6params\x80", b"\xa4args\x80", b"\xa8wrappers\x80", b"\xa8versions\x80", b"\xa6script\xa0"]
    others = [other for other in others if part.encode() not in other]
    data = bytes([0x81 + len(others)]) + b"".join(others) + msgpack.packb(part) + DEEP[what]
    assert "damaged" in load(data)


PROGRAM = """
import os, sys
from cleanrl_utils.untrusted import read_file, read_json, unpack
for path in sys.argv[1:]:
    if os.fork() == 0:
        try:
            read_json(path) if path.endswith(".json") else unpack(read_file(path, 2**40))
        except Exception:
            os._exit(1)
        os._exit(0)
    _, status, usage = os.wait4(-1, 0)
    print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, usage.ru_utime)
"""


def bombs(size):
    """Files of about that size that are made to fill the memory, and a whole one."""
    one = b"\xde\x03\xe7" + b"".join(b"\xa3%03d\x80" % i for i in range(999))
    text = b"a" * (size - 4) + "\U0001f600".encode()
    lists = b"\x93" + b"\xdc\xff\xff" * (size // 3)
    pairs = b"\xdf" + (size // 3).to_bytes(4, "big") + b"\xa1a\x80" * (size // 3)
    wide = b"\xde\x03\xe8" + b"".join(b"\xa3%03d\x7f" % i for i in range(999)) + b"\xa1a"  # the last holds the next
    weights = {"a": np.zeros(size // 4, np.float32)}
    return {
        "a map": pairs,
        "maps of maps": b"\xde\x03\xe8" + b"".join(b"\xa3%03d" % i + one for i in range(size // len(one))),
        "wide and deep": wide * 1000 + b"\x80",
        "text": b"\x81\xa1a\xdb" + len(text).to_bytes(4, "big") + text,
        "a name": b"\x81\xdb" + len(text).to_bytes(4, "big") + text + b"\x01",
        "a list in an array": msgpack.packb({"a": msgpack.ExtType(1, lists)}),
        "maps in an array": msgpack.packb({"a": msgpack.ExtType(1, pairs)}),
        "short lists in an array": msgpack.packb({"a": msgpack.ExtType(1, b"\x9f" * 1000 + b"\x90" * (size - 1000))}),
        "a whole one": flax.serialization.msgpack_serialize(weights),
    }


def test_memory_is_bounded(tmp_path):
    size = 32 * 2**20
    contents = bombs(size)
    contents["empty.json"] = b"{}"
    contents["lists.json"] = b"[" + b"[]," * (MAX_JSON_SIZE // 3 - 2) + b"[]]"
    contents["deep.json"] = b"[" * MAX_JSON_SIZE
    contents["large.json"] = b"1" * size
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with open(tmp_path / "huge.json", "wb") as f:
        f.truncate(2**30)
    names = [*contents, "huge.json"]
    command = [sys.executable, "-c", PROGRAM, *(str(tmp_path / name) for name in names)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and result.stderr == ""
    measured = {name: line.split() for name, line in zip(names, result.stdout.splitlines(), strict=True)}
    base = int(measured["empty.json"][1])
    memory = {name: (int(peak) - base) / size for name, (_, peak, _) in measured.items()}
    print(memory)
    assert all(multiple < 5 for multiple in memory.values()), memory
    assert all(float(seconds) < 5 for _, _, seconds in measured.values()), measured
    assert [name for name in names if measured[name][0] == "0"] == ["a whole one", "empty.json", "lists.json"]


def test_a_small_file_that_asks_for_a_huge_network_is_a_line(whole, tmp_path, capfd):
    path = tmp_path / "m"
    path.write_bytes(edited(whole, args=lambda args: args.update(hidden_size=10_000)))
    started = time.monotonic()
    error = one_line(capfd, lambda: make_evaluator(str(path), ppo).load(str(path)))
    assert "10000]" in error and time.monotonic() - started < 30


def test_the_largest_network_can_be_read():
    args = ppo.Args(hidden_size=10_000, env_id="Humanoid-v4")
    shapes = jax.eval_shape(lambda: ppo.make_agent(args, ppo.make_env(ARGS), jax.random.PRNGKey(0))).params
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) < 0.9 * MAX_FILE_SIZE


# ---------------------------------------------------------------- text
PLACES = {
    "a name in args": {"args": lambda args: args.update({ESCAPE: 1})},
    "a name in params": {"params": lambda params: params.update({ESCAPE: {}})},
    "a name in statistics": {"wrappers": lambda wrappers: wrappers["VectorEnvNormObs"].update({ESCAPE: 1})},
    "text for a weight": {"params": lambda params: params["params"].update(log_std=ESCAPE)},
}
for field in fields(ppo.Args):
    PLACES[field.name] = {"args": lambda args, name=field.name: args.update({name: ESCAPE})}
PATHS = {
    "above": "../../x",
    "absolute": "/etc/x",
    "nul": "a\0b",
    "hidden": ".x",
    "long": "x" * 9999,
}


@pytest.mark.parametrize("place", PLACES)
def test_escape_sequences_stay_in_the_file(place, whole, load, tmp_path, monkeypatch, capfd):
    data = edited(whole, **PLACES[place])
    assert isinstance(load(data), str)  # which checks that it is printable
    if place in ("script", "exp_name", "env_id"):
        Path(tmp_path / "m").write_bytes(data)
        one_line(capfd, lambda: enjoy.main(enjoy.Args("Pendulum-v1", "small", str(tmp_path / "m"))))
        one_line(capfd, zoo.add_best, [str(tmp_path / "m")])


@pytest.mark.parametrize("name", ["script", "exp_name", "env_id"])
@pytest.mark.parametrize("what", PATHS)
def test_names_are_no_paths(name, what, whole, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "ZOO_FOLDER", str(tmp_path / "zoo"))
    model = flax.serialization.msgpack_restore(whole)
    (model if name == "script" else model["args"])[name] = PATHS[what]
    Path("m").write_bytes(flax.serialization.msgpack_serialize(model))
    one_line(capfd, lambda: enjoy.main(enjoy.Args("Pendulum-v1", "small", "m")))
    one_line(capfd, zoo.add_best, ["m"])
    assert os.listdir() == ["m"]


def test_an_array_for_the_name_is_a_line(whole, tmp_path, capfd):
    for name in ("exp_name", "env_id"):
        Path(tmp_path / "m").write_bytes(edited(whole, args=lambda args, name=name: args.update({name: np.ones(9)})))
        one_line(capfd, lambda: enjoy.main(enjoy.Args("Pendulum-v1", "small", str(tmp_path / "m"))))


def test_versions(whole, load):
    """Of an older version, whose missing arguments have their defaults, and of a newer one."""
    assert load(edited(whole, args=lambda args: args.pop("gamma")))[0] == ARGS
    assert "'new_field'" in load(edited(whole, args=lambda args: args.update(new_field=1)))


# ---------------------------------------------------------------- json
BAD_JSON = {
    "empty": b"",
    "cut": b'{"exp_name": "sma',
    "not UTF-8": b'{"exp_name": "\xff"}',
    "deep lists": b"[" * 100_000,
    "deep dicts": b'{"a":' * 100_000,
    "a name twice": b'{"seed": 1, "seed": 2}',
    "nan": b'{"seed": NaN}',
    "infinity": b'{"seed": -Infinity}',
    "a large float": b'{"seed": 1e999}',
    "a large number": b'{"seed": 9223372036854775808}',
    "a huge number": b"1" * 10_000,
    "zeros": bytes(100),
    "more after it": b"{}{}",
}


@pytest.mark.parametrize("what", BAD_JSON)
def test_damaged_json_is_a_line(what, whole, tmp_path, monkeypatch, capfd):
    path = tmp_path / "args.json"
    path.write_bytes(BAD_JSON[what])
    with pytest.raises(ValueError):
        read_json(str(path))
    assert "args.json" in one_line(capfd, huggingface.check_run, str(tmp_path))
    assert huggingface.is_evaluation(str(path)) is False
    assert "it is damaged" in one_line(capfd, zoo.read_scores, str(path))


BAD_ARGS = {
    "a path": {"exp_name": "../small"},
    "control characters": {"exp_name": ESCAPE},
    "a nul": {"exp_name": "\0"},
    "a surrogate": {"exp_name": "\ud800"},
    "a dict": {"exp_name": {}},
    "control characters in the environment": {"env_id": ESCAPE},
    "a list": {"env_id": []},
    "a surrogate in the environment": {"env_id": "\ud800"},
    "control characters in an entity": {"hf_entity": ESCAPE},
    "a large number": {"learning_rate": 2**63 - 1, "gamma": 2**63 - 1},
    "a bool": {"seed": True},
    "null": {"seed": None},
    "a name with control characters": {ESCAPE: 1},
}


@pytest.mark.parametrize("what", BAD_ARGS)
def test_wrong_arguments_in_json_are_a_line(what, whole, tmp_path, capfd):
    (tmp_path / "small.cleanrl_model").write_bytes(whole)
    (tmp_path / "args.json").write_text(json.dumps({**asdict(ARGS), **BAD_ARGS[what]}))
    one_line(capfd, huggingface.check_run, str(tmp_path))


def report_lines(folder, capfd):
    """What the report prints of a folder with one run that it leaves out."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        report.main(report.Args(runs=(str(folder),)))
    out, err = capfd.readouterr()
    assert stopped.value.code == 2
    assert all(line.isprintable() and len(line) < 1000 for line in (out + err).split("\n")), out + err
    return out + err


@pytest.mark.parametrize("what", BAD_JSON)
def test_the_report_leaves_out_damaged_json(what, tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_bytes(BAD_JSON[what])
    assert "args.json can't be read" in report_lines(tmp_path, capfd)


@pytest.mark.parametrize(
    "what", [what for what in BAD_ARGS if not BAD_ARGS[what].keys() & {"hf_entity", "learning_rate", ESCAPE}]
)
def test_the_report_leaves_out_wrong_arguments(what, tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text(json.dumps({**asdict(ARGS), **BAD_ARGS[what]}))
    assert "args.json has" in report_lines(tmp_path, capfd)


def test_the_report_reads_versions_and_commits_of_damaged_files(whole, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(edited(whole, versions=lambda versions: versions.update({ESCAPE: "1", "a": ESCAPE, "b": 1})))
    assert results.read_versions(str(path)).keys() == {"envpool", "flax", "jax", "numpy", "b"}
    path.write_bytes(whole[:-1])
    assert results.read_versions(str(path)) == results.read_versions("/dev/zero") == {}
    (tmp_path / "a.json").write_text('{"run_dir": 5, "git_describe": "x"}')
    (tmp_path / "b.json").write_text("[" * 100_000)
    assert results.read_commits(str(tmp_path)) == {}


BAD_EVALUATIONS = [
    {"episodic_return": []},
    {"episodic_return": [[1.0]]},
    {"episodic_return": ["a"]},
    {"episodic_return": [None]},
    {"episodic_return": {"a": 1}},
    {"episodic_length": [1, 2, 3]},
    {"episodic_length": None},
]


@pytest.mark.parametrize("bad", BAD_EVALUATIONS)
def test_a_wrong_evaluation_is_a_line(bad, tmp_path, capfd):
    path = tmp_path / "evaluation.json"
    evaluation = {"global_step": 1, "episodic_return": [1.0, 2.0], "episodic_length": [3, 4]}
    path.write_text(json.dumps(evaluation))
    assert huggingface.is_evaluation(str(path))
    zoo.read_scores(str(path))
    path.write_text(json.dumps({**evaluation, **bad}))
    assert not huggingface.is_evaluation(str(path))
    one_line(capfd, zoo.read_scores, str(path))


def is_refused(call, *args):
    """Whether the call ends the program, with a line."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            call(*args)
        except SystemExit as stopped:
            assert stopped.code == 2
            assert_line(err.getvalue())
    return err.getvalue() != ""


def test_random_damage_of_arguments_is_a_line_or_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "read_model", lambda path: {"script": ppo.script_name()})
    monkeypatch.setattr(huggingface, "is_evaluation", lambda path: True)
    whole, rng, refused, left_out = json.dumps(asdict(ARGS), indent=2).encode(), np.random.default_rng(0), 0, 0
    for _ in range(10_000):
        data = mutated(whole, rng)
        monkeypatch.setattr(untrusted_json, "read_file", lambda *_, data=data: data)
        refused += is_refused(huggingface.check_run, str(tmp_path))
        try:
            results.read_config(str(tmp_path))
        except results.LeftOut as reason:
            left_out += 1
            assert str(reason).isprintable()
    assert 2000 < left_out < refused < 10_000


def test_random_damage_of_an_evaluation_is_a_line_or_episodes(monkeypatch):
    evaluation = {"global_step": 1, "episodic_return": [1.0, -2.5, 300.25], "episodic_length": [3, 4, 1000]}
    whole, rng, refused = json.dumps(evaluation, indent=2).encode(), np.random.default_rng(0), 0
    for _ in range(10_000):
        data = mutated(whole, rng)
        monkeypatch.setattr(untrusted_json, "read_file", lambda *_, data=data: data)
        bad = is_refused(zoo.read_scores, "evaluation.json")
        assert not (bad and huggingface.is_evaluation("evaluation.json"))
        refused += bad
    assert 2000 < refused < 10_000


def test_names_that_files_and_folders_have_are_printed_as_escapes(whole, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    name = ESCAPE.replace("/", "-")
    os.mkdir(name)
    assert "\\x1b]0;title\\x07\\x1b[2J\\r\\nerror: \\u202e\\x9b" in one_line(capfd, read_model, f"{name}/m")
    one_line(capfd, read_model, "undecodable\udcff")
    one_line(capfd, checkpoints.read_newest, [name])
    one_line(capfd, errors.usage_error, name)
    for record in (b"", b"damaged record, " * 20):
        Path(name, "events.out.tfevents.1" + ESCAPE).write_bytes(record)
        events.trim(name, 1)
    assert " damaged at byte 0 of 320" in (err := capfd.readouterr().err) and err[:-1].isprintable()
    Path(name, "args.json").write_text("{")
    report_lines(tmp_path, capfd)

    folder = Path(f"runs/Pendulum-v1__small__1__{ESCAPE}")
    folder.mkdir(parents=True)
    (folder / "small.cleanrl_model").write_bytes(whole)
    assert "no model of small" in one_line(capfd, find_model, "small", "Pendulum-v1")


# ---------------------------------------------------------------- anything
NAMES = st.text(max_size=5)
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=20))
DTYPES = st.one_of(np_st.boolean_dtypes(), *(f(endianness="<") for f in (np_st.integer_dtypes, np_st.floating_dtypes)))
DTYPES = DTYPES.filter(lambda dtype: dtype.itemsize <= 8)
ARRAYS = np_st.arrays(DTYPES, np_st.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
PLAIN = st.recursive(NUMBERS | ARRAYS, lambda trees: st.dictionaries(NAMES, trees, max_size=4), max_leaves=10)
KEYS = st.one_of(NAMES, st.binary(max_size=3), st.integers(-5, 5), st.none())
EXTENSIONS = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
HOSTILE_ARRAYS = st.builds(
    array, st.lists(st.integers(-2, 2**63)), st.sampled_from(["float32", "object", "O", "V8"]), st.binary(max_size=16)
)
ANYTHING = st.recursive(
    st.one_of(NUMBERS, st.binary(max_size=20), EXTENSIONS, HOSTILE_ARRAYS),
    lambda trees: st.dictionaries(KEYS, trees, max_size=4) | st.lists(trees, max_size=4),
    max_leaves=10,
)


@settings(max_examples=200, **TREES)
@given(st.dictionaries(NAMES, PLAIN, max_size=4))
def test_what_flax_packs_is_unpacked_again(tree):
    restored = unpack(flax.serialization.msgpack_serialize(tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert type(x) is type(y) and np.shape(x) == np.shape(y)
        assert msgpack.packb(x, default=bits) == msgpack.packb(y, default=bits)


def bits(array):
    return [str(array.dtype), array.tobytes()]


@settings(max_examples=300, **TREES)
@given(ANYTHING, st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3))
def test_anything_packed_is_a_plain_tree_or_an_exception(tree, changes):
    data = bytearray(msgpack.packb(tree))
    for place, byte in changes:
        data[int(place * (len(data) - 1))] = byte
    with contextlib.suppress(Exception):
        for leaf in jax.tree.leaves(unpack(bytes(data))):
            assert type(leaf) in (bool, int, float, str, np.ndarray)
            assert not isinstance(leaf, np.ndarray) or leaf.dtype.kind in "biuf"


@settings(max_examples=300, **TREES)
@given(st.data())
def test_anything_in_the_place_of_anything_is_a_line_or_a_whole_model(whole, load, data):
    model = msgpack.unpackb(whole, strict_map_key=False)
    tree = model
    while True:
        name = data.draw(st.sampled_from(sorted(tree)))
        if not isinstance(tree[name], dict) or data.draw(st.integers(0, 3)) == 0:
            break
        tree = tree[name]
    tree[name] = data.draw(ANYTHING)
    is_line(load(msgpack.packb(model)), load(whole)[1])

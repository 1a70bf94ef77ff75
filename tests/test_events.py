"""Event files: as TensorBoard reads them, on disks that fill up, cut at a checkpoint, and damaged."""

import csv
import errno
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from cleanrl_utils import events, report, results
from cleanrl_utils.events import EventWriter, trim


def event_files(folder):
    return sorted(path for path in folder.iterdir() if "tfevents" in path.name)


def read_curves(folder):
    """tag -> [(step, value)], as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def read_texts(folder):
    """[(tag, step, texts)]"""
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = accumulator.PluginTagToContent("text") if accumulator.Tags()["tensors"] else []
    return [(tag, e.step, list(e.tensor_proto.string_val)) for tag in tags for e in accumulator.Tensors(tag)]


def write(folder, curves, texts=(), close=True):
    writer = EventWriter(str(folder))
    for text in texts:
        writer.add_text("hyperparameters", text)
    for tag, points in curves.items():
        for step, value in points:
            writer.add_scalar(tag, value, step)
    if close:
        writer.close()
    return writer


def is_whole(path):
    """Whether a file consists of whole, sound records."""
    return sum(len(record) for record, _ in events.read_records(path)) == os.path.getsize(path)


# ---------------------------------------------------------------- what is written
def test_tensorboard_reads_what_tensorboardX_writes(tmp_path):
    text = "|param|value|\n|-|-|\n|é|1|\n"
    values = [1, -2.5, 1e-20, 3e38, np.float32(0.1), np.float64(0.1), np.nan, np.inf]
    with SummaryWriter(str(tmp_path / "theirs")) as theirs:
        (tmp_path / "ours").mkdir()
        ours = EventWriter(str(tmp_path / "ours"))
        for writer in (theirs, ours):
            writer.add_text("hyperparameters", text)
            writer.add_text("notes/more", "", 7)
            for i, value in enumerate(values):
                writer.add_scalar("charts/SPS", value, i * 10**12)
            writer.add_scalar("losses/v.loss-1", np.array(4.0), np.int64(5))
        ours.close()
    np.testing.assert_equal(read_curves(tmp_path / "ours"), read_curves(tmp_path / "theirs"))
    assert read_texts(tmp_path / "ours") == read_texts(tmp_path / "theirs")
    assert read_texts(tmp_path / "ours")[0] == ("hyperparameters/text_summary", 0, [text.encode()])
    for folder in ("ours", "theirs"):
        (path,) = event_files(tmp_path / folder)
        loaded = list(LegacyEventFileLoader(str(path)).Load())
        assert [event.WhichOneof("what") for event in loaded] == ["file_version"] + ["summary"] * 11
        assert loaded[0].file_version == "brain.Event:2"
        assert abs(loaded[-1].wall_time - time.time()) < 60
        metadata = loaded[1].summary.value[0].metadata
        assert (metadata.plugin_data.plugin_name, metadata.plugin_data.content) == ("text", b"")


def test_events_are_written_when_due_by_a_clock_that_never_goes_back(tmp_path, monkeypatch):
    clock = {"monotonic": 100.0, "time": 1e9}
    monkeypatch.setattr(events.time, "monotonic", lambda: clock["monotonic"])
    monkeypatch.setattr(events.time, "time", lambda: clock["time"])
    writer = EventWriter(str(tmp_path), flush_seconds=10.0)
    (path,) = event_files(tmp_path)
    assert path.name.startswith("events.out.tfevents.1000000000.")
    sizes = []
    for monotonic, wall in [(105.0, 2e9), (109.9, 1e9), (110.1, 5e8), (119.9, 9e9), (120.2, 0.0)]:
        clock.update(monotonic=monotonic, time=wall)
        writer.add_scalar("a", 1.0, 1)
        sizes.append(path.stat().st_size)
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] < sizes[4]
    assert len(read_curves(tmp_path)["a"]) == 5


def test_two_writers_of_the_same_second_have_a_file_each(tmp_path, monkeypatch):
    monkeypatch.setattr(events.time, "time", lambda: 1e9)
    first, second = EventWriter(str(tmp_path)), EventWriter(str(tmp_path))
    for step in range(3):
        first.add_scalar("first", step, step)
        second.add_scalar("second", step, step)
    first.close()
    second.close()
    assert len(event_files(tmp_path)) == 2
    assert {tag: len(points) for tag, points in read_curves(tmp_path).items()} == {"first": 3, "second": 3}


# ---------------------------------------------------------------- disks that take nothing
@contextmanager
def full_after(num_bytes, monkeypatch):
    """A disk with room for so many more bytes: a write takes what fits, the next fails."""
    room, os_write = [num_bytes], os.write

    def write(fd, data):
        taken = min(room[0], len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= taken
        return os_write(fd, data[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(events.os, "write", write)
        yield


@contextmanager
def file_size_limit(num_bytes):
    """The kernel's own: a write that reaches it is cut there, the next fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 11, 12, 50, 100, 233])
@pytest.mark.parametrize("kind", ["monkeypatch", "kernel"])
def test_a_full_disk_loses_and_doubles_nothing(tmp_path, capfd, monkeypatch, room, kind):
    writer = EventWriter(str(tmp_path))
    writer.add_scalar("a", 0.0, 0)
    assert writer.flush()
    (path,) = event_files(tmp_path)
    size = path.stat().st_size
    writer.add_scalar("a", 1.0, 1)
    num_fitting = room // len(writer.pending.pop())
    with full_after(room, monkeypatch) if kind == "monkeypatch" else file_size_limit(size + room):
        for step in range(1, 10):
            writer.add_scalar("a", step, step)
            assert writer.flush() == (step <= num_fitting)
            assert is_whole(path)
            assert len(read_curves(tmp_path)["a"]) == 1 + min(step, num_fitting)
    assert writer.flush() and writer.flush()
    writer.close()
    assert read_curves(tmp_path) == {"a": [(step, step) for step in range(10)]}
    lines = capfd.readouterr().err.splitlines()
    reason = os.strerror(errno.ENOSPC if kind == "monkeypatch" else errno.EFBIG)
    assert lines == [
        f"curves can't be written ({reason}): kept in memory, tried again",
        "curves are written again",
    ]


@pytest.mark.parametrize("function", ["ftruncate", "fsync", "close"])
def test_a_disk_that_fails_late(tmp_path, monkeypatch, function):
    writer = EventWriter(str(tmp_path))
    writer.add_scalar("a", 0.0, 0)
    writer.flush()
    original = getattr(os, function)

    def fail(*args):
        if function == "close":
            original(*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer.add_scalar("a", 1.0, 1)
    with monkeypatch.context() as patch, full_after(20 if function == "ftruncate" else 10**6, patch):
        patch.setattr(events.os, function, fail)
        assert not writer.flush(sync=True)
    writer.add_scalar("a", 2.0, 2)
    writer.close()
    assert is_whole(event_files(tmp_path)[0])
    assert read_curves(tmp_path) == {"a": [(step, step) for step in range(3)]}


def test_a_disk_that_is_really_full(tmp_path, capfd):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        folder = tmp_path / "run"
        folder.mkdir()
        writer = EventWriter(str(folder))
        (tmp_path / "ballast").write_bytes(bytes(40_000))
        step, flushed = 0, True
        while flushed and step < 5000:
            for _ in range(50):
                writer.add_scalar("a", step, step)
                step += 1
            flushed = writer.flush()
        assert not flushed and is_whole(event_files(folder)[0])
        (tmp_path / "ballast").unlink()
        assert writer.flush()
        writer.close()
        assert read_curves(folder) == {"a": [(i, i) for i in range(step)]}
        assert [line.split(" (")[0] for line in capfd.readouterr().err.splitlines()] == [
            "curves can't be written",
            "curves are written again",
        ]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_what_is_left_in_memory_at_the_end_is_named(tmp_path, capfd, monkeypatch):
    writer = write(tmp_path, {"a": [(1, 1.0), (2, 2.0)]}, close=False)
    writer.flush()
    with full_after(30, monkeypatch):
        writer.add_scalar("a", 3.0, 3_000)
        writer.add_scalar("a", 4.0, 4_000)
        writer.close()
    assert read_curves(tmp_path) == {"a": [(1, 1.0), (2, 2.0)]}
    assert capfd.readouterr().err.splitlines()[1].startswith("curves are lost from step 3,000 on")


def test_memory_is_bounded_by_dropping_the_oldest(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(events, "MAX_PENDING_BYTES", 10_000)
    writer = EventWriter(str(tmp_path))
    writer.add_scalar("a", -1.0, 0)
    writer.flush()
    with full_after(0, monkeypatch):
        for step in range(1, 1001):
            writer.add_scalar("a", step, step)
            assert writer.pending_bytes == sum(map(sys.getsizeof, writer.pending)) <= 10_000
        writer.flush()
    dropped = 1000 - len(writer.pending)
    assert 800 < dropped < 1000
    writer.flush()
    assert read_curves(tmp_path)["a"] == [(0, -1.0)] + [(step, step) for step in range(dropped + 1, 1001)]
    assert capfd.readouterr().err.splitlines()[1] == f"curves are written again, but for the {dropped} oldest values"

    with full_after(0, monkeypatch):
        for step in range(2000, 3000):
            writer.add_scalar("a", step, step)
        writer.close()
    assert capfd.readouterr().err.splitlines()[1].startswith("curves are lost from step 2,000 on")


def test_a_full_disk_is_tried_only_when_a_flush_is_due(tmp_path, monkeypatch):
    attempts = []
    writer = EventWriter(str(tmp_path))
    monkeypatch.setattr(events, "append", lambda *args: attempts.append(args) or os.stat("/nowhere"))
    for step in range(1000):
        writer.add_scalar("a", 1.0, step)
    assert not attempts
    assert not writer.flush() and len(attempts) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_is_not_there(tmp_path, capfd, when):
    folder = tmp_path / "run"
    if when == "after":
        folder.mkdir()
    writer = EventWriter(str(folder))
    writer.add_scalar("a", 1.0, 1)
    if when == "after":
        for path in event_files(folder):
            path.unlink()
        folder.rmdir()
    assert not writer.flush()
    assert "No such file or directory" in capfd.readouterr().err
    folder.mkdir()
    assert writer.flush()
    writer.close()
    assert read_curves(folder) == {"a": [(1, 1.0)]}
    assert next(LegacyEventFileLoader(str(event_files(folder)[0])).Load()).file_version == "brain.Event:2"


def test_a_stderr_that_takes_nothing_either(tmp_path, monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "full")

    writer = EventWriter(str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "stderr", Full())
    writer.failing = False
    writer.add_scalar("a", 1.0, 1)
    assert not writer.flush()
    writer.close()


# ---------------------------------------------------------------- going on from a checkpoint
def numbered(steps):
    return [(step, float(step)) for step in steps]


def rename(folder, *names):
    for path, name in zip(event_files(folder), names, strict=True):
        path.rename(folder / f"events.out.tfevents.{name}")


def test_trim_leaves_what_the_checkpoint_has_seen(tmp_path):
    curves = {"a": numbered(range(0, 1000, 100)), "eval/return": numbered([300, 500]), "b": [(500, 1.0), (501, 2.0)]}
    write(tmp_path, curves, texts=["first"])
    (path,) = event_files(tmp_path)
    start_time = next(LegacyEventFileLoader(str(path)).Load()).wall_time
    trim(str(tmp_path), 500)
    kept = {"a": numbered(range(0, 501, 100)), "eval/return": numbered([300, 500]), "b": [(500, 1.0)]}
    assert read_curves(tmp_path) == kept
    write(tmp_path, {"a": numbered(range(600, 1000, 100))}, texts=["second"])
    merged, later = event_files(tmp_path)
    assert merged.name.startswith("events.out.tfevents.0000000000.") and later.name > merged.name
    assert read_curves(tmp_path) == kept | {"a": curves["a"]}

    trim(str(tmp_path), 700)
    assert read_curves(tmp_path)["a"] == numbered(range(0, 701, 100))
    assert [texts for _, _, texts in read_texts(tmp_path)] == [[b"first"], [b"second"]]
    (merged,) = event_files(tmp_path)
    loaded = list(LegacyEventFileLoader(str(merged)).Load())
    assert [event.file_version for event in loaded if event.file_version] == ["brain.Event:2"]
    assert (loaded[0].file_version, loaded[0].wall_time) == ("brain.Event:2", start_time)

    trim(str(tmp_path), 500, evaluated=False)
    assert read_curves(tmp_path) == kept | {"eval/return": numbered([300])}
    assert os.listdir(tmp_path) == [merged.name]


def test_trim_of_trimmed_files_changes_nothing(tmp_path):
    write(tmp_path, {"a": numbered([3, 1, 2, 1])}, texts=["first"])
    trim(str(tmp_path), 10)
    (merged,) = event_files(tmp_path)
    once = merged.read_bytes()
    assert read_curves(tmp_path) == {"a": numbered([3, 1, 2])}
    trim(str(tmp_path), 10)
    assert merged.read_bytes() == once
    (tmp_path / "empty").mkdir()
    trim(str(tmp_path / "empty"), 10)
    assert os.listdir(tmp_path / "empty") == []


class Crash(BaseException):
    pass


@pytest.mark.parametrize("function", ["fsync", "replace", "unlink", "close"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("done", [False, True])
def test_a_crash_of_trim_loses_and_doubles_nothing(tmp_path, monkeypatch, function, call, done):
    for first in (100, 200, 300):
        write(tmp_path, {"a": numbered(range(first, first + 200, 10))}, texts=[f"from {first}"])
    expected = {"a": numbered(range(100, 371, 10))}
    original, calls = getattr(os, function), []

    def crash(*args, **options):
        calls.append(args)
        if len(calls) == call and not done:
            raise Crash
        result = original(*args, **options)
        if len(calls) == call:
            raise Crash
        return result

    with monkeypatch.context() as patch:
        patch.setattr(events.os, function, crash)
        try:
            trim(str(tmp_path), 370)
        except Crash:
            points = set(read_curves(tmp_path)["a"])
            assert points >= set(expected["a"])
    trim(str(tmp_path), 370)
    assert read_curves(tmp_path) == expected
    assert [texts for _, _, texts in read_texts(tmp_path)] == [[b"from 100"], [b"from 200"], [b"from 300"]]
    assert len(os.listdir(tmp_path)) == 1


def test_trim_removes_nothing_before_the_new_file_is_safe(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace", "unlink"):
        original = getattr(os, name)
        monkeypatch.setattr(
            events.os, name, lambda *args, name=name, original=original: calls.append(name) or original(*args)
        )
    write(tmp_path, {"a": numbered([1])})
    calls.clear()
    trim(str(tmp_path), 10)
    assert calls == ["unlink", "fsync", "replace", "fsync", "unlink"]  # the first, of what a crash left: there is none


KILLED = """
import sys
from cleanrl_utils.events import EventWriter
writer = EventWriter(sys.argv[1], flush_seconds=0.0)
for step in range(10**9):
    writer.add_scalar("a", step, step)
    if step == 50:
        print("writing", flush=True)
"""


def test_trim_after_a_kill_in_the_midst_of_writing(tmp_path, capfd):
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    trim(str(tmp_path), 40)
    assert read_curves(tmp_path) == {"a": numbered(range(41))}
    assert capfd.readouterr().err == ""


def test_a_tail_cut_anywhere_is_dropped_silently(tmp_path, capfd):
    write(tmp_path, {"a": numbered(range(4))})
    (path,) = event_files(tmp_path)
    whole = path.read_bytes()
    ends = np.cumsum([len(record) for record, _ in events.read_records(path)])
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert len(list(events.read_records(path))) == (ends <= size).sum()
    for tail in (bytes(1), bytes(12), bytes(5000)):
        path.write_bytes(whole + tail)
        assert len(list(events.read_records(path))) == 5
    path.write_bytes(whole[:-6] + b"~" + whole[-5:])
    assert len(list(events.read_records(path))) == 4
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("offset", [0, 8, 12, 20])
def test_damage_in_the_middle_is_named(tmp_path, capfd, offset):
    write(tmp_path, {"a": numbered(range(10))})
    (path,) = event_files(tmp_path)
    position = sum(len(record) for record, _ in list(events.read_records(path))[:5]) + offset
    whole = path.read_bytes()
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
    write(tmp_path, {"a": numbered(range(20, 22))})
    trim(str(tmp_path), 21)
    assert read_curves(tmp_path) == {"a": numbered([0, 1, 2, 3, 20, 21])}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{path}: damaged at byte {position - offset:,} of ")


def test_trim_takes_only_files_of_the_folder(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write(folder, {"a": numbered(range(10))})
    write(elsewhere, {"b": numbered(range(10))})
    (target,) = event_files(elsewhere)
    (folder / "events.out.tfevents.1.link").symlink_to(target)
    (folder / "events.out.tfevents.2.folder").mkdir()
    os.mkfifo(folder / "events.out.tfevents.3.pipe")
    (folder / "notes on tfevents").write_text("mine")
    (folder / "trimmed_events.tmp").symlink_to(target)
    before = target.read_bytes()
    trim(str(folder), 4)
    assert target.read_bytes() == before
    assert {"link", "folder", "pipe", "notes on tfevents"} <= {p.name.split(".")[-1] for p in event_files(folder)}
    assert not (folder / "trimmed_events.tmp").exists()
    for name in ("1.link", "2.folder", "3.pipe"):
        path = folder / f"events.out.tfevents.{name}"
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "notes on tfevents").unlink()
    assert read_curves(folder) == {"a": numbered(range(5))}


def fails_with_one_line(call, capfd):
    with pytest.raises(SystemExit) as stopped:
        call()
    error = capfd.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_what_trim_refuses(tmp_path, capfd):
    assert "nowhere" in fails_with_one_line(lambda: trim(f"{tmp_path}/nowhere", 1), capfd)
    write(tmp_path, {"a": numbered(range(100))})
    (path,) = event_files(tmp_path)
    before = path.read_bytes()
    with file_size_limit(1000):
        assert "File too large" in fails_with_one_line(lambda: trim(str(tmp_path), 99), capfd)
    os.truncate(path, 2**31 + 1)
    assert "hold 2.0 GiB" in fails_with_one_line(lambda: trim(str(tmp_path), 99), capfd)
    os.truncate(path, len(before))
    assert event_files(tmp_path) == [path] and path.read_bytes() == before
    assert len(os.listdir(tmp_path)) == 1


def test_steps_in_any_order():
    steps = events.Steps()
    numbers = random.Random(0).choices(range(-50, 50), k=300)
    assert [steps.add(n) for n in numbers] == [n not in numbers[:i] for i, n in enumerate(numbers)]


# ---------------------------------------------------------------- the report of damaged runs
CURVES = {
    "charts/episodes": [(step, 20.0) for step in range(100, 501, 100)],
    "charts/episodic_return": [(step, step / 100) for step in range(100, 501, 100)],
    "charts/avg_episodic_return": [(step, step / 100 + 0.5) for step in range(100, 501, 100)],
    "charts/SPS": [(step, 1000.0) for step in range(100, 501, 100)],
    "eval/episodic_return": [(500, 9.0)],
}


def make_run(folder, seed=1, curves=CURVES):
    """A run's folder and its event file."""
    path = folder / f"Hopper-v4__ppo__{seed}__1"
    path.mkdir(parents=True)
    config = {"env_id": "Hopper-v4", "exp_name": "ppo", "seed": seed, "total_timesteps": 500}
    (path / "args.json").write_text(json.dumps(config))
    write(path, curves, texts=["|param|value|"])
    return path, event_files(path)[0]


def record(data, length=None):
    header = struct.pack("<Q", len(data) if length is None else length)
    checksums = [struct.pack("<I", events.masked_crc32c(part)) for part in (header, data)]
    return header + checksums[0] + data + checksums[1]


def changed(tag, step, value):
    return CURVES | {tag: [*CURVES.get(tag, []), (step, value)]}


NOT_READ = {
    "nan": (changed("charts/episodes", 500, np.nan), "charts/episodes is nan at step 500"),
    "infinite": (changed("eval/episodic_return", 500, np.inf), "eval/episodic_return is inf at step 500"),
    "negative": (changed("charts/episodes", -(2**62), 1.0), "at step -4,611,686,018,427,387,904 of 500"),
    "enormous": (changed("charts/avg_episodic_return", 2**62, 1.0), "at step 4,611,686,018,427,387,904 of 500"),
    "no scalars": ({}, "no charts/episodes"),
    "hole": ({tag: [*points[:2], *points[3:]] for tag, points in CURVES.items()}, "before step 400 are missing"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_values_that_no_run_has(tmp_path, name):
    curves, reason = NOT_READ[name]
    make_run(tmp_path, curves=curves)
    runs, (line,) = results.read_runs((str(tmp_path),))
    assert runs == [] and reason in line


def test_an_unfinished_run_without_its_budget(tmp_path):
    """As cleanrl_utils.huggingface reads it."""
    folder, _ = make_run(tmp_path, curves={tag: points[:2] for tag, points in CURVES.items() if "eval" not in tag})
    config = json.loads((folder / "args.json").read_text())
    assert list(results.read_run(str(folder), config | {"total_timesteps": 0}).wall_times) == [100, 200]


NO_FILES = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "too large": lambda path: path.touch() or os.truncate(path, 2**31),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_named_like_an_event_file(tmp_path, name):
    _, path = make_run(tmp_path)
    NO_FILES[name](path.parent / "events.out.tfevents.9")
    runs, (line,) = results.read_runs((str(tmp_path),))
    assert runs == []
    assert line.endswith("hold more than 2 GiB" if name == "too large" else "events.out.tfevents.9 is not a file")


@pytest.mark.parametrize("name", ["args.json", "ppo.cleanrl_model"])
def test_a_pipe_instead_of_another_file(tmp_path, name):
    folder, _ = make_run(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    runs, lines = results.read_runs((str(tmp_path),))
    assert (len(runs), len(lines)) == ((0, 1) if name == "args.json" else (1, 0))


@pytest.mark.parametrize("length", [2**31, 2**36, 2**40, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("end", ["start", "end"])
def test_enormous_records_take_no_memory(tmp_path, length, end):
    _, path = make_run(tmp_path)
    whole, huge = path.read_bytes(), record(b"", length)
    path.write_bytes(whole + huge if end == "end" else huge + whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runs, lines = results.read_runs((str(tmp_path),))
    trim(str(path.parent), 500)
    assert len(runs) + len(lines) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_tags_are_only_names(tmp_path):
    curves = dict(CURVES)
    for tag in ("../../escaped", "/etc/x", "line\nbreak,\"'", "x" * 2**20, "", "\0", "a|b", "=1+1"):
        curves[tag] = [(500, 1.0)]
    make_run(tmp_path / "runs", curves=curves)
    store = tmp_path / "a" / "b" / "store"
    report.main(report.Args(runs=(f"{tmp_path}/runs",), output=f"{tmp_path}/out", openrlbenchmark_store=str(store)))
    assert sorted(os.listdir(tmp_path)) == ["a", "out.csv", "out.md", "out.png", "out.svg", "runs"]
    csv.field_size_limit(2**21)
    (history,) = store.rglob("run_df.csv")
    rows = list(csv.DictReader(history.open(newline="")))
    assert [row["global_step"] for row in rows] == ["100", "200", "300", "400", "500"]
    assert rows[-1]["line\nbreak,\"'"] == "1.0"


def mutate(data, rng):
    """An event file with some damage; half of the time with checksums that hide it."""
    kind = rng.randrange(6)
    position = rng.randrange(len(data))
    if kind == 0:
        return data[:position]
    if kind == 1:
        return data[:position] + rng.randbytes(rng.randrange(30)) + data[position + rng.randrange(30) :]
    if kind == 2:
        flipped = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    records, start = [], 0
    while start < len(data):
        length = int.from_bytes(data[start : start + 8], "little")
        records.append(bytearray(data[start + 12 : start + 12 + length]))
        start += length + 16
    for _ in range(rng.randint(1, 5)):
        chosen = rng.choice(records)
        place = rng.randrange(len(chosen))
        chosen[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3)) if kind == 3 else b""
        if chosen and kind == 4:
            chosen[rng.randrange(len(chosen))] ^= 1 << rng.randrange(8)
        if not chosen:
            chosen.extend(b"\n")
    return b"".join(map(record, records))


def test_a_run_goes_on_with_ten_thousand_damaged_event_files(tmp_path, capfd):
    """In memory: the disk would take most of the time."""
    whole, rng = make_run(tmp_path)[1].read_bytes(), random.Random(1)
    num_records = []
    with open(os.memfd_create("events"), "w+b", buffering=0) as f:
        path = f"/proc/self/fd/{f.fileno()}"
        for _ in range(10_000):
            f.seek(0)
            f.write(mutate(whole, rng))
            f.truncate()
            records = list(events.kept_records([path], 300, True))
            num_records.append(len(records))
            assert all(Event.FromString(record[12:-4]).step <= 300 for record in records)
    assert 2 < np.mean(num_records) < 25 and min(num_records) == 0
    assert all(": damaged at byte " in line for line in capfd.readouterr().err.splitlines())


def test_damaged_event_files_never_break_the_report(tmp_path, capfd):
    """300, or as many as CLEANRL_MUTATIONS says."""
    count, rng = int(os.environ.get("CLEANRL_MUTATIONS", 300)), random.Random(1)
    make_run(tmp_path / "runs", 0)
    for seed in range(1, count + 1):
        folder, path = make_run(tmp_path / "runs", seed)
        path.write_bytes(mutate(path.read_bytes(), rng))
    capfd.readouterr()
    report.main(
        report.Args(runs=(f"{tmp_path}/runs",), output=f"{tmp_path}/out", openrlbenchmark_store=f"{tmp_path}/s")
    )
    output = capfd.readouterr()
    lines = output.err.splitlines()
    assert all(line.startswith(f"left out {tmp_path}/runs/") for line in lines)
    seeds = {line.split("__")[2] for line in lines}
    assert len(seeds) == len(lines) > count / 2
    assert f"| {count + 1 - len(lines)} (0, " in (tmp_path / "out.md").read_text()
    for path in (tmp_path / "runs").iterdir():
        trim(str(path), 300)
        assert all(step <= 300 for points in read_curves(path).values() for step, _ in points)
    assert all(": damaged at byte " in line for line in capfd.readouterr().err.splitlines())


def test_the_command_says_in_one_line_that_nothing_is_left(tmp_path):
    _, path = make_run(tmp_path)
    path.write_bytes(record(b"", 2**40) + path.read_bytes())
    command = [sys.executable, "-m", "cleanrl_utils.report", "--runs", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout) == (2, "")
    left_out, error = result.stderr.splitlines()
    assert left_out.startswith(f"left out {path.parent}: ") and error == f"error: no finished runs in {tmp_path}"


def test_a_resumed_run_is_one_curve_for_the_report_and_openrlbenchmark(tmp_path, capfd):
    folder, _ = make_run(tmp_path / "runs", curves={tag: points[:4] for tag, points in CURVES.items()})
    trim(str(folder), 300)
    write(folder, {tag: [(s, v) for s, v in points if s > 300] for tag, points in CURVES.items()})
    assert len(event_files(folder)) == 2
    make_run(tmp_path / "whole")
    curves = []
    for name in ("runs", "whole"):
        store = tmp_path / f"store of {name}"
        report.main(report.Args(runs=(f"{tmp_path}/{name}",), openrlbenchmark_store=str(store)))
        (history,) = store.rglob("run_df.csv")
        rows = [{**row, "_runtime": ""} for row in csv.DictReader(history.open(newline=""))]
        (run,), _ = results.read_runs((f"{tmp_path}/{name}",))
        curves.append((rows, run.scalars))
    assert len(curves[0][0]) == 5
    assert curves[0] == curves[1]
    assert capfd.readouterr().err == ""

"""The drivers of other libraries, without these: their flags, their pins, and the lines that throughput.py reads."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import throughput
from peers import process

FOLDER = Path(process.__file__).parent
PEERS = get_args(get_args(get_type_hints(throughput.Args)["peers"])[0])
FLAGS = {"env_id": "Hopper-v4", "num_envs": 8, "num_steps": 4, "num_minibatches": 2, "update_epochs": 3}
FLAGS |= {"warm_up_iterations": 2, "iterations": 3, "rounds": 2}
SECONDS = 0.1  # an iteration of the stand-in
STAND_IN = """'''A stand-in.

What differs: it sleeps
instead.
'''
import time
from peers.driver import measure

def make_training(args):
    print("no measurement")
    def train(iterations):
        time.sleep({seconds} * iterations)
        with open("{log}", "a") as f:
            print(args.env_id, args.batch_size, args.minibatch_size, args.update_epochs, iterations, file=f)
        if "{fails_at}" == str(iterations):
            raise RuntimeError("no more\\nof this")
    return train

measure(__doc__, ["tyro"], make_training)
"""


def stand_in(folder, fails_at="nowhere"):
    """A Python that runs the stand-in, whatever the driver; `log` has what it was started as and has trained."""
    log = folder / "log"
    (folder / "driver.py").write_text(STAND_IN.format(seconds=SECONDS, log=log, fails_at=fails_at))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho $1 $2 $3 >> {log}\nshift 3\nexec {sys.executable} {folder}/driver.py "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_every_peer_has_pins_by_name_and_version():
    libraries = [peer for peer in PEERS if peer != "many_seeds"]  # which is the script itself
    assert len(libraries) == 5 and process.find_python("many_seeds") == sys.executable
    for peer in libraries:
        lines = (FOLDER / f"requirements/{peer}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        pin = re.compile(r"[a-z0-9-]+==[\w.]+( ; python_full_version (<|>=) '3.12')?")
        assert pins and [line for line in pins if not pin.fullmatch(line)] == []


@pytest.mark.parametrize("peer", PEERS)
def test_a_driver_lists_its_flags_without_any_package(peer):
    command = [sys.executable, "-S", "-P", "-m", f"peers.{peer}", "--help"]
    done = subprocess.run(command, env={"PYTHONPATH": str(FOLDER.parent)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search("\n\nWhat differs from (one run of )?our script: ", done.stdout)
    assert [flag for flag in FLAGS if f"--{flag.replace('_', '-')} " not in done.stdout] == []


def test_peers_train_and_measure_in_turn(tmp_path, capsys):
    with process.start_peers({"sb3": stand_in(tmp_path)}, FLAGS) as [peer]:
        for _ in range(FLAGS["rounds"]):
            peer.measure()
    lines = ["-P -m peers.sb3", *(f"Hopper-v4 32 16 3 {iterations}" for iterations in (2, 3, 3))]
    assert (tmp_path / "log").read_text().splitlines() == lines
    assert len(peer.steps_per_second) == 2
    assert all(0.5 < speed * SECONDS / 32 <= 1 for speed in peer.steps_per_second)
    assert peer.process.returncode is not None

    peer.steps_per_second = [100.0, 300.0]
    throughput.print_peers([(peer, [1000.0, 1500.0])])
    output, error = capsys.readouterr()
    assert "| Hopper-v4 | sb3 | 200 | 7.50 (5.00 - 10.00) |\n\n- sb3 (tyro " in output
    assert output.endswith("): What differs: it sleeps instead.\n") and error == ""


@pytest.mark.parametrize("fails_at", [FLAGS["warm_up_iterations"], FLAGS["iterations"]])
def test_a_driver_that_fails_gives_one_line_and_the_others_go_on(tmp_path, capsys, fails_at):
    (tmp_path / "sound").mkdir()
    pythons = {"sbx": stand_in(tmp_path, fails_at), "sb3": stand_in(tmp_path / "sound")}
    with process.start_peers(pythons, FLAGS) as peers:
        for peer in peers * FLAGS["rounds"]:
            peer.measure()
    throughput.print_peers([(peer, [1.0, 1.0]) for peer in peers])
    output, error = capsys.readouterr()
    assert error == "error: sbx failed on Hopper-v4: of this\n"
    assert [peer.failed for peer in peers] == [True, False] and len(peers[1].steps_per_second) == 2
    assert "| Hopper-v4 | sbx | failed |  |\n| Hopper-v4 | sb3 | " in output


def test_an_environment_that_cannot_be_made_gives_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    with pytest.raises(SystemExit) as stopped:
        throughput.main(throughput.Args(peers=("sbx",)))
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: can't write {tmp_path}/cache/cleanrl: ")

"""Results of runs as thinned CSV files; every number was worked out by hand."""

import csv
import hashlib
import json
import os
import random

import numpy as np
import pytest
from test_report import write_run, write_seeds

from cleanrl_utils import report, results
from cleanrl_utils.report import Args, main

NAME = "Hopper-v4__ppo__1__100k.csv"


def rows_of(path):
    """By global step."""
    return {int(row["global_step"]): row for row in csv.DictReader(path.read_text().splitlines()[1:])}


def write_long_run(folder, seed=1, evaluations=None, **options):
    """1000 iterations of 100 steps, without an episode in the first two; then 1, 2, 1, 2, ... of return 0, 1, 2, ..."""
    iterations = [(0, None)] * 2 + [(1 + i % 2, float(i)) for i in range(998)]
    return write_run(folder, seed, iterations, total=100_000, evaluations=evaluations or {}, **options)


def save(tmp_path, name="results", runs="runs"):
    main(Args(runs=(f"{tmp_path}/{runs}",), save_results=f"{tmp_path}/{name}"))
    return tmp_path / name


# ---------------------------------------------------------------- thinning
def test_windows_end_at_evaluations_and_where_the_last_100_episodes_begin(tmp_path):
    write_long_run(tmp_path / "runs", evaluations={500: 7.0, 1_300: 8.0, 100_000: 9.125})
    rows = rows_of(save(tmp_path) / NAME)
    # the last 100 episodes: 99 in i = 932 to 997, and one of the two in i = 931, at step 93,400
    ends = sorted([500, 1_300, *range(1000, 100_001, 1000), 93_300, 93_400])
    assert list(rows) == ends
    assert sum(int(row["episodes"]) for row in rows.values()) == 998 + 499
    # iterations 3 to 5, i = 0 to 2; then 6 to 10, i = 3 to 7; then 11 to 13, i = 8 to 10
    assert (rows[500]["episodes"], float(rows[500]["episodic_return"])) == ("4", (0 + 2 * 1 + 2) / 4)
    assert (rows[1000]["episodes"], float(rows[1000]["episodic_return"])) == ("8", (2 * (3 + 5 + 7) + 4 + 6) / 8)
    assert (rows[1300]["episodes"], float(rows[1300]["episodic_return"])) == ("4", (8 + 2 * 9 + 10) / 4)
    assert rows[1000]["avg_episodic_return"] == "7.5" and rows[1000]["SPS"] == "1010"
    evaluated = {step: row["eval_episodic_return"] for step, row in rows.items() if row["eval_episodic_return"]}
    assert evaluated == {500: "7", 1_300: "8", 100_000: "9.125"}


def test_a_window_without_an_episode_is_empty(tmp_path):
    write_run(tmp_path / "runs")
    rows = rows_of(save(tmp_path) / "Hopper-v4__ppo__1__500.csv")
    assert list(rows) == [100, 200, 300, 400, 500]
    assert [row["episodes"] for row in rows.values()] == ["80", "60", "0", "50", "30"]
    assert [row["episodic_return"] for row in rows.values()] == ["1", "2", "", "4", "6"]
    assert [row["avg_episodic_return"] for row in rows.values()] == ["1.5", "2.5", "", "4.5", "6.5"]


def test_the_file_holds_what_made_the_run_and_nothing_private(tmp_path):
    path = write_run(tmp_path / "runs")
    private = {"resume": "last", "coordinator_address": "10.0.0.1:80", "wandb_entity": "me", "hf_entity": "me"}
    private |= {"api_key": "x", "checkpoint": "/home/me/x", "hosts": ["me@there"]}
    config = json.loads((path / "args.json").read_text()) | {"env_id": "a/b-v1", "gamma": 0.99}
    (path / "args.json").write_text(json.dumps({**config, **private}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.json").write_text(json.dumps({"run_dirs": [str(path)], "git_describe": "v3-1-g0123"}))
    options = {"runs": (f"{tmp_path}/runs",), "log_folder": f"{tmp_path}/logs"}
    main(Args(**options, save_results=f"{tmp_path}/results"))
    file = tmp_path / "results/a-b-v1__ppo__1__500.csv"
    record = json.loads(file.read_text().splitlines()[0].removeprefix("# "))
    assert record["args"] == config
    assert record["commit"] == "v3-1-g0123" and record["run"] == path.name
    (run,), lines = results.read_runs((str(file),))
    assert lines == [] and (run.name, run.commit, run.config) == (path.name, "v3-1-g0123", config)


def test_pandas_reads_it(tmp_path):
    pandas = pytest.importorskip("pandas")
    write_long_run(tmp_path / "runs", evaluations={500: 7.0})
    table = pandas.read_csv(save(tmp_path) / NAME, comment="#")
    assert list(table.columns) == results.COLUMNS
    assert len(table) == 103 and table["episodes"].sum() == 998 + 499


# ---------------------------------------------------------------- round trip
def test_the_same_report_from_the_saved_results(tmp_path):
    write_seeds(tmp_path / "runs")
    for seed in (1, 2):
        evaluations = {500: 7.0 + seed, 1_300: 8.0 * seed, 100_000: 9.0}
        write_long_run(tmp_path / "runs", seed, evaluations, env_id="Ant-v4")
    folder = save(tmp_path)
    assert len(os.listdir(folder)) == 5
    (folder / "notes.txt").write_text("mine")
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in save(tmp_path).iterdir()} == first
    again = save(tmp_path, "again", runs="results")  # what is thinned stays as it is
    assert {path.name: path.read_bytes() for path in again.iterdir()} | {"notes.txt": b"mine"} == first
    pages = []
    for name in ("runs", "results", "again"):
        groups = results.group_runs(results.read_runs((f"{tmp_path}/{name}",))[0], ())
        pages.append((report.results_table(groups), report.report_header(Args(), groups, [])))
        pages[-1] += (report.curves_csv(groups),)
    assert pages[0] == pages[1] == pages[2]
    main(Args(runs=(str(folder),), output=f"{tmp_path}/out", openrlbenchmark_store=f"{tmp_path}/store"))
    (history,) = tmp_path.glob("store/local/cleanRL/Hopper-v4__ppo__1__1/run_df.csv")
    assert [row["charts/avg_episodic_return"] for row in csv.DictReader(history.open())][-1] == "6.5"


def test_a_run_and_its_file_count_once(tmp_path):
    write_run(tmp_path / "runs")
    file = save(tmp_path) / "Hopper-v4__ppo__1__500.csv"
    for paths in [(f"{tmp_path}/runs", str(file)), (str(file), f"{tmp_path}/runs")]:
        (run,), (line,) = results.read_runs(paths)
        assert os.path.isdir(run.path)
        assert line == f"left out {file}: it is also in {run.path}"


# ---------------------------------------------------------------- damage
def signed(data, record=None, rows=None):
    """The file with other content and the checksum that belongs to it."""
    first, old_rows = data.decode().split("\n", 1)
    content = json.loads(first.removeprefix("# "))
    content.pop("sha256")
    content, rows = {**content, **(record or {})}, old_rows if rows is None else rows(old_rows)
    checksum = hashlib.sha256(f"{json.dumps(content)}\n{rows}".encode()).hexdigest()
    return f"# {json.dumps({**content, 'sha256': checksum})}\n{rows}".encode()


DAMAGE = {
    "empty": (lambda data: b"", "not a stored result"),
    "another csv file": (lambda data: b"a,b\n1,2\n", "not a stored result"),
    "cut": (lambda data: data[:-40], "checksum"),
    "cut after a line": (lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "checksum"),
    "a flipped digit": (lambda data: data.replace(b",30,6,", b",30,7,"), "checksum"),
    "another seed": (lambda data: data.replace(b'"seed": 1', b'"seed": 2'), "checksum"),
    "not text": (lambda data: data + b"\xff", "not a stored result"),
    "huge": (lambda data: data + b"0" * 2**22, "larger than 4 MiB"),
    "infinite": (lambda data: signed(data, rows=lambda rows: rows.replace(",6,", ",inf,")), "not a stored result"),
    "beyond its budget": (lambda data: signed(data, rows=lambda rows: rows.replace("\n500,", "\n501,")), "step 501"),
    "a step twice": (lambda data: signed(data, rows=lambda rows: rows.replace("\n500,", "\n400,")), "don't ascend"),
    "a step of many digits": (lambda data: signed(data, rows=lambda rows: rows + "9" * 5000), "not a stored result"),
    "without its end": (lambda data: signed(data, rows=lambda rows: rows[: rows.index("\n500,") + 1]), "unfinished"),
    "without rows": (lambda data: signed(data, rows=lambda rows: rows[: rows.index("\n") + 1]), "no charts/episodes"),
    "other columns": (lambda data: signed(data, rows=lambda rows: "a" + rows), "its second line is not"),
    "a path as its name": (lambda data: signed(data, {"run": "../../x"}), "names no run"),
    "no seed": (lambda data: signed(data, {"args": {"env_id": "a", "exp_name": "b"}}), "its first line has no seed"),
    "a path as exp_name": (
        lambda data: signed(data, {"args": {"env_id": "a", "exp_name": "../b", "seed": 1, "total_timesteps": 500}}),
        "which names files",
    ),
    "odd versions": (lambda data: signed(data, {"versions": {"jax": 1}}), "other values"),
    "control characters": (lambda data: signed(data, {"commit": "\x1b[2J"}), "other values"),
    "odd time": (lambda data: signed(data, {"start_time": "nan"}), "not a stored result"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_left_out_with_a_line(tmp_path, name):
    write_run(tmp_path / "runs")
    file = save(tmp_path) / "Hopper-v4__ppo__1__500.csv"
    damage, reason = DAMAGE[name]
    assert signed(file.read_bytes()) == file.read_bytes() != damage(file.read_bytes())
    file.write_bytes(damage(file.read_bytes()))
    runs, (line,) = results.read_runs((str(tmp_path / "results"),))
    assert runs == [] and line.startswith(f"left out {file}: ") and reason in line
    assert line.isprintable() and len(line) < 1000


def test_any_flipped_byte_is_found(tmp_path):
    write_run(tmp_path / "runs")
    file = save(tmp_path) / "Hopper-v4__ppo__1__500.csv"
    whole, rng = file.read_bytes(), random.Random(0)
    for _ in range(500):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        runs, lines = results.read_runs((str(file),))
        assert (len(runs), len(lines)) == (0, 1)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_what_is_named_like_a_result(tmp_path, make):
    make(tmp_path / "a.csv")
    runs, lines = results.read_runs((str(tmp_path),))
    assert runs == [] and len(lines) == 1


# ---------------------------------------------------------------- evaluations
def test_best_evaluation(tmp_path):
    """At 20k the mean is 13, at 40k, where one seed has none, 50, and at the end 12."""
    for seed, evaluations in enumerate([{20_000: 10, 40_000: 50, 100_000: 9}, {20_000: 16, 100_000: 15}]):
        write_long_run(tmp_path, seed, evaluations)
    (group,) = results.group_runs(results.read_runs((str(tmp_path),))[0], ())
    np.testing.assert_allclose(group.returns("best evaluation"), [10, 16])
    np.testing.assert_allclose(group.returns("final evaluation"), [9, 15])


def test_one_evaluation_is_no_best_one(tmp_path):
    for seed, evaluations in enumerate([{100_000: 9}, {20_000: 16, 100_000: 15}]):
        write_long_run(tmp_path, seed, evaluations)
    (group,) = results.group_runs(results.read_runs((str(tmp_path),))[0], ())
    assert np.isnan(group.returns("best evaluation")).all()

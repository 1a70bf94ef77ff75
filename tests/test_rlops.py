"""openrlbenchmark itself, in its own environment, on runs written with tensorboardX."""

import os
import subprocess
import sys

import pytest
from test_python_environments import skip_without_registry
from test_report import write_run

from cleanrl_utils import rlops

FILTERS = "?we=local&wpn=cleanRL&ceik=env_id&cen=exp_name&metric=charts/avg_episodic_return"
COMMAND = [sys.executable, "-m", "cleanrl_utils.rlops"]


def table(path):
    """Environment -> cells, of a Markdown table with a header."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in path.read_text().splitlines()]
    return rows[0][1:], {row[0]: row[1:] for row in rows[2:]}


def test_rlops_makes_curves_tables_and_aggregate_scores(tmp_path):
    base = {("Hopper-v4", "ppo"): 10, ("Hopper-v4", "rpo"): 20, ("Ant-v4", "ppo"): -90, ("Ant-v4", "rpo"): 40}
    for (env_id, exp_name), value in base.items():
        for seed in (1, 2):  # 20 rows, one a minute, of value + row + 0.5 and of 4 more
            iterations = [(9, value + 4 * (seed - 1) + i) for i in range(1, 21)]
            options = {"env_id": env_id, "exp_name": exp_name, "total": 2000, "seconds": 60}
            write_run(tmp_path / "runs", seed, iterations, **options)
    write_run(tmp_path / "runs", 3, [(9, 1e6)] * 5, total=2000, exp_name="ppo")  # unfinished: left out

    (tmp_path / "elsewhere").mkdir()
    rlops_args = ["--filters", FILTERS, "ppo?tag=2k", "rpo?tag=2k&cl=other", "--env-ids", "Hopper-v4", "Ant-v4"]
    rlops_args += ["--metric-last-n-average-window", "3", "--pc.rolling", "5", "--output-filename", "out/compare"]
    rlops_args += ["--rliable", "--rc.score_normalization_method", "maxmin", "--rc.normalized_score_threshold", "1.0"]
    rlops_args += ["--rc.sample_efficiency_plots", "--rc.performance_profile_plots", "--rc.aggregate_metrics_plots"]
    command = [*COMMAND, "--runs", f"{tmp_path}/runs", "--", *rlops_args]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    if "can't install openrlbenchmark" in done.stderr:
        skip_without_registry(tmp_path)
    assert done.returncode == 0, done.stderr

    assert os.listdir(tmp_path / "elsewhere") == ["out"]
    out = tmp_path / "elsewhere/out"
    for name, start in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
        assert (out / f"compare.{name}").read_bytes().startswith(start)
        assert (out / f"compare-time.{name}").read_bytes().startswith(start)
        if name != "svg":
            for rliable in ("aggregate", "performance_profile", "sample_efficiency", "sample_walltime_efficiency"):
                assert (out / f"compare_{rliable}.{name}").read_bytes().startswith(start)

    # the last three rows of the first seed have the mean 19 + 0.5, the other seed 4 more: 21.5 ± 2 (ddof = 0)
    names, returns = table(out / "compare.md")
    assert names == ["local/cleanRL/ppo ({'tag': ['2k']})", "other"]
    assert returns == {"Hopper-v4": ["31.50 ± 2.00", "41.50 ± 2.00"], "Ant-v4": ["-68.50 ± 2.00", "61.50 ± 2.00"]}
    # minutes; of the last tenth of the rows, 19 and 20
    for runtimes in table(out / "compare_runtimes.md")[1].values():
        assert [float(cell) for cell in runtimes] == pytest.approx([19.5, 19.5], abs=0.02)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--runs", "nowhere", "--", "--help"], "no folder nowhere"),
        (["--runs", ".", "--", "--help"], "no finished runs in ."),
        (["--runs", "."], "give the arguments of rlops after --"),
        (["--runs", ".", "--"], "give the arguments of rlops after --"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, args, message):
    done = subprocess.run([*COMMAND, *args], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_the_exit_code_of_rlops_comes_back_with_the_runs_that_it_had(tmp_path, monkeypatch, capfd):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(
        '#!/bin/sh\nls "$PYTHONPATH"/openrlbenchmark/dataset/me/mine\necho "$@"\nexit 3\n'
    )
    (tmp_path / "bin/python").chmod(0o755)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / f"lib/python{version}/site-packages/openrlbenchmark").mkdir(parents=True)
    monkeypatch.setattr(rlops, "find_environment", lambda *_: str(tmp_path))
    run = write_run(tmp_path / "runs", 1)
    with pytest.raises(SystemExit) as stopped:
        rlops.main(rlops.Args((f"{tmp_path}/runs",), "me", "mine"), ["--filters", "?we=me", "x"])
    assert stopped.value.code == 3
    output, error = capfd.readouterr()
    command = "-m openrlbenchmark.rlops --offline --scan-history --filters ?we=me x"
    assert output.splitlines() == [run.name, "offline.sqlite", command]
    assert error == "error: rlops failed; the runs that it was given, as ?we=me&wpn=mine: ppo in Hopper-v4\n"

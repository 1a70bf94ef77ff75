"""Reports from event files written with tensorboardX; every number was worked out by hand."""

import csv
import json
import os
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
import random_policy
from tensorboardX import SummaryWriter

from cleanrl_utils import report, results
from cleanrl_utils.report import Args, main

BATCH_SIZE = 100
# 30 episodes of 6, 50 of 4 and 20 of the 60 of 2: (180 + 200 + 40) / 100 = 4.2
ITERATIONS = [(80, 1.0), (60, 2.0), (0, None), (50, 4.0), (30, 6.0)]


def write_run(folder, seed=1, iterations=ITERATIONS, total=500, env_id="Hopper-v4", exp_name="ppo", **options):
    """A run of five iterations of 100 steps, in each so many episodes of that mean return; returns its path."""
    path = folder / f"{env_id}__{exp_name}__{seed}__{options.get('unix_time', 1)}"
    path.mkdir(parents=True, exist_ok=True)
    config = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "total_timesteps": total, "eval_episodes": 10}
    (path / "args.json").write_text(json.dumps(config))
    writer = SummaryWriter(str(path))
    start_time = time.time()
    for i, (episodes, mean) in enumerate(iterations, start=options.get("first_iteration", 1)):
        step = i * BATCH_SIZE
        writer.add_scalar("charts/episodes", episodes, step, walltime=start_time + i * options.get("seconds", 0))
        if mean is not None:
            writer.add_scalar("charts/episodic_return", mean, step)
            writer.add_scalar("charts/avg_episodic_return", mean + 0.5, step)
        writer.add_scalar("charts/SPS", 1000 + i, step)
    if options.get("evaluation") is not None:
        writer.add_scalar("eval/episodic_return", options["evaluation"], step)
    for step, value in options.get("evaluations", {}).items():
        writer.add_scalar("eval/episodic_return", value, step)
    writer.close()
    return path


def write_seeds(folder, **options):
    """Three seeds with training returns 4.2, 5.2 and 6.2 (5.2 ± 1.0), evaluated at 10, 11 and 15 (12.0 ± 2.6)."""
    for seed, (shift, evaluation) in enumerate([(0, 10.0), (1, 11.0), (2, 15.0)], start=1):
        iterations = [(n, None if mean is None else mean + shift) for n, mean in ITERATIONS]
        write_run(folder, seed, iterations, evaluation=evaluation, **options)


def read_groups(folder, **options):
    args = Args(runs=(str(folder),), **options)
    runs, lines = results.read_runs(args.runs, args.exp_names, args.env_ids, args.log_folder)
    return results.group_runs(runs, args.env_ids), lines


def exit_code(args):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    return stopped.value.code


def table_row(markdown, *cells):
    """By column, the row that starts with these cells, of all tables that have one."""
    header, found = None, {}
    for line in markdown.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        header = row if row[0] in ("Environment", "Experiment") else header
        if line.startswith("|") and row[: len(cells)] == list(cells):
            assert not set(header[len(cells) :]) & set(found) - {"Steps"}, f"two rows of {cells}"
            found |= dict(zip(header, row, strict=True))
    assert found
    return found


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    "counts, means, expected",
    [
        ({1: 80, 2: 60, 3: 0, 4: 50, 5: 30}, {1: 1.0, 2: 2.0, 4: 4.0, 5: 6.0}, 4.2),
        ({1: 100, 2: 100}, {1: -50.0, 2: 7.0}, 7.0),  # exactly the last iteration
        ({1: 1000}, {1: 3.0}, 3.0),  # a part of the only one
        ({1: 10, 2: 30}, {1: 2.0, 2: 4.0}, 3.5),  # fewer than 100: all 40
        ({1: 0, 2: 0}, {}, np.nan),
    ],
)
def test_last_100_episodes(counts, means, expected):
    np.testing.assert_allclose(results.last_episodes_mean(counts, means, 100), expected)


def test_mean_and_sample_deviation_over_seeds(tmp_path):
    write_seeds(tmp_path)
    (group,), lines = read_groups(tmp_path)
    assert lines == []
    np.testing.assert_allclose(group.training_returns, [4.2, 5.2, 6.2], rtol=1e-6)
    assert [run.seed for run in group.runs] == [1, 2, 3]
    row = table_row(report.results_table([group]), "Hopper-v4")
    assert row["Training return"] == "5.20 ± 1.00"  # sqrt((1 + 0 + 1) / 2)
    assert row["Each seed"] == "4.20; 5.20; 6.20"
    assert row["Evaluation return"] == "12.0 ± 2.6"  # sqrt((4 + 1 + 9) / 2) = 2.65
    assert row["Seeds"] == "3 (1, 2, 3)"
    assert row["Steps"] == "500"
    assert row["Steps/s"] == "1,005"


def test_one_seed_has_no_spread_and_missing_evaluations_are_counted(tmp_path):
    write_run(tmp_path, 1, env_id="Ant-v4")
    write_run(tmp_path, 1, evaluation=10.0)
    write_run(tmp_path, 2)
    groups, _ = read_groups(tmp_path)
    table = report.results_table(groups)
    assert table_row(table, "Ant-v4")["Training return"] == "4.20"
    assert table_row(table, "Ant-v4")["Evaluation return"] == "-"
    assert table_row(table, "Hopper-v4")["Evaluation return"] == "10.0 (1 of 2)"


def test_fewer_than_100_episodes_are_named(tmp_path):
    write_run(tmp_path, 1, [(10, 2.0), (0, None), (0, None), (0, None), (30, 4.0)])
    groups, _ = read_groups(tmp_path)
    np.testing.assert_allclose(groups[0].training_returns, [3.5])
    assert "Hopper-v4 seed 1 (40)" in report.report_header(Args(), groups, [])


@pytest.mark.parametrize(
    "value, text", [(109515.65, "109,516"), (2609.3, "2,609"), (99.94, "99.9"), (-4.1, "-4.10"), (np.nan, "-")]
)
def test_digits(value, text):
    assert report.format_number(value) == text


@pytest.mark.parametrize("steps, text", [(10**6, "1M"), (1_500_000, "1.5M"), (100_000, "100k"), (999_424, "999,424")])
def test_budgets(steps, text):
    assert results.format_steps(steps) == text
    assert report.parse_budget(text.replace(",", "")) == steps


# ---------------------------------------------------------------- which runs count
def test_the_newest_of_equal_runs_wins(tmp_path):
    older = write_run(tmp_path, 1, [(100, 1.0)] * 5, unix_time=20)
    newer = write_run(tmp_path, 1, [(100, 2.0)] * 5, unix_time=10)  # by what its events say, not by its name
    write_run(tmp_path, 2, [(100, 4.0)] * 5)
    (group,), lines = read_groups(tmp_path)
    np.testing.assert_allclose(group.training_returns, [2.0, 4.0])
    assert lines == [f"left out {older}: the same was run again in {newer}"]


def test_an_unfinished_rerun_does_not_replace_a_finished_run(tmp_path):
    write_run(tmp_path, 1, [(100, 1.0)] * 5, unix_time=10)
    write_run(tmp_path, 1, [(100, 9.0)] * 4, unix_time=20)
    (group,), _ = read_groups(tmp_path)
    np.testing.assert_allclose(group.training_returns, [1.0])


def test_a_run_of_several_iterations_a_call_is_finished_when_no_call_fits(tmp_path):
    for i, (iterations, finished) in enumerate([(4, True), (3, True), (2, False)]):
        path = write_run(tmp_path, i, [(100, 1.0)] * iterations, total=599)
        args = json.loads((path / "args.json").read_text())
        (path / "args.json").write_text(json.dumps({**args, "iterations_per_call": 3}))
        groups, lines = read_groups(tmp_path)
        assert (lines == []) == finished
    (path / "args.json").write_text(json.dumps({**args, "iterations_per_call": "3"}))
    assert "iterations_per_call" in read_groups(tmp_path)[1][-1]


def test_budgets_and_experiments_stay_apart(tmp_path):
    write_run(tmp_path, 1)
    write_run(tmp_path, 1, [(100, 3.0)] * 4, total=499, unix_time=2)  # 400 of 499: a fifth iteration doesn't fit
    write_run(tmp_path, 1, exp_name="rpo")
    groups, lines = read_groups(tmp_path)
    assert lines == []
    assert [(group.exp_name, group.total_timesteps) for group in groups] == [("ppo", 499), ("ppo", 500), ("rpo", 500)]
    assert table_row(report.results_table(groups), "Hopper-v4", "`rpo`")["Steps"] == "500"


def test_the_asked_experiments_and_environments_in_the_asked_order(tmp_path):
    for env_id in ("Ant-v4", "Hopper-v4", "Walker2d-v4"):
        write_run(tmp_path, env_id=env_id)
        write_run(tmp_path, env_id=env_id, exp_name="rpo")
    groups, _ = read_groups(tmp_path, env_ids=("Walker2d-v4", "Ant-v4"), exp_names=("rpo",))
    assert [(group.env_id, group.exp_name) for group in groups] == [("Walker2d-v4", "rpo"), ("Ant-v4", "rpo")]


def test_damaged_and_unfinished_runs_are_left_out_with_one_line_each(tmp_path, capfd):
    write_run(tmp_path, 1)
    unfinished = write_run(tmp_path, 2, ITERATIONS[:4])
    cut, garbage, flipped, nothing = (write_run(tmp_path, seed) for seed in (3, 4, 5, 6))
    no_args, bad_args, short_args = (write_run(tmp_path, seed) for seed in (7, 8, 9))
    no_episode = write_run(tmp_path, 10, [(0, None)] * 5)
    for path, damage in {
        cut: lambda data: data[: len(data) // 2],
        garbage: lambda data: b"not an event file" * 9,
        flipped: lambda data: data[:300] + bytes(255 - byte for byte in data[300:320]) + data[320:],
        nothing: lambda data: b"",
    }.items():
        (events,) = path.glob("events*")
        events.write_bytes(damage(events.read_bytes()))
    (no_args / "args.json").unlink()
    (bad_args / "args.json").write_text('{"env_id": ')
    (short_args / "args.json").write_text('{"env_id": "Hopper-v4", "exp_name": "ppo", "seed": 9}')

    (group,), lines = read_groups(tmp_path)
    assert [run.seed for run in group.runs] == [1]
    reasons = dict(line.removeprefix("left out ").split(": ", 1) for line in lines)
    assert reasons[str(unfinished)] == "unfinished or damaged: ends at step 400 of 500"
    assert reasons[str(no_args)] == "args.json can't be read (FileNotFoundError)"
    assert reasons[str(bad_args)] == "args.json can't be read (JSONDecodeError)"
    assert reasons[str(short_args)] == "args.json has no total_timesteps"
    assert reasons[str(no_episode)].endswith("no episode ended")
    assert set(reasons) == {
        *map(str, [unfinished, cut, garbage, flipped, nothing, no_args, bad_args, short_args, no_episode])
    }
    assert capfd.readouterr() == ("", "")  # nothing of tensorboard's own


def test_a_resumed_run_counts_each_step_once_as_last_written(tmp_path):
    path = write_run(tmp_path, 1, [(100, 9.0)] * 4)
    (first,) = path.glob("events*")
    first.rename(path / "events.out.tfevents.0000000001.first")
    write_run(tmp_path, 1, [(10, 1.0), (10, 2.0), (10, 3.0)], first_iteration=3)
    (group,), lines = read_groups(tmp_path)
    assert lines == []
    np.testing.assert_allclose(group.training_returns, [(10 * 3 + 10 * 2 + 10 * 1 + 70 * 9) / 100])


# ---------------------------------------------------------------- what is written
REFERENCES = """env_id,source,budget,mean,std,note
Hopper-v4,tianshou,500,6.0,0.7,test returns
Hopper-v4,tianshou,3M,99.0,0.7,
Hopper-v4,rl-zoo,0.5k,4.95,,
Ant-v4,tianshou,1M,50.0,5.0,v3 env
Ant-v4,elsewhere,1M,50.0,5.0,
"""


def test_the_report_files(tmp_path, capsys):
    write_seeds(tmp_path / "runs")
    write_run(tmp_path / "runs", 1, env_id="Ant-v4")
    (tmp_path / "references.csv").write_text(REFERENCES)
    args = Args(runs=(f"{tmp_path}/runs",), output=f"{tmp_path}/docs/ppo", references=f"{tmp_path}/references.csv")
    main(args)
    assert sorted(os.listdir(tmp_path / "docs")) == ["ppo.csv", "ppo.md", "ppo.png", "ppo.svg"]
    assert "ppo.md" in capsys.readouterr().out

    markdown = (tmp_path / "docs/ppo.md").read_text()
    row = table_row(markdown, "Hopper-v4")
    assert row["tianshou"] == "6.00 ± 0.70 (-0.80)"
    assert row["rl-zoo"] == "4.95 (+0.25)"
    assert table_row(markdown, "Ant-v4")["tianshou"] == "-"  # published for another budget
    assert "elsewhere" not in markdown
    assert "tianshou, training: test returns (Hopper-v4); v3 env (Ant-v4)." in markdown
    assert f"\npython -m cleanrl_utils.report --runs {tmp_path}/runs --output {tmp_path}/docs/ppo --ref" in markdown
    for text in ("`ppo`, 500 steps, seeds 1, 2, 3.", "ddof = 1", "(ppo.png)", "of 10 episodes"):
        assert text in markdown

    assert (tmp_path / "docs/ppo.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "docs/ppo.svg").read_bytes()
    main(args)
    assert (tmp_path / "docs/ppo.svg").read_bytes() == svg
    assert (tmp_path / "docs/ppo.md").read_text() == markdown


def test_the_report_names_the_versions_and_the_commits_of_the_runs(tmp_path):
    flax = pytest.importorskip("flax")
    path = write_run(tmp_path, 1)
    assert "**Versions**: not recorded." in report.report_header(Args(), read_groups(tmp_path)[0], [])
    model = {"versions": {"jax": "0.10.2", "flax": "0.12.8"}, "params": {"w": np.ones(3, np.float32)}}
    (path / "ppo.cleanrl_model").write_bytes(flax.serialization.to_bytes(model))
    record = {"run_dirs": ["runs/another seed's", f"runs/{path.name}"], "git_describe": "v3.0-1-g0123456-dirty"}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/a.json").write_text(json.dumps(record))
    (tmp_path / "logs/b.json").write_text(json.dumps({"run_dirs": ["runs/another"], "git_describe": "v2.0"}))
    (tmp_path / "logs/c.json").write_text(json.dumps({"run_dirs": [], "git_describe": None}))
    (tmp_path / "logs/d.json").write_text("{")
    other = write_run(tmp_path, 2)
    (other / "ppo.cleanrl_model").write_bytes(flax.serialization.to_bytes({"versions": {"jax": "0.12.0"}}))
    third = write_run(tmp_path, 3)
    (third / "ppo.cleanrl_model").write_bytes(b"\xc1 not a model")
    header = report.report_header(Args(), read_groups(tmp_path, log_folder=f"{tmp_path}/logs")[0], [])
    assert "**Versions**: flax 0.12.8, jax 0.10.2 and 0.12.0." in header
    assert "of the runs v3.0-1-g0123456-dirty;" in header


def test_the_curves_csv_is_thinned_and_loses_no_episode(tmp_path):
    iterations = [(0, None)] * 2 + [(1 + i % 2, float(i)) for i in range(998)]
    write_run(tmp_path, 1, iterations, total=100_000)
    (group,), _ = read_groups(tmp_path)
    rows = list(csv.DictReader(report.curves_csv([group]).splitlines()))
    assert {(row["exp_name"], row["env_id"], row["total_timesteps"], row["seed"]) for row in rows} == {
        ("ppo", "Hopper-v4", "100000", "1")
    }
    # the last 100 episodes: 99 in i = 932 to 997, and one of the two in i = 931, whose step is a row of its own
    assert [int(row["global_step"]) for row in rows] == sorted([*range(1000, 100_001, 1000), 93_300, 93_400])
    # the first row: iterations 3 to 10, i = 0 to 7, one episode where i is even, two where it is odd
    assert float(rows[0]["episodic_return"]) == pytest.approx((0 + 2 + 4 + 6 + 2 * (1 + 3 + 5 + 7)) / 12, rel=1e-5)
    assert float(rows[0]["avg_episodic_return"]) == 7.5


def test_curves_are_drawn_where_every_seed_has_a_value(tmp_path):
    write_run(tmp_path, 1, [(0, None), (9, 1.0), (9, 2.0), (9, 3.0), (9, 4.0)])
    write_run(tmp_path, 2, [(9, 3.0), (9, 3.0), (9, 4.0), (9, 5.0), (9, 6.0)])
    (group,), _ = read_groups(tmp_path)
    steps, values = report.seed_curves(group, num_points=4)
    np.testing.assert_allclose(steps, [200, 300, 400, 500])
    np.testing.assert_allclose(values, [[1.5, 2.5, 3.5, 4.5], [3.5, 4.5, 5.5, 6.5]])
    (ax,) = report.draw_curves([group], [report.Reference("Hopper-v4", "tianshou", 500, 6.0, np.nan, "")]).axes
    curve, reference = ax.lines
    np.testing.assert_allclose(curve.get_ydata()[[0, -1]], [2.5, 5.5])
    np.testing.assert_allclose(reference.get_ydata(), [6.0, 6.0])


def test_a_long_name_is_not_cut_off_in_the_legend(tmp_path):
    write_run(tmp_path, exp_name="learning_rate_1e-3+" * 5)
    figure = report.draw_curves(read_groups(tmp_path)[0], [])
    report.figure_bytes(figure, "png")
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


# ---------------------------------------------------------------- interquartile mean
@pytest.mark.parametrize(
    "samples, expected",
    [
        ([[1, 2, 4, 100]], 3),  # without the lowest and the highest
        ([[-50, 1, 2, 3, 4, 5, 6, 900]], (2 + 3 + 4 + 5) / 4),
        ([[1, 2, 6]], 3),  # a quarter of three is none
        ([[1, 2], [4, 100]], 3),  # over all tasks together
        ([[5]], 5),
    ],
)
def test_interquartile_mean(samples, expected):
    estimate, low, high = report.interquartile_mean([np.array(sample, float) for sample in samples])
    assert estimate == expected
    assert np.isnan([low, high]).all() if len(samples[0]) == 1 else low <= estimate <= high


def test_the_interval_of_two_seeds_and_of_strata():
    # (0, 0), (0, 10), (10, 0), (10, 10): means 0, 5, 5, 10, the ends with 25% each
    assert report.interquartile_mean([np.array([0.0, 10.0])]) == (5, 0, 10)
    # the seeds of one task never stand for those of another: half is 0 and half 10 in every sample
    assert report.interquartile_mean([np.zeros(2), np.full(2, 10.0)]) == (5, 5, 5)


def test_the_interval_is_that_of_another_bootstrap():
    values, rng = np.array([3.0, 1, 4, 1, 5, 9, 2, 6]), np.random.default_rng(1)
    means = np.sort(rng.choice(values, (100_000, 8)), axis=1)[:, 2:6].mean(1)
    _, *interval = report.interquartile_mean([values])
    np.testing.assert_allclose(interval, np.percentile(means, [2.5, 97.5]), atol=0.1)


def test_normalised_scores_and_the_tasks_without_them(tmp_path):
    """Hopper: 0 is -2 and 1 is 18: of evaluations 8, 12, 16 and 18: 0.5, 0.7, 0.9 and 1; Ant's training 4.2 of 8.4."""
    for seed, evaluation in enumerate([8.0, 12.0, 16.0, 18.0]):
        write_run(tmp_path, seed, evaluation=evaluation)
        write_run(tmp_path, seed, env_id="Ant-v4")
        write_run(tmp_path, seed, env_id="Swimmer-v4")
        write_run(tmp_path, seed, env_id="Pusher-v4")
    references = [
        report.Reference("Hopper-v4", "random", 0, -2.0, 1.0, ""),
        report.Reference("Hopper-v4", "a", 500, 18.0, 1.0, "", "best evaluation"),
        report.Reference("Hopper-v4", "b", 500, 7.0, 1.0, ""),
        report.Reference("Hopper-v4", "a", 1000, 99.0, 1.0, ""),
        report.Reference("Ant-v4", "random", 0, 0.0, 1.0, ""),
        report.Reference("Ant-v4", "a", 500, 8.4, 1.0, ""),
        report.Reference("Swimmer-v4", "a", 500, 8.4, 1.0, ""),
        report.Reference("Pusher-v4", "random", 0, 0.0, 1.0, ""),
    ]
    groups, _ = read_groups(tmp_path)
    header, _, row = report.aggregate_table(groups, references).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 0.5, 0.5, 0.5, 0.5, 0.5, 0.7, 0.9, 1: the middle four are 0.5, 0.5, 0.5 and 0.7
    assert cells[:3] == ["`ppo`", "500", "2"] and cells[3].startswith("0.55 [0.50, 0.")
    assert cells[4] == "Pusher-v4, Swimmer-v4"
    assert report.aggregate_table(groups, []) == ""
    table = report.results_table(groups) + report.references_table(groups, references)
    assert table_row(table, "Hopper-v4")["IQM [95% CI]"].startswith("14.0 [")
    assert table_row(table, "Ant-v4")["IQM [95% CI]"] == "4.20 [4.20, 4.20] (training)"
    assert "random" not in table


def test_the_random_policy_replaces_its_own_rows(tmp_path):
    path = tmp_path / "references.csv"
    header = "env_id,source,budget,mean,std,note,measure\n"
    path.write_text(header + "Pendulum-v1,random,0,1,,,\nHopper-v4,random,0,1,,,\nPendulum-v1,a,1M,-200,,,training\n")
    args = random_policy.Args(env_ids=("Pendulum-v1",), num_episodes=4, references=str(path))
    random_policy.main(args)
    text = path.read_text()
    hopper, other, new = report.read_references(str(path))
    assert (hopper.env_id, other.source, new.source, new.total_timesteps) == ("Hopper-v4", "a", "random", 0)
    assert -200 * 17 < new.mean < -200 and new.std > 0  # 200 steps, whose rewards are above -17
    random_policy.main(args)
    assert path.read_text() == text


# ---------------------------------------------------------------- regression check
CHECK_HEADER = "env_id,exp_name,total_timesteps,minimum,source\n"


@pytest.mark.parametrize(
    "line, code, result",
    [
        ("Hopper-v4,ppo,500,5.1,issue 2", 0, "pass"),
        ("Hopper-v4,ppo,0.5k,5.3,issue 2", 1, "**FAIL**"),
        ("Ant-v4,ppo,500,5.1,issue 2", 1, "**FAIL**: no finished run"),
        ("Hopper-v4,ppo,1M,5.1,issue 2", 1, "**FAIL**: no finished run"),
        ("Hopper-v4,rpo,500,5.1,issue 2", 1, "**FAIL**: no finished run"),
    ],
)
def test_check(tmp_path, capsys, line, code, result):
    write_seeds(tmp_path / "runs")
    (tmp_path / "check.csv").write_text(CHECK_HEADER + line + "\n")
    args = Args(runs=(f"{tmp_path}/runs",), output=f"{tmp_path}/ppo", check=f"{tmp_path}/check.csv")
    assert (exit_code(args) if code else main(args)) == (code or None)
    check_table = capsys.readouterr().out.split("\n", 1)[1]
    row = table_row(check_table, line.split(",")[0])
    assert row["Result"] == result
    assert row["Source"] == "issue 2"
    if code == 0:
        assert (row["Return"], row["Minimum"], row["Seeds"]) == ("5.20 ± 1.00", "5.10", "3")
        assert row["Measure"] == "training"
    assert check_table.strip() in (tmp_path / "ppo.md").read_text()


def test_one_failure_fails_the_check_and_the_filters_apply_to_it(tmp_path):
    write_seeds(tmp_path / "runs")
    (tmp_path / "check.csv").write_text(CHECK_HEADER + "Hopper-v4,ppo,500,5.1,\nAnt-v4,ppo,500,5.1,\n")
    args = {"runs": (f"{tmp_path}/runs",), "check": f"{tmp_path}/check.csv"}
    assert exit_code(Args(**args)) == 1
    main(Args(**args, env_ids=("Hopper-v4",)))
    assert exit_code(Args(**args, env_ids=("Hopper-v4", "Ant-v4"))) == 1


@pytest.mark.parametrize(
    "returns, published, minimum, result",
    [
        # three seeds whose deviation is 1: 2 / sqrt(3) = 1.155 below
        ([4.2, 5.2, 6.2], "6.3,0.5", "5.15", "pass"),
        ([4.2, 5.2, 6.2], "6.4,0.5", "5.25", "**FAIL**"),
        ([4.2, 5.2, 6.2], "6.3,", "5.15", "pass"),
        ([4.2, 5.2, 6.2], "6.4,", "5.25", "**FAIL**"),
        # the published deviation is the larger one: 4 / sqrt(3) = 2.309
        ([4.2, 5.2, 6.2], "7.4,2", "5.09", "pass"),
        ([4.2, 5.2, 6.2], "7.6,2", "5.29", "**FAIL**"),
        ([-5.8, -4.8, -3.8], "-3.7,0.3", "-4.85", "pass"),
        ([-5.8, -4.8, -3.8], "-3.6,0.3", "-4.75", "**FAIL**"),
        # one seed has no deviation: the published one, if there is one
        ([4.2], "6.0,1", "4.00", "pass"),
        ([4.2], "6.3,1", "4.30", "**FAIL**"),
        ([4.2], "4.1,", "4.10", "pass"),
        ([4.2], "4.3,", "4.30", "**FAIL**"),
    ],
)
def test_check_against_published_results(tmp_path, capsys, returns, published, minimum, result):
    for seed, mean in enumerate(returns):
        write_run(tmp_path / "runs", seed, [(100, mean)] * 5)
    lines = f"Hopper-v4,tianshou,500,{published},\nHopper-v4,rl-zoo,500,99,,\nAnt-v4,tianshou,1M,99,,\n"
    (tmp_path / "references.csv").write_text("env_id,source,budget,mean,std,note\n" + lines)
    args = Args(runs=(f"{tmp_path}/runs",), references=f"{tmp_path}/references.csv", check_sources=("tianshou",))
    code = 1 if "FAIL" in result else None
    assert (exit_code(args) if code else main(args)) == code
    check_table = capsys.readouterr().out.split("\n\n", 1)[1]
    row = table_row(check_table, "Hopper-v4")  # and none for the source that was not named
    assert (row["Result"], row["Minimum"], row["Source"]) == (result, minimum, "tianshou")
    assert row["Seeds"] == str(len(returns))


def test_the_check_names_what_nobody_published_and_joins_both_kinds(tmp_path, capsys):
    write_seeds(tmp_path / "runs")
    write_run(tmp_path / "runs", 1, env_id="Ant-v4")
    (tmp_path / "references.csv").write_text(REFERENCES)
    (tmp_path / "check.csv").write_text(CHECK_HEADER + "Ant-v4,ppo,500,4,\nHopper-v4,ppo,500,9,issue 2\n")
    options = {"runs": (f"{tmp_path}/runs",), "references": f"{tmp_path}/references.csv"}
    options["check_sources"] = ("tianshou", "rl-zoo")
    main(Args(**options))
    check_table = capsys.readouterr().out.split("\n\n", 1)[1]
    assert table_row(check_table, "Ant-v4")["Result"] == "no reference"  # tianshou's is of another budget
    assert check_table.count("| pass |") == 2
    assert exit_code(Args(**options, check=f"{tmp_path}/check.csv", output=f"{tmp_path}/ppo")) == 1
    check_table = capsys.readouterr().out.split("\n", 1)[1]
    text = (tmp_path / "ppo.md").read_text()
    assert check_table.strip() in text and "2 s / √n" in text
    assert [check_table.count(result) for result in ("| pass |", "| **FAIL** |", "| no reference |")] == [3, 1, 1]


@pytest.mark.parametrize(
    "stored, evaluations, results",
    [
        # the stored deviation is 1 for both, the new one 0: 2 / sqrt(4) = 1 below the stored mean
        ([4.0, 5.0, 6.0], None, ["pass"]),
        ([4.1, 5.1, 6.1], None, ["**FAIL**"]),
        ([4.0, 5.0, 6.0], [9.0, 10.0, 11.0], ["pass", "pass"]),
        ([4.0, 5.0, 6.0], [9.1, 10.1, 11.1], ["pass", "**FAIL**"]),
        # one stored seed has no deviation
        ([4.0], [9.0], ["pass", "pass"]),
        ([4.1], [9.1], ["**FAIL**", "**FAIL**"]),
    ],
)
def test_check_against_stored_results(tmp_path, capsys, stored, evaluations, results):
    for seed, mean in enumerate(stored):
        evaluation = evaluations and evaluations[seed]
        write_run(tmp_path / "old", seed, [(100, mean)] * 5, evaluation=evaluation)
    main(Args(runs=(f"{tmp_path}/old",), save_results=f"{tmp_path}/results"))
    for seed in range(4):
        write_run(tmp_path / "runs", seed, [(100, 4.0)] * 5, evaluation=9.0)
    write_run(tmp_path / "runs", 0, exp_name="another")
    capsys.readouterr()
    args = Args(runs=(f"{tmp_path}/runs",), check_results=f"{tmp_path}/results")
    code = 1 if "**FAIL**" in results else None
    assert (exit_code(args) if code else main(args)) == code
    check_table = capsys.readouterr().out.split("\n\n", 1)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in check_table.splitlines()[2:] if line]
    assert [row[-1] for row in rows] == ["no reference", *results]
    assert [row[4] for row in rows] == ["training", "training", "final evaluation"][: 1 + len(results)]
    assert {row[6] for row in rows} == {"stored results"}


def test_differences_and_checks_by_measure(tmp_path, capsys):
    """The seeds' training returns are 4.2 and 4.2, their final evaluations 9 and 15, the best ones 10 and 16."""
    write_run(tmp_path / "runs", 1, evaluations={200: 10.0, 500: 9.0})
    write_run(tmp_path / "runs", 2, evaluations={200: 16.0, 500: 15.0})
    write_run(tmp_path / "runs", 1, env_id="Ant-v4")
    header = "env_id,source,budget,mean,std,note,measure\n"
    rows = ["Hopper-v4,a,500,4,,,training", "Hopper-v4,b,500,20,,,best evaluation"]
    rows += ["Hopper-v4,c,500,11,,,final evaluation", "Hopper-v4,d,500,3,,,", "Ant-v4,b,500,3,,,best evaluation"]
    (tmp_path / "references.csv").write_text(header + "\n".join(rows) + "\n")
    options = {"runs": (f"{tmp_path}/runs",), "references": f"{tmp_path}/references.csv"}
    args = Args(**options, check_sources=("a", "b", "c"))
    assert exit_code(args) == 1
    table, check_table = capsys.readouterr().out.strip().rsplit("\n\n", 1)
    row = table_row(table, "Hopper-v4")
    assert row["Evaluation return"] == "12.0 ± 4.2" and row["Best evaluation"] == "13.0 ± 4.2"
    differences = [row[source].split()[-1] for source in "abcd"]
    assert differences == ["(+0.20)", "(-7.0)", "(+1.0)", "(+1.20)"]
    assert table_row(table, "Ant-v4")["b"] == "3.00 (-)"
    assert table_row(table, "Ant-v4")["Best evaluation"] == "-"
    # b's minimum is 20 - 2 * 4.243 / sqrt(2) = 14, above 13; c's 11 - 6 = 5
    for cells, minimum, result in [
        (("Hopper-v4", "`ppo`", "500", "2", "training"), "4.00", "pass"),
        (("Hopper-v4", "`ppo`", "500", "2", "best evaluation"), "14.0", "**FAIL**"),
        (("Hopper-v4", "`ppo`", "500", "2", "final evaluation"), "5.00", "pass"),
        (("Ant-v4",), "-", "no best evaluation to compare"),
    ]:
        row = table_row(check_table, *cells)
        assert (row["Minimum"], row["Result"]) == (minimum, result)
    assert exit_code(Args(**options, check_sources=("b",), env_ids=("Ant-v4",))) == 2
    assert "nothing to check" in capsys.readouterr().err


def test_a_minimum_of_an_evaluation_that_is_missing_fails(tmp_path, capsys):
    write_run(tmp_path / "runs", 1)
    (tmp_path / "check.csv").write_text(CHECK_HEADER.strip() + ",measure\nHopper-v4,ppo,500,1,,final evaluation\n")
    assert exit_code(Args(runs=(f"{tmp_path}/runs",), check=f"{tmp_path}/check.csv")) == 1
    assert "**FAIL**: no final evaluation" in capsys.readouterr().out


def test_the_command_exits_with_1_on_a_regression(tmp_path):
    write_run(tmp_path / "runs", 1)
    (tmp_path / "check.csv").write_text(CHECK_HEADER + "Hopper-v4,ppo,500,5,\n")
    command = [sys.executable, "-m", "cleanrl_utils.report", "--runs", f"{tmp_path}/runs", "--check"]
    result = subprocess.run([*command, f"{tmp_path}/check.csv"], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == ""
    assert "**FAIL**" in result.stdout


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    "options, message",
    [
        ({"runs": ("{}/nowhere",)}, "no folder {}/nowhere"),
        ({"runs": ("{}/empty",)}, "no finished runs in {}/empty"),
        ({"env_ids": ("Hoper-v4",)}, "no finished runs of Hoper-v4 in {}/runs"),
        ({"env_ids": ("Hopper-v4", "Ant-v4")}, "no finished runs of Ant-v4 in {}/runs"),
        ({"output": "{}/a file/ppo"}, "can't write {}/a file"),
        ({"output": "{}/empty/"}, "give a name without an ending"),
        ({"output": "{}/ppo.md"}, "give a name without an ending"),
        ({"output": "{}/out", "references": "{}/nowhere.csv"}, "can't read {}/nowhere.csv: No such file"),
        ({"output": "{}/out", "references": "{}/check.csv"}, "its first line lacks budget, mean, std, note"),
        ({"references": "{}/measure.csv"}, "measure.csv, line 2: measure is 'best', which is none of training, final"),
        ({"check_results": "{}/nowhere"}, "no folder {}/nowhere"),
        ({"check_results": "{}/empty"}, "{}/empty has no finished run like these: there is nothing to check"),
        ({"save_results": "{}/a file"}, "can't write {}/a file"),
        ({"output": "{}/out", "check": "{}/bad.csv"}, "bad.csv, line 3: minimum is 'high', which is not a number"),
        ({"output": "{}/out", "check": "{}/nan.csv"}, "nan.csv, line 2: minimum is 'nan', which is not a number"),
        ({"output": "{}/out", "check": "{}/check.csv", "env_ids": ("Ant-v4",)}, "there is nothing to check"),
        ({"check": "{}/check.csv", "env_ids": ("Hopper-v4", "Ant-v4")}, "no finished runs of Ant-v4 in {}/runs"),
        ({"check_sources": ("tianshou",)}, "--check-sources tianshou: --references has to name a file"),
        ({"references": "{}/refs.csv", "check_sources": ("Tianshou",)}, "Tianshou: --references has tianshou, rl-zoo"),
        ({"references": "{}/refs.csv", "check_sources": ("elsewhere",)}, "elsewhere published nothing for these runs"),
        ({"openrlbenchmark_store": "{}/a file"}, "can't write {}/a file"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, capsys, options, message):
    write_run(tmp_path / "runs", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("")
    (tmp_path / "check.csv").write_text(CHECK_HEADER + "Hopper-v4,ppo,500,1,\n")
    (tmp_path / "nan.csv").write_text(CHECK_HEADER + "Hopper-v4,ppo,500,nan,\n")
    (tmp_path / "bad.csv").write_text(CHECK_HEADER + "Hopper-v4,ppo,500,1,\nAnt-v4,ppo,500,high,\n")
    (tmp_path / "refs.csv").write_text(REFERENCES)
    (tmp_path / "measure.csv").write_text("env_id,source,budget,mean,std,note,measure\nHopper-v4,a,1,2,,,best\n")
    before = sorted(tmp_path.rglob("*"))

    def fill(value):
        return tuple(map(fill, value)) if isinstance(value, tuple) else value.format(tmp_path)

    options = {"runs": ("{}/runs",), **options}
    assert exit_code(Args(**{name: fill(value) for name, value in options.items()})) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message.format(tmp_path) in error
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- openrlbenchmark
def test_openrlbenchmark_store(tmp_path):
    write_seeds(tmp_path / "runs")
    args = Args(runs=(f"{tmp_path}/runs",), openrlbenchmark_store=f"{tmp_path}/dataset")
    main(args)
    main(args)  # the same again: nothing twice
    store = tmp_path / "dataset/local/cleanRL"
    run_id = "Hopper-v4__ppo__1__1"
    assert len(list(store.iterdir())) == 4

    database = sqlite3.connect(store / "offline.sqlite")
    # the query that openrlbenchmark 0.3.1 sends for the filter 'ppo?tag=500' and the environment Hopper-v4
    found = database.execute(
        "SELECT r.id, r.name, r.state, r.url, r.path, r.username, r.project, r.entity, r.config FROM offlinerun AS r "
        "INNER JOIN tag_offlinerun_through AS t ON t.offlinerun_id = r.id INNER JOIN tag ON t.tag_id = tag.id "
        "WHERE r.project = 'cleanRL' AND r.entity = 'local' AND json_extract(r.config, '$.env_id') = 'Hopper-v4' "
        "AND json_extract(r.config, '$.exp_name') = 'ppo' AND tag.name = '500' ORDER BY r.id"
    ).fetchall()
    assert len(found) == 3
    assert found[0][:4] == (run_id, run_id, "finished", run_id)
    assert json.loads(found[0][4]) == ["local", "cleanRL", run_id]
    assert json.loads(found[0][8])["total_timesteps"] == 500
    database.close()

    run = json.loads((store / run_id / "run.json").read_text())
    assert set(run) == {*"id name state url project entity config tags path user".split()}
    assert run["tags"] == ["500"] and run["user"]["username"] == "local"
    rows = list(csv.DictReader((store / run_id / "run_df.csv").read_text().splitlines()))
    assert [row["global_step"] for row in rows] == ["100", "200", "300", "400", "500"]
    assert [row["charts/avg_episodic_return"] for row in rows] == ["1.5", "2.5", "", "4.5", "6.5"]
    assert all(float(row["_runtime"]) >= 0 for row in rows)

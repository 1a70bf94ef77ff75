"""The results of runs: from their folders, and as CSV files of some kB each, which keep them where folders are too big.

    # {"args": {...}, "versions": {...}, "commit": "...", "run": "...", "start_time": ..., "sha256": "..."}
    global_step,seconds,episodes,episodic_return,avg_episodic_return,SPS,eval_episodic_return

A row stands for a window of steps, about 100 of them in a run: its last step and the seconds until then, the episodes
that ended in it and their mean return, and what was logged at its last step; empty where there is none. Windows end at
each evaluation, and where the run's last 100 episodes begin, so that its returns are exact, to six digits.
"""

import csv
import glob
import hashlib
import io
import json
import logging
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_utils import untrusted
from cleanrl_utils.errors import usage_error
from cleanrl_utils.events import MAX_FOLDER_BYTES
from cleanrl_utils.files import write_file
from cleanrl_utils.untrusted_json import parse_float, parse_int, parse_json

NUM_EPISODES = 100  # a run's training return is the mean of so many, its last ones
NUM_WINDOWS = 100  # of a thinned run
MAX_MODEL_SIZE = 2**30  # bytes
MAX_RESULT_SIZE = 4 * 2**20  # bytes
# What the report is made of, by column; there a run's values are finite and lie within its budget.
TAGS = {
    "episodes": "charts/episodes",
    "episodic_return": "charts/episodic_return",
    "avg_episodic_return": "charts/avg_episodic_return",
    "SPS": "charts/SPS",
    "eval_episodic_return": "eval/episodic_return",
}
COLUMNS = ["global_step", "seconds", *TAGS]
MEASURES = ("training", "final evaluation", "best evaluation")
# Arguments with such a word in their name stay where the run was made, as do all values that might be paths.
PRIVATE_WORDS = set("address dir entity file folder host key password path resume secret token url user".split())


@dataclass(frozen=True)
class Run:
    path: str
    name: str
    config: dict
    start_time: float
    scalars: dict[str, dict[int, float]]  # tag -> global step -> value
    wall_times: dict[int, float]  # global step -> seconds since the start
    versions: dict[str, str]  # of the packages that trained it, empty if it kept no model
    commit: str = ""  # empty if it was not recorded

    @property
    def key(self) -> tuple[str, str, int, int]:
        return tuple(self.config[name] for name in ("exp_name", "env_id", "total_timesteps", "seed"))

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def num_episodes(self) -> int:
        return round(sum(self.scalars["charts/episodes"].values()))

    @property
    def training_return(self) -> float:
        return last_episodes_mean(self.scalars["charts/episodes"], self.scalars["charts/episodic_return"], NUM_EPISODES)

    @property
    def evaluation_return(self) -> float:
        """nan if the run was not evaluated."""
        return last_value(self.scalars.get("eval/episodic_return", {}))

    @property
    def steps_per_second(self) -> float:
        return last_value(self.scalars.get("charts/SPS", {}))


@dataclass(frozen=True)
class Group:
    """The seeds of one experiment in one environment with one budget: a row of the table, a line of the figure."""

    exp_name: str
    env_id: str
    total_timesteps: int
    runs: tuple[Run, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.exp_name, self.env_id, self.total_timesteps

    @property
    def training_returns(self) -> np.ndarray:
        return np.array([run.training_return for run in self.runs])

    @property
    def evaluation_returns(self) -> np.ndarray:
        return np.array([run.evaluation_return for run in self.runs])

    @property
    def best_evaluation_returns(self) -> np.ndarray:
        """[num_seeds], at that step with the highest mean at which every seed was evaluated; nan if there is just one.

        That is how tianshou quotes its results: the maximum, over the training, of the mean over the seeds.
        """
        evaluations = [run.scalars.get("eval/episodic_return", {}) for run in self.runs]
        steps = sorted(set.intersection(*map(set, evaluations)))
        if len(steps) < 2:
            return np.full(len(self.runs), np.nan)
        returns = np.array([[values[step] for step in steps] for values in evaluations])  # [num_seeds, num_steps]
        return returns[:, returns.mean(0).argmax()]

    def returns(self, measure: str) -> np.ndarray:
        """[num_seeds] of one of MEASURES, nan where it is not known."""
        return {
            "training": self.training_returns,
            "final evaluation": self.evaluation_returns,
            "best evaluation": self.best_evaluation_returns,
        }[measure]


class LeftOut(Exception):
    """Why a run is not in the report."""


def known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def last_value(values: dict[int, float]) -> float:
    return values[max(values)] if values else math.nan


def last_episodes_mean(counts: dict[int, float], means: dict[int, float], num_episodes: float) -> float:
    """Mean return of the last num_episodes, from each step's number of episodes and their mean (fewer: of all).

    The oldest step needed counts only in part, by its mean: which of its episodes ended last was not recorded.
    """
    total, counted = 0.0, 0.0
    for step in sorted(means, reverse=True):
        count = min(counts.get(step, 0.0), num_episodes - counted)
        total += count * means[step]
        counted += count
    return total / counted if counted else math.nan


def format_steps(steps: int) -> str:
    for unit, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if steps >= unit and steps % (unit // 10) == 0:
            return f"{steps / unit:g}{suffix}"
    return f"{steps:,}"


# ---------------------------------------------------------------- folders of runs
def find_runs(paths: tuple[str, ...]) -> list[str]:
    """The folders and CSV files in these folders, and those paths that are runs or files themselves, each once."""
    found = {}
    for path in paths:
        if not os.path.exists(path):
            usage_error(f"no folder {path}: give the one that holds the runs, e.g. --runs runs")
        if not os.path.isdir(path) or os.path.exists(os.path.join(path, "args.json")):
            members = [path]
        else:
            members = sorted(entry.path for entry in os.scandir(path) if entry.is_dir() or entry.name.endswith(".csv"))
        for member in members:
            found[os.path.realpath(member)] = member
    return list(found.values())


def read_json(path: str) -> dict:
    if os.path.exists(path) and not os.path.isfile(path):
        raise LeftOut(f"{os.path.basename(path)} is not a file")
    try:
        content = untrusted.read_json(path)
    except (OSError, ValueError) as error:
        raise LeftOut(f"{os.path.basename(path)} can't be read ({error.__class__.__name__})") from error
    if not isinstance(content, dict):
        raise LeftOut(f"{os.path.basename(path)} holds no names and values")
    return content


def read_config(path: str) -> dict:
    config = read_json(os.path.join(path, "args.json"))
    check_config(config, "args.json")
    return config


def check_config(config: dict, place: str) -> None:
    for name, kind in {"env_id": str, "exp_name": str, "seed": int, "total_timesteps": int}.items():
        if type(config.get(name)) is not kind:
            raise LeftOut(f"{place} has no {name}")
        if not str(config[name]).isprintable():
            raise LeftOut(f"{place} has {config[name]!r:.200} for {name}")
    if "/" in config["exp_name"]:
        raise LeftOut(f"{place} has {config['exp_name']!r:.200} for exp_name, which names files")


def check_event_files(path: str) -> None:
    """Raises LeftOut where TensorBoard's reader would wait for ever, or fill the memory."""
    entries = [entry for entry in os.scandir(path) if "tfevents" in entry.name]
    for entry in entries:
        if not os.path.isfile(entry.path):
            raise LeftOut(f"{entry.name} is not a file")
    if sum(entry.stat().st_size for entry in entries) > MAX_FOLDER_BYTES:
        raise LeftOut(f"its event files hold more than {MAX_FOLDER_BYTES >> 30} GiB")


def check_scalars(scalars: dict[str, dict[int, float]], total_timesteps: int) -> None:
    """Raises LeftOut for what no run writes, in a damaged file that its checksums let pass. A budget of 0: any step."""
    budget = total_timesteps or math.inf
    for tag in TAGS.values():
        for step, value in scalars.get(tag, {}).items():
            if not (0 < step <= budget and math.isfinite(value)):
                raise LeftOut(f"damaged: {tag} is {value:g} at step {step:,} of {total_timesteps:,}")


def check_finished(scalars: dict[str, dict[int, float]], config: dict) -> list[int]:
    """The steps of each iteration, or of each row if the run is thinned; raises LeftOut if it has not finished."""
    if not scalars.get("charts/episodes"):
        raise LeftOut("it has no charts/episodes")
    # The steps of a last, incomplete call of so many iterations are never taken: finished means that none would fit.
    steps = sorted(scalars["charts/episodes"])
    iteration_steps = [end - start for start, end in pairwise([0, *steps])]
    iterations_per_call = config.get("iterations_per_call", 1)
    if not isinstance(iterations_per_call, int):
        raise LeftOut("its iterations_per_call is no number")
    if steps[-1] + min(iteration_steps) * iterations_per_call <= config["total_timesteps"]:
        raise LeftOut(f"unfinished or damaged: ends at step {steps[-1]:,} of {config['total_timesteps']:,}")
    for tag in ("charts/episodic_return", "charts/avg_episodic_return"):
        if not scalars.get(tag):
            raise LeftOut(f"it has no {tag}: no episode ended")
    return iteration_steps


def read_run(path: str, config: dict, commits: dict[str, str] | None = None) -> Run:
    """The run in a folder; raises LeftOut if it is damaged or has not finished."""
    logging.getLogger("tensorboard").setLevel(logging.CRITICAL)  # it warns of a damaged record; so do we, in one line
    events = EventAccumulator(path, size_guidance={"scalars": 0, "tensors": 1, "images": 1})
    try:
        check_event_files(path)
        events.Reload()
    except LeftOut:
        raise
    except Exception as error:  # a damaged file can fail anywhere in the protobuf parser
        raise LeftOut(f"its event file can't be read ({error.__class__.__name__})") from error
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    check_scalars(scalars, config["total_timesteps"])
    iteration_steps = check_finished(scalars, config)
    if min(iteration_steps) < max(iteration_steps):
        end = sorted(scalars["charts/episodes"])[iteration_steps.index(max(iteration_steps))]
        raise LeftOut(f"damaged: iterations before step {end:,} are missing")
    start_time, name = events.FirstEventTimestamp(), os.path.basename(os.path.abspath(path))
    return Run(
        path=path,
        name=name,
        config=config,
        start_time=start_time,
        scalars=scalars,
        wall_times={e.step: e.wall_time - start_time for e in events.Scalars("charts/episodes")},
        versions=read_versions(os.path.join(path, f"{config['exp_name']}.cleanrl_model")),
        commit=(commits or {}).get(name, ""),
    )


def read_versions(model_path: str) -> dict[str, str]:
    """The package versions that a saved model names; none if it is damaged."""
    try:
        versions = untrusted.unpack(untrusted.read_file(model_path, MAX_MODEL_SIZE))["versions"]
        return {name: str(version) for name, version in versions.items() if f"{name}{version}".isprintable()}
    except Exception:  # msgpack and NumPy each raise their own on damaged bytes
        return {}


def read_commits(log_folder: str) -> dict[str, str]:
    """The commit of each run, by the run's name, from the records that cleanrl_utils.benchmark keeps, if any."""
    commits = {}
    for path in glob.glob(os.path.join(glob.escape(log_folder), "*.json")):
        with suppress(LeftOut):
            record = read_json(path)
            run_dirs, commit = record.get("run_dirs"), record.get("git_describe")
            if isinstance(run_dirs, list) and isinstance(commit, str):
                commits |= {os.path.basename(run_dir): commit for run_dir in run_dirs if isinstance(run_dir, str)}
    return commits


# ---------------------------------------------------------------- thinned results
def step_windows(run: Run) -> list[list[int]]:
    """The run's steps in about NUM_WINDOWS windows, which end where the text at the top of this file says.

    The steps at which the windows end are their own windows: what is thinned once stays as it is.
    """
    counts, means, evaluations = (run.scalars.get(TAGS[x], {}) for x in ("episodes", "episodic_return", COLUMNS[-1]))
    steps = sorted(counts.keys() | evaluations.keys())
    ended, oldest = 0.0, steps[0]  # the oldest step with one of the last NUM_EPISODES
    for step in sorted(means, reverse=True):
        ended, oldest = ended + counts.get(step, 0.0), step
        if ended >= NUM_EPISODES:
            break
    windows = [[steps[0]]]
    for last, step in pairwise(steps):
        same = math.ceil(last * NUM_WINDOWS / steps[-1]) == math.ceil(step * NUM_WINDOWS / steps[-1])
        if same and last not in evaluations and oldest not in (last, step):
            windows[-1].append(step)
        else:
            windows.append([step])
    return windows


def thinned_rows(run: Run) -> list[dict[str, int | float]]:
    """By column, a row for each window; nan where there is no value."""
    counts, means = run.scalars["charts/episodes"], run.scalars["charts/episodic_return"]
    rows = []
    for window in step_windows(run):
        end = window[-1]
        row = {"global_step": end, "seconds": run.wall_times.get(end, math.nan)}
        row |= {column: run.scalars.get(tag, {}).get(end, math.nan) for column, tag in TAGS.items()}
        row["episodes"] = round(sum(counts.get(step, 0.0) for step in window))
        row["episodic_return"] = last_episodes_mean(counts, {s: means[s] for s in window if s in means}, math.inf)
        rows.append(row)
    return rows


def format_value(value: int | float) -> str:
    return str(value) if isinstance(value, int) else "" if math.isnan(value) else f"{value:.6g}"


def is_private(name: str, value) -> bool:
    text = "" if name in ("env_id", "exp_name") else json.dumps(value, ensure_ascii=False)
    return bool(PRIVATE_WORDS & set(name.split("_"))) or any(c in text for c in "/\\~@")


def digest(record: dict, rows: str) -> str:
    return hashlib.sha256(f"{json.dumps(record)}\n{rows}".encode()).hexdigest()


def stored_result(run: Run) -> str:
    """The CSV file of a run, which holds neither secrets nor paths."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([format_value(row[column]) for column in COLUMNS] for row in thinned_rows(run))
    record = {
        "args": {name: value for name, value in run.config.items() if not is_private(name, value)},
        "versions": run.versions,
        "commit": run.commit,
        "run": run.name,
        "start_time": run.start_time,
    }
    return f"# {json.dumps(record | {'sha256': digest(record, buffer.getvalue())})}\n{buffer.getvalue()}"


def save_results(folder: str, runs: list[Run]) -> None:
    """A file for each, {env_id}__{exp_name}__{seed}__{budget}.csv; other files of the folder stay as they are."""
    os.makedirs(folder, exist_ok=True)
    for run in runs:
        exp_name, env_id, total_timesteps, seed = run.key
        budget = format_steps(total_timesteps).replace(",", "")
        name = f"{env_id.replace('/', '-')}__{exp_name}__{seed}__{budget}.csv"
        write_file(os.path.join(folder, name), stored_result(run).encode())


def read_stored(path: str) -> Run:
    """The run of a CSV file; raises LeftOut if it is not as `stored_result` writes it."""
    try:
        first, rows = untrusted.read_file(path, MAX_RESULT_SIZE).decode().split("\n", 1)
        record = parse_json(first.removeprefix("# "))
        config, versions, commit, name = (record[key] for key in ("args", "versions", "commit", "run"))
        if record.pop("sha256") != digest(record, rows):
            raise LeftOut("damaged: its lines don't match its checksum")
        lines = list(csv.reader(io.StringIO(rows), strict=True))
        if lines[0] != COLUMNS:
            raise LeftOut(f"its second line is not {','.join(COLUMNS)}")
        steps = [parse_int(line[0]) for line in lines[1:]]
        columns = {
            column: {step: parse_float(line[i]) for step, line in zip(steps, lines[1:], strict=True) if line[i]}
            for i, column in enumerate(COLUMNS[1:], start=1)
        }
        start_time = parse_float(str(record["start_time"]))
    except OSError as error:
        raise LeftOut(f"it can't be read ({error.strerror or error.__class__.__name__})") from error
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise LeftOut(f"not a stored result, or damaged ({error.__class__.__name__})") from error
    texts = [commit, name, *versions, *versions.values()] if isinstance(versions, dict) else [None]
    if not isinstance(config, dict) or not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise LeftOut("damaged: its first line holds other values than a run has")
    if name in ("", ".", "..") or "/" in name:
        raise LeftOut(f"damaged: {name!r:.200} names no run")
    check_config(config, "its first line")
    if steps != sorted(set(steps)):
        raise LeftOut("damaged: its steps don't ascend")
    scalars = {tag: columns[column] for column, tag in TAGS.items() if columns[column]}
    check_scalars(scalars, config["total_timesteps"])
    check_finished(scalars, config)
    return Run(path, name, config, start_time, scalars, columns["seconds"], versions, commit)


# ---------------------------------------------------------------- what was asked for
def read_runs(
    paths: tuple[str, ...], exp_names: tuple[str, ...] = (), env_ids: tuple[str, ...] = (), log_folder: str = "logs"
) -> tuple[list[Run], list[str]]:
    """The finished runs of these experiments and environments (none named: all), and a line about each left out."""
    runs, lines, commits = {}, [], read_commits(log_folder)
    for path in find_runs(paths):
        try:
            stored = None if os.path.isdir(path) else read_stored(path)
            config = stored.config if stored else read_config(path)
            if exp_names and config["exp_name"] not in exp_names or env_ids and config["env_id"] not in env_ids:
                continue
            run = stored or read_run(path, config, commits)
        except LeftOut as reason:
            lines.append(f"left out {path}: {reason}")
            continue
        if run.key in runs:
            older, run = sorted((runs[run.key], run), key=lambda run: (run.start_time, os.path.isdir(run.path)))
            reason = "it is also" if older.name == run.name else "the same was run again"
            lines.append(f"left out {older.path}: {reason} in {run.path}")
        runs[run.key] = run
    return list(runs.values()), lines


def group_runs(runs: list[Run], env_ids: tuple[str, ...]) -> list[Group]:
    """By environment (in the order of env_ids, if given), experiment and budget; seeds in order."""

    def order(key):
        exp_name, env_id, total_timesteps = key
        return env_ids.index(env_id) if env_ids else 0, env_id, exp_name, total_timesteps

    members = {}
    for run in sorted(runs, key=lambda run: run.seed):
        members.setdefault(run.key[:3], []).append(run)
    return [Group(*key, runs=tuple(members[key])) for key in sorted(members, key=order)]

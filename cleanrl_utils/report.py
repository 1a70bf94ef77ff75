"""Tables, learning curves and a regression check from the runs on this machine.

    python -m cleanrl_utils.report --runs runs --output docs/benchmark/ppo --references benchmark/references.csv
    python -m cleanrl_utils.report --env-ids Hopper-v4 --references benchmark/references.csv --check-sources tianshou
    python -m cleanrl_utils.report --runs runs --check benchmark/regression.csv --check-results benchmark/results
    python -m cleanrl_utils.report --runs runs --save-results benchmark/results

The first writes ppo.md (table), ppo.png and ppo.svg (curves) and ppo.csv (their data). The next two are the regression
check: exit code 1 if the mean return over the seeds lies below its minimum, which for a published result, or one that
was stored earlier, is

    its mean - 2 s / sqrt(n), with n seeds and s the larger of two standard deviations, the seeds' and the result's

(two standard errors below it), and for the project's own minima what the file says. With --output, the check's table
is written too. The last keeps each run as a small file, which --runs takes as well. A run counts once it has finished;
of two that differ in nothing, the newer does.
"""

import csv
import io
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

import numpy as np
import tyro
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.files import write_file
from cleanrl_utils.results import (
    MEASURES,
    NUM_EPISODES,
    Group,
    format_steps,
    format_value,
    group_runs,
    known,
    read_runs,
    save_results,
    thinned_rows,
)
from cleanrl_utils.rlops import write_openrlbenchmark_store

NUM_RESAMPLES = 10_000  # of the bootstrap
RANDOM = "random"  # the source of the random policy's returns in the file of references
STORED = "stored results"
OUTPUT_ENDINGS = (".md", ".png", ".svg", ".csv")


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...] = ("runs",)
    """folders of runs or of `--save-results` (or single ones)"""
    exp_names: tuple[str, ...] = ()
    """only these experiments; none named: all"""
    env_ids: tuple[str, ...] = ()
    """only these environments, in this order; none named: all, by name"""
    output: str | None = None
    """where to write NAME.md, NAME.png, NAME.svg and NAME.csv, without an ending; not given: the table is printed"""
    references: str | None = None
    """published results to compare with: a csv file of env_id,source,budget,mean,std,note,measure"""
    check_sources: tuple[str, ...] = ()
    """sources in `--references` that returns must not fall below, but for their spread; exit code 1 if one does"""
    check: str | None = None
    """minimal returns: a csv file of env_id,exp_name,total_timesteps,minimum,source,measure; exit code 1 below one"""
    check_results: str | None = None
    """results that returns must not fall below, but for their spread: a folder of `--save-results`, or of runs"""
    log_folder: str = "logs"
    """the benchmark's `--log-folder`, which tells the commits of the runs, if there is one"""
    save_results: str | None = None
    """the folder in which to write a small csv file for each run, which `--runs` takes as it takes the runs"""
    openrlbenchmark_store: str | None = None
    """the `openrlbenchmark/dataset` folder in which to write the runs for `openrlbenchmark.rlops --offline`"""
    wandb_entity: str = "local"
    """openrlbenchmark's `we`: the first folder in its store"""
    wandb_project_name: str = "cleanRL"
    """openrlbenchmark's `wpn`: the second folder in its store"""


# ---------------------------------------------------------------- references and minima
@dataclass(frozen=True)
class Reference:
    env_id: str
    source: str
    total_timesteps: int
    mean: float
    std: float  # nan if not published
    note: str
    measure: str = "training"  # one of MEASURES


@dataclass(frozen=True)
class Minimum:
    env_id: str
    exp_name: str
    total_timesteps: int
    minimum: float  # nan if there is nothing to compare
    source: str
    measure: str = "training"
    published: str = "-"


def parse_budget(text: str) -> int:
    """1M, 1.5M, 500k or a plain number of steps."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    return round(float(text.replace("_", "") if unit == 1 else text[:-1]) * unit)


def read_csv(path: str, columns: dict[str, Callable]) -> list[list]:
    """The rows' values of these columns, each converted by its function."""
    try:
        with open(path, newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f)
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, ValueError, csv.Error) as error:
        usage_error(f"can't read {path}: {getattr(error, 'strerror', None) or 'not a csv file'}")
    missing = [name for name in columns if name not in (reader.fieldnames or []) and name != "measure"]
    if missing:
        usage_error(f"{path}: its first line lacks {', '.join(missing)}; it should read {','.join(columns)}")
    rows = []
    for line_number, line in lines:
        row = []
        for name, convert in columns.items():
            text = (line.get(name) or "").strip()
            try:
                row.append(convert(text))
            except (ValueError, OverflowError):
                problem = "none of " + ", ".join(MEASURES) if name == "measure" else "not a number"
                usage_error(f"{path}, line {line_number}: {name} is {text!r}, which is {problem}")
        rows.append(row)
    return rows


def parse_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError  # compared with such a one, everything passes
    return number


def parse_measure(text: str) -> str:
    return MEASURES[MEASURES.index(text or "training")]


def read_references(path: str) -> list[Reference]:
    def optional(text):
        return parse_number(text) if text else math.nan

    columns = {"env_id": str, "source": str, "budget": parse_budget, "mean": parse_number, "std": optional, "note": str}
    return [Reference(*row) for row in read_csv(path, columns | {"measure": parse_measure})]


def read_minima(path: str) -> list[Minimum]:
    columns = {"env_id": str, "exp_name": str, "total_timesteps": parse_budget, "minimum": parse_number, "source": str}
    return [Minimum(*row) for row in read_csv(path, columns | {"measure": parse_measure})]


def lowest_return(reference: Reference, returns: np.ndarray) -> float:
    """The lowest mean of these returns, one per seed, that is no regression (see the top of this file)."""
    std = returns.std(ddof=1) if len(returns) > 1 else 0.0
    return reference.mean - 2 * np.nanmax([std, reference.std]) / math.sqrt(len(returns))


def reference_minimum(reference: Reference, group: Group) -> Minimum:
    returns = known(group.returns(reference.measure))
    limit = lowest_return(reference, returns) if len(returns) else math.nan
    published = format_mean_std(reference.mean, reference.std)
    key = group.env_id, group.exp_name, group.total_timesteps
    return Minimum(*key, limit, reference.source, reference.measure, published)


def no_reference(group: Group, source: str) -> Minimum:
    return Minimum(group.env_id, group.exp_name, group.total_timesteps, math.nan, source)


def published_minima(references: list[Reference], groups: list[Group], sources: tuple[str, ...]) -> list[Minimum]:
    """Of each group for each of the sources, and one of nan if none of them published its environment and budget."""
    minima = []
    for group in groups if sources else ():
        found = [ref for source, ref in matching(references, group).items() if source in sources]
        minima += [reference_minimum(ref, group) for ref in found] or [no_reference(group, ", ".join(sources))]
    return minima


def stored_minima(stored: list[Group], groups: list[Group]) -> list[Minimum]:
    """Of each group for each measure that the stored results of the same experiment have too; one of nan if none do."""
    by_key, minima = {group.key: group for group in stored}, []
    for group in groups:
        found = []
        for measure in ("training", "final evaluation") if group.key in by_key else ():
            returns = known(by_key[group.key].returns(measure))
            if len(returns) and len(known(group.returns(measure))):
                std = returns.std(ddof=1) if len(returns) > 1 else math.nan
                found.append(Reference(group.env_id, STORED, group.total_timesteps, returns.mean(), std, "", measure))
        minima += [reference_minimum(ref, group) for ref in found] or [no_reference(group, STORED)]
    return minima


def check_minima(minima: list[Minimum], groups: list[Group]) -> tuple[str, bool]:
    """The regression check as a Markdown table, and whether all is well. A group that is missing is not."""
    by_key = {(group.env_id, group.exp_name, group.total_timesteps): group for group in groups}
    rows, all_pass = [], True
    for minimum in minima:
        group = by_key.get((minimum.env_id, minimum.exp_name, minimum.total_timesteps))
        returns = known(group.returns(minimum.measure)) if group else np.array([])
        if group is None:
            result = "**FAIL**: no finished run"
        elif math.isnan(minimum.minimum):
            result = "no reference" if minimum.published == "-" else f"no {minimum.measure} to compare"
        elif not len(returns):
            result = f"**FAIL**: no {minimum.measure}"
        else:
            result = "pass" if returns.mean() >= minimum.minimum else "**FAIL**"
        all_pass = all_pass and "FAIL" not in result
        rows.append(
            [
                minimum.env_id,
                f"`{minimum.exp_name}`",
                format_steps(minimum.total_timesteps),
                "-" if group is None else len(group.runs),
                minimum.measure,
                "-" if group is None else format_returns(group.returns(minimum.measure)),
                minimum.source,
                minimum.published,
                format_number(minimum.minimum),
                result,
            ]
        )
    header = ["Environment", "Experiment", "Steps", "Seeds", "Measure", "Return", "Source", "Reference"]
    return markdown_table([*header, "Minimum", "Result"], rows), all_pass


# ---------------------------------------------------------------- interquartile mean
def interquartile_mean(samples: list[np.ndarray]) -> tuple[float, float, float]:
    """IQM over the samples, one per task and each [num_seeds], and the ends of its 95% interval, nan for one seed.

    As rliable's `aggregate_iqm` and `get_interval_estimates` define them (that needs pandas below 3): the mean of all
    scores without the lowest and the highest quarter; percentiles of a bootstrap that resamples each task's seeds.
    """
    from scipy.stats import bootstrap, trim_mean

    def statistic(*samples, axis):
        return trim_mean(np.concatenate(samples, axis), 0.25, axis)

    estimate = statistic(*samples, axis=-1)
    if min(map(len, samples)) < 2:
        return estimate, math.nan, math.nan
    interval = bootstrap(
        samples, statistic, n_resamples=NUM_RESAMPLES, batch=1000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return estimate, interval.low, interval.high


def scored_returns(group: Group) -> tuple[np.ndarray, str]:
    """[num_seeds], of the final evaluation, or of the training if not every seed was evaluated; and which it is."""
    measure = "training" if np.isnan(group.evaluation_returns).any() else "final evaluation"
    return group.returns(measure), measure


def format_interval(estimate: float, low: float, high: float) -> str:
    interval = "" if math.isnan(low) else f" [{format_number(low, estimate)}, {format_number(high, estimate)}]"
    return format_number(estimate) + interval


def normalised_returns(group: Group, references: list[Reference]) -> np.ndarray | None:
    """[num_seeds], 0 for the random policy and 1 for the best published result of the budget; None if one lacks."""
    zero = [ref.mean for ref in references if (ref.source, ref.env_id) == (RANDOM, group.env_id)]
    one = max((ref.mean for ref in matching(references, group).values()), default=-math.inf)
    return (scored_returns(group)[0] - zero[0]) / (one - zero[0]) if zero and one > zero[0] else None


def aggregate_table(groups: list[Group], references: list[Reference]) -> str:
    """A row for each experiment and budget; empty if none has a task with both references."""
    rows = []
    for exp_name, total_timesteps in distinct((group.exp_name, group.total_timesteps) for group in groups):
        own = [group for group in groups if (group.exp_name, group.total_timesteps) == (exp_name, total_timesteps)]
        scores = {group.env_id: normalised_returns(group, references) for group in own}
        samples = [score for score in scores.values() if score is not None]
        left_out = [env_id for env_id, score in scores.items() if score is None]
        rows.append(
            [
                f"`{exp_name}`",
                format_steps(total_timesteps),
                len(samples),
                format_interval(*interquartile_mean(samples)) if samples else "-",
                ", ".join(left_out) or "-",
            ]
        )
    header = ["Experiment", "Steps", "Tasks", "Normalised IQM [95% CI]", "Tasks left out"]
    return markdown_table(header, rows) if any(row[2] for row in rows) else ""


# ---------------------------------------------------------------- Markdown
def decimals(size: float) -> int:
    return 0 if abs(size) >= 100 else 1 if abs(size) >= 10 else 2


def format_number(x: float, like: float | None = None) -> str:
    """With as many decimals as suit the size of `like` (default: of x itself)."""
    return "-" if math.isnan(x) else f"{x:,.{decimals(x if like is None else like)}f}"


def format_mean_std(mean: float, std: float) -> str:
    return format_number(mean) + ("" if math.isnan(std) else f" ± {format_number(std, like=mean)}")


def format_returns(values: np.ndarray) -> str:
    """Mean and sample standard deviation over the seeds that have a value, and how many if some have none."""
    returns = known(values)
    if not len(returns):
        return "-"
    std = returns.std(ddof=1) if len(returns) > 1 else math.nan
    missing = f" ({len(returns)} of {len(values)})" if len(returns) < len(values) else ""
    return format_mean_std(returns.mean(), std) + missing


def format_compared(reference: Reference | None, group: Group) -> str:
    """The published result, and in brackets by how much the group's of the same measure is higher."""
    if reference is None:
        return "-"
    returns = known(group.returns(reference.measure))
    difference = f"{returns.mean() - reference.mean:+,.{decimals(reference.mean)}f}" if len(returns) else "-"
    return f"{format_mean_std(reference.mean, reference.std)} ({difference})"


def markdown_table(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def distinct(values) -> list:
    return list(dict.fromkeys(values))


def matching(references: list[Reference], group: Group) -> dict[str, Reference]:
    """By source."""
    key = (group.env_id, group.total_timesteps)
    return {ref.source: ref for ref in references if (ref.env_id, ref.total_timesteps) == key}


def matching_sources(references: list[Reference], groups: list[Group]) -> list[str]:
    """Those that have a result to show, in the file's order."""
    shown = {source for group in groups for source in matching(references, group)}
    return [source for source in distinct(ref.source for ref in references) if source in shown]


def row_names(groups: list[Group]) -> tuple[list[str], list[list[str]]]:
    """The first columns of a table and of its rows: the experiment too, if there are several."""
    several = len({group.exp_name for group in groups}) > 1
    header = ["Environment", *(["Experiment"] if several else []), "Steps"]
    names = [[g.env_id, *([f"`{g.exp_name}`"] if several else []), format_steps(g.total_timesteps)] for g in groups]
    return header, names


def results_table(groups: list[Group]) -> str:
    header, names = row_names(groups)
    header += ["Seeds", "Training return", "Evaluation return", "Best evaluation", "IQM [95% CI]"]
    rows = []
    for group, name in zip(groups, names, strict=True):
        mean = group.training_returns.mean()
        scores, measure = scored_returns(group)
        rows.append(
            [
                *name,
                f"{len(group.runs)} ({', '.join(str(run.seed) for run in group.runs)})",
                format_returns(group.training_returns),
                format_returns(group.evaluation_returns),
                format_returns(group.best_evaluation_returns),
                format_interval(*interquartile_mean([scores])) + (" (training)" if measure == "training" else ""),
                format_number(np.mean([run.steps_per_second for run in group.runs]), like=math.inf),
                "; ".join(format_number(value, like=mean) for value in group.training_returns),
            ]
        )
    return markdown_table([*header, "Steps/s", "Each seed"], rows)


def references_table(groups: list[Group], references: list[Reference]) -> str:
    """Empty if nothing was published for these groups."""
    header, names = row_names(groups)
    sources = matching_sources(references, groups)
    rows = []
    for group, name in zip(groups, names, strict=True):
        found = matching(references, group)
        rows.append([*name, *(format_compared(found.get(source), group) for source in sources)])
    return markdown_table([*header, *sources], rows) if sources else ""


def check_text(table: str, minima: list[Minimum]) -> str:
    text = "The mean return over the seeds must not lie below the minimum"
    if any(minimum.published != "-" for minimum in minima):
        text += (
            ": for a published or stored reference, its mean - 2 s / √n, with n seeds and s the larger of two standard "
            "deviations, the seeds' and the reference's"
        )
    return f"Regression check. {text}.\n\n{table}"


def command_line(args: Args) -> str:
    """The command that gives these arguments."""
    words = ["python", "-m", "cleanrl_utils.report"]
    for field in fields(args):
        value = getattr(args, field.name)
        if field.default is MISSING or value != field.default:
            words += ["--" + field.name.replace("_", "-"), *(value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def current_commit() -> str:
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "--short", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def report_header(args: Args, groups: list[Group], references: list[Reference]) -> str:
    runs = [run for group in groups for run in group.runs]
    lines = ["Generated by", "", "```bash", command_line(args), "```", ""]
    for exp_name in distinct(group.exp_name for group in groups):
        own = [group for group in groups if group.exp_name == exp_name]
        steps = " and ".join(format_steps(n) for n in sorted({group.total_timesteps for group in own}))
        seeds = ", ".join(map(str, sorted({run.seed for group in own for run in group.runs})))
        lines.append(f"- **Experiment**: `{exp_name}`, {steps} steps, seeds {seeds}.")
    lines.append(
        f"- **Training return**: raw return of the stochastic policy while it learns: the mean over seeds of the mean "
        f"of each run's last {NUM_EPISODES} episodes (the last column), ± the sample standard deviation over seeds "
        "(ddof = 1)."
    )
    short = [
        f"{g.env_id} seed {r.seed} ({r.num_episodes})" for g in groups for r in g.runs if r.num_episodes < NUM_EPISODES
    ]
    if short:
        lines.append(
            f"- **Fewer than {NUM_EPISODES} episodes ended in**: {', '.join(short)}: the mean is of all of them."
        )
    evaluated = [run for run in runs if not math.isnan(run.evaluation_return)]
    episodes = distinct(run.config.get("eval_episodes", "?") for run in evaluated)
    lines.append(
        f"- **Evaluation return**: raw return of deterministic actions after training, with frozen statistics: the "
        f"mean over seeds of each run's mean of {' or '.join(map(str, episodes))} episodes, ± the same deviation."
        if evaluated
        else "- **Evaluation return**: these runs were not evaluated."
    )
    if any(not math.isnan(group.best_evaluation_returns[0]) for group in groups):
        lines.append(
            "- **Best evaluation**: the highest, over the steps at which every seed was evaluated in training, of the "
            "mean over seeds of that return, ± the same deviation over seeds at that step: so tianshou quotes its "
            "results. As a maximum over noise it lies above what the policy at that step is worth."
        )
    lines.append(
        "- **IQM**: interquartile mean over seeds of the evaluation return (of the training return, and marked so, if "
        "a seed was not evaluated), with its 95% interval, by rliable's definitions: without the lowest and the "
        f"highest quarter, rounded down; percentiles of {NUM_RESAMPLES:,} stratified bootstrap samples."
    )
    lines.append("- **Steps/s**: environment steps per second over a whole run, compilation included; mean over seeds.")
    sources = matching_sources(references, groups)
    if sources:
        lines.append(
            "- **References** (second table): published mean ± spread at the same budget, in brackets our return of "
            "the same measure minus it (-: we have none)."
        )
    for source in sources:
        own, notes = [ref for ref in references if ref.source == source], {}
        for ref in own:
            if ref.note:
                notes.setdefault(ref.note, []).append(ref.env_id)
        text = "; ".join(f"{note} ({', '.join(distinct(env_ids))})" for note, env_ids in notes.items())
        lines.append(f"    - {source}, {' and '.join(distinct(ref.measure for ref in own))}{text and f': {text}'}.")
    if any(normalised_returns(group, references) is not None for group in groups):
        lines.append(
            "- **Normalised IQM** (third table): IQM over seeds and tasks together, of scores that are 0 for the "
            "random policy and 1 for the best result published for the same budget, of whatever measure; ours as in "
            "the column IQM. Tasks that lack either are left out."
        )
    packages = sorted({name for run in runs for name in run.versions})
    versions = ", ".join(
        f"{name} {' and '.join(sorted({run.versions[name] for run in runs if name in run.versions}))}"
        for name in packages
    )
    lines.append(f"- **Versions**: {versions or 'not recorded'}.")
    commits = ", ".join(sorted({run.commit for run in runs if run.commit}))
    lines.append(
        f"- **Commit**: of the runs {commits or 'not recorded'}; of this report {current_commit() or 'unknown'}."
    )
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- curves
def draw_curves(groups: list[Group], references: list[Reference]) -> Figure:
    """One panel per environment: mean over seeds, band from the lowest to the highest seed, references dashed."""
    env_ids = distinct(group.env_id for group in groups)
    several_budgets = len({group.total_timesteps for group in groups}) > 1
    labels = {
        (group.exp_name, group.total_timesteps): group.exp_name
        + (f", {format_steps(group.total_timesteps)}" if several_budgets else "")
        for group in groups
    }
    colors = dict(zip(labels, colormaps["tab10" if len(labels) <= 10 else "tab20"].colors * len(labels), strict=False))
    sources = matching_sources(references, groups)
    names = {r.source: r.source + ("" if r.measure == "training" else f" ({r.measure})") for r in references}
    ncols = min(3, len(env_ids))
    nrows = math.ceil(len(env_ids) / ncols)
    longest = max(len(text) for text in [*labels.values(), *(names[source] for source in sources)])
    entry_width = 0.6 + 0.09 * longest  # inches of a line and of its text
    width = max(3.4 * ncols, 4.6, entry_width)
    legend_ncols = min(ncols, max(1, int(width / entry_width)))
    height = 2.7 * nrows + 0.2 * math.ceil((len(labels) + len(sources)) / legend_ncols)
    figure = Figure(figsize=(width, height), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(nrows, ncols, squeeze=False).flatten()
    handles = {}
    for ax, env_id in zip(axes, env_ids, strict=False):
        ax.set_title(env_id, fontsize=11)
        for group in (group for group in groups if group.env_id == env_id):
            label, color = (of[group.exp_name, group.total_timesteps] for of in (labels, colors))
            steps, values = seed_curves(group)
            (handles[label],) = ax.plot(steps, values.mean(0), color=color, linewidth=1.6)
            ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.25, linewidth=0)
            for source, ref in matching(references, group).items():
                index = sources.index(source)
                dashes = (0, (6 - index % 3 * 2, 2))
                (handles[names[source]],) = ax.plot(
                    [0, ref.total_timesteps],
                    [ref.mean, ref.mean],
                    color=f"C{9 - index % 10}",
                    ls=dashes,
                    lw=1.2,
                    zorder=1,
                )
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.set_xlim(left=0)
        ax.set_xlabel("environment steps")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[::ncols]:
        ax.set_ylabel("episodic return")
    for ax in axes[len(env_ids) :]:
        ax.remove()
    published = [names[source] for source in sources]
    order = [label for label in handles if label not in published] + published
    lines = [handles[label] for label in order]
    figure.legend(lines, order, loc="outside lower center", ncols=legend_ncols, frameon=False, fontsize=10)
    return figure


def seed_curves(group: Group, num_points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Steps, [num_points], where every seed has a value, and the seeds' curves there, [num_seeds, num_points]."""
    curves = [sorted(run.scalars["charts/avg_episodic_return"].items()) for run in group.runs]
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    steps = np.linspace(first, last, num_points)
    return steps, np.array([np.interp(steps, *zip(*curve, strict=True)) for curve in curves])


def figure_bytes(figure: Figure, file_format: str) -> bytes:
    """The same picture gives the same bytes: no date, no random ids."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "cleanrl"}):
        figure.savefig(buffer, format=file_format, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()


def curves_csv(groups: list[Group]) -> str:
    """A thinned row per point: the average of the environments' last episodes, and the mean since the row before."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = ["global_step", "avg_episodic_return", "episodic_return"]
    writer.writerow(["exp_name", "env_id", "total_timesteps", "seed", *columns])
    for group in groups:
        for run in group.runs:
            writer.writerows([*run.key, *(format_value(row[c]) for c in columns)] for row in thinned_rows(run))
    return buffer.getvalue()


# ---------------------------------------------------------------- command
def write_report(output: str, markdown: str, groups: list[Group], references: list[Reference]) -> None:
    figure = draw_curves(groups, references)
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    write_file(output + ".csv", curves_csv(groups).encode())
    write_file(output + ".png", figure_bytes(figure, "png"))
    write_file(output + ".svg", figure_bytes(figure, "svg"))
    write_file(output + ".md", markdown.encode())


def main(args: Args) -> None:
    name = os.path.basename(args.output or "report")
    if not name or name.endswith(OUTPUT_ENDINGS):
        usage_error(f"--output {args.output}: give a name without an ending; {', '.join(OUTPUT_ENDINGS)} are added")
    references = read_references(args.references) if args.references else []
    minima = read_minima(args.check) if args.check else []
    minima = [m for m in minima if not args.env_ids or m.env_id in args.env_ids]
    minima = [m for m in minima if not args.exp_names or m.exp_name in args.exp_names]
    if args.check and not minima:
        usage_error(f"{args.check} has no minimum for what was asked: there is nothing to check")
    sources = distinct(reference.source for reference in references if reference.source != RANDOM)
    for source in args.check_sources:
        if source not in sources:
            usage_error(f"--check-sources {source}: --references has {', '.join(sources) or 'to name a file'}")

    asked_for = args.exp_names, args.env_ids, args.log_folder
    runs, left_out = read_runs(args.runs, *asked_for)
    stored, stored_left_out = read_runs((args.check_results,), *asked_for) if args.check_results else ([], [])
    for line in left_out + stored_left_out:
        warn(line)
    asked = " of " + ", ".join(args.exp_names + args.env_ids) if args.exp_names or args.env_ids else ""
    if not runs:
        usage_error(f"no finished runs{asked} in {', '.join(args.runs)}")
    groups = group_runs(runs, args.env_ids)
    names = {name for group in groups for name in (group.exp_name, group.env_id)}
    names |= {name for minimum in minima for name in (minimum.exp_name, minimum.env_id)}  # there the check fails
    without_runs = [name for name in args.exp_names + args.env_ids if name not in names]
    if without_runs:
        usage_error(f"no finished runs of {', '.join(without_runs)} in {', '.join(args.runs)}")

    published = published_minima(references, groups, args.check_sources)
    if published and all(math.isnan(minimum.minimum) for minimum in published):
        nothing = "published nothing for these runs, or only what they didn't measure: there is nothing to check"
        usage_error(f"{', '.join(args.check_sources)} {nothing}")
    remembered = stored_minima(group_runs(stored, ()), groups) if args.check_results else []
    if remembered and all(math.isnan(minimum.minimum) for minimum in remembered):
        usage_error(f"{args.check_results} has no finished run like these: there is nothing to check")

    tables = results_table(groups), references_table(groups, references), aggregate_table(groups, references)
    table = "\n".join(filter(None, tables))
    minima += published + remembered
    check_table, all_pass = check_minima(minima, groups)
    try:
        if args.output:
            markdown = f"{report_header(args, groups, references)}\n{table}\n"
            markdown += f"![Learning curves: mean over seeds, band from the lowest to the highest seed]({name}.png)\n"
            markdown += f"\n{check_text(check_table, minima)}" if minima else ""
            write_report(args.output, markdown, groups, references)
            print(f"wrote {', '.join(args.output + ending for ending in OUTPUT_ENDINGS)}")
        else:
            print(table)
        if args.save_results:
            save_results(args.save_results, runs)
            print(f"wrote {len(runs)} results to {args.save_results}")
        if args.openrlbenchmark_store:
            write_openrlbenchmark_store(args.openrlbenchmark_store, args.wandb_entity, args.wandb_project_name, runs)
            print(f"wrote {os.path.join(args.openrlbenchmark_store, args.wandb_entity, args.wandb_project_name)}")
    except OSError as error:
        usage_error(f"can't write {error.filename or args.output}: {error.strerror}")
    if minima:
        print(check_table)
    if not all_pass:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m cleanrl_utils.report", description=__doc__))

"""Searches hyperparameters with Optuna; trials that differ only in what a script's lanes may are one program.

    python -m cleanrl_utils.tuner --env-ids Hopper-v4 --num-trials 32 --population 8 --num-seeds 2 \\
        --params "learning_rate log 1e-5 1e-2" "gamma 0.9 0.999" "num_steps choice 16 32 64" \\
        -- --total-timesteps 300000

What follows `--` are arguments of the script, the same in all trials. The same command again goes on with the study;
several at a time, here or on other machines that reach its storage, share it.
"""

import difflib
import io
import math
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import time
import types
import typing
import warnings
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from cleanrl_utils.errors import usage_error
from cleanrl_utils.files import write_file
from cleanrl_utils.models import load_script

try:
    import optuna
    import sqlalchemy
except ModuleNotFoundError:
    usage_error("tuning needs Optuna: pip install '.[tune]'")
from optuna.trial import FrozenTrial, Trial, TrialState

AGGREGATIONS = {"average": np.mean, "median": np.median, "min": np.min, "max": np.max}
# What the tuner sets itself, and what only whole runs of the script do.
NOT_THE_SCRIPTS = {"env_id": "--env-ids", "seed": "--seed", "num_seeds": "--num-seeds"}
OF_WHOLE_RUNS = ("track", "capture_video", "upload_model", "eval_interval", "num_processes")


@dataclass(frozen=True)
class Args:
    script: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the training script"""
    env_ids: tuple[str, ...] = ("Hopper-v4",)
    """the environments that one set of hyperparameters is searched for"""
    target_scores: tuple[str, ...] = ()
    """for each environment "ENV_ID LOW HIGH", the returns that count as 0 and 1; several environments need them"""
    aggregation: Literal["average", "median", "min", "max"] = "average"
    """of the environments' scores, for each seed; the seeds are averaged"""
    params: tuple[str, ...] = ()
    """what is searched: "NAME LOW HIGH", "NAME log LOW HIGH" or "NAME choice VALUE VALUE ..." """
    num_trials: int = 32
    """the number of trials of the study, earlier ones and those of other processes included"""
    num_seeds: int = 2
    """the seeds of each trial, side by side"""
    population: int = 8
    """the number of trials at a time, side by side if they differ only in what the script's lanes may"""
    num_reports: int = 10
    """how often in a training the scores are reported, and trials pruned"""
    pruner: Literal["median", "halving", "none"] = "median"
    """which trials end early: below the median of those before, the lower half at each doubling, or none"""
    seed: int = 1
    """the first of the seeds to train with; the search is seeded with it too"""
    study_name: str | None = None
    """the name of the study (default: of the environments and the script); an existing one goes on"""
    storage: str | None = None
    """a file, or a database URL that many machines reach (default: tuning/STUDY_NAME/journal.log)"""


# ---------------------------------------------------------------- what is searched
@dataclass(frozen=True)
class Param:
    name: str
    kind: str  # "uniform", "log" or "choice"
    values: tuple  # low and high, or the choices

    @property
    def distribution(self) -> optuna.distributions.BaseDistribution:
        if self.kind == "choice":
            return optuna.distributions.CategoricalDistribution(self.values)
        is_int = isinstance(self.values[0], int)
        kind = optuna.distributions.IntDistribution if is_int else optuna.distributions.FloatDistribution
        return kind(*self.values, log=self.kind == "log")

    def contains(self, value) -> bool:
        if self.kind == "choice":
            return value in self.values
        return value is not None and self.values[0] <= value <= self.values[1]


def did_you_mean(name: str, names) -> str:
    return "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(name, names, n=1))


def parse_value(text: str, allowed: tuple[type, ...]):
    """The value that `text` stands for in one of the types; ValueError if in none."""
    words = {"True": True, "False": False, "None": None}
    if text in words and type(words[text]) in allowed:
        return words[text]
    for kind in (int, float, str):
        with suppress(ValueError):
            if kind in allowed and (kind is str or math.isfinite(float(text))):
                return kind(text)
    raise ValueError(text)


def parse_param(text: str, args_class: type) -> Param:
    """One of `--params`, of a field of the script's arguments."""
    hints = typing.get_type_hints(args_class)
    name, *words = text.split() or [""]
    name = name.removeprefix("--").replace("-", "_")
    if name not in hints:
        usage_error(f'--params "{text}": the script has no argument {name}{did_you_mean(name, hints)}')
    if name in (*NOT_THE_SCRIPTS, *OF_WHOLE_RUNS, "total_timesteps"):
        usage_error(f'--params "{text}": {name} is no hyperparameter to search')
    kind = words[0] if words and words[0] in ("log", "choice") else "uniform"
    words = words[kind != "uniform" :]
    allowed = typing.get_args(hints[name]) or (hints[name],)  # `float | None` is two types
    if kind != "choice" and not (allowed := tuple({int, float} & set(allowed))):
        usage_error(f'--params "{text}": {name} is no number: give "{name} choice VALUE VALUE ..."')
    try:
        values = tuple(parse_value(word, allowed) for word in words)
    except ValueError as error:
        names = " or ".join("None" if t is types.NoneType else t.__name__ for t in allowed)
        usage_error(f'--params "{text}": {error} is not of type {names}, as {name} is')
    if kind == "choice":
        if len(values) < 2 or len(set(values)) < len(values):
            usage_error(f'--params "{text}": give two or more different values')
    elif len(values) != 2 or not values[0] < values[1] or (kind == "log" and values[0] <= 0):
        above_zero = " above 0" if kind == "log" else ""
        usage_error(f'--params "{text}": give a lower and a higher bound{above_zero}')
    return Param(name, kind, values)


def parse_target_scores(args: Args) -> dict[str, tuple[float, float]]:
    """Environment -> the returns that count as 0 and 1; empty if the score is the return itself."""
    targets = {}
    for text in args.target_scores:
        try:
            env_id, *bounds = text.split()
            low, high = (parse_value(bound, (float,)) for bound in bounds)
        except ValueError:
            usage_error(f'--target-scores "{text}": give "ENV_ID LOW HIGH"')
        if env_id not in args.env_ids:
            usage_error(f'--target-scores "{text}": --env-ids has no {env_id}{did_you_mean(env_id, args.env_ids)}')
        if not low < high:
            usage_error(f'--target-scores "{text}": the first return has to be the lower one')
        targets[env_id] = (low, high)
    missing = [env_id for env_id in args.env_ids if env_id not in targets]
    if missing and (len(args.env_ids) > 1 or targets):
        examples = " ".join(f'"{env_id} LOW HIGH"' for env_id in missing)
        usage_error(f"several environments need to be scaled alike: add to --target-scores {examples}")
    return targets


def mistake(script, script_args, num_reports: int) -> str | None:
    """What the script says of these arguments, in a line; None if it takes them."""
    with redirect_stderr(io.StringIO()) as message:
        try:
            script.check_args(script_args)
        except SystemExit:
            return message.getvalue().strip().removeprefix("error: ")
    if script_args.num_iterations < num_reports:
        return f"these are {script_args.num_iterations} iterations, fewer than --num-reports {num_reports}"
    return None


def check_args(args: Args, script, fixed, params: list[Param]) -> None:
    """Ends the program (see `usage_error`) on a mistake that can be seen before anything runs."""
    for name in ("num_seeds", "population", "num_reports"):
        if getattr(args, name) < 1:
            usage_error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.num_trials < 0:
        usage_error(f"--num-trials {args.num_trials}: give 0 (only a report of the study) or more")
    if not args.env_ids or len(set(args.env_ids)) < len(args.env_ids):
        usage_error("--env-ids: name each environment once, and one at least")
    for env_id in args.env_ids:
        script.check_env_id(env_id)
    name = study_name(args)
    if not name.isprintable() or not 0 < len(name.encode()) <= 200 or "/" in name or name.startswith("."):
        usage_error(f"--study-name {name!r}: it names a folder: give 1 to 200 bytes of printable text without '/'")
    for field in fields(fixed):
        value = getattr(fixed, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if field.name in NOT_THE_SCRIPTS:
            usage_error(f"{flag} after `--`: the tuner's own {NOT_THE_SCRIPTS[field.name]} sets it")
        if field.name in OF_WHOLE_RUNS:
            usage_error(f"{flag} after `--`: a trial leaves no run; give it to the best command afterwards")
        if field.name in [param.name for param in params]:
            usage_error(f"{flag} after `--` is searched by --params too: leave one out")
    if not params:
        usage_error('nothing to search: give --params, as in --params "learning_rate log 1e-5 1e-2"')
    if len({param.name for param in params}) < len(params):
        usage_error("--params names a hyperparameter twice")
    first = {param.name: param.values[0] for param in params}
    fixed = replace(fixed, seed=args.seed, num_seeds=args.num_seeds, **first)
    if reason := mistake(script, fixed, args.num_reports):
        usage_error(reason)
    for param in params:
        for value in param.values[1:]:
            if reason := mistake(script, replace(fixed, **{param.name: value}), args.num_reports):
                usage_error(f'--params "{param.name} ...": {reason}')


# ---------------------------------------------------------------- the study
def study_name(args: Args) -> str:
    return args.study_name or f"{'_'.join(args.env_ids)}__{args.script}".replace("/", "-")


def study_folder(args: Args) -> str:
    return os.path.join("tuning", study_name(args))


class SamplerOfTrial(optuna.samplers.BaseSampler):
    """TPE, each trial's randomness made of the seed and its number: processes that share a study sample apart."""

    def __init__(self, seed: int):
        self.seed = seed

    def before_trial(self, study, trial):
        seed = int(np.random.SeedSequence([self.seed, trial.number]).generate_state(1)[0])
        # Of trials that run, it expects the worst ("constant liar"): those of a population spread out.
        self.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def infer_relative_search_space(self, study, trial):
        return self.sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study, trial, search_space):
        return self.sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        return self.sampler.sample_independent(study, trial, param_name, param_distribution)


def make_pruner(args: Args) -> optuna.pruners.BasePruner:
    if args.pruner == "median":  # the first returns tell little
        return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1 + args.num_reports // 5)
    if args.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    return optuna.pruners.NopPruner()


def open_database(url: str, attempts: int = 4) -> optuna.storages.RDBStorage:
    """Of processes that start together, each makes the tables: all but one fail, and find them at the next attempt."""
    try:
        return optuna.storages.RDBStorage(url)
    except sqlalchemy.exc.DatabaseError:
        if attempts == 1:
            raise
        time.sleep(0.5)
        return open_database(url, attempts - 1)


def open_storage(args: Args) -> optuna.storages.BaseStorage:
    path = args.storage or os.path.join(study_folder(args), "journal.log")
    try:
        if "://" in path:
            return open_database(path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    except Exception as error:  # SQLAlchemy's and its drivers' own, JSON's, the file system's
        reason = str(error).strip().partition("\n")[0]
        usage_error(f"can't open the storage {path.rpartition('@')[2]}: {type(error).__name__}, {reason}")


def open_study(args: Args, fixed, params: list[Param], targets: dict) -> optuna.Study:
    """Makes it, or goes on with the one of that name, if it is of the same question."""
    question = {
        "script": args.script,
        "env_ids": list(args.env_ids),
        "target_scores": {env_id: list(bounds) for env_id, bounds in targets.items()},
        "aggregation": args.aggregation,
        "params": {param.name: [param.kind, *param.values] for param in params},
        "num_seeds": args.num_seeds,
        "num_reports": args.num_reports,
        "seed": args.seed,
        "script_args": asdict(fixed),
    }
    study = optuna.create_study(
        storage=open_storage(args),
        study_name=study_name(args),
        sampler=SamplerOfTrial(args.seed),
        pruner=make_pruner(args),
        direction="maximize",
        load_if_exists=True,
    )
    known = study.user_attrs
    for name, value in question.items():
        if known.get(name, value) != value:
            what = "arguments after `--`" if name == "script_args" else f"--{name.replace('_', '-')}"
            usage_error(f"the study {study.study_name} has another {what}: give the same, or another --study-name")
        if name not in known:
            study.set_user_attr(name, value)
    defaults = {param.name: getattr(fixed, param.name) for param in params}
    if not study.trials and all(param.contains(defaults[param.name]) for param in params):
        study.enqueue_trial(defaults, skip_if_exists=True)  # what the search has to beat
    return study


def is_interrupted(trial: FrozenTrial) -> bool:
    """Ended by something else than itself: it doesn't count."""
    return trial.state == TrialState.FAIL and "error" not in trial.user_attrs


def counted(study: optuna.Study) -> list[FrozenTrial]:
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state != TrialState.WAITING and not is_interrupted(trial)]


def interrupt(study: optuna.Study, numbers: list[int]) -> None:
    """Those of these trials that run fail, and their hyperparameters come first when the study goes on."""
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        if trial.number in numbers:
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            study.enqueue_trial(trial.params)


def interrupt_those_of_dead_processes(study: optuna.Study) -> None:
    """What a killed process of this machine left running."""
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        host, _, pid = trial.user_attrs.get("process", "").rpartition(":")
        if host == socket.gethostname() and not is_alive(int(pid)):
            interrupt(study, [trial.number])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def ask(study: optuna.Study, args: Args, params: list[Param]) -> list[Trial]:
    """The next population; fewer at the end, and none if the study has all its trials."""
    trials = []
    while len(trials) < args.population and len(counted(study)) < args.num_trials:
        trial = study.ask({param.name: param.distribution for param in params})
        trial.set_user_attr("process", f"{socket.gethostname()}:{os.getpid()}")
        trials.append(trial)
    return trials


# ---------------------------------------------------------------- training
def train(connection, script_name: str, lanes: list, env_ids: tuple[str, ...], num_reports: int) -> None:
    """A process of its own: the environments in turns, so that each report is of the same step of them all.

    Sends returns, [num_envs, num_lanes], and whether all losses were finite, [num_lanes].
    """
    script = load_script(script_name)
    num_devices = script.start_jax(lanes[0]).num_devices
    finite = np.ones(len(lanes), bool)
    states = []
    for env_id in env_ids:
        env_lanes = [replace(lane, env_id=env_id, num_devices=num_devices) for lane in lanes]
        args = replace(env_lanes[0], num_seeds=len(lanes))
        states.append((args, script.init_lanes(env_lanes, script.make_env(*env_lanes))))
    iterations = np.arange(1, lanes[0].num_iterations + 1)
    for window in np.array_split(iterations, num_reports):
        returns = np.full((len(env_ids), len(lanes)), np.nan)
        for i, (args, state) in enumerate(states):
            averages = []
            for _ in window:
                state, metrics = script.train_iteration(args, state)
                metrics = script.fetch(metrics)
                averages.append(metrics["charts/avg_episodic_return"])
                finite &= np.isfinite(metrics["losses/loss"])
            states[i] = args, state
            ended = np.isfinite(averages)  # nan until an episode has ended
            returns[i] = np.where(ended, averages, 0.0).sum(0) / np.where(ended.any(0), ended.sum(0), np.nan)
        connection.send((returns, finite))


class TrainingDied(Exception):
    """The process that trained ended before its last report."""


def reports(script_name: str, lanes: list, env_ids: tuple[str, ...], num_reports: int) -> Iterator:
    """What `train` sends. In a fresh process, since EnvPool never frees its environments; closing this ends it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(sender, script_name, lanes, env_ids, num_reports), daemon=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which it inherits: Ctrl-C is for this process alone
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sender.close()
    try:
        for _ in range(num_reports):
            yield receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == 2:  # a mistake of the user that it has named
            raise SystemExit(2) from None
        raise TrainingDied(f"its process ended with exit code {process.exitcode}") from None
    finally:
        process.terminate()
        process.join()


def scores_of(returns: np.ndarray, args: Args, targets: dict) -> np.ndarray:
    """Of returns [num_envs, num_trials, num_seeds] the scores [num_trials], nan where a return is."""
    if targets:
        low, high = (np.array([targets[env_id][i] for env_id in args.env_ids])[:, None, None] for i in (0, 1))
        returns = (returns - low) / (high - low)
    return AGGREGATIONS[args.aggregation](returns, axis=0).mean(-1)


def end_trial(study: optuna.Study, trial: Trial, state: TrialState, score=None, error: str | None = None) -> None:
    if error:
        trial.set_user_attr("error", error)
    study.tell(trial, score, state)
    tqdm.write(describe(study.trials[trial.number]))


def train_trials(study: optuna.Study, trials: list[Trial], args: Args, fixed, targets: dict, label: str) -> None:
    """Side by side, in one program: the lanes are the trials' seeds."""
    seeds = range(args.seed, args.seed + args.num_seeds)
    lanes = [replace(fixed, **trial.params, seed=seed) for trial in trials for seed in seeds]
    running = dict(enumerate(trials))
    bar = tqdm(total=args.num_reports, desc=label, unit="report", leave=False, disable=None, dynamic_ncols=True)
    with closing(reports(args.script, lanes, args.env_ids, args.num_reports)) as received, bar:
        try:
            for step, (returns, finite) in enumerate(received, start=1):
                returns = returns.reshape(len(args.env_ids), len(trials), args.num_seeds)
                finite = finite.reshape(len(trials), args.num_seeds).all(1)
                scores = scores_of(returns, args, targets)
                for i in [i for i in running if not finite[i]]:
                    end_trial(study, running.pop(i), TrialState.FAIL, error=f"diverged before report {step}")
                for i, trial in running.items():
                    if np.isfinite(scores[i]):
                        trial.report(float(scores[i]), step)
                        means = dict(zip(args.env_ids, returns[:, i].mean(-1).tolist(), strict=True))
                        trial.set_user_attr("returns", means)
                if step < args.num_reports:
                    for i in [i for i, trial in running.items() if trial.should_prune()]:
                        end_trial(study, running.pop(i), TrialState.PRUNED)
                bar.update()
                if not running:
                    return
        except TrainingDied as error:
            for trial in running.values():
                end_trial(study, trial, TrialState.FAIL, error=str(error))
            return
    for i, trial in running.items():
        if np.isfinite(scores[i]):
            end_trial(study, trial, TrialState.COMPLETE, float(scores[i]))
        else:
            end_trial(study, trial, TrialState.FAIL, error="no episode has ended: give more --total-timesteps")


def train_population(study, trials: list[Trial], args: Args, script, fixed, targets: dict) -> None:
    """Those that differ only in what lanes may (`MAY_DIFFER`) together, one such group after another."""
    groups = {}
    for trial in trials:
        if reason := mistake(script, replace(fixed, **trial.params), args.num_reports):
            end_trial(study, trial, TrialState.FAIL, error=reason)
        else:
            static = tuple(value for name, value in trial.params.items() if name not in script.MAY_DIFFER)
            groups.setdefault(static, []).append(trial)
    for group in groups.values():
        numbers = ", ".join(str(trial.number) for trial in group)
        num_lanes = len(group) * args.num_seeds
        tqdm.write(f"training    trial {numbers}: {num_lanes} lane{'s' * (num_lanes > 1)} in one program")
        train_trials(study, group, args, fixed, targets, f"trial {numbers}")


# ---------------------------------------------------------------- what is shown and left
def show(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def early_end(trial: FrozenTrial) -> str:
    if trial.state == TrialState.FAIL:
        return f"failed: {trial.user_attrs['error']}"
    return f"pruned at report {trial.last_step}" if trial.state == TrialState.PRUNED else ""


def describe(trial: FrozenTrial) -> str:
    """One line of a trial that has ended."""
    params = ", ".join(f"{name} {show(value)}" for name, value in trial.params.items())
    score = "" if trial.value is None else f"score {show(trial.value)}"
    return f"trial {trial.number:>5} {', '.join(filter(None, [early_end(trial), score]))}  ({params})"


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """Of those that were trained to the end."""
    trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return max(trials, key=lambda trial: trial.value, default=None)


def best_commands(study: optuna.Study, args: Args, fixed, uv_run: str) -> list[str]:
    """The best trial's trainings, for each environment as one command to paste."""
    values = {f.name: getattr(fixed, f.name) for f in fields(fixed) if getattr(fixed, f.name) != f.default}
    values |= {"seed": args.seed, "num_seeds": args.num_seeds, **best_trial(study).params}
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", shlex.quote(str(value))]
    program = f"{uv_run or 'python '}cleanrl/{args.script}.py"
    return [f"{program} --env-id {env_id} {' '.join(flags)}" for env_id in args.env_ids]


def importances(study: optuna.Study) -> dict[str, float]:
    """How much each hyperparameter matters among the better trials (PED-ANOVA); empty if too few have ended."""
    with suppress(ValueError, RuntimeError), warnings.catch_warnings(action="ignore"):
        if len(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])) > 3:
            return optuna.importance.get_param_importances(study)
    return {}


def report_figure(study: optuna.Study, params: list[Param]) -> Figure:
    """The scores over the trials, each trial's reports, the importances, and a slice for each hyperparameter."""
    trials = study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED and trial.intermediate_values]
    columns = 3
    rows = 1 + math.ceil(len(params) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()

    history, curves, bars = axes[:columns]
    history.scatter([t.number for t in complete], [t.value for t in complete], s=18, color="C0", label="trial")
    if complete:
        history.step(
            [trial.number for trial in complete],
            np.maximum.accumulate([trial.value for trial in complete]),
            where="post",
            color="C1",
            label="best so far",
        )
        history.legend()
    history.xaxis.set_major_locator(MaxNLocator(integer=True))
    history.set(title="Trained to the end", xlabel="trial", ylabel="score")

    for group, color in ((pruned, "0.75"), (complete, "C0")):
        for trial in group:
            curves.plot(*zip(*sorted(trial.intermediate_values.items()), strict=True), color=color, lw=0.9)
    if best := best_trial(study):
        curves.plot(*zip(*sorted(best.intermediate_values.items()), strict=True), color="C1", lw=2, label="best")
        curves.legend()
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.set(title="Reports (pruned trials in grey)", xlabel="report", ylabel="score")

    shares = dict(sorted(importances(study).items(), key=lambda item: item[1]))
    bars.barh(list(shares), list(shares.values()), color="C0")
    if not shares:
        bars.text(0.5, 0.5, "too few trials yet", ha="center", va="center", transform=bars.transAxes)
    bars.set(title="Importance among the better trials", xlim=(0, 1))

    for axis, param in zip(axes[columns:], params, strict=False):
        if param.kind == "choice":
            labels = [show(value) for value in param.values]
            positions = {trial.number: param.values.index(trial.params[param.name]) for trial in complete}
            axis.set_xticks(range(len(labels)), labels)
            axis.set_xlim(-0.5, len(labels) - 0.5)
        else:
            positions = {trial.number: trial.params[param.name] for trial in complete}
            low, high = param.values
            axis.set_xscale("log" if param.kind == "log" else "linear")
            margin = (high / low) ** 0.03 if param.kind == "log" else 0.03 * (high - low)
            axis.set_xlim(*((low / margin, high * margin) if param.kind == "log" else (low - margin, high + margin)))
        colors = ["C1" if trial.number == best.number else "C0" for trial in complete]
        axis.scatter([positions[t.number] for t in complete], [t.value for t in complete], s=18, c=colors)
        axis.set(xlabel=param.name, ylabel="score")
    for axis in axes[columns + len(params) :]:
        axis.remove()
    return figure


def report_page(study: optuna.Study, args: Args, fixed, params: list[Param], targets: dict) -> str:
    trials = [trial for trial in counted(study) if trial.state.is_finished()]
    counts = {state: sum(trial.state == state for trial in trials) for state in TrialState}
    scale = ", ".join(f"{env_id} {low:g} to {high:g}" for env_id, (low, high) in targets.items())
    lines = [
        f"# {study.study_name}",
        "",
        f"{counts[TrialState.COMPLETE]} trials were trained to the end, {counts[TrialState.PRUNED]} were pruned and "
        f"{counts[TrialState.FAIL]} failed; each of {args.num_seeds} seeds and {fixed.total_timesteps:,} steps.",
        f"The score is the {args.aggregation} over the environments, {scale} scaled to 0 to 1, averaged over the seeds."
        if targets
        else "The score is the return, averaged over the seeds.",
        "",
    ]
    if best := best_trial(study):
        lines += [f"## Best: trial {best.number}, score {show(best.value)}", "", "```bash"]
        lines += [*best_commands(study, args, fixed, ""), "```", ""]
    lines += ["![scores, reports, importances and slices](report.png)", "", "## Trials, the best first", ""]
    names = [param.name for param in params]
    lines.append("| trial | score | " + " | ".join([*args.env_ids, *names, "state"]) + " |")
    lines.append("|" + "---|" * (3 + len(args.env_ids) + len(names)))
    order = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    for trial in sorted(trials, key=lambda t: (order.index(t.state), -(t.value or 0), t.number)):
        returns = trial.user_attrs.get("returns", {})
        cells = [str(trial.number), "" if trial.value is None else show(trial.value)]
        cells += [f"{returns[env_id]:.1f}" if env_id in returns else "" for env_id in args.env_ids]
        cells += [show(trial.params.get(name, "")) for name in names] + [early_end(trial) or "complete"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write_report(study: optuna.Study, args: Args, fixed, params: list[Param], targets: dict) -> None:
    folder, picture = study_folder(args), io.BytesIO()
    os.makedirs(folder, exist_ok=True)
    report_figure(study, params).savefig(picture, format="png", dpi=110)
    write_file(os.path.join(folder, "report.png"), picture.getvalue())
    write_file(os.path.join(folder, "report.md"), report_page(study, args, fixed, params, targets).encode())


def tune(study: optuna.Study, args: Args, script, fixed, params: list[Param], targets: dict) -> None:
    """Population after population; what ends this leaves a study that can go on."""
    interrupt_those_of_dead_processes(study)
    trials = []
    try:
        while trials := ask(study, args, params):
            train_population(study, trials, args, script, fixed, targets)
            write_report(study, args, fixed, params, targets)
    except BaseException:
        interrupt(study, [trial.number for trial in trials])
        raise
    finally:
        write_report(study, args, fixed, params, targets)


def main(args: Args, script_argv: list[str]) -> int:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    script = load_script(args.script)
    fixed = tyro.cli(script.Args, args=script_argv, prog="what follows --")
    params = [parse_param(text, script.Args) for text in args.params]
    targets = parse_target_scores(args)
    check_args(args, script, fixed, params)
    try:
        study = open_study(args, fixed, params, targets)
        print(f"study       {study.study_name}, {len(counted(study))} of {args.num_trials} trials so far")
        tune(study, args, script, fixed, params, targets)
    except OSError as error:
        usage_error(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the study", file=sys.stderr)
        return 130
    print(f"report      {study_folder(args)}/report.md")
    if (best := best_trial(study)) is None:
        print("no trial was trained to the end", file=sys.stderr)
        return 1
    print(f"best        {describe(best)}")
    for command in best_commands(study, args, fixed, "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""):
        print(f"  {command}")
    return 0


if __name__ == "__main__":
    argv = [*sys.argv[1:], "--"]
    split = argv.index("--")
    sys.exit(main(tyro.cli(Args, args=argv[:split]), argv[split + 1 : -1]))

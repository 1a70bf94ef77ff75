"""Puts a finished run on the Hugging Face Hub: python -m cleanrl_utils.huggingface runs/Hopper-v4__...

A run without an `evaluation.json` (its training was interrupted) is evaluated first.
"""

import glob
import importlib
import importlib.metadata
import json
import os
import re
import reprlib
import shlex
import signal
import sys
from dataclasses import asdict, dataclass
from functools import partial

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, during the imports too: no traceback

import numpy as np
import tyro

from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.files import write_file
from cleanrl_utils.untrusted import read_file, read_json, unpack

WITHOUT_EFFECT = "track wandb_project_name wandb_entity upload_model hf_entity progress".split()  # on what is learned

CARD = """---
{metadata}
---

# {title}

Trained with [CleanRL](https://github.com/vwxyzjn/cleanrl)'s `{script}.py`{steps}. Evaluated with
deterministic actions: **return {mean:.1f} ± {std:.1f}**, length {length:.1f} ({episodes} episodes).
{curve}
## Watch it

In a checkout of CleanRL for JAX:

```bash
pip install '.[video]'
{watch}
```

## Train it again

There too, with the versions of packages that this repository's `requirements.txt` pins:

```bash
hf download {repository} requirements.txt --local-dir .
pip install -r requirements.txt .
{reproduce}
```

## Hyperparameters

```json
{args}
```
"""

CURVE = """
![Return of the training episodes over the environment steps](learning_curve.png)
"""


@dataclass(frozen=True)
class Args:
    run_dir: tyro.conf.Positional[str]
    """the folder of the run, e.g. runs/Hopper-v4__ppo_continuous_action_envpool_xla_jax_scan__1__1700000000"""
    hf_entity: str | None = None
    """the user or org name of the model repository on the Hugging Face Hub; none given: the one logged in"""


# ---------------------------------------------------------------- upload
def push_to_hub(run_dir: str, hf_entity: str | None = None) -> bool:
    """Uploads an evaluated run, and returns whether that went well; if not, a line says why and what to do.

    The repository is `{hf_entity}/{env_id}-{exp_name}-seed{seed}`.
    """
    try:
        from cleanrl_utils.hub import in_time  # here: a damaged huggingface_hub costs the upload, not the run

        url = in_time(partial(upload, run_dir, hf_entity))
    except KeyboardInterrupt:
        reason = "interrupted"
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("HubError: ")
    else:
        print(f"  hub         {url}")
        return True
    command = ["python", "-m", "cleanrl_utils.huggingface", run_dir, *(["--hf-entity", hf_entity] if hf_entity else [])]
    uv_run = "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""
    warn(f"not uploaded: {reason}; push it again with: {uv_run}{shlex.join(command)}")
    return False


def upload(run_dir: str, hf_entity: str | None) -> str:
    """Returns the address of the repository, made anew or added to."""
    import huggingface_hub

    from cleanrl_utils.hub import redacted, retrying
    from cleanrl_utils.models import agent_name

    args = read_json(f"{run_dir}/args.json")
    api = huggingface_hub.HfApi()
    entity = hf_entity or retrying(api.whoami)["name"]
    repository = f"{entity}/{agent_name(args['env_id'], args['exp_name'], args['seed'])}"
    contents = repository_files(run_dir, args, repository)

    def commit():  # operations can't be used twice
        operations = [huggingface_hub.CommitOperationAdd(name, content) for name, content in contents.items()]
        api.create_commit(repository, operations, commit_message="Add the model")

    retrying(lambda: make_repository(api, repository))
    retrying(commit)
    return redacted(f"{api.endpoint}/{repository}")


def make_repository(api, repository: str) -> None:
    """Makes the repository unless it is there."""
    from cleanrl_utils.hub import HubError

    try:
        api.create_repo(repository)
    except HubError as refused:
        if refused.status in (402, 403):  # a token that may write, but not create
            try:
                api.repo_info(repository)
            except HubError as error:
                raise (refused if error.status == 404 else error) from error
        elif refused.status != 409 or "conflicting operation" in str(refused):
            raise


def repository_files(run_dir: str, args: dict, repository: str) -> dict[str, str | bytes]:
    """Name in the repository -> path, or content."""
    from cleanrl_utils.models import MAX_FILE_SIZE

    model = f"{args['exp_name']}.cleanrl_model"
    script = importlib.import_module(f"cleanrl.{unpack(read_file(f'{run_dir}/{model}', MAX_FILE_SIZE))['script']}")
    below = glob.escape(run_dir)
    names = [model, "args.json", "evaluation.json", *map(os.path.basename, glob.glob(f"{below}/events.*"))]
    files = {name: f"{run_dir}/{name}" for name in names}
    if videos := glob.glob(f"{below}/videos/*.mp4"):
        files["replay.mp4"] = max(videos, key=os.path.getmtime)
    files[os.path.basename(script.__file__)] = script.__file__
    files["requirements.txt"] = requirements().encode()
    if curve := learning_curve(run_dir, args):
        files["learning_curve.png"] = curve
    evaluation = read_json(f"{run_dir}/evaluation.json")
    files["README.md"] = model_card(args, evaluation, script, repository, CURVE if curve else "").encode()
    return files


def requirements() -> str:
    """The installed versions of what the project depends on."""
    needed = [text for text in importlib.metadata.requires("cleanrl") or [] if "extra ==" not in text]
    names = sorted({re.match(r"[\w.-]+", text)[0] for text in needed}, key=str.lower)
    return "".join(f"{name}=={importlib.metadata.version(name)}\n" for name in names)


def learning_curve(run_dir: str, args: dict) -> bytes | None:
    """The run's curve as a png; None if its event files can't be read or no episode has ended."""
    from cleanrl_utils.report import draw_curves, figure_bytes
    from cleanrl_utils.results import Group, read_run

    try:
        run = read_run(run_dir, {**args, "total_timesteps": 0})  # of an interrupted run too
        group = Group(args["exp_name"], args["env_id"], args["total_timesteps"], runs=(run,))
        return figure_bytes(draw_curves([group], []), "png")
    except Exception:  # damaged event files, or a name that Matplotlib takes for a formula
        return None


# ---------------------------------------------------------------- model card
def model_card(args: dict, evaluation: dict, script, repository: str, curve: str) -> str:
    """The repository's README: what the Hub reads between its dashes, and what people read below."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    env_id, exp_name = args["env_id"], args["exp_name"]
    returns, lengths = np.array(evaluation["episodic_return"]), np.array(evaluation["episodic_length"])
    data = ModelCardData(
        tags=[env_id, "deep-reinforcement-learning", "reinforcement-learning", "custom-implementation"],
        library_name="cleanrl",
        pipeline_tag="reinforcement-learning",
        model_name=exp_name,
        eval_results=[
            EvalResult(
                task_type="reinforcement-learning",
                task_name="reinforcement-learning",
                dataset_type=env_id,
                dataset_name=env_id,
                metric_type="mean_reward",
                metric_name="mean_reward",
                metric_value=f"{returns.mean():.2f} +/- {returns.std():.2f}",
            )
        ],
    )
    names = ["--exp-name", exp_name, "--env-id", env_id, "--hf-repository", repository]
    card = CARD.format(
        metadata=data.to_yaml(),
        title=escape_markdown(f"{exp_name} on {env_id}"),
        script=script.__name__.rpartition(".")[2],
        steps=f", {evaluation['global_step']:,} steps" if evaluation["global_step"] else "",
        mean=returns.mean(),
        std=returns.std(),
        length=lengths.mean(),
        episodes=len(returns),
        curve=curve,
        repository=repository,
        watch=shlex.join(["python", "-m", "cleanrl_utils.enjoy", *names]),
        reproduce=training_command(args, script),
        args=json.dumps(args, indent=2),
    )
    return str(ModelCard(card))


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", text)


def training_command(args: dict, script) -> str:
    """The command that gives these arguments, less those that change nothing in what is learned."""
    defaults = asdict(script.Args())
    words = ["python", f"cleanrl/{os.path.basename(script.__file__)}", "--env-id", args["env_id"]]
    for name, value in args.items():
        flag = name.replace("_", "-")
        if name in ("env_id", *WITHOUT_EFFECT) or value == defaults[name]:
            continue
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(words)


# ---------------------------------------------------------------- command
def check_run(run_dir: str) -> None:
    """Ends the program with a line unless the folder is a run's with a model, and evaluates that if it wasn't yet."""
    from cleanrl_utils.models import load_script, read_model, restore_args

    if not os.path.isdir(run_dir):
        usage_error(f"no folder {run_dir}: give the one of a run, e.g. runs/Hopper-v4__...")
    path = f"{run_dir}/args.json"
    try:
        saved = read_json(path)
    except (OSError, ValueError) as error:
        usage_error(f"can't read {path}: {getattr(error, 'strerror', None) or 'it is damaged'}")
    missing = {"exp_name", "env_id", "seed", "total_timesteps"} - (saved.keys() if isinstance(saved, dict) else set())
    if missing:
        usage_error(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    name = saved["exp_name"]
    if not isinstance(name, str) or not name.isprintable() or "/" in name:
        usage_error(f"{path} is damaged: its exp_name is {reprlib.repr(name)}")
    model_path = f"{run_dir}/{saved['exp_name']}.cleanrl_model"
    script = load_script(read_model(model_path)["script"])
    args = restore_args(script.Args, saved, path)
    script.check_args(args)
    if not is_evaluation(f"{run_dir}/evaluation.json"):
        evaluate(run_dir, model_path, args, script)


def is_evaluation(path: str) -> bool:
    try:
        evaluation = read_json(path)
        episodes = np.array([evaluation[name] for name in ("episodic_return", "episodic_length")], float)
        whole = episodes.ndim == 2 and episodes.size > 0 and bool(np.isfinite(episodes).all())
        return whole and type(evaluation["global_step"]) in (int, type(None))
    except (OSError, ValueError, TypeError, LookupError):
        return False


def evaluate(run_dir: str, model_path: str, args, script) -> None:
    """Writes the `evaluation.json` that an interrupted training did not come to."""
    from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate
    from cleanrl_utils.results import LeftOut, read_run

    print(f"evaluating {model_path}")
    returns, lengths = evaluate(model_path, script)
    try:
        global_step = max(read_run(run_dir, {**asdict(args), "total_timesteps": 0}).wall_times)
    except LeftOut:
        global_step = None
    evaluation = {
        "global_step": global_step,
        "episodic_return": returns.tolist(),
        "episodic_length": lengths.tolist(),
    }
    write_file(f"{run_dir}/evaluation.json", json.dumps(evaluation).encode())


def main(args: Args) -> None:
    run_dir = args.run_dir.rstrip("/") or args.run_dir
    check_run(run_dir)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C ends the upload with its line
    sys.exit(0 if push_to_hub(run_dir, args.hf_entity) else 1)


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m cleanrl_utils.huggingface", description=__doc__))

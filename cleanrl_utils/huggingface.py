"""Puts a finished run's model on the Hugging Face Hub."""

import glob
import json
import os
import shlex
import sys

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import get_session

SECONDS_TO_ANSWER = 30.0  # huggingface_hub itself would wait for ever

CARD = """---
{metadata}
---

# {exp_name} on {env_id}

A PPO agent trained with [CleanRL](https://github.com/vwxyzjn/cleanrl).

Watch it: download `{model}` and run

    python -m cleanrl_utils.enjoy --exp-name {quoted_exp_name} --env-id {env_id} --model-path {quoted_model}

Hyperparameters:

```json
{args}
```
"""


def push_to_hub(run_dir: str, returns, hf_entity: str | None = None) -> None:
    """Uploads the model, its arguments, the event files, videos and a model card; a failure is a line, no more.

    `returns`, [eval_episodes], are the evaluation's. The repository is `{hf_entity}/{env_id}-{exp_name}-seed{seed}`.
    """
    try:
        url = upload(run_dir, returns, hf_entity)
    except (Exception, KeyboardInterrupt) as error:  # the run is finished: neither network nor impatience spoils it
        reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
        print(f"not uploaded: {reason}; the model is safe in {run_dir}", file=sys.stderr)
    else:
        print(f"  hub         {url}")


def upload(run_dir: str, returns, hf_entity: str | None) -> str:
    """Returns the address of the repository, made anew or added to."""
    with open(f"{run_dir}/args.json") as f:
        args = json.load(f)
    model = f"{args['exp_name']}.cleanrl_model"
    files = [f"{run_dir}/{model}", f"{run_dir}/args.json"]
    files += glob.glob(f"{glob.escape(run_dir)}/events.*") + glob.glob(f"{glob.escape(run_dir)}/videos/*.mp4")
    operations = [CommitOperationAdd(os.path.relpath(path, run_dir), path) for path in files]
    operations.append(CommitOperationAdd("README.md", model_card(args, model, returns).encode()))
    get_session().timeout = SECONDS_TO_ANSWER
    api = HfApi()
    entity = hf_entity or api.whoami()["name"]
    name = f"{args['env_id'].replace('/', '-')}-{args['exp_name']}-seed{args['seed']}"
    url = api.create_repo(f"{entity}/{name}", exist_ok=True)
    api.create_commit(url.repo_id, operations, commit_message="Add the model")
    return str(url)


def model_card(args: dict, model: str, returns) -> str:
    """The repository's README: what the Hub reads between its dashes, and what people read below."""
    data = ModelCardData(
        tags=[args["env_id"], "deep-reinforcement-learning", "reinforcement-learning", "custom-implementation"],
        library_name="cleanrl",
        model_name=args["exp_name"],
        eval_results=[
            EvalResult(
                task_type="reinforcement-learning",
                task_name="reinforcement-learning",
                dataset_type=args["env_id"],
                dataset_name=args["env_id"],
                metric_type="mean_reward",
                metric_name="mean_reward",
                metric_value=f"{returns.mean():.2f} +/- {returns.std():.2f}",
            )
        ],
    )
    quoted = {"quoted_exp_name": shlex.quote(args["exp_name"]), "quoted_model": shlex.quote(model)}
    described = {**args, **quoted, "args": json.dumps(args, indent=2), "model": model, "metadata": data.to_yaml()}
    return str(ModelCard(CARD.format(**described)))

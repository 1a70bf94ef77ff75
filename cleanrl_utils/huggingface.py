"""Puts a finished run's model on the Hugging Face Hub."""

import glob
import json
import os
import sys

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData

CARD = """---
{metadata}
---

# {exp_name} on {env_id}

A PPO agent trained by [CleanRL](https://github.com/vwxyzjn/cleanrl)'s `{exp_name}.py`.

Watch it: download `{model}` and run

    python -m cleanrl_utils.enjoy --exp-name {exp_name} --env-id {env_id} --model-path {model}

Hyperparameters:

```json
{args}
```
"""


def push_to_hub(run_dir: str, returns, hf_entity: str = "") -> None:
    """Uploads the model, its arguments, the event files, videos and a model card; a failure is a line, no more.

    `returns`, [eval_episodes], are the evaluation's. The repository is `{hf_entity}/{env_id}-{exp_name}-seed{seed}`.
    """
    with open(f"{run_dir}/args.json") as f:
        args = json.load(f)
    name = f"{args['env_id'].replace('/', '-')}-{args['exp_name']}-seed{args['seed']}"
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
    model = f"{args['exp_name']}.cleanrl_model"
    card = ModelCard(CARD.format(metadata=data.to_yaml(), args=json.dumps(args, indent=2), model=model, **args))
    files = [f"{run_dir}/{model}", f"{run_dir}/args.json"]
    files += glob.glob(f"{glob.escape(run_dir)}/events.*") + glob.glob(f"{glob.escape(run_dir)}/videos/*.mp4")
    operations = [CommitOperationAdd(os.path.relpath(path, run_dir), path) for path in files]
    operations.append(CommitOperationAdd("README.md", str(card).encode()))
    try:
        api = HfApi()
        entity = hf_entity or api.whoami()["name"]
        url = api.create_repo(f"{entity}/{name}", exist_ok=True)
        api.create_commit(url.repo_id, operations, commit_message="Add the model")
    except Exception as error:  # the run is finished and safe: no fault of the network may end it
        print(f"not uploaded: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    else:
        print(f"  hub         {url}")

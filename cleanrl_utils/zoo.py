"""The zoo, trained models that come with the package: adds the best of some runs, and makes the zoo's page.

The best takes the place of the zoo's present model of that environment and experiment, whatever that one scores.

    python -m cleanrl_utils.zoo --run-dirs runs/Hopper-v4__*
"""

import glob
import json
import os
import shlex
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from urllib.parse import quote

import numpy as np
import tyro

from cleanrl_utils.errors import usage_error
from cleanrl_utils.files import write_file
from cleanrl_utils.models import ZOO_FOLDER, load_script, read_model, restore_args, zoo_path
from cleanrl_utils.untrusted import read_json

EVALUATION = {"eval_episodes": 10, "seed": 1}  # as `python -m cleanrl_utils.enjoy` does it
MAX_MODEL_SIZE = 200_000  # bytes: the zoo is part of every installation
SECONDS_SHOWN = 8
HEIGHT = 240


@dataclass(frozen=True)
class Args:
    run_dirs: tuple[str, ...] = ()
    """runs to choose from: of each environment and experiment, the one with the highest evaluation return joins"""
    docs: str = "docs/get-started/zoo"
    """the folder of the page: a video of each model and the included `models.md`"""


def evaluate_model(model_path: str, video_path: str | None = None):
    """Raw returns and lengths, both [eval_episodes]."""
    from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate

    script = load_script(read_model(model_path)["script"])
    return evaluate(model_path, script, video_path=video_path, **EVALUATION)


def find_models(run_dirs: tuple[str, ...]) -> list[str]:
    paths = []
    for run_dir in run_dirs:
        found = sorted(glob.glob(os.path.join(glob.escape(run_dir), "*.cleanrl_model")))
        if not found:
            usage_error(f"no model in {run_dir}: give folders of finished runs")
        paths += found
    return paths


def add_best(model_paths: list[str]) -> None:
    """Copies the best model of each environment and experiment into the zoo, with its evaluation."""
    best = {}
    for path in model_paths:
        if os.path.exists(path) and os.path.getsize(path) > MAX_MODEL_SIZE:
            usage_error(f"{path} has {os.path.getsize(path):,} bytes, more than the {MAX_MODEL_SIZE:,} of the zoo")
        model = read_model(path)
        args = restore_args(load_script(model["script"]).Args, model["args"], path)
        returns, lengths = evaluate_model(path)
        print(f"{path}\n  evaluation  return {returns.mean():.1f} ± {returns.std():.1f}, length {lengths.mean():.0f}")
        key = (args.exp_name, args.env_id)
        if key not in best or returns.mean() > best[key][1].mean():
            best[key] = (path, returns, lengths)
    for key, (path, returns, lengths) in best.items():
        os.makedirs(os.path.dirname(zoo_path(*key)), exist_ok=True)
        with open(path, "rb") as f:
            write_file(zoo_path(*key), f.read())
        evaluation = {"episodic_return": returns.tolist(), "episodic_length": lengths.tolist()}
        evaluation["run"] = os.path.basename(os.path.dirname(os.path.abspath(path)))
        write_file(scores_path(zoo_path(*key)), json.dumps(evaluation, indent=2).encode())


def scores_path(model_path: str) -> str:
    """Of the evaluation that comes with a model of the zoo."""
    return model_path.removesuffix(".cleanrl_model") + ".json"


def zoo_models() -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(ZOO_FOLDER), "*", "*.cleanrl_model")))


def video_name(args: dict) -> str:
    return f"{args['env_id'].replace('/', '-')}-{args['exp_name']}.mp4"


def record(model_path: str, target: str) -> None:
    """The beginning of the first episode, small enough for a page."""
    from imageio_ffmpeg import get_ffmpeg_exe

    with tempfile.TemporaryDirectory() as folder:
        video_path = os.path.join(folder, "whole.mp4")
        evaluate_model(model_path, video_path)
        if not os.path.exists(video_path):
            usage_error(f"the page needs a video of {model_path}")
        small = f"-t {SECONDS_SHOWN} -vf scale=-2:{HEIGHT} -c:v libx264 -crf 30 -preset slow -pix_fmt yuv420p"
        command = [get_ffmpeg_exe(), "-y", "-loglevel", "error", "-i", video_path, *small.split()]
        subprocess.run([*command, "-movflags", "+faststart", target], check=True)


def read_args(model_path: str) -> dict:
    model = read_model(model_path)
    return asdict(restore_args(load_script(model["script"]).Args, model["args"], model_path))


def read_scores(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, both [eval_episodes]; ends the program with a line if the file is damaged."""
    try:
        evaluation = read_json(path)
        episodes = np.array([evaluation[name] for name in ("episodic_return", "episodic_length")], float)
        if episodes.ndim != 2 or not episodes.size or not np.isfinite(episodes).all():
            raise ValueError
    except (OSError, ValueError, TypeError, LookupError) as error:
        usage_error(f"can't read {path}: {getattr(error, 'strerror', None) or 'it is damaged'}")
    return tuple(episodes)


def models_markdown() -> str:
    """A section for each model of the zoo: what it scores, how it moves, how to run it."""
    sections = []
    for path in zoo_models():
        returns, lengths = read_scores(scores_path(path))
        model, args = read_model(path), read_args(path)
        versions = model["versions"]
        exp_name = "" if args["exp_name"] == model["script"] else f" --exp-name {shlex.quote(args['exp_name'])}"
        sections.append(f"""## {args["env_id"]}

<video src="{quote(video_name(args))}" height="{HEIGHT}" controls muted loop playsinline preload="metadata"></video>

Return **{returns.mean():.1f} ± {returns.std():.1f}**, length {lengths.mean():.0f} (mean and standard deviation of
{len(returns)} episodes, deterministic actions). Trained for {args["total_timesteps"]:,} steps by
[`{model["script"]}.py`](../../source/{model["script"]}.md), seed {args["seed"]}, EnvPool {versions.get("envpool")};
{os.path.getsize(path) / 1000:.0f} kB.

```bash
uv run python -m cleanrl_utils.enjoy --env-id {args["env_id"]}{exp_name}
```
""")
    return "\n".join(sections)


def main(args: Args) -> None:
    if not os.path.isdir(os.path.dirname(os.path.abspath(args.docs))):
        usage_error(f"--docs {args.docs}: there is no {os.path.dirname(args.docs)} here: run it in a checkout's root")
    add_best(find_models(args.run_dirs))
    os.makedirs(args.docs, exist_ok=True)
    for path in zoo_models():
        record(path, os.path.join(args.docs, video_name(read_args(path))))
    write_file(os.path.join(args.docs, "models.md"), models_markdown().encode())
    print(f"{len(zoo_models())} models in {ZOO_FOLDER}, shown in {args.docs}")


if __name__ == "__main__":
    main(tyro.cli(Args))

"""Watches a trained model: python -m cleanrl_utils.enjoy --exp-name ppo_... --env-id Hopper-v4

With --hf-entity or --hf-repository the model comes from the Hugging Face Hub.
"""

import os
import reprlib
import signal
import sys
import tempfile
from dataclasses import dataclass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, during the imports too: no traceback

import tyro

from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.models import MAX_FILE_SIZE, agent_name, find_model, load_script, read_model, zoo_path


@dataclass(frozen=True)
class Args:
    env_id: str
    """the id of the environment"""
    exp_name: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the name of the experiment that trained the model"""
    model_path: str | None = None
    """the model (default: the newest in `runs` of that experiment and environment, else the zoo's)"""
    zoo: bool = False
    """whether to take the zoo's model, whatever there is in `runs`"""
    hf_entity: str | None = None
    """the user or org name whose model on the Hugging Face Hub is to be watched"""
    hf_repository: str | None = None
    """the model's repository there (default: {hf_entity}/{env_id}-{exp_name}-seed{seed})"""
    eval_episodes: int = 10
    """the number of episodes"""
    seed: int = 1
    """seed of the environments, and of the model that `hf_entity` names"""
    capture_video: bool = False
    """whether to record the first episode (to the folder `videos` of the run; for other models, of this folder)"""


def main(args: Args) -> None:
    on_hub = bool(args.hf_entity or args.hf_repository)
    if on_hub + args.zoo + bool(args.model_path) > 1:
        usage_error("--model-path, --zoo, and --hf-entity or --hf-repository: give one of them")
    if on_hub:
        with tempfile.TemporaryDirectory(prefix="cleanrl-") as folder:
            watch(args, download_model(args, folder), video_folder="")
        return
    model_path = args.model_path or find_model(args.exp_name, args.env_id, runs=None if args.zoo else "runs")
    from_zoo = model_path == zoo_path(args.exp_name, args.env_id)
    watch(args, model_path, video_folder="" if from_zoo else os.path.dirname(model_path))


def download_model(args: Args, folder: str) -> str:
    """Path, below the folder, of the hub's model: an untrusted file, of which only the size is checked here.

    Ends the program with a line if the hub has no such file (exit code 2) or can't be reached (1).
    """
    from cleanrl_utils.hub import HubError, download

    repository = args.hf_repository or f"{args.hf_entity}/{agent_name(args.env_id, args.exp_name, args.seed)}"
    filename = f"{args.exp_name}.cleanrl_model"
    try:
        data = download(repository, filename, MAX_FILE_SIZE)
    except HubError as error:
        warn(f"error: can't get {filename} from {repository}: {error}")
        sys.exit(1 if error.temporary else 2)
    path = os.path.join(folder, repository, os.path.basename(filename))
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as f:
        f.write(data)
    return path


def watch(args: Args, model_path: str, video_folder: str) -> None:
    model = read_model(model_path)
    for name in ("exp_name", "env_id"):
        saved, asked = model["args"].get(name), getattr(args, name)
        if not isinstance(saved, str) or saved != asked:
            flag = f"--{name.replace('_', '-')}"
            usage_error(f"{model_path} is a model of {flag} {reprlib.repr(saved)}, not of {flag} {asked}")
    script = load_script(model["script"])
    from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate

    name = agent_name(args.env_id, args.exp_name, args.seed)
    video_path = os.path.join(video_folder, "videos", f"{name}.mp4") if args.capture_video else None
    returns, lengths = evaluate(
        model_path, script, video_path=video_path, eval_episodes=args.eval_episodes, seed=args.seed
    )
    print(f"{args.env_id}, {model_path}")
    for i, (episodic_return, length) in enumerate(zip(returns, lengths, strict=True), start=1):
        print(f"  episode {i:3d}   return {episodic_return:10.1f}   length {length:5d}")
    print(f"  mean ± std    return {returns.mean():10.1f} ± {returns.std():.1f}   length {lengths.mean():.1f}")
    if video_path and os.path.exists(video_path):
        print(f"  video         {video_path}")


if __name__ == "__main__":
    args = tyro.cli(Args)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a video that is being recorded is cleared away
    try:
        main(args)
    except KeyboardInterrupt:
        sys.exit(130)

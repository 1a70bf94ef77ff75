"""Watches a trained model: python -m cleanrl_utils.enjoy --exp-name ppo_... --env-id Hopper-v4"""

import os
import reprlib
import signal
from dataclasses import dataclass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, during the imports too: no traceback

import tyro

from cleanrl_utils.errors import usage_error
from cleanrl_utils.models import find_model, load_script, read_model


@dataclass(frozen=True)
class Args:
    env_id: str
    """the id of the environment"""
    exp_name: str = "ppo_continuous_action_envpool_xla_jax_scan"
    """the name of the experiment that trained the model"""
    model_path: str | None = None
    """the model (default: the newest in `runs` of that experiment and environment)"""
    eval_episodes: int = 10
    """the number of episodes"""
    seed: int = 1
    """seed of the environments"""
    capture_video: bool = False
    """whether to record the first episode (to a folder `videos` beside the model)"""


def main(args: Args) -> None:
    model_path = args.model_path or find_model(args.exp_name, args.env_id)
    model = read_model(model_path)
    for name in ("exp_name", "env_id"):
        saved, asked = model["args"].get(name), getattr(args, name)
        if saved != asked:
            flag = f"--{name.replace('_', '-')}"
            usage_error(f"{model_path} is a model of {flag} {reprlib.repr(saved)}, not of {flag} {asked}")
    script = load_script(model["script"])
    from cleanrl_utils.evals.ppo_envpool_jax_eval import evaluate

    video_path = None
    if args.capture_video:
        video_path = os.path.join(os.path.dirname(model_path), "videos", f"{args.exp_name}-seed{args.seed}.mp4")
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
    main(tyro.cli(Args))

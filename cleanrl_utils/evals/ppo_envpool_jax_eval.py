"""Evaluates a saved PPO model with the environment and the policy of the script that trained it."""

import os
import sys
from collections.abc import Callable
from contextlib import closing
from types import ModuleType

import jax
import numpy as np

from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.models import read_model, restore, restore_args
from cleanrl_utils.video import VideoWriter, why_no_video

MAX_LENGTH = 30_000  # of an episode: some environments have no time limit, and a policy may walk in circles for ever


class Evaluator:
    """Evaluates saved models in environments that are made once: EnvPool never frees them.

    `script` is the training script's module. Each call goes on where the last one left the environments' streams.
    """

    def __init__(self, script: ModuleType, args, is_stopped: Callable[[], bool] = lambda: False):
        self.script, self.is_stopped = script, is_stopped
        self.env = script.make_env(args, evaluation=True)
        reason = why_no_video(self.env.envs) if args.capture_video else None
        if reason:
            print(f"no video: {reason}", file=sys.stderr)
        self.records_video = args.capture_video and not reason
        # Shapes and dtypes only: a file is a few bytes, the network that its arguments ask for may be gigabytes.
        self.agent = jax.eval_shape(lambda: script.make_agent(args, self.env, jax.random.PRNGKey(0)))
        self.step = jax.jit(lambda env, action: env.step(action))
        self.act = jax.jit(self.deterministic_action)

    def deterministic_action(self, agent, obs):
        action, _ = self.script.get_action(agent, obs, jax.random.PRNGKey(0), deterministic=True)
        return action.reshape(self.env.action_shape)

    def load(self, model_path: str):
        """The environments (not yet reset; statistics restored and frozen) and the agent, without its optimizer.

        A file that does not fit the script ends the program with a line.
        """
        model = read_model(model_path)
        check_script(self.script, model, model_path)
        wrappers = []
        for wrapper in self.env.wrappers:
            if hasattr(wrapper, "stats"):
                name = type(wrapper).__name__
                stats = restore(wrapper.stats, model["wrappers"].get(name, {}), model_path, name)
                wrapper = wrapper.replace(stats=stats)
            wrappers.append(wrapper)
        params = restore(self.agent.params, model["params"], model_path, "params")
        agent = self.agent.replace(step=0, params=params, opt_state=None)
        return self.env.replace(wrappers=tuple(wrappers)), agent

    def __call__(self, model_path: str, video_path: str | None = None):
        """Raw returns and lengths, both [eval_episodes], of the first episode of each of `eval_episodes` environments.

        Actions are deterministic. One episode per environment: of episodes that run side by side, the first N to
        finish would be the short ones. With `video_path`, the first environment's episode is recorded there. Episodes
        that don't end count up to `MAX_LENGTH` steps. Raises KeyboardInterrupt once `is_stopped` is true.
        """
        env, agent = self.load(model_path)
        env, timestep = env.reset()
        running = np.ones(env.num_envs, bool)
        returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
        with VideoWriter(video_path if self.records_video else None) as video:
            for _ in range(MAX_LENGTH):
                if not running.any():
                    break
                if self.is_stopped():
                    raise KeyboardInterrupt
                if running[0]:
                    video.write(env.render)
                action = self.act(agent, timestep.obs)
                if not np.isfinite(action).all():  # Box2D would take minutes for a step with one
                    usage_error(
                        f"{model_path}: the policy's actions are not finite: train it anew, with a lower learning rate"
                    )
                env, timestep = self.step(env, action)
                ended = running & np.asarray(timestep.done)
                returns[ended] = np.asarray(timestep.info["episodic_return"])[ended]
                lengths[ended] = np.asarray(timestep.info["episodic_length"])[ended]
                running &= ~ended
        if running.any():
            warn(f"{running.sum()} of the episodes did not end within {MAX_LENGTH:,} steps: they count up to there")
            (stats,) = (wrapper for wrapper in env.wrappers if hasattr(wrapper, "episodic_return"))
            returns[running], lengths[running] = np.asarray(stats.returns)[running], np.asarray(stats.lengths)[running]
        return returns, lengths

    def close(self) -> None:
        """Closes what else would end in error messages at the program's exit: Gymnasium's and MuJoCo's windows."""
        if hasattr(self.env, "close"):
            self.env.close()


def check_script(script: ModuleType, model: dict, model_path: str) -> None:
    name = os.path.basename(script.__file__)[: -len(".py")]
    if model["script"] != name:
        usage_error(f"{model_path} was saved by the script {model['script'][:100]!r}, not by {name}")


def make_evaluator(model_path: str, script: ModuleType, **overrides) -> Evaluator:
    """An evaluator with the arguments of a saved model; `overrides` replace some (`eval_episodes`, `seed`, ...)."""
    model = read_model(model_path)
    check_script(script, model, model_path)
    done_with = {"eval_interval": None, "video_interval": None, "upload_model": False}  # they were the training's
    done_with |= {"num_devices": 1, "num_processes": None, "process_id": None, "coordinator_address": None}
    args = restore_args(script.Args, model["args"], model_path, **done_with, **overrides)
    script.check_args(args)
    script.check_env_id(args.env_id)
    return Evaluator(script, args)


def load_agent(model_path: str, script: ModuleType, **overrides):
    """The environments and the agent of a saved model, see `Evaluator.load`."""
    return make_evaluator(model_path, script, **overrides).load(model_path)


def evaluate(model_path: str, script: ModuleType, video_path: str | None = None, **overrides):
    """Raw returns and lengths of a saved model, see `Evaluator`: the same at each call."""
    with closing(make_evaluator(model_path, script, capture_video=video_path is not None, **overrides)) as evaluator:
        return evaluator(model_path, video_path)

"""Evaluates a saved PPO model with the environment and the policy of the script that trained it."""

import os
import sys
from types import ModuleType

import jax
import numpy as np

from cleanrl_utils.errors import usage_error
from cleanrl_utils.models import read_model, restore, restore_args
from cleanrl_utils.video import VideoWriter, why_no_video


def load_agent(model_path: str, script: ModuleType, **overrides):
    """The evaluation environments (not yet reset; statistics restored and frozen) and the agent of a saved model.

    `script` is the training script's module. `overrides` replace saved arguments (`eval_episodes`, `seed`, ...).
    A file that does not fit the script ends the program with a line.
    """
    model = read_model(model_path)
    script_name = os.path.basename(script.__file__)[: -len(".py")]
    if model["script"] != script_name:
        usage_error(f"{model_path} was saved by the script {model['script'][:100]!r}, not by {script_name}")
    args = restore_args(script.Args, model["args"], model_path, **overrides)
    script.check_args(args)
    script.check_env_id(args.env_id)
    env = script.make_env(args, evaluation=True)
    wrappers = []
    for wrapper in env.wrappers:
        if hasattr(wrapper, "stats"):
            name = type(wrapper).__name__
            wrapper = wrapper.replace(stats=restore(wrapper.stats, model["wrappers"].get(name, {}), model_path, name))
        wrappers.append(wrapper)
    env = env.replace(wrappers=tuple(wrappers))
    agent = script.make_agent(args, env, jax.random.PRNGKey(0))
    return env, agent.replace(params=restore(agent.params, model["params"], model_path, "params"))


def evaluate(model_path: str, script: ModuleType, video_path: str | None = None, **overrides):
    """Raw returns and lengths, both [eval_episodes], of the first episode of each of `eval_episodes` environments.

    Actions are deterministic. One episode per environment: of episodes that run side by side, the first N to
    finish would be the short ones. With `video_path`, the first environment's episode is recorded there.
    """
    if video_path and (reason := why_no_video()):
        print(f"no video: {reason}", file=sys.stderr)
        video_path = None
    env, agent = load_agent(model_path, script, capture_video=video_path is not None, **overrides)

    @jax.jit
    def act(agent, obs):
        action, _ = script.get_action(agent, obs, jax.random.PRNGKey(0), deterministic=True)
        return action.reshape(env.action_shape)

    step = jax.jit(lambda env, action: env.step(action))
    envs = env.envs
    env, timestep = env.reset()
    running = np.ones(env.num_envs, bool)
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
    with VideoWriter(video_path) as video:
        while running.any():
            if running[0]:
                video.write(lambda: envs.render(env_ids=[0])[0])
            action = act(agent, timestep.obs)
            if not np.isfinite(action).all():  # Box2D would take minutes for a step with one
                usage_error(
                    f"{model_path}: the policy's actions are not finite: train it anew, with a lower learning rate"
                )
            env, timestep = step(env, action)
            ended = running & np.asarray(timestep.done)
            returns[ended] = np.asarray(timestep.info["episodic_return"])[ended]
            lengths[ended] = np.asarray(timestep.info["episodic_length"])[ended]
            running &= ~ended
    return returns, lengths

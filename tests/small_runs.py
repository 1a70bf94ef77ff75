"""What the tests of several training scripts do alike; each takes the script's module."""

import os
import re
import subprocess
import sys
from functools import partial

import jax
import pytest

from cleanrl_utils import enjoy

SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "hidden_size": 8}
SMALL |= {"total_timesteps": 3 * 64, "eval_episodes": 2, "progress": False, "compilation_cache": False}


def learning_program(script, args) -> str:
    """What `learn` computes, as text."""
    state = jax.eval_shape(partial(script.init_state, args), script.make_env(args))
    _, batch = jax.eval_shape(partial(script.rollout, args), state)
    return str(jax.make_jaxpr(partial(script.learn, args))(state, batch))


def train_in_one_call(script, args, env):
    """The state after all iterations, and their metrics, [num_iterations], in an environment written in JAX."""

    def iteration(state, _):
        state, batch = script.rollout(args, state)
        return script.learn(args, state, batch)

    state = script.init_state(args, env)
    return jax.jit(partial(jax.lax.scan, iteration, length=args.num_iterations))(state, None)


def assert_evaluated_alike_in_another_process(script, env_id: str, step: int, capfd, *flags: str) -> None:
    """Trains on two devices in a process of its own, and watches the agent in this one."""
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    sizes = "--num-devices 2 --num-envs 4 --num-steps 16 --num-minibatches 2 --hidden-size 8 --eval-episodes 2"
    command = [sys.executable, script.__file__, "--env-id", env_id, "--no-progress", *sizes.split(), *flags]
    command += ["--total-timesteps", str(step)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    enjoy.main(enjoy.Args(env_id=env_id, exp_name=script.script_name(), eval_episodes=2))
    watched = re.search(r"mean ± std +return +(\S+ ± \S+) +length (\d+)", capfd.readouterr().out)
    assert f"evaluation  return {watched[1]}, length {watched[2]} at step {step} (2" in result.stdout


def assert_refused(run, capfd, *words: str) -> None:
    """`run()` ends with one line that has these words, exit code 2, and nothing written to the working folder."""
    with pytest.raises(SystemExit) as ended:
        run()
    error = capfd.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    assert [word for word in words if word not in error] == [], error
    assert not os.listdir()

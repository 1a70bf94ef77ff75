"""Videos: the writer, and EnvPool's renderer for every family of environments."""

import os
import subprocess
import sys

import numpy as np
import pytest
from video_frames import frames_of

from cleanrl_utils import video


def test_frames_of_odd_size(tmp_path):
    with video.VideoWriter(str(tmp_path / "videos" / "v.mp4")) as writer:
        for i in range(5):
            writer.write(lambda: np.full((33, 47, 3), 40 * i, np.uint8))  # noqa: B023
    frames = frames_of(tmp_path / "videos" / "v.mp4")
    assert frames.shape == (5, 34, 48, 3)
    assert np.abs(frames[:, 5, 5, 0] - 40.0 * np.arange(5)).max() < 8


def test_a_video_cut_short_leaves_no_file(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt), video.VideoWriter(str(tmp_path / "v.mp4")) as writer:
        writer.write(lambda: np.zeros((32, 32, 3), np.uint8))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr().err == "no video: KeyboardInterrupt while recording\n"


RECORD = """
import sys
import numpy as np
from cleanrl.ppo_continuous_action_envpool_xla_jax_scan import envpool  # libEGL comes before it
from cleanrl_utils.video import VideoWriter

path, env_id = sys.argv[1:]
envs = envpool.make(env_id, env_type="gymnasium", num_envs=2, seed=1, render_mode="rgb_array")
envs.action_space.seed(1)
envs.reset()
with VideoWriter(path) as video:
    for _ in range(40):
        envs.step(np.stack([envs.action_space.sample() for _ in range(2)]))
        video.write(lambda: envs.render(env_ids=[0])[0])
"""


@pytest.mark.parametrize(
    "env_id",
    ["Hopper-v4", "HalfCheetah-v4", "CheetahRun-v1"]  # MuJoCo and dm_control
    + ["Pendulum-v1", "CartPole-v1", "BipedalWalker-v3", "LunarLanderContinuous-v3", "Pong-v5", "Breakout-v5"],
)
def test_every_family_is_rendered(env_id, tmp_path):
    path = tmp_path / "v.mp4"
    result = subprocess.run([sys.executable, "-c", RECORD, str(path), env_id], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    frames = frames_of(path)
    assert len(frames) == 40
    assert frames.std(axis=(1, 2, 3)).min() > 5  # none is blank
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 30  # something moves

"""Videos of evaluation episodes."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import gymnasium as gym
import numpy as np

FRAMES_PER_SECOND = 30


def why_no_video(envs) -> str | None:
    """What this machine lacks to record a video of EnvPool's, Gymnasium's or Brax's envs, how to get it, or None."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        return "imageio-ffmpeg is not installed (pip install 'cleanrl[video]')"
    if isinstance(envs, gym.vector.SyncVectorEnv):
        if envs.render_mode != "rgb_array":
            return "the environment has no render mode rgb_array"
        uses_mujoco = hasattr(envs.envs[0].unwrapped, "mujoco_renderer")
    elif not hasattr(envs, "observation_space"):  # Brax's, drawn by MuJoCo
        uses_mujoco = True
    else:
        uses_mujoco = gym.spaces.flatten_space(envs.observation_space).dtype == np.float64  # the others have 32 bits
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return "libEGL.so.1 is missing (apt-get install libegl1)" if uses_mujoco else None
    return None


class VideoWriter:
    """An H.264 mp4, written frame by frame; it appears at `path` when it is whole.

    A failure (no ffmpeg, a full disk, a folder that can't be written) costs the video and a line, nothing else.
    """

    def __init__(self, path: str | None):
        self.path = path  # None: there is no video to write
        self.ffmpeg = None

    def __enter__(self):
        if self.path is not None:
            with suppress(OSError):
                os.remove(self.path)  # if it can't be written anew, no older one is taken for it
        return self

    def write(self, render: Callable[[], np.ndarray]) -> None:
        """Adds a frame, uint8 [height, width, 3]; all have the first one's size."""
        if self.path is None:
            return
        try:
            frame = render()
            if self.ffmpeg is None:
                self.ffmpeg = self.start_ffmpeg(*frame.shape[:2])
            self.ffmpeg.stdin.write(np.ascontiguousarray(frame).tobytes())
        except Exception as error:
            self.discard(error)

    def start_ffmpeg(self, height: int, width: int) -> subprocess.Popen:
        from imageio_ffmpeg import get_ffmpeg_exe

        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {FRAMES_PER_SECOND} -i -"
        even_size = "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2"  # H.264 takes no odd ones
        target = f"-c:v libx264 -pix_fmt yuv420p -movflags +faststart {even_size} -f mp4"
        command = [get_ffmpeg_exe(), "-y", "-loglevel", "error", *source.split(), *target.split(), self.path + ".tmp"]
        # In a session of its own, so that a terminal's Ctrl-C is ours to handle.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def discard(self, reason: object) -> None:
        """Stops recording, says why, and leaves no file."""
        if self.ffmpeg:
            self.ffmpeg.kill()
            self.ffmpeg.wait()
            with suppress(OSError):  # what is still in the buffer has nowhere to go
                self.ffmpeg.stdin.close()
            reason = " ".join(self.ffmpeg.stderr.read().decode(errors="replace").split()) or reason
            self.ffmpeg.stderr.close()
            with suppress(OSError):
                os.remove(self.path + ".tmp")
        print(f"no video: {' '.join(str(reason).split())}", file=sys.stderr)
        self.path = self.ffmpeg = None

    def __exit__(self, _, error, __) -> None:
        if self.ffmpeg is None:
            return
        if error is not None:
            return self.discard(f"{type(error).__name__} while recording")
        try:
            self.ffmpeg.stdin.close()
            if self.ffmpeg.wait() != 0:
                raise OSError("ffmpeg failed")
            os.replace(self.path + ".tmp", self.path)
        except OSError as error:
            return self.discard(error)
        self.ffmpeg.stderr.close()

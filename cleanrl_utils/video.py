"""Videos of evaluation episodes."""

import ctypes
import importlib.util
import os
import subprocess

import numpy as np

FRAMES_PER_SECOND = 30


def why_no_video() -> str | None:
    """What this machine lacks to record a video, and how to get it; None if it lacks nothing."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        return "imageio-ffmpeg is not installed (pip install 'cleanrl[video]')"
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return "libEGL.so.1 is missing (apt-get install libegl1)"
    return None


class VideoWriter:
    """An H.264 mp4, written frame by frame; it appears at `path` when it is whole."""

    def __init__(self, path: str):
        self.path = path
        self.ffmpeg = None
        os.makedirs(os.path.dirname(path), exist_ok=True)

    def write(self, frame: np.ndarray) -> None:
        """Adds a frame, uint8 [height, width, 3]; all have the first one's size."""
        if self.ffmpeg is None:
            from imageio_ffmpeg import get_ffmpeg_exe

            height, width, _ = frame.shape
            source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {FRAMES_PER_SECOND} -i -"
            even_size = "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2"  # H.264 takes no odd ones
            target = f"-c:v libx264 -pix_fmt yuv420p -movflags +faststart {even_size} -f mp4"
            command = [get_ffmpeg_exe(), "-y", "-loglevel", "error", *source.split(), *target.split()]
            self.ffmpeg = subprocess.Popen([*command, f"{self.path}.tmp"], stdin=subprocess.PIPE)
        self.ffmpeg.stdin.write(np.ascontiguousarray(frame).tobytes())

    def close(self) -> None:
        """Raises RuntimeError if ffmpeg failed."""
        self.ffmpeg.stdin.close()
        if self.ffmpeg.wait() != 0:
            raise RuntimeError(f"ffmpeg failed to write {self.path}")
        os.replace(f"{self.path}.tmp", self.path)

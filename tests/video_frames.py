"""Reads a video back."""

import re
import subprocess

import numpy as np
from imageio_ffmpeg import get_ffmpeg_exe


def frames_of(path):
    """[frames, height, width, 3], decoded by ffmpeg; the video has to be H.264."""
    source = ["-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-fps_mode", "passthrough", "-"]
    decoded = subprocess.run([get_ffmpeg_exe(), *source], capture_output=True, check=True)
    width, height = map(int, re.search(rb"Video: h264.* (\d+)x(\d+)", decoded.stderr).groups())
    return np.frombuffer(decoded.stdout, np.uint8).reshape(-1, height, width, 3)

"""Records episodes as HTML files: one per episode, self-contained, played by a browser without the network.

Pictures are either frames (uint8 RGB, kept as an H.264 video: needs ffmpeg) or the poses of bodies, which the page
draws in three dimensions: needs neither OpenGL nor ffmpeg. `RecordHTML` wraps a `gymnasium.Env`, `RecordHTMLVector` a
`gymnasium.vector.VectorEnv` (EnvPool's too), `HTMLRecorder` serves any other loop, and `save_brax_episode` states that
are already there.
"""

import base64
import ctypes
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from cleanrl_utils.files import write_file

TEMPLATE = os.path.join(os.path.dirname(__file__), "record_html.html")


class FrameEncoder:
    """Frames, uint8 [height, width, 3], into one mp4 in which a browser finds each of them.

    Raises ValueError if ffmpeg is missing, OSError if it fails.
    """

    def __init__(self, fps: float):
        if importlib.util.find_spec("imageio_ffmpeg") is None:
            raise ValueError("frames need imageio-ffmpeg: pip install 'cleanrl[video]'")
        self.fps, self.shape, self.ffmpeg = fps, None, None
        self.file = tempfile.NamedTemporaryFile(suffix=".mp4")  # gone with this object

    def add(self, frame: np.ndarray) -> None:
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a frame is uint8 [height, width, 3], not {frame.dtype} {list(frame.shape)}")
        if self.ffmpeg is None:
            self.shape, self.ffmpeg = frame.shape, self.start_ffmpeg(*frame.shape[:2])
        if frame.shape != self.shape:
            raise ValueError(f"the frames' size changed from {list(self.shape)} to {list(frame.shape)}")
        try:
            self.ffmpeg.stdin.write(np.ascontiguousarray(frame).tobytes())
        except OSError:
            self.finish()  # says what ffmpeg said
            raise

    def start_ffmpeg(self, height: int, width: int) -> subprocess.Popen:
        from imageio_ffmpeg import get_ffmpeg_exe

        rate = Fraction(float(self.fps)).limit_denominator(1000)
        source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {rate} -i -"
        even_size = "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2"  # H.264 takes no odd ones
        # A key frame every 10, and none that depends on a later one: any frame is found quickly.
        target = f"-c:v libx264 -pix_fmt yuv420p -g 10 -bf 0 -movflags +faststart {even_size} -f mp4"
        command = [get_ffmpeg_exe(), "-y", "-loglevel", "error", *source.split(), *target.split(), self.file.name]
        # In a session of its own, so that a terminal's Ctrl-C is ours to handle.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def finish(self) -> bytes:
        """The mp4."""
        _, errors = self.ffmpeg.communicate()
        if self.ffmpeg.returncode != 0:
            reason = one_line(errors.decode(errors="replace")) or f"exit code {self.ffmpeg.returncode}"
            raise OSError(f"ffmpeg: {reason}")
        with self.file:
            return self.file.read()

    def discard(self) -> None:
        if self.ffmpeg:
            self.ffmpeg.kill()
            self.ffmpeg.communicate()
        self.file.close()


class PoseEncoder:
    """Poses of bodies, [num_bodies, 7]: position x, y, z in meters and quaternion w, x, y, z, in the world's frame."""

    def __init__(self, num_bodies: int):
        self.num_bodies, self.data = num_bodies, bytearray()

    def add(self, poses: np.ndarray) -> None:
        if poses.shape != (self.num_bodies, 7):
            raise ValueError(f"poses are [{self.num_bodies}, 7] in this scene, not {list(poses.shape)}")
        self.data += np.ascontiguousarray(poses, "<f4").tobytes()

    def finish(self) -> bytes:
        return bytes(self.data)

    def discard(self) -> None:
        self.data.clear()


class EpisodeHTML:
    """One episode, picture by picture; `save` writes it to `path`.

    Pictures are frames, uint8 [height, width, 3], or poses [num_bodies, 7] if there is a `scene`
    (`scene_of_mujoco`, `scene_of_brax`). They are encoded as they come: memory holds 28 bytes per body and picture,
    and of frames none. `fps` is the number of pictures per second of the environment's time.
    """

    def __init__(self, path: str, title: str, fps: float = 30, scene: dict | None = None):
        if not (math.isfinite(fps) and fps > 0):
            raise ValueError(f"fps has to be positive, not {fps}")
        self.path, self.title, self.fps, self.scene = path, title, fps, scene
        self.encoder = FrameEncoder(fps) if scene is None else PoseEncoder(scene["num_bodies"])
        self.rewards = None
        self.last_picture = None

    def add(self, picture: np.ndarray | None, reward: float | None = None) -> None:
        """The reset's picture, without a reward, then that of each step; None repeats the last one."""
        if (self.rewards is None) != (reward is None):
            raise ValueError("the first picture, the reset's, has no reward; each later one has its step's")
        if self.rewards is None:
            self.rewards = []
        else:
            self.rewards.append(float(reward))
        self.last_picture = self.last_picture if picture is None else np.asarray(picture)
        self.encoder.add(self.last_picture)

    def save(self, ended: str) -> None:
        """`ended`: "terminated", "truncated" or "unfinished". Raises OSError; the file is whole or as it was before."""
        if self.rewards is None:
            raise ValueError("there is no picture to save")
        data = {
            "title": self.title,
            "fps": float(self.fps),
            "ended": ended,
            "rewards": [reward if math.isfinite(reward) else None for reward in self.rewards],
            "scene": self.scene,
            "media": base64.b64encode(self.encoder.finish()).decode(),
        }
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        text = text.replace("<", "\\u003c")  # nothing in it, a title say, ends the script that holds it
        with open(TEMPLATE, encoding="utf-8") as f:
            before, after = f.read().split("{{ data }}")
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        write_file(self.path, (before + text + after).encode())

    def discard(self) -> None:
        self.encoder.discard()


def cubic_schedule(episode_id: int) -> bool:
    """Gymnasium's for videos: episodes 0, 1, 8, 27, ... 729, then every 1000th."""
    return round(episode_id ** (1 / 3)) ** 3 == episode_id if episode_id < 1000 else episode_id % 1000 == 0


class HTMLRecorder:
    """Records the episodes of one environment, as `reset` and `step` tell of them.

    `render` gives the picture of the environment as it is now (see `EpisodeHTML`), and is called while recording only.
    Episode i is recorded if `episode_trigger(i)`, to `{folder}/{name_prefix}-episode-{i}.html`, and for at most
    `max_steps` steps: a longer one is written as unfinished. A file that can't be written costs that file and a line.
    """

    def __init__(
        self,
        folder: str,
        render: Callable[[], np.ndarray],
        title: str,
        episode_trigger: Callable[[int], bool] | None = None,
        name_prefix: str = "rl",
        fps: float = 30,
        scene: dict | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.DISABLED,
        max_steps: int = 10_000,
    ):
        self.folder, self.render, self.title = str(folder), render, title
        self.episode_trigger = cubic_schedule if episode_trigger is None else episode_trigger
        self.name_prefix, self.fps, self.scene = name_prefix, fps, scene
        self.autoreset_mode, self.max_steps = AutoresetMode(autoreset_mode), max_steps
        self.episode_id, self.episode = -1, None
        self.is_over = True  # the episode that was begun last
        EpisodeHTML("", title, fps, scene).discard()  # what is wrong with the arguments or missing is said at once

    def reset(self) -> None:
        """The environment was reset."""
        self.save("unfinished")
        self.episode_id += 1
        self.is_over = False
        if self.episode_trigger(self.episode_id):
            path = os.path.join(self.folder, f"{self.name_prefix}-episode-{self.episode_id}.html")
            title = f"{self.title}, episode {self.episode_id}"
            self.episode = EpisodeHTML(path, title, self.fps, self.scene)
            self.add(self.picture())

    def step(self, reward: float, terminated: bool, truncated: bool) -> None:
        """The environment made a step, which gave these. With autoreset, a step may be, or contain, a reset."""
        if self.is_over:
            if self.autoreset_mode == AutoresetMode.NEXT_STEP and self.episode_id >= 0:
                self.reset()
            return
        self.is_over = bool(terminated or truncated)
        was_reset = self.is_over and self.autoreset_mode == AutoresetMode.SAME_STEP
        if self.episode:
            # After a reset in the same step there is no picture of the last state any more.
            self.add(None if was_reset else self.picture(), reward)
        if self.is_over:
            self.save("terminated" if terminated else "truncated")
        elif self.episode and len(self.episode.rewards) >= self.max_steps:
            self.save("unfinished")
        if was_reset:
            self.reset()

    def close(self) -> None:
        """Writes the episode that is being recorded."""
        self.save("unfinished")
        self.is_over = True

    def picture(self) -> np.ndarray:
        try:
            return np.asarray(self.render())
        except Exception as error:
            self.discard()
            hint = "MuJoCo without a display needs MUJOCO_GL=egl in the environment, and libegl1; a scene needs neither"
            raise RuntimeError(f"can't render ({one_line(error)}). {hint}") from error

    def add(self, picture: np.ndarray | None, reward: float | None = None) -> None:
        try:
            self.episode.add(picture, reward)
        except OSError as error:
            self.fail(error)
        except BaseException:
            self.discard()
            raise

    def save(self, ended: str) -> None:
        if self.episode and self.episode.rewards:  # a reset alone is no episode
            try:
                self.episode.save(ended)
            except OSError as error:
                self.fail(error)
        self.discard()

    def fail(self, error: OSError) -> None:
        print(f"{self.episode.path} is not written: {one_line(error)}", file=sys.stderr)
        self.discard()

    def discard(self) -> None:
        if self.episode:
            self.episode.discard()
        self.episode = None


class RecordHTML(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Records episodes of a single environment: Gymnasium's `RecordVideo` for HTML files.

    `title` is the page's, the environment's id if it is None; `HTMLRecorder` explains the others. Without `render`,
    frames are those of `env.render()`, which needs `render_mode="rgb_array"`. Poses instead of frames, for a MuJoCo
    environment, with nothing to install and a file a tenth as large:

        model, data = env.unwrapped.model, env.unwrapped.data
        env = RecordHTML(env, "videos", scene=scene_of_mujoco(model), render=lambda: poses_of_mujoco(data))

    Raises ValueError if the environment can't be rendered as it was made, RuntimeError if rendering fails.
    """

    def __init__(
        self,
        env: gym.Env,
        folder: str,
        episode_trigger: Callable[[int], bool] | None = None,
        name_prefix: str = "rl",
        title: str | None = None,
        fps: float | None = None,
        scene: dict | None = None,
        render: Callable[[], np.ndarray] | None = None,
        max_steps: int = 10_000,
    ):
        gym.utils.RecordConstructorArgs.__init__(
            self,
            folder=folder,
            episode_trigger=episode_trigger,
            name_prefix=name_prefix,
            title=title,
            fps=fps,
            scene=scene,
            render=render,
            max_steps=max_steps,
        )
        super().__init__(env)
        self.recorder = HTMLRecorder(
            folder,
            render or render_of(env, env.render, scene),
            title or title_of(env),
            episode_trigger,
            name_prefix,
            env.metadata.get("render_fps", 30) if fps is None else fps,
            scene,
            max_steps=max_steps,
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        result = self.env.reset(seed=seed, options=options)
        self.recorder.reset()
        return result

    def step(self, action):
        result = self.env.step(action)
        _, reward, terminated, truncated, _ = result
        self.recorder.step(reward, terminated, truncated)
        return result

    def close(self):
        self.recorder.close()
        super().close()


class RecordHTMLVector(gym.vector.VectorWrapper):
    """Records episodes of environment 0 of a `gymnasium.vector.VectorEnv`; `RecordHTML` explains the arguments.

    EnvPool's do not know their id: pass it as `title`, and the pictures per second of their time as `fps`. With
    same-step autoreset the last picture is that of the step before: the environment shows its next episode.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv,
        folder: str,
        episode_trigger: Callable[[int], bool] | None = None,
        name_prefix: str = "rl",
        title: str | None = None,
        fps: float | None = None,
        scene: dict | None = None,
        render: Callable[[], np.ndarray] | None = None,
        max_steps: int = 10_000,
    ):
        super().__init__(env)
        if "autoreset_mode" not in env.metadata:
            raise ValueError("the environment's metadata lack autoreset_mode: add gymnasium.vector.AutoresetMode's")
        self.recorder = HTMLRecorder(
            folder,
            render or render_of(env, first_frame_of(env), scene),
            title or title_of(env),
            episode_trigger,
            name_prefix,
            env.metadata.get("render_fps", 30) if fps is None else fps,
            scene,
            env.metadata["autoreset_mode"],
            max_steps,
        )

    def reset(self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None):
        # Looked at first: Gymnasium's own take it out of the options.
        is_reset = options is None or "reset_mask" not in options or options["reset_mask"][0]
        result = self.env.reset(seed=seed, options=options)
        if is_reset:
            self.recorder.reset()
        return result

    def step(self, actions):
        result = self.env.step(actions)
        _, rewards, terminations, truncations, _ = result
        self.recorder.step(rewards[0], terminations[0], truncations[0])
        return result

    def close(self, **kwargs: Any):
        self.recorder.close()
        super().close(**kwargs)


def title_of(env) -> str:
    """The environment's id; EnvPool's do not know theirs."""
    return getattr(env.spec, "id", None) or type(env.unwrapped).__name__


def render_of(env, render: Callable[[], np.ndarray], scene: dict | None) -> Callable[[], np.ndarray]:
    """`render`, if the environment was made so that it can."""
    if scene is not None:
        raise ValueError("a scene is drawn from poses, not from frames: pass render= a function that returns them")
    if env.render_mode != "rgb_array":
        raise ValueError(f'render_mode is {env.render_mode!r}: make the environment with render_mode="rgb_array"')
    return render


def first_frame_of(envs) -> Callable[[], np.ndarray]:
    """Renders environment 0, and no other where that can be helped."""
    raw = envs.unwrapped
    if "env_ids" in inspect.signature(raw.render).parameters:  # EnvPool's
        check_egl(raw)
        return lambda: raw.render(env_ids=[0])[0]
    if isinstance(raw, gym.vector.SyncVectorEnv):
        return raw.envs[0].render
    if hasattr(raw, "render_one"):  # GymnasiumVectorEnv's
        return lambda: raw.render_one(0)
    return lambda: envs.render()[0]


def check_egl(pool) -> None:
    """Raises ValueError where EnvPool would end the process as it renders MuJoCo."""
    uses_mujoco = gym.spaces.flatten_space(pool.observation_space).dtype == np.float64  # EnvPool's others have 32 bits
    if uses_mujoco and sys.version_info < (3, 12) and not hasattr(ctypes.CDLL(None), "eglGetDisplay"):
        raise ValueError(
            "EnvPool 1.2.5 can't render MuJoCo unless libEGL (apt-get install libegl1) was loaded before it: first "
            'ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL), then import envpool'
        )


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def scene_of_mujoco(model) -> dict:
    """What the page draws of a `mujoco.MjModel`: geoms but those of groups 3 to 5, MuJoCo's hidden ones.

    Planes that lie flat become the floor. Raises ValueError for heightfields and signed distance fields.
    """
    import mujoco

    kinds = {getattr(mujoco.mjtGeom, f"mjGEOM_{name}").value: name.lower() for name in DRAWN}
    floor, geoms, meshes = None, [], {}
    for i in range(model.ngeom):
        rgba, material = model.geom_rgba[i], model.geom_matid[i]
        if material >= 0 and np.array_equal(rgba, np.float32([0.5, 0.5, 0.5, 1])):  # the color of a geom without one
            rgba = model.mat_rgba[material]
        if model.geom_group[i] >= 3 or rgba[3] == 0:
            continue
        kind = kinds.get(int(model.geom_type[i]))
        if kind is None:
            name = mujoco.mjtGeom(int(model.geom_type[i])).name.removeprefix("mjGEOM_").lower()
            raise ValueError(f"geom {i} is of type {name}, which can't be drawn: record frames instead of a scene")
        size, quat = model.geom_size[i], model.geom_quat[i]
        if kind == "plane":
            if model.geom_bodyid[i] == 0 and abs(quat[1]) + abs(quat[2]) < 1e-6:
                height = float(model.geom_pos[i, 2])
                floor = height if floor is None else max(floor, height)
                continue
            kind, size = "box", np.array([size[0] or 10, size[1] or 10, 1e-3])
        geom = {"type": kind, "body": int(model.geom_bodyid[i]), "rgb": rounded(rgba[:3])}
        geom |= {"size": rounded(size), "pos": rounded(model.geom_pos[i]), "quat": rounded(quat)}
        if kind == "mesh":
            geom["mesh"] = str(model.geom_dataid[i])
            meshes[geom["mesh"]] = mesh_of(model, model.geom_dataid[i])
        geoms.append(geom)
    return {"num_bodies": int(model.nbody), "floor": floor, "geoms": geoms, "meshes": meshes}


DRAWN = ("PLANE", "SPHERE", "CAPSULE", "ELLIPSOID", "CYLINDER", "BOX", "MESH")


def mesh_of(model, i: int) -> dict:
    vertices = model.mesh_vert[model.mesh_vertadr[i] :][: model.mesh_vertnum[i]]
    triangles = model.mesh_face[model.mesh_faceadr[i] :][: model.mesh_facenum[i]]
    return {"vertices": rounded(vertices.reshape(-1)), "triangles": triangles.reshape(-1).tolist()}


def rounded(array: np.ndarray) -> list[float]:
    return [round(float(x), 6) for x in array]


def poses_of_mujoco(data) -> np.ndarray:
    """[num_bodies, 7], of a `mujoco.MjData`."""
    return np.concatenate([data.xpos, data.xquat], axis=-1)


def scene_of_brax(sys) -> dict:
    """What the page draws of a `brax.System`; see `scene_of_mujoco`."""
    if sys.num_links() != sys.mj_model.nbody - 1:
        raise ValueError(f"the system has {sys.num_links()} links for {sys.mj_model.nbody - 1} bodies")
    return scene_of_mujoco(sys.mj_model)


def poses_of_brax(pipeline_state):
    """[..., 1 + num_links, 7]: the world's pose and the links', of a state of any of Brax's back ends; jit takes it."""
    import jax.numpy as jnp

    poses = jnp.concatenate([pipeline_state.x.pos, pipeline_state.x.rot], axis=-1)
    world = jnp.broadcast_to(jnp.array([0.0, 0, 0, 1, 0, 0, 0]), (*poses.shape[:-2], 1, 7))
    return jnp.concatenate([world, poses], axis=-2)


def save_brax_episode(path: str, env, pipeline_states, rewards, title: str = "", ended: str = "unfinished") -> None:
    """Writes an episode of a Brax environment, as Brax's own `html.save` does, but to be played without the network.

    `pipeline_states`, a list or an axis [num_steps + 1, ...] in front, begins with the reset's; `rewards`: [num_steps].
    """
    if isinstance(pipeline_states, list):
        poses = np.array([poses_of_brax(state) for state in pipeline_states])
    else:
        poses = np.asarray(poses_of_brax(pipeline_states))
    rewards = np.asarray(rewards)
    if poses.ndim != 3 or rewards.shape != (len(poses) - 1,):
        raise ValueError(
            f"states of [num_steps + 1] and rewards of [num_steps] are needed, not states of {list(poses.shape[:-2])} "
            f"and rewards of {list(rewards.shape)}"
        )
    title = title or type(env.unwrapped).__name__
    episode = EpisodeHTML(path, title, fps=1 / float(env.dt), scene=scene_of_brax(env.unwrapped.sys))
    episode.add(poses[0])
    for picture, reward in zip(poses[1:], rewards, strict=True):
        episode.add(picture, reward)
    episode.save(ended)

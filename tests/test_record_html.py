"""Episodes as HTML files: what is recorded, and how Chromium plays it without the network."""

import base64
import fcntl
import importlib
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from video_frames import frames_of

from cleanrl_utils.envs import record_html
from cleanrl_utils.envs.record_html import EpisodeHTML, HTMLRecorder, RecordHTML, RecordHTMLVector

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def episode_in(path) -> dict:
    """What a page holds."""
    with open(path, encoding="utf-8") as f:
        return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', f.read())[1])


class Browser:
    """Headless Chromium without the network, told what to do through the DevTools protocol."""

    def __init__(self, profile):
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]  # neither is 3 or 4
        flags = (
            "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --window-size=1240,760"
        )
        # Chromium reads commands from file 3 and writes answers to file 4.
        shell = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        command = [CHROMIUM, *flags.split(), "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(["bash", "-c", shell, *command], pass_fds=theirs, stderr=subprocess.DEVNULL)
        for fd in (commands, answers, *theirs):
            os.close(fd)
        self.unread, self.id, self.session, self.events = b"", 0, None, []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")
        self("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def __call__(self, method: str, **params) -> dict:
        self.id += 1
        message = {"id": self.id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.id:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self) -> dict:
        while b"\0" not in self.unread:
            assert select.select([self.answers], [], [], 60)[0], "Chromium does not answer"
            data = os.read(self.answers, 1 << 20)
            assert data, "Chromium has ended"
            self.unread += data
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, fragment: str = "") -> None:
        self("Page.navigate", url="about:blank")
        self.events.clear()
        self("Page.navigate", url=f"file://{path}{fragment}")
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str):
        result = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        for _ in range(200):
            if self.evaluate(condition):
                return
            time.sleep(0.05)
        raise AssertionError(f"{condition} did not come true")

    def text(self, name: str) -> str:
        return self.evaluate(f"document.getElementById('{name}').textContent")

    def click(self, name: str, across: float = 0.5) -> None:
        """With the mouse, at a part of the element's width."""
        box = self.evaluate(f"document.getElementById('{name}').getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + across * box["width"], "y": box["y"] + box["height"] / 2, "button": "left"}
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, clickCount=1, buttons=1, **at)

    def seek(self, step: int) -> None:
        """As the slider does when it is moved."""
        self.evaluate(f"""(() => {{
            const slider = document.getElementById("slider");
            slider.value = {step};
            slider.dispatchEvent(new Event("input"));
        }})()""")

    def faults(self) -> list:
        """Exceptions, messages on the console, and whatever was asked of the network, since the page was opened."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.requestWillBeSent")
        return [
            event
            for event in self.events
            if event["method"] in kinds
            and not event["params"]
            .get("request", {})
            .get("url", "")
            .startswith(("file://", "data:", "blob:", "about:"))
        ]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


# ---- The recorder


ONE_BODY = {"num_bodies": 1, "floor": None, "geoms": [], "meshes": {}}


def poses_in(path) -> np.ndarray:
    episode = episode_in(path)
    shape = (len(episode["rewards"]) + 1, episode["scene"]["num_bodies"], 7)
    return np.frombuffer(base64.b64decode(episode["media"]), np.float32).reshape(shape)


class Script:
    """An environment whose episodes have 3 steps; its picture says which episode it shows, and which step of it."""

    def __init__(self):
        self.episode, self.time = -1, 0

    def reset(self):
        self.episode, self.time = self.episode + 1, 0

    def picture(self):
        return np.float32([[self.episode, self.time, 0, 1, 0, 0, 0]])

    def record(self, recorder: HTMLRecorder, num_steps: int, mode: AutoresetMode):
        """Steps as an environment of that mode does, with reward 10 * episode + step; odd episodes are truncated."""
        self.reset()
        recorder.reset()
        ended = False
        for _ in range(num_steps):
            if ended and mode == AutoresetMode.DISABLED:
                self.reset()
                recorder.reset()
            if ended and mode == AutoresetMode.NEXT_STEP:
                self.reset()
                reward, ended, even = 0, False, False
            else:
                self.time += 1
                reward, ended, even = 10 * self.episode + self.time, self.time == 3, self.episode % 2 == 0
            if ended and mode == AutoresetMode.SAME_STEP:
                self.reset()
            recorder.step(reward, ended and even, ended and not even)


@pytest.mark.parametrize(
    ("mode", "num_steps", "last"),
    [(AutoresetMode.DISABLED, 8, 3), (AutoresetMode.NEXT_STEP, 10, 3), (AutoresetMode.SAME_STEP, 8, 2)],
)
def test_episodes_in_each_autoreset_mode(mode, num_steps, last, tmp_path):
    script = Script()
    recorder = HTMLRecorder(tmp_path, script.picture, "x", lambda i: True, scene=ONE_BODY, autoreset_mode=mode)
    script.record(recorder, num_steps, mode)
    assert len(os.listdir(tmp_path)) == 2  # a file appears when its episode is over
    recorder.close()
    assert sorted(os.listdir(tmp_path)) == [f"rl-episode-{i}.html" for i in range(3)]
    for i, ended in enumerate(("terminated", "truncated", "unfinished")):
        episode, poses = episode_in(tmp_path / f"rl-episode-{i}.html"), poses_in(tmp_path / f"rl-episode-{i}.html")
        times = [0, 1, 2, last] if i < 2 else [0, 1, 2]
        assert episode["ended"] == ended
        assert episode["title"] == f"x, episode {i}"
        assert episode["rewards"] == [10 * i + t for t in (1, 2, 3)[: len(times) - 1]]
        assert poses[:, 0, :2].tolist() == [[i, t] for t in times]


def test_only_the_episodes_that_are_asked_for_are_rendered(tmp_path):
    script = Script()
    recorder = HTMLRecorder(tmp_path, script.picture, "x", lambda i: i == 1, name_prefix="eval", scene=ONE_BODY)
    recorder.render = lambda: rendered.append(script.episode) or script.picture()
    rendered = []
    script.record(recorder, 9, AutoresetMode.DISABLED)
    assert os.listdir(tmp_path) == ["eval-episode-1.html"]
    assert rendered == [1] * 4
    assert [i for i in range(3001) if record_html.cubic_schedule(i)] == [i**3 for i in range(10)] + [1000, 2000, 3000]


def test_an_endless_episode_is_cut_off(tmp_path):
    recorder = HTMLRecorder(tmp_path, Script().picture, "x", scene=ONE_BODY, max_steps=5)
    recorder.reset()
    for _ in range(20):
        recorder.step(1, False, False)
    assert episode_in(tmp_path / "rl-episode-0.html")["rewards"] == [1] * 5
    assert recorder.episode is None


def test_steps_after_the_end_are_no_episode(tmp_path):
    recorder = HTMLRecorder(tmp_path, Script().picture, "x", lambda i: True, scene=ONE_BODY)
    recorder.step(1, False, False)  # nor those before a reset
    recorder.reset()
    for terminated in (True, False, True):
        recorder.step(1, terminated, False)
    recorder.close()
    assert os.listdir(tmp_path) == ["rl-episode-0.html"]
    assert episode_in(tmp_path / "rl-episode-0.html")["rewards"] == [1]


def test_a_file_that_cannot_be_written_costs_a_line(tmp_path, capfd, monkeypatch):
    (tmp_path / "file").write_text("")
    script = Script()
    script.record(HTMLRecorder(tmp_path / "file", script.picture, "x", scene=ONE_BODY), 4, AutoresetMode.DISABLED)
    path = tmp_path / "file" / "rl-episode-0.html"
    assert re.fullmatch(rf"{path} is not written: .*\n", capfd.readouterr().err)
    (tmp_path / "rl-episode-0.html").write_text("before")
    recorder = HTMLRecorder(tmp_path, lambda: np.zeros((32, 32, 3), np.uint8), "x")
    recorder.reset()
    recorder.episode.encoder.ffmpeg.kill()
    recorder.step(1, True, False)
    recorder.reset()  # goes on
    assert "is not written: ffmpeg: exit code -9\n" in capfd.readouterr().err
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    script.record(HTMLRecorder(tmp_path, script.picture, "x", scene=ONE_BODY), 4, AutoresetMode.DISABLED)
    assert "rl-episode-0.html is not written: [Errno 28]" in capfd.readouterr().err
    assert (tmp_path / "rl-episode-0.html").read_text() == "before"


@pytest.mark.parametrize(
    ("picture", "line"),
    [
        (np.zeros((8, 8, 3)), r"a frame is uint8 \[height, width, 3\], not float64 \[8, 8, 3\]"),
        (np.zeros((8, 8), np.uint8), r"a frame is uint8 \[height, width, 3\], not uint8 \[8, 8\]"),
        (np.zeros((16, 8, 3), np.uint8), r"size changed from \[8, 8, 3\] to \[16, 8, 3\]"),
    ],
)
def test_frames_that_are_none(picture, line):
    episode = EpisodeHTML("x.html", "x")
    episode.add(np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match=line):
        episode.add(picture, 1.0)
    episode.discard()


def test_wrong_use_is_said_in_a_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="fps has to be positive, not 0"):
        EpisodeHTML("x.html", "x", fps=0)
    with pytest.raises(ValueError, match=r"poses are \[1, 7\] in this scene, not \[2, 7\]"):
        EpisodeHTML("x.html", "x", scene=ONE_BODY).add(np.zeros((2, 7)))
    with pytest.raises(ValueError, match="the first picture, the reset's, has no reward"):
        EpisodeHTML("x.html", "x", scene=ONE_BODY).add(np.zeros((1, 7)), 1.0)
    monkeypatch.setattr(record_html.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"imageio-ffmpeg: pip install 'cleanrl\[video\]'"):
        HTMLRecorder(tmp_path, lambda: None, "x")


# ---- Environments


class Lamp(gym.Env):
    """Its frame is as bright as its time; 4 steps long."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = gym.spaces.Box(0, 1)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.time = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), float(self.time), False, self.time == 4, {}

    def render(self):
        return np.full((33, 47, 3), 50 * self.time, np.uint8)


def video_in(path, folder) -> np.ndarray:
    """The frames of a page's video."""
    video = folder / "video.mp4"
    video.write_bytes(base64.b64decode(episode_in(path)["media"]))
    return frames_of(video)


def test_a_single_environment(tmp_path):
    env = RecordHTML(Lamp("rgb_array"), str(tmp_path / "pages"), lambda i: True, name_prefix="lamp")
    for _ in range(2):
        env.reset()
        while not env.step(0)[3]:
            pass
    env.reset()
    env.step(0)
    env.close()
    assert len(os.listdir(tmp_path / "pages")) == 3
    episode = episode_in(tmp_path / "pages" / "lamp-episode-1.html")
    assert (episode["title"], episode["fps"], episode["ended"]) == ("Lamp, episode 1", 20, "truncated")
    assert episode["rewards"] == [1, 2, 3, 4]
    frames = video_in(tmp_path / "pages" / "lamp-episode-1.html", tmp_path)
    assert frames.shape == (5, 34, 48, 3)
    assert np.abs(frames[:, 5, 5, 0] - 50.0 * np.arange(5)).max() < 8
    assert episode_in(tmp_path / "pages" / "lamp-episode-2.html")["rewards"] == [1]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments(mode, tmp_path):
    envs = gym.vector.SyncVectorEnv([lambda: Lamp("rgb_array")] * 2, autoreset_mode=mode)
    envs = RecordHTMLVector(envs, str(tmp_path), lambda i: True)
    envs.reset()
    ended = np.zeros(2, bool)
    for _ in range(7):
        if mode == AutoresetMode.DISABLED and ended.any():
            envs.reset(options={"reset_mask": np.array([False, True])})  # not the one that is recorded
            assert len(os.listdir(tmp_path)) == 1
            envs.reset(options={"reset_mask": np.array([True, False])})
        ended = envs.step(np.zeros(2, int))[3]
    envs.close()
    assert episode_in(tmp_path / "rl-episode-0.html")["rewards"] == [1, 2, 3, 4]
    rest = 2 if mode == AutoresetMode.NEXT_STEP else 3
    assert episode_in(tmp_path / "rl-episode-1.html")["rewards"] == list(range(1, rest + 1))


def test_environments_that_cannot_be_rendered(tmp_path):
    line = 'render_mode is None: make the environment with render_mode="rgb_array"'
    with pytest.raises(ValueError, match=line):
        RecordHTML(Lamp(), str(tmp_path))
    with pytest.raises(ValueError, match=line):
        RecordHTMLVector(gym.vector.SyncVectorEnv([Lamp]), str(tmp_path))
    with pytest.raises(ValueError, match="a scene is drawn from poses, not from frames: pass render="):
        RecordHTML(Lamp("rgb_array"), str(tmp_path), scene=ONE_BODY)
    lamps = gym.vector.SyncVectorEnv([lambda: Lamp("rgb_array")])
    for wrap, env in ((RecordHTML, Lamp("rgb_array")), (RecordHTMLVector, lamps)):
        with pytest.raises(ValueError, match="fps has to be positive, not 0"):
            wrap(env, str(tmp_path), fps=0)
    env = RecordHTML(Lamp("rgb_array"), str(tmp_path), render=lambda: 1 / 0)
    with pytest.raises(RuntimeError, match=r"can't render \(division by zero\). MuJoCo without a display needs .*egl"):
        env.reset()


RECORD_ENVPOOL = """
import sys
import numpy as np
from cleanrl.ppo_continuous_action_envpool_xla_jax_scan import envpool  # libEGL comes before it
from cleanrl_utils.envs.record_html import RecordHTMLVector

envs = envpool.make("Hopper-v4", env_type="gymnasium", num_envs=2, seed=1, max_episode_steps=3, render_mode="rgb_array")
envs = RecordHTMLVector(envs, sys.argv[1], lambda i: i < 2, title="Hopper-v4", fps=125)
envs.reset()
for _ in range(5):
    print(envs.step(np.zeros((2, 3)))[1][0])
envs.close()
"""


def test_envpool(tmp_path):
    command = [sys.executable, "-c", RECORD_ENVPOOL, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    rewards = [float(line) for line in result.stdout.split()]
    episode = episode_in(tmp_path / "rl-episode-0.html")
    assert (episode["title"], episode["fps"], episode["ended"]) == ("Hopper-v4, episode 0", 125, "truncated")
    assert episode["rewards"] == pytest.approx(rewards[:3])
    assert episode_in(tmp_path / "rl-episode-1.html")["rewards"] == pytest.approx(rewards[4:])
    frames = video_in(tmp_path / "rl-episode-0.html", tmp_path)
    assert len(frames) == 4
    assert frames.std(axis=(1, 2, 3)).min() > 5  # none is blank


def test_envpool_without_egl_is_refused(monkeypatch):
    pool = SimpleNamespace(observation_space=gym.spaces.Box(0, 1, dtype=np.float64))
    atari = SimpleNamespace(observation_space=gym.spaces.Box(0, 255, dtype=np.uint8))
    monkeypatch.setattr(record_html.sys, "version_info", (3, 11))
    monkeypatch.setattr(record_html.ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(ValueError, match="can't render MuJoCo unless libEGL"):
        record_html.check_egl(pool)
    record_html.check_egl(atari)
    monkeypatch.setattr(record_html.ctypes, "CDLL", lambda name: SimpleNamespace(eglGetDisplay=None))
    record_html.check_egl(pool)


# ---- Scenes


GEOMS = """
<mujoco>
  <asset>
    <material name="red" rgba="1 0 0 1"/>
    <mesh name="tetra" vertex="0 0 0  1 0 0  0 1 0  0 0 1"/>
  </asset>
  <worldbody>
    <geom type="plane" size="0 0 1" pos="0 0 -0.5"/>
    <geom type="plane" size="2 3 1" zaxis="1 0 0" pos="-4 0 0"/>
    <body pos="1 2 3">
      <freejoint/>
      <geom type="sphere" size=".1" material="red" pos="0 0 1"/>
      <geom type="capsule" size=".1 .2" rgba="0 1 0 1" pos="-1 0 0"/>
      <geom type="cylinder" size=".1 .2" pos="0 0 .5"/>
      <geom type="ellipsoid" size=".1 .2 .3"/>
      <geom type="box" size=".1 .2 .3" group="3"/>
      <geom type="box" size=".1 .2 .3" rgba="0 0 0 0"/>
      <geom type="box" size=".1 .2 .3"/>
      <geom type="mesh" mesh="tetra"/>
    </body>
  </worldbody>
</mujoco>
"""


def test_scene_of_mujoco():
    mujoco = pytest.importorskip("mujoco")
    scene = record_html.scene_of_mujoco(mujoco.MjModel.from_xml_string(GEOMS))
    geoms = scene["geoms"]
    assert (scene["num_bodies"], scene["floor"]) == (2, -0.5)
    assert [geom["type"] for geom in geoms] == ["box", "sphere", "capsule", "cylinder", "ellipsoid", "box", "mesh"]
    assert geoms[0]["size"] == [2, 3, 1e-3]  # the wall
    assert [geom["body"] for geom in geoms] == [0] + [1] * 6
    assert [geom["rgb"] for geom in geoms[1:4]] == [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0.5]]
    assert geoms[3]["pos"] == [0, 0, 0.5]
    mesh = scene["meshes"][geoms[-1]["mesh"]]
    assert len(mesh["vertices"]) == 12
    assert sorted(np.reshape(mesh["triangles"], (4, 3)).sum(axis=1)) == [3, 4, 5, 6]


def test_a_scene_that_cannot_be_drawn():
    mujoco = pytest.importorskip("mujoco")
    hills = GEOMS.replace("</asset>", '<hfield name="h" nrow="2" ncol="2" size="1 1 1 1"/></asset>')
    hills = hills.replace('type="sphere" size=".1"', 'type="hfield" hfield="h"').replace("<freejoint/>", "")
    with pytest.raises(ValueError, match="geom 2 is of type hfield, which can't be drawn: record frames instead"):
        record_html.scene_of_mujoco(mujoco.MjModel.from_xml_string(hills))


def test_brax_poses_are_those_of_mujoco(tmp_path):
    brax_envs = pytest.importorskip("brax.envs")
    mujoco = pytest.importorskip("mujoco")
    kinematics = importlib.import_module("brax.kinematics")
    env = brax_envs.get_environment("hopper", backend="spring")
    data = mujoco.MjData(env.sys.mj_model)
    q = np.asarray(env.sys.init_q) + np.float32([[0], [0.1], [0.2]])
    expected = []
    for row in q:
        data.qpos = row
        mujoco.mj_kinematics(env.sys.mj_model, data)
        expected.append(record_html.poses_of_mujoco(data))
    forward = jax.jit(jax.vmap(lambda q: kinematics.forward(env.sys, q, jnp.zeros(env.sys.qd_size()))[0]))
    states = SimpleNamespace(x=forward(q))
    record_html.save_brax_episode(str(tmp_path / "a.html"), env, states, jnp.ones(2), ended="terminated")
    episode = episode_in(tmp_path / "a.html")
    assert (episode["title"], episode["fps"]) == ("Hopper", pytest.approx(125))
    assert [geom["type"] for geom in episode["scene"]["geoms"]] == ["capsule"] * 4
    np.testing.assert_allclose(poses_in(tmp_path / "a.html"), expected, atol=1e-5)
    one_by_one = [SimpleNamespace(x=jax.tree.map(lambda leaf: leaf[t], states.x)) for t in range(3)]  # noqa: B023
    record_html.save_brax_episode(str(tmp_path / "b.html"), env, one_by_one, [1.0, 1.0], ended="terminated")
    assert episode_in(tmp_path / "b.html") == episode
    with pytest.raises(ValueError, match=r"not states of \[3\] and rewards of \[3\]"):
        record_html.save_brax_episode(str(tmp_path / "c.html"), env, states, jnp.ones(3))


# ---- The page


NUM_STEPS, BITS, FPS = 40, 6, 8


def frame_of(t: int) -> np.ndarray:
    """A frame that says its number: white and black squares, of 32 pixels, for its bits."""
    return (
        np.kron([[t >> bit & 1 for bit in range(BITS)]], np.full((32, 32), 255))
        .astype(np.uint8)[:, :, None]
        .repeat(3, 2)
    )


SHOWN_FRAME = f"""(() => {{
    const video = document.getElementById("video"), canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    const context = canvas.getContext("2d", {{ willReadFrequently: true }});
    context.drawImage(video, 0, 0);
    const bit = (i) => context.getImageData(32 * i + 16, 16, 1, 1).data[0] > 127;
    return [...Array({BITS}).keys()].reduce((n, i) => n | bit(i) << i, 0);
}})()"""
TITLE = "</script><script>injected = 1</script><!--<b>&amp;"


@pytest.fixture(scope="module")
def video_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "page.html"
    episode = EpisodeHTML(str(path), TITLE, FPS)
    for t in range(NUM_STEPS + 1):
        episode.add(frame_of(t), None if t == 0 else math.sin(t))
    episode.save("truncated")
    return path


@pytest.fixture(scope="module")
def scene_page(tmp_path_factory):
    """Every kind of geom, falling and turning."""
    mujoco = pytest.importorskip("mujoco")
    path = tmp_path_factory.mktemp("scene") / "page.html"
    episode = EpisodeHTML(str(path), "Geoms", FPS, record_html.scene_of_mujoco(mujoco.MjModel.from_xml_string(GEOMS)))
    for t in range(NUM_STEPS + 1):
        world = [0, 0, 0, 1, 0, 0, 0]
        body = [0, 0, 1 - t / NUM_STEPS, math.cos(t / 9), 0, math.sin(t / 9), 0]
        episode.add(np.float32([world, body]), None if t == 0 else math.nan if t == 7 else 1)
    episode.save("terminated")
    return path


def test_the_pages_refer_to_nothing_outside(video_page, scene_page):
    with open(record_html.TEMPLATE, encoding="utf-8") as f:
        template = f.read()
    for text in (template, video_page.read_text(), scene_page.read_text()):
        assert not re.search(r"https?:|(src|href)=(?![\"']?data:)|@import|url\(", text)
        assert "default-src 'none'" in text


def test_video_is_found_picture_by_picture(browser, video_page):
    browser.open(video_page, "#t=12")
    browser.wait_for(f"!document.getElementById('video').seeking && {SHOWN_FRAME} === 12")
    assert browser.text("step") == "12"
    for t in [*range(NUM_STEPS, -1, -3), 0, 1, 40, 9, 10, 11]:
        browser.seek(t)
        browser.wait_for("!document.getElementById('video').seeking")
        assert (browser.evaluate(SHOWN_FRAME), browser.text("step")) == (t, str(t))
    assert browser.text("title") == TITLE  # as text
    assert browser.evaluate("typeof injected") == "undefined"
    assert float(browser.text("return")) == pytest.approx(sum(map(math.sin, range(1, NUM_STEPS + 1))), abs=1e-3)
    assert (browser.text("length"), browser.text("ended")) == ("40", "truncated")
    assert browser.text("reward") == f"{math.sin(11):.3f}"
    assert browser.text("so-far") == f"{sum(map(math.sin, range(1, 12))):.3f}"
    assert browser.faults() == []


PLAY = """
env.reset()
for _ in range(20):
    env.step(env.action_space.sample())
env.close()
"""
PLAY_EACH = PLAY.replace("sample()", "sample()[None].repeat(8, 0)").replace("env.", "envs.")


@pytest.mark.parametrize(
    "block, then",
    list(enumerate([PLAY, PLAY, PLAY_EACH, "", ""])),
    ids=["frames", "poses", "envpool", "brax", "brax_loop"],
)
def test_the_pages_that_the_documentation_makes_play(block, then, browser, tmp_path):
    """Gymnasium's MuJoCo by frames and by poses, EnvPool's, an episode of Brax, and a compiled loop."""
    pytest.importorskip("brax")
    page = (Path(__file__).parents[1] / "docs/envs/record_html.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[block]
    code = re.sub(r"\b(1000|500)\b", "20", code)  # steps
    code = re.sub(r'"(ant|hopper)", backend', '"inverted_pendulum", backend', code)  # it compiles in half the time
    environ = {**os.environ, "MUJOCO_GL": "egl", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code + then]
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    browser.open(min(tmp_path.rglob("*.html")), "#t=2")
    browser.wait_for("document.getElementById('step').textContent === '2'")
    assert float(browser.text("length")) > 2 and browser.text("problem") == ""
    assert browser.faults() == []


@pytest.mark.parametrize("kind", ["video_page", "scene_page"])
def test_play_and_pause(kind, browser, request):
    browser.open(request.getfixturevalue(kind))
    step = "Number(document.getElementById('step').textContent)"
    browser.wait_for(f"{step} > 3")  # it plays when it is opened
    browser.click("play")
    paused = browser.evaluate(step)
    time.sleep(0.3)
    assert browser.evaluate(step) == paused < NUM_STEPS
    assert browser.evaluate("document.getElementById('slider').value") == str(paused)
    if kind == "video_page":
        browser.wait_for(f"{SHOWN_FRAME} === {paused}")
    browser.click("play")
    browser.evaluate("document.getElementById('speed').value = 4, document.getElementById('speed').onchange()")
    browser.wait_for(f"{step} === {NUM_STEPS} && document.getElementById('play').ariaLabel === 'Play'")  # its end
    browser.evaluate("document.getElementById('speed').value = 1")
    browser.click("play")  # from the start
    browser.wait_for(f"0 < {step} && {step} < {NUM_STEPS}")
    browser.click("chart", across=0.5)
    middle = browser.evaluate(step)
    assert abs(middle - NUM_STEPS / 2) < 3
    browser.evaluate("document.getElementById('slider').focus()")  # one step, not its own as well
    browser("Input.dispatchKeyEvent", type="rawKeyDown", key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    assert browser.evaluate(step) == middle + 1
    browser("Input.dispatchKeyEvent", type="keyDown", key=" ", text=" ")
    browser.wait_for(f"{step} > {middle} + 2")
    assert browser.faults() == []


@pytest.mark.parametrize(
    "largest, ticks", [(170_000, "0 50000 1e+5 1.5e+5"), (0.0017, "0 5e-4 0.001 0.0015"), (17, "0 5 10 15")]
)
def test_the_chart_says_where_its_lines_are(browser, tmp_path, largest, ticks):
    episode = EpisodeHTML(str(tmp_path / "page.html"), "Rewards", FPS, ONE_BODY)
    for reward in (None, largest / 2, largest):
        episode.add(np.float32([[0, 0, 0, 1, 0, 0, 0]]), reward)
    episode.save("truncated")
    browser.open(tmp_path / "page.html")
    shown = "[...document.querySelectorAll('#ticks text[text-anchor=end]')].map(x => x.textContent).join(' ')"
    assert browser.evaluate(shown) == f"{ticks} step"


def test_scene_is_drawn(browser, scene_page):
    browser.open(scene_page, "#t=3")
    picture = "document.getElementById('scene').toDataURL()"
    colors = """(() => {
        const canvas = document.getElementById("scene");
        const found = { red: 0, green: 0, shadow: stage.shadow.reduce((a, b) => a + b, 0) };
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < data.length; i += 4) {
            found.red += data[i] > 2 * data[i + 1] && data[i] > 2 * data[i + 2];
            found.green += data[i + 1] > 2 * data[i] && data[i + 1] > 2 * data[i + 2];
        }
        return found;
    })()"""
    browser.wait_for("stage.image !== undefined")
    browser.evaluate("stage.quality = 1, stage.resize()")  # what a slow machine would do at some time
    found = browser.evaluate(colors)
    assert min(found.values()) > 100
    at_3 = browser.evaluate(picture)
    browser.seek(20)
    assert browser.evaluate(picture) != at_3
    browser.seek(3)
    assert browser.evaluate(picture) == at_3
    browser.seek(7)
    assert (browser.text("reward"), browser.text("so-far")) == ("not finite", "not finite")
    line = browser.evaluate("document.getElementById('rewards').getAttribute('d')")
    assert (line.count("M"), line.count("L")) == (2, 40 - 1 - 2)  # a gap where it is not finite
    assert browser.faults() == []


def test_the_browser_is_offline(browser, scene_page):
    browser.open(scene_page, "#t=0")
    browser.evaluate(
        "new Promise(done => { const i = new Image(); i.onerror = done; i.src = 'http://example.org/x.png'; })"
    )
    assert browser.faults() != []  # the tests above would have seen it

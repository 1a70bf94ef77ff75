"""Checkpoints of runs: written beside the training, read as untrusted input."""

import fcntl
import glob
import os
import re
import struct
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache

import flax
import jax
import numpy as np

from cleanrl_utils.errors import usage_error, warn
from cleanrl_utils.files import write_file
from cleanrl_utils.models import check_arrays, check_types, restore_args
from cleanrl_utils.untrusted import read_file, read_json, unpack

FOLDER = "checkpoint"
KEPT = 2
MAX_FILE_SIZE = 2**30  # bytes
PARTS = {"script": str, "args": dict, "versions": dict, "global_step": int, "seconds": float, "state": dict}
# What may be given otherwise when a run goes on: it changes nothing of what is learned from the same steps.
MAY_CHANGE = ("total_timesteps", "track", "wandb_project_name", "wandb_entity", "capture_video", "video_interval")
MAY_CHANGE += ("save_model", "upload_model", "hf_entity", "progress", "compilation_cache", "num_seeds", "num_processes")
MAY_CHANGE += ("process_id", "coordinator_address", "checkpoint_interval", "resume", "skip_nonfinite_updates")
MAY_CHANGE += ("eval_episodes", "eval_interval")


# ---------------------------------------------------------------- writing
class CheckpointWriter:
    """Writes the checkpoints of runs that train together, in a thread of its own: the training does not wait."""

    def __init__(self):
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self.writing: Future | None = None

    @property
    def is_busy(self) -> bool:
        return self.writing is not None and not self.writing.done()

    def save(self, checkpoints: dict[str, dict]) -> None:
        """Run folder -> checkpoint. What can't be written costs a line; the ones before stay."""
        self.writing = self.executor.submit(lambda: [write(folder, x) for folder, x in checkpoints.items()])

    def close(self) -> None:
        """Waits for what is being written."""
        self.executor.shutdown()
        if self.writing:
            self.writing.result()


def path_of(folder: str, step: int) -> str:
    return os.path.join(folder, FOLDER, f"{step:014}.msgpack")


def write(folder: str, checkpoint: dict) -> None:
    path = path_of(folder, checkpoint["global_step"])
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, packed(checkpoint))
    except OSError as error:
        warn(f"the checkpoint {path} can't be written ({error.strerror}): training goes on")
        return
    with suppress(OSError):
        older = [step for step in steps(folder) if step <= checkpoint["global_step"]]
        kept = older[-KEPT:]  # and none of later steps: the run went on from before them
        old = [path_of(folder, step) for step in steps(folder) if step not in kept]
        unfinished = glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "*.tmp"))  # by a killed process
        for name in old + unfinished:
            os.remove(name)


def packed(checkpoint: dict) -> bytes:
    """The content of its file: msgpack, and four bytes of a checksum, as no flipped bit may become a weight."""
    data = flax.serialization.to_bytes(checkpoint)
    return data + struct.pack("<I", zlib.crc32(data))


# ---------------------------------------------------------------- reading
def steps(folder: str) -> list[int]:
    """Those that the run's checkpoints are of, ascending."""
    names = os.listdir(os.path.join(folder, FOLDER)) if os.path.isdir(os.path.join(folder, FOLDER)) else []
    return sorted(int(name[:14]) for name in names if re.fullmatch(r"\d{14}\.msgpack", name))


def read(folder: str, step: int) -> dict:
    """The run's checkpoint of that step. Raises ValueError if the file holds anything else."""
    path = path_of(folder, step)
    try:
        return unpacked(read_file(path, MAX_FILE_SIZE), step)
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def unpacked(data: bytes, step: int) -> dict:
    """The checkpoint of that step in a file's content. Raises ValueError if that is anything else."""
    content = memoryview(data)[:-4]
    if data[-4:] != struct.pack("<I", zlib.crc32(content)):
        raise ValueError("is damaged, or of another version")
    try:
        checkpoint = unpack(content)
    except Exception:  # msgpack and NumPy each raise their own
        raise ValueError("is damaged") from None
    if any(not isinstance(checkpoint.get(name), kind) for name, kind in PARTS.items()):
        raise ValueError(f"is not a checkpoint: that is a dict of {', '.join(PARTS)}")
    if checkpoint["global_step"] != step or not 0 <= checkpoint["seconds"] < 1e12:
        raise ValueError("is not what its name says")
    if not isinstance(checkpoint.get("tracker_id"), str | None):
        raise ValueError("is damaged: its tracker_id is no text")
    return checkpoint


def read_newest(folders: list[str]) -> list[dict]:
    """As `newest_whole`; ends the program with a line where that raises."""
    try:
        return newest_whole(folders)
    except (OSError, ValueError) as error:
        usage_error(f"--resume: {error}")


def newest_whole(folders: list[str]) -> list[dict]:
    """Of each of these runs, which trained together, the checkpoint of the newest step that is whole in all of them.

    Raises ValueError if there is none.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"there is no such folder: {folder}")
        if not steps(folder):
            raise ValueError(f"there is no checkpoint in {folder}")
    common = sorted(set.intersection(*(set(steps(folder)) for folder in folders)))
    if not common:
        raise ValueError(f"no step has a checkpoint in each of {', '.join(folders)}")
    for step in reversed(common[1:]):
        try:
            return [read(folder, step) for folder in folders]
        except ValueError as error:
            warn_once(f"{error}: going on from the one before")
    return [read(folder, common[0]) for folder in folders]


@lru_cache
def warn_once(message: str) -> None:
    """A run's checkpoints are read several times until it goes on."""
    warn(message)


def saved_args(args_class: type, checkpoint: dict, folder: str):
    """The arguments that the run of this folder was trained with."""
    return restore_args(args_class, checkpoint["args"], path_of(folder, checkpoint["global_step"]))


def args_to_go_on_with(args):
    """Those of the run that `args.resume` names, or finds; the defaults if it finds none.

    Which processes trained it, and where they met, is not of the run but of that start.
    """
    folder = find_unfinished(args) if args.resume == "auto" else args.resume
    if folder is None:
        return type(args)()
    (checkpoint,) = read_newest([folder])
    saved = saved_args(type(args), checkpoint, folder)
    return replace(saved, num_processes=None, process_id=None, coordinator_address=None)


def load(lanes: list, script_name: str) -> list[dict]:
    """The checkpoints that the lanes go on from, each of its own `resume`; ends the program if they don't fit."""
    folders = [lane.resume for lane in lanes]
    checkpoints = read_newest(folders)
    for lane, checkpoint, folder in zip(lanes, checkpoints, folders, strict=True):
        if checkpoint["script"] != script_name:
            usage_error(f"--resume {folder}: the run is of the script {checkpoint['script'][:100]!r}")
        saved = saved_args(type(lane), checkpoint, folder)
        for name, value in asdict(lane).items():
            before = getattr(saved, name)
            if name not in MAY_CHANGE and value != before:
                flag = f"--{name.replace('_', '-')}"
                usage_error(f"{flag} {value}: the run {folder} was trained with {before} and goes on with that alone")
        done = checkpoint["global_step"]
        if done % lane.batch_size:
            usage_error(f"--resume {folder}: its checkpoint is of no whole iteration")
        if done > lane.num_iterations * lane.batch_size:
            usage_error(f"--total-timesteps {lane.total_timesteps}: the run {folder} has {done} steps behind it")
    return checkpoints


def find_unfinished(args, runs: str = "runs") -> str | None:
    """The newest run of this experiment, environment and seed that has a checkpoint, isn't finished, and is at rest."""
    name = f"{glob.escape(args.env_id.replace('/', '-'))}__{glob.escape(args.exp_name)}__{args.seed}__*"
    folders = glob.glob(os.path.join(glob.escape(runs), name))
    for folder in sorted(filter(str.isprintable, folders), key=start_time, reverse=True):
        try:
            if steps(folder) and not is_locked(folder) and not is_finished(type(args), folder):
                return folder
        except (OSError, ValueError) as error:
            warn_once(f"--resume auto passes over {folder}: {error}")
    return None


def start_time(folder: str) -> tuple[int, str]:
    suffix = folder.rpartition("__")[2]
    return (int(suffix) if suffix.isdecimal() else 0), folder


def is_finished(args_class: type, folder: str) -> bool:
    """Whether all its steps are done and the model, if there is to be one, is saved and evaluated.

    Raises ValueError if no checkpoint is whole, or of this version of the script.
    """
    (checkpoint,) = newest_whole([folder])
    check_types(args_class, checkpoint["args"])
    args, step = args_class(**checkpoint["args"]), checkpoint["global_step"]
    if args.batch_size < 1:
        raise ValueError(f"its checkpoint is of {args.num_envs} environments and {args.num_steps} steps")
    if step // args.batch_size < args.num_iterations:
        return False
    with suppress(OSError, ValueError, TypeError, KeyError):
        return read_json(os.path.join(folder, "evaluation.json"))["global_step"] == step
    return not args.save_model


def restore_states(template: dict, checkpoints: list[dict], folders: list[str]) -> dict:
    """The checkpoints' states as one, of plain dicts and of arrays [num_devices, num_lanes, ...] as in `template`."""
    for checkpoint, folder in zip(checkpoints, folders, strict=True):
        path, saved = path_of(folder, checkpoint["global_step"]), checkpoint["state"]
        if saved.keys() != template.keys():
            usage_error(f"{path} is of another version of the script: it holds {', '.join(map(repr, saved))}"[:300])
        for name, part in template.items():
            own = {name: jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), part)}
            # Of episodes the returns may be nan yet.
            check_arrays(own, {name: saved[name]}, path, "state", finite=name != "episodes")
        if (saved["iteration"] != saved["iteration"].flat[0]).any() or saved["iteration"].flat[0] < 0:
            usage_error(f"{path}: iteration is {saved['iteration'].flat[0]}")
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *(checkpoint["state"] for checkpoint in checkpoints))


# ---------------------------------------------------------------- one process a run
def lock(folder: str) -> int:
    """Holds the run's folder until the process ends or the file descriptor is closed.

    Raises BlockingIOError if another process holds it, and other OSErrors where nothing can be written.
    """
    os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
    descriptor = os.open(os.path.join(folder, FOLDER, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(0.5)  # it may have been one that only looked
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(folder: str) -> bool:
    """Whether a process trains this run."""
    with suppress(FileNotFoundError):
        with open(os.path.join(folder, FOLDER, "lock")) as f:
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at a time
            except BlockingIOError:
                return True
    return False

"""The curves of a run: TensorBoard's event files, written so that no full disk can stop or delay the training.

tensorboardX's SummaryWriter hands its events to a thread; once that has died of a full disk, training waits for it for
ever. Here is no thread: what can't be written stays in memory, and is tried again.
"""

import hashlib
import os
import socket
import struct
import sys
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import text as text_summary

from cleanrl_utils.errors import usage_error, warn

PREFIX = "events.out.tfevents."
FILE_VERSION = "brain.Event:2"
MAX_PENDING_BYTES = 64 * 2**20  # what an EventWriter keeps in memory while the disk is full
MAX_RECORD_BYTES = 64 * 2**20  # of one that is read
MAX_FOLDER_BYTES = 2 * 2**30  # of all event files of a run together


# ---------------------------------------------------------------- records
@lru_cache
def record_header(length: int) -> bytes:
    """Bytes 0 to 12 of a record: the event's length and its checksum."""
    header = struct.pack("<Q", length)
    return header + struct.pack("<I", masked_crc32c(header))


def encode(event: Event) -> bytes:
    """A record: length, its checksum, event, its checksum."""
    data = event.SerializeToString()
    return record_header(len(data)) + data + struct.pack("<I", masked_crc32c(data))


def version_record(wall_time: float) -> bytes:
    """What an event file starts with; wall_time: seconds since 1970."""
    return encode(Event(wall_time=wall_time, file_version=FILE_VERSION))


def read_records(path: str) -> Iterator[tuple[bytes, Event]]:
    """The records of a file and their events, up to the first that is damaged.

    The end of a file that a killed process left is dropped silently, damage anywhere else with a line to stderr.
    """
    with open(path, "rb") as f:
        start, size = 0, os.fstat(f.fileno()).st_size
        while len(header := f.read(12)) == 12:
            length = int.from_bytes(header[:8], "little")
            try:
                if header != record_header(length) or length > MAX_RECORD_BYTES:
                    raise DecodeError
                data, checksum = f.read(length), f.read(4)
                if len(checksum) < 4:
                    return  # not written to its end
                if checksum != struct.pack("<I", masked_crc32c(data)):
                    raise DecodeError
                event = Event.FromString(data)
            except DecodeError:
                if not is_tail(f, start, size):
                    warn(f"{path}: damaged at byte {start:,} of {size:,}, what follows is lost")
                return
            yield header + data + checksum, event
            start += len(header) + length + len(checksum)


def is_tail(f, start: int, size: int) -> bool:
    """Whether the damaged record at `start` is a file's last one, or nothing but zeros follows, as after a crash."""
    f.seek(start)
    header = f.read(12)
    length = int.from_bytes(header[:8], "little")
    if header == record_header(length):
        return start + 12 + length + 4 >= size
    return not any(header) and not any(any(chunk) for chunk in iter(lambda: f.read(2**20), b""))


# ---------------------------------------------------------------- writing
class EventWriter:
    """Appends scalars and texts to an event file of its own in `folder`, every `flush_seconds` and when told to.

    Nothing here raises an OSError: `flush` tells whether all is on disk, and a line to stderr why it is not. What waits
    is lost unless `close` is called.
    """

    def __init__(self, folder: str, flush_seconds: float = 10.0):
        self.folder, self.flush_seconds = folder, flush_seconds
        self.start_time = time.time()
        self.path = None  # there is no file yet
        self.size = 0  # bytes of the file that are known to be whole records
        self.pending = deque()  # records that are not in the file
        self.pending_bytes = 0  # of memory
        self.first_dropped, self.num_dropped = None, 0
        self.failing = False
        self.flush()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.add(Summary(value=[Summary.Value(tag=tag, simple_value=float(value))]), step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        """Markdown, for TensorBoard's TEXT tab, where it is called `tag`/text_summary."""
        self.add(text_summary(tag, text), step)

    def add(self, summary: Summary, step: int) -> None:
        record = encode(Event(wall_time=time.time(), step=int(step), summary=summary))
        self.pending.append(record)
        self.pending_bytes += sys.getsizeof(record)
        while self.pending_bytes > MAX_PENDING_BYTES:
            oldest = self.pending.popleft()
            self.pending_bytes -= sys.getsizeof(oldest)
            self.first_dropped = self.first_dropped or oldest
            self.num_dropped += 1
        if time.monotonic() - self.last_flush >= self.flush_seconds:
            self.flush()

    def flush(self, sync: bool = False) -> bool:
        """Whether every record so far is in the file; `sync`: and on the device."""
        self.last_flush = time.monotonic()
        try:
            self.write_pending(sync)
        except OSError as error:
            if not self.failing:
                reason = error.strerror or error.__class__.__name__
                warn(f"curves can't be written ({reason}): kept in memory, tried again")
            self.failing = True
            return False
        if self.failing:
            lost = f", but for the {self.num_dropped:,} oldest values" if self.num_dropped else ""
            warn(f"curves are written again{lost}")
        self.first_dropped, self.num_dropped = None, 0
        self.failing = False
        return True

    def write_pending(self, sync: bool) -> None:
        """All of it or nothing. The file is opened anew each time: it may be on a disk that went and came back."""
        if self.path is None or not os.path.exists(self.path):  # not yet, or deleted
            self.path, self.size = create_file(self.folder), 0
        first = [] if self.size else [version_record(self.start_time)]
        data = b"".join([*first, *self.pending])
        append(self.path, self.size, data, sync)
        self.size += len(data)
        self.pending.clear()
        self.pending_bytes = 0

    def close(self) -> None:
        if not self.flush(sync=True) and self.pending:
            step = Event.FromString((self.first_dropped or self.pending[0])[12:-4]).step
            warn(f"curves are lost from step {step:,} on: the disk took nothing any more")


def create_file(folder: str) -> str:
    """A new event file that sorts after those of earlier seconds; no two writers get the same."""
    prefix = os.path.join(folder, f"{PREFIX}{int(time.time()):010d}.{socket.gethostname()}")
    for i in range(1000):
        with suppress(FileExistsError):
            os.close(os.open(f"{prefix}.{i}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            return f"{prefix}.{i}"
    raise FileExistsError(f"{prefix}.0 to .999 exist")


def append(path: str, size: int, data: bytes, sync: bool) -> None:
    """Adds data to the first `size` bytes of a file, which are all that is left of it if that fails."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.fstat(fd).st_size > size:  # a part of what failed before
            os.ftruncate(fd, size)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if sync:
            os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise
    finally:
        os.close(fd)


# ---------------------------------------------------------------- going on from a checkpoint
class Steps:
    """The steps at which a tag has a value: eight bytes each, as long as they come in order."""

    def __init__(self):
        self.in_order, self.others = array("q"), set()

    def add(self, step: int) -> bool:
        """Whether it is new."""
        if not self.in_order or step > self.in_order[-1]:
            self.in_order.append(step)
            return True
        if self.in_order[bisect_left(self.in_order, step)] == step or step in self.others:
            return False
        self.others.add(step)
        return True


def trim(folder: str, step: int, evaluated: bool = True) -> None:
    """Leaves of a run's curves what a checkpoint at `step` has seen, in one event file that sorts before later ones.

    All texts stay. `evaluated`: whether the evaluation at `step` itself had been made. A crash at any time leaves
    files from which this makes the same curves again: of two values of a tag at a step the first counts.
    """
    try:
        files = sorted(
            entry.path
            for entry in os.scandir(folder)
            if entry.name.startswith(PREFIX) and entry.is_file(follow_symlinks=False)
        )
        size = sum(os.path.getsize(path) for path in files)
        if size > MAX_FOLDER_BYTES:
            usage_error(f"{folder}: its event files hold {size / 2**30:.1f} GiB, more than 2: move them elsewhere")
        if files:
            replace_files(folder, files, kept_records(files, step, evaluated))
    except OSError as error:
        usage_error(f"can't trim the curves in {folder}: {error.strerror}")


def kept_records(files: list[str], step: int, evaluated: bool) -> Iterator[bytes]:
    """What `trim` leaves of the files' records, after a new one of the format's version."""
    tags, digests, start_time = {}, set(), None

    def is_new(message) -> bool:
        num_digests = len(digests)
        digests.add(hashlib.sha256(message.SerializeToString()).digest())
        return len(digests) > num_digests

    def is_kept(event: Event, value: Summary.Value) -> bool:
        if value.metadata.plugin_data.plugin_name == "text":
            return is_new(value)
        if event.step > step or (event.step == step and not evaluated and value.tag.startswith("eval/")):
            return False
        return tags.setdefault(value.tag, Steps()).add(event.step)

    for path in files:
        for record, event in read_records(path):
            if start_time is None:
                start_time = event.wall_time
                yield version_record(start_time)
            if event.HasField("summary"):
                values = [value for value in event.summary.value if is_kept(event, value)]
                if len(values) < len(event.summary.value):
                    record = encode(Event(wall_time=event.wall_time, step=event.step, summary=Summary(value=values)))
                if values:
                    yield record
            elif not event.HasField("file_version") and event.step <= step and is_new(event):
                yield record


def replace_files(folder: str, files: list[str], records: Iterator[bytes]) -> None:
    """One file of these records instead of the files, which stay until it is safely there."""
    merged = os.path.join(folder, f"{PREFIX}{0:010d}.{socket.gethostname()}")
    temporary = os.path.join(folder, "trimmed_events.tmp")  # not a name that readers take for an event file
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        with open(temporary, "xb") as f:
            f.writelines(records)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, merged)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder)  # before anything is removed
    for path in files:
        if path != merged:
            os.unlink(path)


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(fd)
    finally:
        os.close(fd)

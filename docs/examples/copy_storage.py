"""Copy a storage while it lives: `python docs/examples/copy_storage.py SOURCE TARGET`.

Both are a directory or `s3://bucket/prefix`. The order is that of docs/operations.md, "Backup":
what may be behind, then head is read, then what is written once, and head is written last. Run
again, it copies what is new. Never copy into a storage that is written to.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

HEAD = "meta/head.json"
# Who is at work, and what a directory keeps for itself: nothing of it belongs into a copy.
LEFT_OUT = re.compile(
    r"meta/(locks|lines|compaction|attempts)/|meta/branches/[^/]+/[^/]+/lock\.json$"
    r"|meta/probe-|sessions/|\.tmp/|\.locks/"
)
BOOKKEEPING = re.compile(r"claims/|dead_letters/|events/[^/]+/_")
EVENTS = re.compile(r"events/")
CAN_CHANGE = re.compile(r"meta/(tags|branches|indices|schema)/|meta/[^/]+\.json$")
BEHIND = (BOOKKEEPING, EVENTS, CAN_CHANGE)  # in this order


class Place:
    """A directory, or a prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self.files: fs.FileSystem
        if uri.startswith("s3://"):
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            scheme, _, host = endpoint.partition("://") if endpoint else ("", "", "")
            options = {"endpoint_override": host, "scheme": scheme} if endpoint else {}
            self.files = fs.S3FileSystem(**options)
            self.root = uri.removeprefix("s3://").rstrip("/")
        else:
            self.files = fs.LocalFileSystem()
            self.root = str(Path(uri).resolve())

    def listing(self) -> Iterator[tuple[str, int]]:
        """What is there: keys and sizes."""
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        for info in self.files.get_file_info(selector):
            if info.type == fs.FileType.File:
                yield info.path.removeprefix(f"{self.root}/"), info.size

    def make_room(self, key: str) -> str:
        """The path for a key, its folder made where there are folders."""
        path = f"{self.root}/{key}"
        if isinstance(self.files, fs.LocalFileSystem):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def read_head(self) -> bytes:
        try:
            with self.files.open_input_stream(f"{self.root}/{HEAD}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise SystemExit(f"There is no storage at {self.root}: it has no {HEAD}.") from None

    def write_head(self, data: bytes) -> None:
        path = self.make_room(HEAD)
        if isinstance(self.files, fs.LocalFileSystem):
            Path(f"{path}.new").write_bytes(data)
            os.sync()  # all that was copied is on the disk before head says so
            os.replace(f"{path}.new", path)
        else:
            with self.files.open_output_stream(path) as stream:
                stream.write(data)

    def delete(self, key: str) -> None:
        self.files.delete_file(f"{self.root}/{key}")


def copy_storage(source: Place, target: Place) -> int:
    """How many objects were copied."""
    there = dict(target.listing())
    copied = 0

    def copy(key: str) -> int:
        try:
            fs.copy_files(f"{source.root}/{key}", target.make_room(key), source.files, target.files)
        except FileNotFoundError:
            return 0  # deleted since it was listed
        return 1

    with ThreadPoolExecutor(16) as pool:
        for kind in BEHIND:
            keys = {key for key, _ in source.listing() if _kind(key) is kind}
            copied += sum(pool.map(copy, keys))
            gone = [key for key in there if _kind(key) is kind and key not in keys]
            list(pool.map(target.delete, gone))  # tags that were deleted, events that ran out
        head = source.read_head()
        once = [k for k, size in source.listing() if _kind(k) is None and there.get(k) != size]
        copied += sum(pool.map(copy, once))
    target.write_head(head)
    return copied + 1


def _kind(key: str) -> re.Pattern[str] | None:
    """None: written once."""
    if key == HEAD or LEFT_OUT.match(key):
        return LEFT_OUT
    return next((kind for kind in BEHIND if kind.match(key)), None)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    count = copy_storage(Place(sys.argv[1]), Place(sys.argv[2]))
    print(f"{count} objects copied; now: onto verify --storage-uri {sys.argv[2]}")

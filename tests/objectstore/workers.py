"""What other processes do in the tests of the directory store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from storage_engine.objectstore.local import DirectoryStore
from storage_engine.objectstore.protocol import ConditionalConflict, ObjectStore, PreconditionFailed


def increment(store: ObjectStore, key: str, times: int) -> None:
    """Add `times` to the counter under `key`, one compare-and-swap each."""
    done = 0
    while done < times:
        current = store.get(key)
        value = json.loads(current.data) + 1
        try:
            store.put_if_match(key, json.dumps(value).encode(), current.etag, write_id="w")
            done += 1
        except (PreconditionFailed, ConditionalConflict):
            continue


def increment_directory(root: str, key: str, times: int) -> None:
    store = DirectoryStore(Path(root))
    try:
        increment(store, key, times)
    finally:
        store.close()


def create_in_directory(root: str, keys: list[str], mark: str) -> int:
    """Try to create every key; how many were won."""
    store = DirectoryStore(Path(root))
    won = 0
    for key in keys:
        try:
            store.put_if_absent(key, mark.encode(), write_id=mark)
            won += 1
        except PreconditionFailed:
            pass
    store.close()
    return won


def churn_directory(root: str, mark: str, rounds: int) -> None:
    """Create and delete objects of one folder, so that it comes and goes all the time."""
    store = DirectoryStore(Path(root))
    for number in range(rounds):
        key = f"churn/deep/{mark}-{number}"
        etag = store.put_if_absent(key, mark.encode(), write_id=mark)
        assert store.get(key).etag == etag
        store.delete_if_match(key, etag)
    store.close()


def torn_bodies() -> list[bytes]:
    """Two bodies, each of one letter all through: a mixture or a piece would show."""
    return [b"a" * 3_000_000, b"b" * 2_000_000]


def overwrite_for_ever(root: str) -> None:
    """Write whole objects until killed: by replacement, by CAS and by creation."""
    store = DirectoryStore(Path(root))
    bodies = torn_bodies()
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        store.put("put", bodies[number % 2])
        current = store.get("cas")
        store.put_if_match("cas", bodies[number % 2], current.etag, write_id="w")
        try:
            etag = store.put_if_absent("created", bodies[number % 2], write_id="w")
            store.delete_if_match("created", etag)
        except PreconditionFailed:
            store.delete_many(["created"])


if __name__ == "__main__":
    overwrite_for_ever(sys.argv[1])

"""What other processes do in the tests of the immutable cache."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from storage_engine.objectstore.cache import ImmutableCache

OBJECTS = 120


def content(number: int) -> bytes:
    chance = random.Random(number)
    return chance.randbytes(chance.randrange(20_000, 60_000))


CONTENTS = [content(number) for number in range(OBJECTS)]
HASHES = [hashlib.sha256(data).hexdigest() for data in CONTENTS]


def obtain(cache: ImmutableCache, number: int) -> Path | bytes:
    data = CONTENTS[number]
    key = f"objects/{number}"
    return cache.obtain("s", key, size=len(data), sha256=HASHES[number], fetch=lambda: data)


def hammer(root: str, max_bytes: int, grace_s: float, seed: int, failures: str) -> None:
    """Use objects until killed, from two threads; a broken promise is written to `failures`."""

    def complain(message: str) -> None:
        with open(failures, "a") as file:
            file.write(message + "\n")

    def work(chance: random.Random, parity: int) -> None:
        while True:
            # What is used moves on, so that there is something to evict however fast this runs.
            # Each thread has its own objects: who gets the path that another thread obtained
            # cannot tell how old the promise is.
            number = (int(time.time() * 40) + chance.randrange(30)) % OBJECTS // 2 * 2 + parity
            started = time.time()
            try:
                found = obtain(cache, number)
                data = found if isinstance(found, bytes) else found.read_bytes()
                if data != CONTENTS[number]:
                    complain(f"wrong content of {number}: {len(data)} bytes")
            except FileNotFoundError:
                if time.time() - started < grace_s / 2:  # otherwise this process slept too long
                    complain(f"{number} was evicted in its grace period")
            except Exception as error:  # noqa: BLE001 - all are failures
                complain(repr(error))

    cache = ImmutableCache(Path(root), max_bytes, grace_s=grace_s, warn=complain)
    threading.Thread(target=work, args=[random.Random(seed), 0], daemon=True).start()
    work(random.Random(-seed), 1)


def die_at(root: str, max_bytes: int, function: str, call: int) -> None:
    """Keep one object, but die when `os.function` is called for the `call`th time."""
    cache = ImmutableCache(Path(root), max_bytes)
    calls = 0
    original = getattr(os, function)

    def deadly(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(os, function, deadly)
    obtain(cache, 0)

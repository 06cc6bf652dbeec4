"""The immutable cache: right content always, a bound that holds, and no read that it fails."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError, IntegrityError
from storage_engine.objectstore import cache_space
from storage_engine.objectstore.cache import ImmutableCache, default_directory, open_cache
from tests.objectstore import cache_workers as workers

GRACE_S = 600.0
START = 1_800_000_000.0


class World:
    """A cache on a clock of its own, over objects of 100 bytes."""

    def __init__(self, root: Path, max_bytes: int = 1000) -> None:
        self.root = root
        self.now = START
        self.warnings: list[str] = []
        self.fetched: list[str] = []
        self.max_bytes = max_bytes
        self.cache = self.another()

    def another(self, max_bytes: int | None = None) -> ImmutableCache:
        """As another process would open it."""
        bound = self.max_bytes if max_bytes is None else max_bytes
        return ImmutableCache(
            self.root, bound, warn=self.warnings.append, clock=lambda: self.now, grace_s=GRACE_S
        )

    @staticmethod
    def content(key: str) -> bytes:
        return key.encode().ljust(100, b".")

    def obtain(self, key: str, cache: ImmutableCache | None = None) -> Path | bytes:
        data = self.content(key)
        found = (cache or self.cache).obtain(
            "storage",
            key,
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            fetch=lambda: self.fetch(key),
        )
        assert (found if isinstance(found, bytes) else found.read_bytes()) == data
        return found

    def fetch(self, key: str) -> bytes:
        self.fetched.append(key)
        return self.content(key)

    def path(self, key: str, cache: ImmutableCache | None = None) -> Path:
        found = self.obtain(key, cache)
        assert isinstance(found, Path)
        return found

    def fill(self, count: int = 10) -> list[Path]:
        """Objects 0, 1, ... used one second after another."""
        paths = []
        for number in range(count):
            paths.append(self.path(str(number)))
            self.now += 1
        return paths

    def files(self) -> list[Path]:
        return [p for p in self.root.rglob("*") if p.is_file() and p.name != "usage"]

    def ledger(self) -> int:
        return int((self.root / "usage").read_bytes().split()[0])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "cache")


# -- hits and misses ---------------------------------------------------------------------------


def test_an_object_is_fetched_once_and_kept_for_other_processes(world: World) -> None:
    assert not world.root.exists()
    path = world.path("a")
    assert world.path("a") == path
    assert world.path("a", world.another()) == path
    assert world.fetched == ["a"]
    assert world.root.stat().st_mode & 0o777 == 0o700
    assert world.cache.stats() == {
        "hits": 1,
        "misses": 1,
        "bytes_hit": 100,
        "bytes_missed": 100,
        "not_kept": 0,
        "damaged": 0,
        "evictions": 0,
        "bytes_held": 100,
    }
    assert world.warnings == []


def test_get_returns_the_content(world: World) -> None:
    data = world.content("a")
    sha256 = hashlib.sha256(data).hexdigest()
    for _ in range(2):
        assert (
            world.cache.get("storage", "a", size=100, sha256=sha256, fetch=lambda: world.fetch("a"))
            == data
        )
    assert world.fetched == ["a"]


def test_objects_of_the_same_content_have_paths_of_their_own(world: World) -> None:
    """Readers tell objects apart by path, such as to give rows the commit id of their file."""
    data = b"same"
    sha256 = hashlib.sha256(data).hexdigest()
    found = {
        world.cache.obtain(namespace, key, size=4, sha256=sha256, fetch=lambda: data)
        for namespace, key in [("s", "a"), ("s", "b"), ("t", "a")]
    }
    assert len(found) == 3


def test_the_same_key_with_other_content_is_another_object(world: World) -> None:
    """A storage was erased and begun anew under the same address."""
    for data in (b"old", b"new"):
        sha256 = hashlib.sha256(data).hexdigest()
        assert world.cache.get("s", "k", size=3, sha256=sha256, fetch=partial(bytes, data)) == data


def test_damaged_objects_are_named_and_not_kept(world: World) -> None:
    data = world.content("a")
    sha256 = hashlib.sha256(data).hexdigest()
    for wrong in (data[:50], data[:-1] + b"x"):
        with pytest.raises(IntegrityError, match=r"commits/a\.parquet has") as caught:
            world.cache.obtain(
                "s", "commits/a.parquet", size=100, sha256=sha256, fetch=partial(bytes, wrong)
            )
        assert caught.value.key == "commits/a.parquet"
    assert world.files() == []


@pytest.mark.parametrize("sha256", ["", "../../etc/passwd", "A" * 64], ids=["none", "path", "case"])
def test_without_a_hash_nothing_is_kept(world: World, sha256: str) -> None:
    for _ in range(2):
        found = world.cache.obtain("s", "k", size=2, sha256=sha256, fetch=lambda: b"ab")
        assert found == b"ab"
    assert not world.root.exists()
    with pytest.raises(IntegrityError, match="1 bytes where the log says 2"):
        world.cache.obtain("s", "k", size=2, sha256=sha256, fetch=lambda: b"a")


def test_a_size_that_is_not_known_is_not_checked(world: World) -> None:
    sha256 = hashlib.sha256(b"ab").hexdigest()
    for _ in range(2):
        found = world.cache.get("s", "k", size=None, sha256=sha256, fetch=lambda: b"ab")
        assert found == b"ab"
    assert world.cache.stats()["hits"] == 1


def test_what_fetch_raises_goes_to_the_caller(world: World) -> None:
    """Even an OSError, which is no trouble of the cache."""

    def fail() -> bytes:
        raise OSError(errno.ECONNRESET, "gone")

    with pytest.raises(OSError, match="gone"):
        world.cache.obtain("s", "k", size=1, sha256="0" * 64, fetch=fail)
    assert world.warnings == []
    world.path("a")


def test_zero_bytes_turn_it_off(world: World) -> None:
    cache = world.another(0)
    assert isinstance(world.obtain("a", cache), bytes)
    assert isinstance(world.obtain("a", cache), bytes)
    assert world.fetched == ["a", "a"]
    assert not world.root.exists()


# -- threads -----------------------------------------------------------------------------------


def test_threads_that_miss_the_same_object_fetch_it_once(world: World) -> None:
    data = world.content("a")
    sha256 = hashlib.sha256(data).hexdigest()
    begun, go = threading.Event(), threading.Event()

    def fetch() -> bytes:
        begun.set()
        assert go.wait(240)
        return world.fetch("a")

    def obtain() -> Path | bytes:
        return world.cache.obtain("s", "a", size=100, sha256=sha256, fetch=fetch)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(obtain)
        assert begun.wait(240)
        rest = [pool.submit(obtain) for _ in range(7)]
        go.set()
        assert len({f.result(240) for f in [first, *rest]}) == 1
    assert world.fetched == ["a"]
    assert world.cache.stats()["hits"] == 7


def test_who_waited_for_a_fetch_that_failed_tries_for_himself(world: World) -> None:
    data = world.content("a")
    sha256 = hashlib.sha256(data).hexdigest()
    begun, go = threading.Event(), threading.Event()

    def fail() -> bytes:
        begun.set()
        assert go.wait(240)
        raise IntegrityError("no")

    def obtain(fetch: Callable[[], bytes]) -> Path | bytes:
        return world.cache.obtain("s", "a", size=100, sha256=sha256, fetch=fetch)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(obtain, fail)
        assert begun.wait(240)
        second = pool.submit(obtain, lambda: data)
        go.set()
        with pytest.raises(IntegrityError):
            first.result(240)
        assert isinstance(second.result(240), Path)
    assert isinstance(obtain(fail), Path)  # found, not fetched


# -- damaged files -----------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    os.truncate(path, 40)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _zeros(path: Path) -> None:
    """What a power loss leaves of a file whose size reached the disk and whose content did not."""
    path.write_bytes(bytes(100))


def _grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


DAMAGE = [_truncate, _empty, _zeros, _grown]


@pytest.mark.parametrize("damage", DAMAGE, ids=[f.__name__ for f in DAMAGE])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_a_damaged_file_is_replaced_with_one_warning(
    world: World, damage: Callable[[Path], None], known: bool
) -> None:
    """By the process that had checked it before, and by one that finds it."""
    path = world.path("a")
    damage(path)
    cache = world.cache if known else world.another()

    assert world.path("a", cache) == path
    assert world.path("a", cache) == path
    assert world.fetched == ["a", "a"]
    assert len(world.warnings) == 1
    assert str(path) in world.warnings[0]
    assert cache.stats()["damaged"] == 1
    assert [p.stat().st_size for p in world.files()] == [100]


def test_a_damaged_file_is_gone_even_when_fetching_fails(world: World) -> None:
    path = world.path("a")
    status = path.stat()
    _zeros(path)
    world.cache._space.discard(path.name, status)
    assert path.exists(), "it is not the file that was found to be damaged"

    def fail() -> bytes:
        raise ConnectionError("no")

    sha256 = hashlib.sha256(world.content("a")).hexdigest()
    with pytest.raises(ConnectionError):
        world.cache.obtain("storage", "a", size=100, sha256=sha256, fetch=fail)
    assert not path.exists()
    assert world.ledger() == 0


def test_a_file_that_took_the_place_of_the_checked_one_is_not_trusted(world: World) -> None:
    path = world.path("a")
    checked = path.stat()
    other = path.with_name("other")
    _zeros(other)
    os.replace(other, path)
    assert world.cache._space.mark_used(path.name, checked) is None


def test_a_file_is_hashed_once_and_again_when_it_has_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Any] = []
    original = hashlib.file_digest

    def file_digest(*args: Any) -> Any:
        hashed.append(args)
        return original(*args)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    path = world.path("a")
    world.path("a")
    assert len(hashed) == 0  # its own file was checked before it was written

    other = world.another()
    world.path("a", other)
    world.path("a", other)
    assert len(hashed) == 1

    world.now += GRACE_S  # marking it as used is no reason
    world.path("a", other)
    world.path("a", other)
    assert len(hashed) == 1

    os.utime(path, (world.now + 1, world.now + 1))
    world.now += 2
    world.path("a", other)
    assert len(hashed) == 2


def test_something_else_in_the_place_of_a_file(world: World) -> None:
    path = world.path("a")
    path.unlink()
    path.mkdir()
    assert isinstance(world.obtain("a", world.another()), bytes)
    assert len(world.warnings) == 1


# -- the bound ---------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(world: World) -> None:
    paths = world.fill()
    world.now += GRACE_S
    world.path("0", world.another())  # used again, by another process
    world.path("new")

    assert [p.exists() for p in paths] == [True, False] + [True] * 8
    assert world.cache.stats()["evictions"] == 1
    assert world.ledger() == 1000
    assert len(world.files()) == 10


def test_what_is_in_use_is_not_evicted(world: World) -> None:
    paths = world.fill()
    assert isinstance(world.obtain("new"), bytes)
    world.now = START + GRACE_S - 1
    assert isinstance(world.obtain("new"), bytes)
    assert all(p.exists() for p in paths)
    assert world.cache.stats()["evictions"] == 0

    world.now = START + GRACE_S + 1
    assert isinstance(world.obtain("new"), bytes), "it was looked a moment ago"
    world.now += GRACE_S / 20
    world.path("new")
    assert [p.exists() for p in paths[:2]] == [False, True]
    assert world.warnings == []


@pytest.mark.parametrize("age", [0.0, 299.0, 301.0, 599.0, 5000.0])
def test_a_path_can_be_opened_for_half_the_grace_period(world: World, age: float) -> None:
    """However old the file was when it was handed out."""
    path = world.path("0")
    world.now += age
    world.fill()
    assert world.path("0") == path
    world.now += GRACE_S / 2 - 11
    other = world.another()
    for number in range(20):
        world.obtain(f"other {number}", other)
    assert path.exists()


def test_nothing_is_evicted_for_what_does_not_fit_anyway(world: World) -> None:
    paths = world.fill()
    world.now += GRACE_S
    for number in range(1, 10):
        world.path(str(number))
    data = bytes(200)
    sha256 = hashlib.sha256(data).hexdigest()
    found = world.cache.obtain("s", "big", size=200, sha256=sha256, fetch=lambda: data)
    assert found == data
    assert all(p.exists() for p in paths)


def test_what_is_larger_than_the_bound_is_not_kept(world: World) -> None:
    paths = world.fill()
    world.now += 2 * GRACE_S
    data = bytes(1001)
    sha256 = hashlib.sha256(data).hexdigest()
    found = world.cache.obtain("s", "big", size=1001, sha256=sha256, fetch=lambda: data)
    assert found == data
    assert all(p.exists() for p in paths)


def test_eviction_makes_more_room_than_is_needed(tmp_path: Path) -> None:
    world = World(tmp_path / "cache", max_bytes=10_000)
    world.fill(100)
    world.now += GRACE_S
    world.path("new")
    assert world.cache.stats()["evictions"] == 10
    assert world.ledger() == 9_100


def test_room_is_made_without_looking_at_all_files_each_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[Any] = []
    original = os.scandir

    def scandir(path: Any) -> Any:
        scans.append(path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    world.path("0")
    first = len(scans)
    world.fill()
    assert len(scans) == first
    world.obtain("a")
    second = len(scans)
    assert second > first
    world.obtain("b")
    assert len(scans) == second, "and not each time when there is none"


def test_a_smaller_bound_holds_for_all(world: World) -> None:
    world.fill()
    world.now += GRACE_S
    world.path("new", world.another(500))
    assert sum(p.stat().st_size for p in world.files()) <= 500


def test_files_of_others_are_neither_counted_nor_deleted(world: World) -> None:
    foreign = [world.root / "notes.txt", world.root / "ab" / "x", world.root / "tmp" / "y"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5000))
        os.utime(path, (1, 1))
    for _ in range(3):
        world.fill()
        world.now += 2 * GRACE_S
    assert all(path.exists() for path in foreign)


def test_a_clock_that_was_set_back_does_not_freeze_the_cache(world: World) -> None:
    world.fill()
    world.now -= 86_400
    path = world.path("9")  # used now, and no more in the future
    world.path("new")
    assert path.exists()
    assert len(world.files()) <= 10


@pytest.mark.parametrize("usage", [b"", b"garbage", bytes(42), b"9" * 200])
def test_a_count_that_is_not_readable_is_made_anew(world: World, usage: bytes) -> None:
    world.fill(5)
    (world.root / "usage").write_bytes(usage)
    for number in range(3):
        world.path(f"new {number}")
    assert world.ledger() == 800


def test_a_wrong_count_is_put_right_within_an_hour(world: World) -> None:
    world.fill(10)
    (world.root / "usage").write_bytes(b"%020d %020d\n" % (0, int(START)))
    world.now += 3600
    world.path("new")
    assert world.ledger() == sum(p.stat().st_size for p in world.files()) <= 1000


# -- directories that do not work --------------------------------------------------------------


@contextmanager
def _unprivileged() -> Iterator[None]:
    """Root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unwritable_directory(world: World) -> None:
    world.root.mkdir()
    world.root.chmod(0o500)
    with _unprivileged():
        for _ in range(3):
            assert isinstance(world.obtain("a"), bytes)
            world.now += 40  # the pause ends, the trouble does not
    assert world.fetched == ["a"] * 3
    assert len(world.warnings) == 1
    assert "permission denied" in world.warnings[0]
    assert str(world.root) in world.warnings[0]


def test_a_file_in_the_place_of_the_directory(world: World) -> None:
    world.root.write_bytes(b"")
    assert isinstance(world.obtain("a"), bytes)
    assert isinstance(world.obtain("b"), bytes)
    assert len(world.warnings) == 1


def test_a_full_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.path("a")
    full = True
    original = open

    def write_nothing(file: Any, mode: str = "r", **options: Any) -> Any:
        if full and "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(file, mode, **options)

    monkeypatch.setattr(cache_space, "open", write_nothing, raising=False)
    for key in "bcd":
        assert isinstance(world.obtain(key), bytes)
    world.path("a")  # what is there is still found
    assert len(world.warnings) == 1
    assert "disk is full" in world.warnings[0]
    assert len(world.files()) == 1
    assert world.ledger() == 100

    full = False
    assert isinstance(world.obtain("b"), bytes), "left alone for a minute"
    world.now += 61
    world.path("b")
    assert world.ledger() == 200


def test_a_directory_that_is_deleted_midway(world: World) -> None:
    for _ in range(3):
        path = world.path("a")
        shutil.rmtree(world.root)
        assert not path.exists()
    world.path("a")
    (world.root / "usage").unlink()
    world.path("b")
    shutil.rmtree(world.root / "tmp")
    world.path("c")
    assert world.warnings == []
    assert world.ledger() == 300


def test_a_directory_that_is_deleted_between_reserving_and_naming(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = os.replace, 0

    def replace(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            shutil.rmtree(world.root)
        original(*args)

    monkeypatch.setattr(os, "replace", replace)
    world.path("a")
    assert calls == 2
    assert world.warnings == []
    assert world.ledger() == 100


def test_get_survives_a_deletion_after_the_file_was_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = world.path("a")
    data = world.content("a")
    monkeypatch.setattr(world.cache, "obtain", lambda *a, **k: path)
    shutil.rmtree(world.root)
    sha256 = hashlib.sha256(data).hexdigest()
    assert world.cache.get("s", "a", size=100, sha256=sha256, fetch=lambda: data) == data


def test_a_lock_file_that_is_deleted_while_others_wait_for_it(world: World) -> None:
    """Who then got the lock of the deleted one would share the directory with others."""
    world.path("a")
    usage = world.root / "usage"

    def count() -> bool:
        with world.another()._space._locked():
            return usage.exists()

    with ThreadPoolExecutor(1) as pool:
        with world.cache._space._locked():
            waiting = pool.submit(count)
            time.sleep(0.05)
            usage.unlink()
        assert waiting.result(240)


def test_a_lock_that_is_not_given_back_delays_once_and_fails_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_space, "_LOCK_WAIT_S", 0.05)
    path = world.path("a")
    with world.another()._space._locked():
        assert isinstance(world.obtain("b"), bytes)
        assert world.path("a") == path  # needs no lock
        world.now += GRACE_S
        # It cannot be kept from being evicted, so it is read at once.
        assert isinstance(world.obtain("a"), bytes)
        assert world.fetched == ["a", "b"]
    assert len(world.warnings) == 1


# -- several processes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.objectstore.cache_workers"])
    return context


# In the order of keeping one object in a new directory: the count is begun and raised, the file
# reserved, filled, marked as used and given its name, the count lowered by what it replaced.
DEATHS = [
    ("scandir", 1),
    ("pwrite", 1),
    ("pwrite", 2),
    ("ftruncate", 1),
    ("utime", 1),
    ("replace", 1),
    ("pwrite", 3),
]


@pytest.mark.parametrize(("function", "call"), DEATHS, ids=[f"{f}-{n}" for f, n in DEATHS])
def test_a_writer_killed_at_any_step_leaves_nothing_that_counts(
    tmp_path: Path, forks: Any, function: str, call: int
) -> None:
    root, size = tmp_path / "cache", len(workers.CONTENTS[0])
    for attempt in range(3):
        process = forks.Process(target=workers.die_at, args=(str(root), 2 * size, function, call))
        process.start()
        process.join(240)
        assert process.exitcode == -signal.SIGKILL or (attempt and process.exitcode == 0)
        usage = (root / "usage").read_bytes()
        held = sum(p.stat().st_size for p in root.rglob("*") if p.is_file() and p.name != "usage")
        assert not usage or int(usage.split()[0]) >= held, "a count that is too low breaks bounds"
        assert held <= 2 * size

    # There is room for two of its size: what the dead left is swept when it is in the way.
    cache = ImmutableCache(root, 2 * size)
    assert isinstance(workers.obtain(cache, 0), Path)
    data = bytes(size)
    sha256 = hashlib.sha256(data).hexdigest()
    assert isinstance(cache.obtain("s", "x", size=size, sha256=sha256, fetch=lambda: data), Path)
    assert list((root / "tmp").iterdir()) == []


def test_files_of_living_writers_count_and_are_not_swept(world: World) -> None:
    (world.root / "tmp").mkdir(parents=True)
    temp = world.root / "tmp" / ("0" * 32)
    writer = world.cache._space
    with writer._locked():
        handle = writer._reserve(temp, 950)
    other = world.another()
    assert isinstance(world.obtain("a", other), bytes), "it counts with its final size"
    assert temp.exists()

    writer._close(handle)  # as the kernel does when the writer dies
    world.now += GRACE_S
    world.path("a", other)
    assert not temp.exists()


def test_processes_that_are_killed_all_the_time(tmp_path: Path, forks: Any) -> None:
    """Every content is right, every path can be opened in its time, the bound always holds."""
    root, failures = tmp_path / "cache", tmp_path / "failures"
    max_bytes, grace_s = 1_200_000, 1.0
    chance = random.Random(11)
    seeds = iter(range(1, 10_000))

    def start() -> Any:
        process = forks.Process(
            target=workers.hammer, args=(str(root), max_bytes, grace_s, next(seeds), str(failures))
        )
        process.start()
        return process

    observer = ImmutableCache(root, max_bytes, grace_s=grace_s)
    processes = [start() for _ in range(3)]
    gone: set[str] = set()
    before: set[str] = set()
    killed = 0
    try:
        until = time.monotonic() + 240
        while (len(gone) < 25 or killed < 12) and time.monotonic() < until:
            time.sleep(chance.uniform(0.0, 0.08))
            if root.exists():
                with observer._space._locked() as ledger:
                    found = {
                        str(p): p.stat().st_size
                        for p in root.rglob("*")
                        if p.is_file() and p.name != "usage"
                    }
                    held = sum(found.values())
                    assert held <= max_bytes
                    assert ledger.total >= held or not found
                gone |= before - set(found)
                before = {path for path in found if len(Path(path).name) == 64}
            if chance.random() < 0.4:
                victim = processes.pop(0)
                victim.kill()
                victim.join(240)
                killed += 1
                processes.append(start())
    finally:
        for process in processes:
            process.kill()
            process.join(240)

    assert not failures.exists(), failures.read_text()
    assert len(gone) >= 25, "hardly anything was ever evicted: this test tells nothing"

    left = [p for p in root.rglob("*") if p.is_file() and len(p.name) == 64]
    known = set(workers.HASHES)
    assert left
    assert all(hashlib.sha256(p.read_bytes()).hexdigest() in known for p in left)


def _in_a_fork(work: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    for _ in range(3000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_fork_while_another_thread_fetches(world: World) -> None:
    data = world.content("a")
    sha256 = hashlib.sha256(data).hexdigest()
    begun, go = threading.Event(), threading.Event()

    def fetch() -> bytes:
        begun.set()
        assert go.wait(240)
        return data

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            lambda: world.cache.obtain("storage", "a", size=100, sha256=sha256, fetch=fetch)
        )
        assert begun.wait(240)
        assert _in_a_fork(lambda: isinstance(world.obtain("a"), Path))
        go.set()
        assert isinstance(future.result(240), Path)


def test_a_fork_while_another_thread_holds_the_lock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_space, "_LOCK_WAIT_S", 0.05)
    world.path("a")
    locked, go = threading.Event(), threading.Event()

    def hold() -> None:
        with world.cache._space._locked():
            locked.set()
            assert go.wait(240)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold)
        assert locked.wait(240)
        assert _in_a_fork(lambda: isinstance(world.obtain("b"), bytes))
        go.set()
        future.result(240)
    world.path("b")


# -- settings ----------------------------------------------------------------------------------


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_directory() == Path("/home/ada/.cache/ontologia")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_directory() == Path("/home/ada/.cache/ontologia")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/ada")
    assert default_directory() == Path("/var/cache/ada/ontologia")


def test_a_user_without_a_home_has_no_cache_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    warnings: list[str] = []
    assert default_directory() is None
    cache = open_cache(OntologiaConfig(), warn=warnings.append)
    assert cache.get("s", "k", size=1, sha256="", fetch=lambda: b"a") == b"a"
    assert len(warnings) == 1
    assert "cache_dir" in warnings[0]
    open_cache(OntologiaConfig(cache_bytes=0), warn=warnings.append)
    assert len(warnings) == 1


def test_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert OntologiaConfig().cache_bytes == 1 << 30
    assert open_cache(OntologiaConfig()).directory == tmp_path / "xdg" / "ontologia"
    config = tmp_path / "onto.toml"
    config.write_text('cache_dir = "~/fast"\ncache_bytes = 1_000\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = open_cache(OntologiaConfig.from_file(config))
    assert cache.directory == tmp_path / "fast"
    found = cache.obtain(
        "s", "k", size=1, sha256=hashlib.sha256(b"a").hexdigest(), fetch=lambda: b"a"
    )
    assert isinstance(found, Path)
    with pytest.raises(ConfigurationError, match="cache_bytes"):
        OntologiaConfig(cache_bytes=-1)

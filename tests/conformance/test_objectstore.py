"""What every object store must do, asked of each adapter and of each server alike."""

from __future__ import annotations

import multiprocessing
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage_engine.commitlog import layout
from storage_engine.objectstore.local import DirectoryStore
from storage_engine.objectstore.memory import MemoryBackend
from storage_engine.objectstore.open import probe_conditional_writes
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    PreconditionFailed,
)
from storage_engine.objectstore.s3 import S3Store
from tests.objectstore import workers
from tests.servers import S3Server

Opener = Callable[[], ObjectStore]


@pytest.fixture(scope="session")
def buckets() -> dict[str, str]:
    return {}


@pytest.fixture(params=["directory", "memory", "moto", "seaweedfs", "moto-bulk", "seaweedfs-bulk"])
def another(
    request: pytest.FixtureRequest, tmp_path: Path, buckets: dict[str, str]
) -> Iterator[Opener]:
    """Opens clients of one fresh storage, as many as the test wants."""
    opened: list[ObjectStore] = []
    backend = MemoryBackend()
    prefix = f"{uuid.uuid4().hex[:8]}/nested prefix"

    def open_one() -> ObjectStore:
        store: ObjectStore
        if request.param == "directory":
            store = DirectoryStore(tmp_path / "root")
        elif request.param == "memory":
            store = backend.client()
        else:
            name, _, way = request.param.partition("-")
            server: S3Server = request.getfixturevalue(f"{name}_s3")
            if server.name not in buckets:
                buckets[server.name] = server.make_bucket()
            # A server on a busy machine may take its time; who has won must be known here.
            config = server.config(s3_request_timeout_s=60)
            plain = S3Store(buckets[server.name], prefix, config)
            opened.append(plain)
            return plain.bulk if way else plain
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(another: Opener) -> ObjectStore:
    return another()


def race(count: int, attempt: Callable[[int], object]) -> list[object]:
    """Run `attempt(0..count-1)` at the same moment; results, or signals of having lost."""
    barrier = threading.Barrier(count)

    def run(number: int) -> object:
        barrier.wait()
        try:
            return attempt(number)
        except (PreconditionFailed, ConditionalConflict) as lost:
            return lost

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def winners(outcomes: list[object]) -> list[int]:
    return [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]


def keys_of(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after=start_after)]


def test_put_then_get(store: ObjectStore) -> None:
    store.put("a/b.json", b"one")
    first = store.get("a/b.json")
    store.put("a/b.json", b"two")
    second = store.get("a/b.json")
    assert (first.data, second.data) == (b"one", b"two")
    assert first.etag != second.etag


def test_missing_objects(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("no/such")
    with pytest.raises(ObjectNotFound):
        store.get_if_changed("no/such", '"0"')
    with pytest.raises(PreconditionFailed):
        store.put_if_match("no/such", b"x", '"0"', write_id="w")
    with pytest.raises(PreconditionFailed):
        store.delete_if_match("no/such", '"0"')
    assert keys_of(store, "") == []
    store.put("a/b/c", b"")
    for near in ("a", "a/b", "a/b/c/d"):
        with pytest.raises(ObjectNotFound):
            store.get(near)


def test_create_only_once(store: ObjectStore) -> None:
    etag = store.put_if_absent("lock", b"mine", write_id="w1")
    with pytest.raises(PreconditionFailed):
        store.put_if_absent("lock", b"theirs", write_id="w2")
    assert store.get("lock").data == b"mine"
    assert store.get("lock").etag == etag


def test_replace_exactly_one_version(store: ObjectStore) -> None:
    first = store.put_if_absent("head", b"1", write_id="w1")
    second = store.put_if_match("head", b"2", first, write_id="w2")
    assert store.get("head").etag == second
    with pytest.raises(PreconditionFailed):
        store.put_if_match("head", b"3", first, write_id="w3")
    assert store.get("head").data == b"2"
    # The ETag of a read serves as well as that of a write.
    store.put_if_match("head", b"4", store.get("head").etag, write_id="w4")
    assert store.get("head").data == b"4"


def test_delete_exactly_one_version(store: ObjectStore) -> None:
    stale = store.put_if_absent("lock", b"1", write_id="w1")
    fresh = store.put_if_match("lock", b"2", stale, write_id="w2")
    with pytest.raises(PreconditionFailed):
        store.delete_if_match("lock", stale)
    assert store.get("lock").data == b"2"
    store.delete_if_match("lock", fresh)
    with pytest.raises(ObjectNotFound):
        store.get("lock")
    store.put_if_absent("lock", b"3", write_id="w3")


def test_get_if_changed(store: ObjectStore) -> None:
    etag = store.put_if_absent("head", b"1", write_id="w1")
    assert store.get_if_changed("head", etag) is None
    assert store.get_if_changed("head", store.get("head").etag) is None
    store.put_if_match("head", b"2", etag, write_id="w2")
    changed = store.get_if_changed("head", etag)
    assert changed is not None
    assert changed.data == b"2"
    assert store.get_if_changed("head", changed.etag) is None


def test_ranges(store: ObjectStore) -> None:
    store.put("large", bytes(range(200)))
    before = store.meter.snapshot()
    assert store.get_range("large", 10, 5) == bytes(range(10, 15))
    assert store.get_range("large", 0, 200) == bytes(range(200))
    after = store.meter.snapshot()
    assert after["total"] - before["total"] == 2
    assert after["bytes_read"] - before["bytes_read"] == 205
    assert store.get_range("large", 190, 100) == bytes(range(190, 200)), "no more than there is"
    assert store.get_range("large", 200, 10) == b""
    assert store.get_range("large", 7, 0) == b""
    with pytest.raises(ObjectNotFound):
        store.get_range("no/such", 0, 10)


def test_quotes_around_etags_do_not_matter(store: ObjectStore) -> None:
    etag = store.put_if_absent("head", b"1", write_id="w1")
    assert store.get_if_changed("head", etag.strip('"')) is None
    store.put_if_match("head", b"2", etag.strip('"'), write_id="w2")
    with pytest.raises(PreconditionFailed):
        store.delete_if_match("head", etag.strip('"'))
    store.delete_if_match("head", store.get("head").etag.strip('"'))


def test_what_one_client_writes_another_sees(another: Opener) -> None:
    one, two = another(), another()
    etag = one.put_if_absent("meta/head.json", b"1", write_id="w1")
    assert two.get("meta/head.json").etag == etag
    two.put_if_match("meta/head.json", b"2", etag, write_id="w2")
    with pytest.raises(PreconditionFailed):
        one.put_if_match("meta/head.json", b"3", etag, write_id="w3")


def test_probe_passes_and_cleans_up(store: ObjectStore) -> None:
    probe_conditional_writes(store, layout.probe())
    assert keys_of(store, "") == []


def test_racing_creates_have_one_winner(another: Opener) -> None:
    clients = [another(), another()]
    for round_number in range(3):
        key = f"race/{round_number}"
        outcomes = race(
            16,
            lambda n, key=key: clients[n % 2].put_if_absent(  # type: ignore[misc]
                key, f"writer {n}".encode(), write_id=f"w{n}"
            ),
        )
        (won,) = winners(outcomes)
        stored = clients[0].get(key)
        assert stored.data == f"writer {won}".encode()
        assert stored.etag == outcomes[won]


def test_racing_replacements_lose_no_update(another: Opener) -> None:
    clients = [another(), another()]
    clients[0].put("counter", b"0")
    race(8, lambda n: workers.increment(clients[n % 2], "counter", 5))
    assert clients[0].get("counter").data == b"40"


def test_racing_deletes_have_one_winner(store: ObjectStore) -> None:
    for round_number in range(5):
        etag = store.put_if_absent("lock", str(round_number).encode(), write_id="w")
        outcomes = race(8, lambda _, etag=etag: store.delete_if_match("lock", etag))  # type: ignore[misc]
        assert len(winners(outcomes)) == 1
        with pytest.raises(ObjectNotFound):
            store.get("lock")


def test_delete_races_with_replacement(store: ObjectStore) -> None:
    for round_number in range(10):
        etag = store.put_if_absent("lock", b"1", write_id="w")

        def attempt(number: int, etag: str = etag) -> object:
            if number == 0:
                return store.delete_if_match("lock", etag)
            return store.put_if_match("lock", b"renewed", etag, write_id="w2")

        (won,) = winners(race(2, attempt))
        remaining = keys_of(store, "lock")
        assert remaining == ([] if won == 0 else ["lock"]), round_number
        store.delete_many(["lock"])


def test_listing_is_in_byte_order(store: ObjectStore) -> None:
    keys = ["a-x/z", "a.txt", "a/b", "a/c/d", "a/c-e", "a0", "b", "b é/1", "ä", "z/y/x", "Z", "￮"]
    for key in keys:
        store.put(key, key.encode())
    ordered = sorted(keys, key=str.encode)
    assert keys_of(store, "") == ordered
    assert keys_of(store, "a") == [k for k in ordered if k.startswith("a")]
    assert keys_of(store, "a/") == ["a/b", "a/c-e", "a/c/d"]
    assert keys_of(store, "a/c") == ["a/c-e", "a/c/d"]
    assert keys_of(store, "b") == ["b", "b é/1"]
    assert keys_of(store, "nothing/") == []
    assert keys_of(store, "", "a/c/d") == [k for k in ordered if k.encode() > b"a/c/d"]


def test_start_after(store: ObjectStore) -> None:
    keys = [f"events/2026-01-0{day}/{n}" for day in (1, 2, 3) for n in (1, 2)]
    for key in keys:
        store.put(key, b"")
    assert keys_of(store, "events/", keys[2]) == keys[3:]
    assert keys_of(store, "events/", "events/2026-01-02") == keys[2:]
    assert keys_of(store, "events/", "events/2026-01-02/15") == keys[3:]
    assert keys_of(store, "events/2026-01-02/", keys[0]) == keys[2:4]
    assert keys_of(store, "events/", "zzz") == []
    assert keys_of(store, "events/", "a") == keys


def test_listing_tells_size_and_time(store: ObjectStore) -> None:
    store.put("sized", b"12345")
    (info,) = store.list("sized")
    assert info.size == 5
    assert info.modified.tzinfo is not None
    assert abs(info.modified - store.now()) < timedelta(minutes=1)


def test_long_listings_are_paged_completely(store: ObjectStore) -> None:
    flat = [f"many/flat/{n:05d}" for n in range(510)]
    deep = [f"many/{n % 97:02d}-attempt/data/{n:05d}.parquet" for n in range(510)]
    keys = flat + deep
    store.parallel.map(lambda key: store.put(key, b""), keys)
    before = store.meter.snapshot().get("LIST", 0)
    assert keys_of(store, "many/") == sorted(keys)
    assert store.meter.snapshot()["LIST"] - before == 2
    assert keys_of(store, "many/", sorted(keys)[700]) == sorted(keys)[701:]
    # Lazy: who wants the first few does not pay for all.
    before = store.meter.snapshot()["LIST"]
    assert next(iter(store.list("many/flat/"))).key == flat[0]
    assert store.meter.snapshot()["LIST"] - before == 1
    store.delete_many([*keys, "many/not/there"])
    assert keys_of(store, "many/") == []


def test_deleting_missing_objects_is_fine(store: ObjectStore) -> None:
    store.put("there", b"")
    store.delete_many([])
    store.delete_many(["not/there", "there", "nor/there"])
    store.delete_many(["there"])
    assert keys_of(store, "") == []


def test_empty_objects(store: ObjectStore, tmp_path: Path) -> None:
    store.put("empty", b"")
    assert store.get("empty").data == b""
    (tmp_path / "empty").write_bytes(b"")
    store.put_file("empty-file", tmp_path / "empty")
    assert store.get("empty-file").data == b""
    etag = store.put_if_absent("empty-lock", b"", write_id="w")
    store.put_if_match("empty-lock", b"", etag, write_id="w")
    assert [info.size for info in store.list("")] == [0, 0, 0]


def test_large_objects(store: ObjectStore, tmp_path: Path) -> None:
    data = bytes(range(256)) * (32 * 1024 * 1024 // 256) + b"end"
    store.put("large", data)
    assert store.get("large").data == data
    source = tmp_path / "source"
    source.write_bytes(data)
    store.put_file("large-file", source)
    stored = store.get("large-file")
    assert stored.data == data
    # A multipart ETag is not a hash of the content, and conditions must hold on it as well.
    assert store.get_if_changed("large-file", stored.etag) is None
    store.put_if_match("large-file", b"small", stored.etag, write_id="w")
    assert store.get("large-file").data == b"small"
    assert source.exists()


ODD_KEYS = [
    "with space/and  two",
    "plus+plus",
    "per%cent%20",
    "hash#tag",
    "a=b&c=d",
    "question?mark",
    "quote'single",
    'quote"double',
    "semi;colon:comma,",
    "brackets[1](2){3}<4>",
    "at@tilde~star*dollar$pipe|caret^bang!",
    "grüße/日本語/😀",
    "e\u0301 and \u00e9",
    "trailing.dot.",
    "x" * 200,
]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys(store: ObjectStore, key: str) -> None:
    store.put(f"odd/{key}", b"put")
    etag = store.get(f"odd/{key}").etag
    etag = store.put_if_match(f"odd/{key}", b"replaced", etag, write_id="w")
    assert store.get(f"odd/{key}").data == b"replaced"
    assert keys_of(store, "odd/") == [f"odd/{key}"]
    assert keys_of(store, f"odd/{key}") == [f"odd/{key}"]
    assert keys_of(store, "odd/", f"odd/{key}") == []
    store.delete_if_match(f"odd/{key}", etag)
    store.put_if_absent(f"odd/{key}", b"again", write_id="w")
    store.delete_many([f"odd/{key}"])
    assert keys_of(store, "odd/") == []


BAD_KEYS = [
    "",
    "/",
    "/abs",
    "a//b",
    "a/",
    "..",
    "a/../b",
    "./a",
    ".tmp/x",
    ".locks/00",
    "a/.hidden",
    "back\\slash",
    "nul\x00",
    "line\n",
    "tab\t",
    "x" * 201,
    "é" * 150,
    "/".join(["x" * 100] * 10),
    "\ud800",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused(store: ObjectStore, tmp_path: Path, key: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    attempts: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.get_if_changed(key, "e"),
        lambda: store.put(key, b"x"),
        lambda: store.put_file(key, source),
        lambda: store.put_if_absent(key, b"x", write_id="w"),
        lambda: store.put_if_match(key, b"x", "e", write_id="w"),
        lambda: store.delete_if_match(key, "e"),
        lambda: store.delete_many(["fine", key]),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match="object key"):
            attempt()
    assert store.meter.snapshot()["total"] == 0


@pytest.mark.parametrize("prefix", ["/", "../", "a/../", ".tmp/", "a//", "a\\"])
def test_bad_prefixes_are_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(ValueError, match="object key"):
        store.list(prefix)


def test_requests_are_counted_as_what_they_are(store: ObjectStore) -> None:
    etag = store.put_if_absent("a", b"12", write_id="w")
    etag = store.put_if_match("a", b"345", etag, write_id="w")
    store.put("b", b"6789")
    store.get("a")
    with pytest.raises(ObjectNotFound):
        store.get("c")
    list(store.list(""))
    store.delete_if_match("a", etag)
    store.delete_many(["b", "c"])
    assert store.meter.snapshot() == {
        "PUT_IF": 2,
        "PUT": 1,
        "GET": 2,
        "LIST": 1,
        "DELETE_IF": 1,
        "DELETE": 1,
        "total": 8,
        "bytes_read": 3,
        "bytes_written": 9,
    }


def test_clock_is_utc_and_goes_on(store: ObjectStore) -> None:
    before = store.now()
    store.sleep(0.05)
    assert before.utcoffset() == timedelta(0)
    assert store.now() - before >= timedelta(seconds=0.05)
    if store.kind != "memory":
        assert abs(before - datetime.now(UTC)) < timedelta(minutes=1)


def test_close_twice(another: Opener) -> None:
    store = another()
    store.put("a", b"kept")
    store.close()
    store.close()
    assert another().get("a").data == b"kept"


def test_processes_share_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    store = DirectoryStore(root)
    store.put("counter", b"0")
    keys = [f"created/{n:03d}" for n in range(60)]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(4) as pool:
        counted = [
            pool.apply_async(workers.increment_directory, (str(root), "counter", 25))
            for _ in range(4)
        ]
        for result in counted:
            result.get(240)
        created = [
            pool.apply_async(workers.create_in_directory, (str(root), keys, f"p{n}"))
            for n in range(4)
        ]
        won = [result.get(240) for result in created]
        churned = [
            pool.apply_async(workers.churn_directory, (str(root), f"p{n}", 60)) for n in range(4)
        ]
        for done in churned:
            done.get(240)
    assert store.get("counter").data == b"100"
    assert sum(won) == len(keys)
    assert keys_of(store, "created/") == keys
    assert keys_of(store, "churn/") == []
    assert not list((root / ".tmp").iterdir())
    store.close()

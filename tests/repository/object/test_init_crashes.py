"""`init` and `init --force`: stopped at any request, two at once, beside writers that live.

At any moment the storage is uninitialised, what it was, or what it shall be, opens with the engine
that its log is written with, and has every commit that was acknowledged on the head that stands.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import Head, Manifest
from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    AlreadyInitializedError,
    LeaseExpiredError,
    MigrationTokenError,
    OntologiaError,
    StorageBackendError,
    UninitializedStorageError,
    UnsupportedEngineError,
)
from storage_engine.objectstore.memory import SimulatedCrash
from storage_engine.repository import Repository
from storage_engine.repository.object import engine
from storage_engine.repository.open import _init_objects, _Options, open_object_repository
from tests.commitlog.support import shared_duck
from tests.engines import CUSTOMER, commit, customer, rows_of, stream_of
from tests.repository.object.wire import KINDS, Client, Place

LEASE_MS = 30_000
CONFIG = OntologiaConfig(
    runtime_id="test", s3_lease_ttl_ms=LEASE_MS, s3_lock_timeout_ms=3 * LEASE_MS
)

OTHER = {"v1": "v2", "v2": "v1"}


@pytest.fixture(autouse=True)
def _unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of conditional writes is half of the requests of an init, and not what this is
    about."""
    monkeypatch.setattr("storage_engine.objectstore.open.probe_conditional_writes", lambda *_: None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Storage:
    """One storage, and what was acknowledged on it."""

    def __init__(self, kind: str, folder: Path, engine_version: str | None = None) -> None:
        self.place = Place(kind, folder)
        if engine_version is not None:
            init(self.place.client(), engine_version)

    def open(self) -> Repository:
        with mock.patch.object(engine, "Duck", return_value=shared_duck()):
            return open_object_repository(self.place.client(), CONFIG)

    def commit(self, key: str, *, repository: Repository | None = None) -> str:
        """Commit one customer; the id of the log that has it."""
        repository = repository or self.open()
        result = commit(repository, rows_of(CUSTOMER, customer(key)))
        assert result is not None
        repository.flush()
        return self.head().log_id

    def head(self) -> Head:
        return Head.parse(self.place.objects()[layout.HEAD], key=layout.HEAD)

    def check(self, engine_version: str, keys: set[str]) -> None:
        """The storage has this engine and these customers, and every object that its log names."""
        objects = self.place.objects()
        stamp = json.loads(objects[layout.ENGINE])
        assert stamp["engine_version"] in ("v1", "v2")
        path, files = self.head().manifest_path, []
        while path is not None:
            manifest = Manifest.parse(objects[path], key=path)
            files += [file.path for file in manifest.files]
            path = manifest.parent_manifest_path
        assert set(files) <= set(objects)
        versioned = {re.search(r"/Customer/v1[./]", path) is not None for path in files}
        assert versioned <= {engine_version == "v2"}, "files of another engine"
        assert self.open().engine_version == engine_version
        tables = [pq.read_table(BytesIO(objects[path]), columns=["entity_key"]) for path in files]
        assert {key for table in tables for key in table["entity_key"].to_pylist()} == keys


def init(store: Client, engine_version: str, **options: Any) -> Any:
    return _init_objects(store, _options(engine_version, **options))


def init_anew(store: Client, engine_version: str) -> None:
    token = init(store, engine_version, dry_run=True, force=True).token
    init(store, engine_version, force=True, token=token)


def _options(
    engine_version: str, *, dry_run: bool = False, force: bool = False, token: str | None = None
) -> _Options:
    return _Options(engine_version, CONFIG, dry_run, force, token)


def unstamp(storage: Storage) -> None:
    """As another program made it: no stamp, no log id."""
    store = storage.place.client()
    store.delete_many([layout.ENGINE])
    head = json.loads(store.get(layout.HEAD).data)
    store.put(layout.HEAD, json.dumps({**head, "log_id": ""}).encode())


# -- crashes ----------------------------------------------------------------------------------


def crash_points(client: Client) -> Iterator[tuple[int, bool]]:
    for number in range(1, client.requests + 1):
        yield number, False
        yield number, True


@pytest.mark.parametrize(
    ("kind", "engine_version", "leftovers"),
    [
        *(("memory", version, left) for version in OTHER for left in (False, True)),
        ("directory", "v2", True),
    ],
)
def test_init_stopped_at_any_request(
    kind: str, tmp_path: Path, engine_version: str, leftovers: bool
) -> None:
    def fresh() -> Storage:
        storage = Storage(kind, tmp_path)
        if leftovers:  # an init of the other engine that came as far as its head
            client = storage.place.client()
            client.before = _crash_at_head(client)
            with pytest.raises(SimulatedCrash):
                init(client, OTHER[engine_version])
        return storage

    whole = fresh().place.client()
    init(whole, engine_version)
    for number, applied in crash_points(whole):
        storage = fresh()
        client = storage.place.client()
        client.crash_at(number, applied=applied)
        with pytest.raises(SimulatedCrash):
            init(client, engine_version)
        head = storage.place.objects().get(layout.HEAD)
        if head is None:
            with pytest.raises(UninitializedStorageError):
                storage.open()
            init(storage.place.client(), OTHER[engine_version])
            expected = OTHER[engine_version]
        else:
            with pytest.raises(AlreadyInitializedError):
                init(storage.place.client(), OTHER[engine_version])
            expected = engine_version
        storage.check(expected, set())
        storage.commit("a")
        storage.check(expected, {"a"})
        storage.place.close()


def _crash_at_head(client: Client) -> Any:
    def crash(_number: int, kind: str, key: str) -> None:
        if kind == "put_if_absent" and key == layout.HEAD:
            client.dead = True
            raise SimulatedCrash("before head")

    return crash


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        *(("memory", before, after) for before in ("v1", "v2", "unstamped") for after in OTHER),
        ("directory", "v1", "v2"),
    ],
)
def test_init_by_force_stopped_at_any_request(
    kind: str, tmp_path: Path, before: str, after: str
) -> None:
    was = "v1" if before == "unstamped" else before

    def fresh() -> tuple[Storage, Client, str]:
        storage = Storage(kind, tmp_path, was)
        storage.commit("old")
        if before == "unstamped":
            unstamp(storage)
        token = init(storage.place.client(), after, dry_run=True, force=True).token
        return storage, storage.place.client(), token

    storage, whole, token = fresh()
    init(whole, after, force=True, token=token)
    storage.check(after, set())
    for number, applied in crash_points(whole):
        if kind == "directory" and not applied:
            continue  # as after the request before, and a directory takes its time
        storage, client, token = fresh()
        log_id = storage.head().log_id
        client.crash_at(number, applied=applied)
        with pytest.raises(SimulatedCrash):
            init(client, after, force=True, token=token)
        swung = storage.head().log_id != log_id
        stamped = layout.ENGINE in storage.place.objects()
        assert stamped or (before == "unstamped" and not swung) or swung
        assert stamped or before == "unstamped", "the stamp was deleted"
        expected = (after, set()) if swung else (was, {"old"})
        storage.commit("new")
        storage.check(expected[0], expected[1] | {"new"})
        init_anew(storage.place.client(), after)
        storage.check(after, set())
        rest = set(storage.place.objects()) - {layout.ENGINE, layout.TYPES, layout.HEAD}
        assert not rest, f"left at {number}: {rest}"
        storage.place.close()


# -- beside others ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "before", "after", "opened"),
    [
        *(
            ("memory", before, after, opened)
            for before in OTHER
            for after in OTHER
            for opened in ("before", "meanwhile")
        ),
        ("directory", "v1", "v2", "before"),
        ("directory", "v2", "v2", "meanwhile"),
    ],
)
def test_a_writer_that_commits_at_any_request_of_init_by_force(
    kind: str, tmp_path: Path, before: str, after: str, opened: str
) -> None:
    """It waits for the lock; as nobody renews here, it gets it when the lease has run out. What
    it was told to be committed on the head that stands then stays."""

    def commit_at(number: int) -> int:
        storage = Storage(kind, tmp_path, before)
        storage.commit("old")
        session = storage.open() if opened == "before" else None
        token = init(storage.place.client(), after, dry_run=True, force=True).token
        client, log_id = storage.place.client(), storage.head().log_id
        acknowledged: list[str] = []

        def write(now: int, _kind: str, _key: str) -> None:
            if now == number:
                with suppress(UnsupportedEngineError):
                    acknowledged.append(storage.commit("live", repository=session))

        client.before = write
        with suppress(MigrationTokenError, LeaseExpiredError):
            init(client, after, force=True, token=token)
        head = storage.head()
        erased = head.log_id != log_id
        keys = {"live"} if acknowledged == [head.log_id] else set()
        assert head.commit_id == len(keys) + (0 if erased else 1)
        storage.check(after if erased else before, keys if erased else {"old", *keys})
        storage.place.close()
        return client.requests

    assert every_request(commit_at) > 10


def every_request(run: Callable[[int], int]) -> int:
    """Undisturbed, which says how many requests there are, then at each of them."""
    total = run(0)
    for number in range(1, total + 1):
        run(number)
    return total


def test_a_bulk_load_that_began_before_the_erasure(kind: str, tmp_path: Path) -> None:
    """Its parts are staged, so a lost swap does not write them again: at each request of the
    erasure they go up, and are published after it."""

    def load_at(number: int) -> int:
        storage = Storage(kind, tmp_path, "v2")
        token = init(storage.place.client(), "v2", dry_run=True, force=True).token
        client = storage.place.client()
        bulk = storage.open()
        pause = Pause(bulk.store)  # type: ignore[attr-defined]
        outcomes: list[str] = []

        def publish() -> None:
            try:
                commit(bulk, stream_of(CUSTOMER, [customer("bulk")]))
                bulk.flush()
                outcomes.append("published")
            except OntologiaError as error:
                outcomes.append(type(error).__name__)

        worker = threading.Thread(target=publish)

        def load(now: int, _kind: str, _key: str) -> None:
            if now == number:
                worker.start()
                assert pause.reached.wait(240)

        client.before = load
        init(client, "v2", force=True, token=token)
        pause.go_on.set()
        if number:
            worker.join(240)
            assert outcomes
        seen.update(outcomes)
        storage.check("v2", {"bulk"} if outcomes == ["published"] else set())
        storage.place.close()
        return client.requests

    seen: set[str] = set()
    assert every_request(load_at) > 10
    assert seen == {"published", "GivenUp"}, "either it goes or it stays"


class Pause:
    """Stops a client where it first asks for the lock, with all its parts staged."""

    def __init__(self, client: Client) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

        def hold(_number: int, kind: str, key: str) -> None:
            if kind == "put_if_absent" and key == layout.LOCK and not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(240)

        client.before = hold


@pytest.mark.parametrize(
    ("kind", "first"), [("memory", "v1"), ("memory", "v2"), ("directory", "v1")]
)
def test_two_inits_at_once(kind: str, tmp_path: Path, first: str) -> None:
    """One at any of its requests, the other at any of its own, in every combination."""
    second = OTHER[first]
    whole = Storage(kind, tmp_path).place.client()
    init(whole, first)
    for at in range(1, whole.requests + 1):
        for until in range(1, whole.requests + 2):
            storage = Storage(kind, tmp_path)
            outcomes = interleave(storage, first, second, at, until)
            winners = [name for name, error in outcomes.items() if error is None]
            assert len(winners) == 1, (at, until, outcomes)
            for error in outcomes.values():
                assert error is None or isinstance(
                    error, StorageBackendError | AlreadyInitializedError
                )
            storage.check(winners[0], set())
            storage.commit("a")
            storage.check(winners[0], {"a"})
            assert (
                json.loads(storage.place.objects()[layout.ENGINE])["engine_version"] == (winners[0])
            )
            storage.place.close()


def interleave(
    storage: Storage, first: str, second: str, at: int, until: int
) -> dict[str, BaseException | None]:
    """The first up to request `at`, the second up to its request `until`, the first to its end,
    the second to its end."""
    outcomes: dict[str, BaseException | None] = {}
    ours, theirs = storage.place.client(), storage.place.client()
    stopped, go_on = threading.Event(), threading.Event()

    def run(client: Client, engine_version: str) -> None:
        try:
            init(client, engine_version)
            outcomes[engine_version] = None
        except OntologiaError as error:
            outcomes[engine_version] = error

    def hold(number: int, _kind: str, _key: str) -> None:
        if number == until:
            stopped.set()
            assert go_on.wait(240)

    def rival() -> None:
        run(theirs, second)
        stopped.set()

    worker = threading.Thread(target=rival)

    def start(number: int, _kind: str, _key: str) -> None:
        if number == at:
            worker.start()
            assert stopped.wait(240)

    theirs.before, ours.before = hold, start
    run(ours, first)
    go_on.set()
    worker.join(240)
    return outcomes


def test_two_inits_by_force_with_one_token(kind: str, tmp_path: Path) -> None:
    storage = Storage(kind, tmp_path, "v1")
    storage.commit("old")
    token = init(storage.place.client(), "v2", dry_run=True, force=True).token
    init(storage.place.client(), "v2", force=True, token=token)
    with pytest.raises(MigrationTokenError):
        init(storage.place.client(), "v2", force=True, token=token)
    storage.check("v2", set())


# -- storages of others -----------------------------------------------------------------------


def test_a_storage_of_another_program_without_a_stamp_is_v1(kind: str, tmp_path: Path) -> None:
    storage = Storage(kind, tmp_path, "v1")
    storage.commit("a")
    unstamp(storage)
    repository = storage.open()
    assert repository.engine_version == "v1"
    assert repository.storage_info()["format"] == 0
    storage.commit("b", repository=repository)
    storage.check("v1", {"a", "b"})


def test_an_init_of_an_earlier_release_that_was_stopped_does_not_open_as_v1(
    kind: str, tmp_path: Path
) -> None:
    """It deleted the stamp after the swap of head, whose log id does not name the engine."""
    storage = Storage(kind, tmp_path, "v2")
    store = storage.place.client()
    head = json.loads(store.get(layout.HEAD).data)
    store.put(layout.HEAD, json.dumps({**head, "log_id": "0" * 32}).encode())
    assert storage.open().engine_version == "v2"
    store.delete_many([layout.ENGINE])
    with pytest.raises(UnsupportedEngineError, match="init --force"):
        storage.open()
    init_anew(storage.place.client(), "v2")
    storage.check("v2", set())


def test_a_log_whose_stamp_says_another_engine_goes_by_its_head(kind: str, tmp_path: Path) -> None:
    storage = Storage(kind, tmp_path, "v2")
    storage.commit("a")
    store = storage.place.client()
    stamp = json.loads(store.get(layout.ENGINE).data)
    store.put(layout.ENGINE, json.dumps({**stamp, "engine_version": "v1"}).encode())
    storage.check("v2", {"a"})
    store.delete_many([layout.ENGINE])
    assert storage.open().engine_version == "v2"


def test_a_session_that_has_not_committed_yet_finds_another_engine(
    kind: str, tmp_path: Path
) -> None:
    storage = Storage(kind, tmp_path, "v1")
    session = storage.open()
    init_anew(storage.place.client(), "v2")
    with pytest.raises(UnsupportedEngineError, match="open it again"):
        storage.commit("a", repository=session)
    storage.check("v2", set())

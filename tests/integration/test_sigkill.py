"""A writer dies by SIGKILL at every request of a commit, small and bulk.

Afterwards a reader sees the state before the commit or the one after it, whole; whatever was
acknowledged is there; and the next writer, which finds the holder of the lock dead, commits.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage_engine.commitlog import layout
from storage_engine.repository import ReadWindow, Repository, initialize_storage
from tests.engines import CUSTOMER, PRODUCT, Row, Storage, customer, new_storage, put
from tests.integration import killed
from tests.integration.killed import KillPoint, When

AT_ONCE = 8
JOIN_TIMEOUT_S = 240
LAZY_IMPORTS = [
    "pandas",  # pyarrow imports it where it is installed
    "pyarrow.compute",
    "pyarrow.parquet",
    "storage_engine.objectstore.local",
    "storage_engine.objectstore.s3",
    "storage_engine.repository.object.engine",
]
PATIENT_MS = 30_000


@pytest.fixture(scope="module")
def forks(aws_environment: None) -> Any:
    """Processes forked from one that has imported everything and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.killed", *LAZY_IMPORTS])
    return context


def prepared(storage: Storage) -> Storage:
    """With one commit, on which the killed one builds."""
    initialize_storage(storage.uri, storage.engine_version, storage.config())
    repository = storage.open()
    put(repository, *killed.BEFORE_CUSTOMERS)
    repository.close()
    return storage


def run_writer(
    forks: Any, storage: Storage, form: str, point: KillPoint | None, notes: Path
) -> int | None:
    """The writer's exit code: -9 when it died at the point, 0 when it got through."""
    notes.mkdir()
    process = forks.Process(target=killed.write, args=(storage, form, point, str(notes)))
    process.start()
    process.join(JOIN_TIMEOUT_S)
    assert process.exitcode in (0, -signal.SIGKILL), f"{point}: exit code {process.exitcode}"
    return int(process.exitcode)


def versions(repository: Repository) -> dict[str, list[Row]]:
    """Everything there is of both types, commit ids included."""
    window = ReadWindow(history=True)
    return {spec.name: repository.read(spec, window).to_pylist() for spec in (CUSTOMER, PRODUCT)}


BEFORE: dict[str, list[Row]] = {
    "Customer": [{"commit_id": 1, **row} for row in killed.BEFORE_CUSTOMERS],
    "Product": [],
}
AFTER: dict[str, list[Row]] = {
    "Customer": [
        *BEFORE["Customer"],
        *({"commit_id": 2, **row} for row in killed.STATED_CUSTOMERS if row["name"] == "new"),
    ],
    "Product": [{"commit_id": 2, **row} for row in killed.STATED_PRODUCTS],
}


def assert_recovers(storage: Storage, notes: Path, point: KillPoint) -> bool:
    """Check what the dead writer left behind; whether its commit stands."""
    repository = storage.open(s3_lock_timeout_ms=PATIENT_MS)
    try:
        head = repository.head_commit_id()
        assert head in (1, 2), point
        if (notes / "acknowledged").exists():
            assert head == 2, f"{point}: acknowledged and lost"
        wanted = BEFORE if head == 1 else AFTER
        assert versions(repository) == wanted, point
        assert [c.id for c in repository.list_commits()] == list(range(head, 0, -1)), point
        assert [c["operation"] for c in repository.list_commit_changes(1)] == ["insert"] * 2

        # SeaweedFS may have kept what the dead client had begun to send. With an empty types.json
        # a commit writes types.json anew and leaves indices as they are (RFC 0004 3.3).
        objects = repository.objects
        types_known = objects is None or objects.store.get(layout.TYPES).data
        landed = put(repository, customer("next"))
        assert landed.commit_id == head + 1, point
        repository.flush()
        extended = {**wanted, "Customer": [*wanted["Customer"], _next(head + 1)]}
        assert versions(repository) == extended, point
        # The index of a type that was written again is whole, whatever the dead writer left out.
        if types_known:
            warnings = repository.index_warnings()  # type: ignore[attr-defined]
            assert not [w for w in warnings if "Customer" in w], point
    finally:
        repository.close()
    fresh = storage.open()
    try:
        assert versions(fresh) == extended, f"{point}: after reopening"
    finally:
        fresh.close()
    return head == 2


def _next(commit_id: int) -> Row:
    return {"commit_id": commit_id, **customer("next")}


def die_everywhere(
    forks: Any, template: Storage, folder: Path, form: str, points: Sequence[KillPoint]
) -> list[bool]:
    """One copy of the template per kill point; whether the commit stood in each."""
    source = Path(template.uri.removeprefix("file://"))

    def die_once(place: int) -> bool:
        point = points[place]
        root = folder / f"at-{place}"
        shutil.copytree(source, root)
        storage = replace(template, uri=root.as_uri())
        notes = folder / f"notes-{place}"
        if run_writer(forks, storage, form, point, notes) == 0:
            # Its own run had fewer requests: a lease that ran short leaves some out.
            assert len((notes / "requests").read_text().splitlines()) < point.number
        return assert_recovers(storage, notes, point)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(die_once, range(len(points))))


@pytest.mark.parametrize(("form", "engine"), [("small", "v2"), ("bulk", "v2"), ("small", "v1")])
def test_rfc0004_03_killed_at_every_request_of_a_commit(
    forks: Any, form: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    template = prepared(new_storage(f"directory-{engine}", request, tmp_path))
    whole = replace(template, uri=(tmp_path / "whole").as_uri())
    shutil.copytree(Path(template.uri.removeprefix("file://")), tmp_path / "whole")
    assert run_writer(forks, whole, form, None, tmp_path / "notes") == 0
    requests = (tmp_path / "notes" / "requests").read_text().splitlines()
    assert any(r.startswith("put_if_match meta/head.json") for r in requests)

    # Right before a request is about the same as right after the one before; what writes the lock
    # and head is taken from both sides all the same.
    points = [KillPoint("before", 1)]
    for number, name in enumerate(requests, start=1):
        pivotal = name.startswith(("put_if", "delete_if")) and ("head" in name or "lock" in name)
        sides: tuple[When, ...] = ("before", "after") if pivotal else ("after",)
        points += [KillPoint(when, number) for when in sides]
    stood = die_everywhere(forks, template, tmp_path, form, points)
    print(f"\n{form} commit, engine {engine}: {len(requests)} requests, {len(points)} deaths")
    assert not stood[0], "dead before the first request, and yet published"
    assert stood[-1], "dead after the last request, and yet not published"


SERVER_STEPS = [
    KillPoint("after", operation="put_if_absent", key="meta/locks/"),
    KillPoint("after", operation="put_if_absent", key="manifest.json"),
    KillPoint("before", operation="put_if_match", key="meta/head.json"),
    KillPoint("after", operation="put_if_match", key="meta/head.json"),
    KillPoint("after", operation="put_if_match", key="meta/indices/entities/Customer"),
    KillPoint("before", operation="delete_if_match", key="meta/locks/"),
]


@pytest.mark.s3
@pytest.mark.parametrize("form", ["small", "bulk"])
def test_rfc0004_03_killed_on_a_real_server(
    forks: Any, form: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def die_once(place: int) -> bool:
        point = SERVER_STEPS[place]
        storage = prepared(storages[place])
        notes = tmp_path / f"notes-{place}"
        exit_code = run_writer(forks, storage, form, point, notes)
        assert exit_code == -signal.SIGKILL, f"{point} was not reached"
        return assert_recovers(storage, notes, point)

    storages = [new_storage("seaweedfs-v2", request, tmp_path) for _ in SERVER_STEPS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stood = list(pool.map(die_once, range(len(SERVER_STEPS))))
    assert stood == [False, False, False, True, True, True]

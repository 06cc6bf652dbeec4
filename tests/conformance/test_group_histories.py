"""Random requests in groups of random sizes come to the same as one by one, on every engine.

Both storages are asked the same afterwards: what each request was told, what every temporal mode
reads, commits, schemas, units of work, and whether `verify --deep` finds anything.
"""

from __future__ import annotations

import random
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.errors import OntologiaError
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Entity, Field, TypeSpec, spec_of
from storage_engine.repository import (
    CommitRequest,
    ReadWindow,
    Repository,
    TypeInput,
    initialize_storage,
    open_repository,
)
from storage_engine.repository.commit_queue import PendingCommit
from storage_engine.repository.object.write.group import GroupRows
from storage_engine.repository.protocol import Idempotency, Snapshot
from tests.campaigns import examples
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    PRODUCT,
    SUBSCRIPTION,
    customer,
    edge,
    product,
    rows_of,
    stream_of,
)

ENGINES = ("sqlite-v1", "sqlite-v2", "memory-v1", "memory-v2")
SPECS = (CUSTOMER, PRODUCT, SUBSCRIPTION, EMPLOYMENT)
REQUESTS = 30


class Wider(Entity, name="Product"):
    """What is refused where the other one was first, and the other way round."""

    sku: Field[str] = Field(primary_key=True)
    price: Field[float]
    weight: Field[float]


@contextmanager
def opened(engine: str) -> Iterator[Repository]:
    kind, _, version = engine.partition("-")
    config = OntologiaConfig(checkpoint_interval=7)
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/onto.db"
        if kind == "memory":
            uri = f"memory://groups-{uuid.uuid4().hex}"
        initialize_storage(uri, version)
        repository = open_repository(uri, config)
        try:
            yield repository
        finally:
            repository.close()


def check(repository: Repository) -> None:
    """Relations may point to what is not there: nobody said that it must be."""
    findings = verify_storage(repository, deep=True).findings
    assert [finding for finding in findings if finding.area != "endpoints"] == []
    if repository.objects is not None:
        assert repository.objects.index_warnings() == []


class Requests:
    """The same sequence for the same seed; streams are made anew each time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[CommitRequest]:
        for number in range(REQUESTS):
            yield self._request(number)

    def _request(self, number: int) -> CommitRequest:
        chance = self._random
        inputs = [self._input(spec) for spec in chance.sample(SPECS, chance.choice((1, 1, 1, 2)))]
        request = CommitRequest(inputs, metadata={"n": str(number)})
        if chance.random() < 0.2:
            unit = Idempotency(chance.choice("xy"), chance.randrange(1, 6))
            request = replace(request, idempotency=unit)
        if chance.random() < 0.15:
            request = replace(request, expect={inputs[0].spec.ref: chance.randrange(0, 8)})
        if chance.random() < 0.25:
            snapshot = Snapshot(chance.randrange(0, 10), refuses=chance.random() < 0.5)
            request = replace(request, snapshot=snapshot)
        return request

    def _input(self, spec: TypeSpec) -> TypeInput:
        chance = self._random
        keys = chance.sample("abcd", chance.choice((1, 1, 2)))
        value = chance.randrange(3)
        if spec is CUSTOMER:
            rows = [customer(key, age=value) for key in keys]
            return stream_of(spec, rows) if chance.random() < 0.08 else rows_of(spec, *rows)
        if spec is PRODUCT and chance.random() < 0.1:
            made = [{**product(key, float(value)), "weight": 1.0} for key in keys]
            return rows_of(spec_of(Wider), *made)
        if spec is PRODUCT:
            return rows_of(spec, *(product(key, float(value)) for key in keys))
        if spec is SUBSCRIPTION:
            return rows_of(spec, *(edge(key, "p", seats=value) for key in keys))
        return rows_of(spec, *(edge(key, "p", str(value), role=f"r{value}") for key in keys))


def told(pending: PendingCommit) -> Any:
    try:
        result = pending.result()
    except OntologiaError as error:
        return type(error).__name__, str(error)
    if result is None:
        return None
    return result.commit_id, result.already_applied, sorted(map(str, result.changes)), result.notes


def one_by_one(repository: Repository, requests: Requests) -> list[Any]:
    return [told(repository.submit(request)) for request in requests]


def in_groups(repository: Repository, requests: Requests, seed: int) -> list[Any]:
    sizes = random.Random(seed)
    pending: list[PendingCommit] = []
    left = 0
    for request in requests:
        left = left or sizes.choice((1, 2, 3, 5, 8, 13))
        pending.append(repository.submit(request))
        left -= 1
        if not left:
            repository.flush()
    repository.flush()
    return [told(each) for each in pending]


def everything(repository: Repository) -> dict[str, Any]:
    head = repository.head_commit_id()
    said: dict[str, Any] = {"head": head}
    commits = repository.list_commits(limit=head + 1)
    said["commits"] = [(c.id, c.parent_id, c.metadata, list(c.written)) for c in commits]
    times: list[datetime] = [c.created_at for c in commits]
    assert times == sorted(times, reverse=True)
    said["changes"] = [repository.list_commit_changes(n) for n in range(1, head + 1)]
    said["counts"] = repository.identity_counts()
    said["versions"] = {
        ref: [(v.version, v.schema_sha256, v.activation_commit_id) for v in history.versions]
        for ref, history in repository.type_histories().items()
    }
    units = [Idempotency(app, version) for app in "xy" for version in range(1, 7)]
    said["units"] = [repository.applied(unit) for unit in units]
    for spec in repository.known_types():
        said[f"{spec.name} history"] = repository.read(spec, ReadWindow(history=True)).to_pylist()
        said[f"{spec.name} head"] = repository.type_head(spec)
        for commit_id in range(0, head + 1, 5):
            window = ReadWindow(as_of=commit_id)
            said[f"{spec.name} as of {commit_id}"] = repository.read(spec, window).to_pylist()
    return said


def compare(engine: str, seed: int) -> None:
    with opened(engine) as alone, opened(engine) as grouped:
        answers = one_by_one(alone, Requests(seed))
        assert in_groups(grouped, Requests(seed), seed) == answers
        assert everything(grouped) == everything(alone)
        check(grouped)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_come_to_the_same_as_one_by_one(engine: str) -> None:
    for seed in range(examples(2)):
        compare(engine, seed)


@pytest.mark.parametrize("engine", ["sqlite-v2", "memory-v2"])
def test_threads_come_to_the_same_as_their_commits_one_by_one(engine: str) -> None:
    """Eight threads; then the same requests in the order of their commits, on another storage."""
    for seed in range(examples(1)):
        with opened(engine) as together, opened(engine) as alone:
            requests = list(Requests(seed))
            share = [requests[n::8] for n in range(8)]
            answers = answers_of_threads(together, share)
            for lane in answers:
                ids = [answer[0] for answer in lane if answer and isinstance(answer[0], int)]
                assert ids == sorted(ids) or any(a and a[1] is True for a in lane)
            order = sorted(
                (c.id, int(c.metadata["n"]))
                for c in together.list_commits(limit=together.head_commit_id() + 1)
            )
            for commit_id, number in order:
                again = list(Requests(seed))[number]
                # What it was based on may be another commit now, and is none of this test.
                result = alone.commit(replace(again, expect={}, snapshot=None, idempotency=None))
                assert result is not None
                assert result.commit_id == commit_id
            for spec in alone.known_types():
                window = ReadWindow(history=True)
                assert together.read(spec, window).equals(alone.read(spec, window))
            check(together)


def answers_of_threads(
    repository: Repository, share: Sequence[Sequence[CommitRequest]]
) -> list[list[Any]]:
    answers: list[list[Any]] = [[] for _ in share]

    def work(number: int) -> None:
        answers[number] = [told(repository.submit(request)) for request in share[number]]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(share))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [len(lane) for lane in answers] == [len(lane) for lane in share], "a thread failed"
    return answers


def test_planted_a_draft_that_sees_nothing_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GroupRows, "of", lambda self, ref: None)
    with pytest.raises(AssertionError):
        compare("memory-v2", seed=0)

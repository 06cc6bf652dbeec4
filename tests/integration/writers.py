"""What writer processes do in the tests with many of them."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

from storage_engine import ConcurrentWriteError, Session
from storage_engine.model import TypeSpec, spec_of
from storage_engine.repository import TypeInput
from tests.engines import CUSTOMER, PRODUCT, Storage, commit, customer, product, rows_of, table_of
from tests.integration import many_types
from tests.shop import Customer

START_TIMEOUT_S = 120.0

_start: Barrier | None = None


@dataclass(frozen=True)
class Done:
    """One commit as its writer saw it."""

    writer: str
    commit_id: int
    attempts: int
    lock_wait_ms: float
    seconds: float


def pool_of(writers: int) -> ProcessPoolExecutor:
    """Processes that have imported everything; a task of each begins when all are there."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        writers, context, initializer=_remember, initargs=(context.Barrier(writers),)
    )


def _remember(start: Any) -> None:
    global _start
    _start = start


def _begin_together() -> None:
    assert _start is not None
    _start.wait(START_TIMEOUT_S)


def insert_customers(storage: Storage, writer: str, count: int, **settings: Any) -> list[Done]:
    """`count` commits, each of one customer of its own."""
    rows = [rows_of(CUSTOMER, customer(f"{writer}-{n:03}")) for n in range(count)]
    return _commit_all(storage, writer, rows, settings)


def insert_products(storage: Storage, writer: str, count: int, **settings: Any) -> list[Done]:
    rows = [rows_of(PRODUCT, product(f"{writer}-{n:03}")) for n in range(count)]
    return _commit_all(storage, writer, rows, settings)


def update_one_customer(storage: Storage, writer: str, count: int, **settings: Any) -> list[Done]:
    """Every commit states the same customer anew: all writers want the same row."""
    rows = [rows_of(CUSTOMER, customer("shared", f"{writer}-{n:03}")) for n in range(count)]
    return _commit_all(storage, writer, rows, settings)


def register_types(storage: Storage, writer: str, count: int, **settings: Any) -> list[Done]:
    """One commit per type, the same types in the same order in every writer."""
    specs = [spec_of(cls) for cls in many_types.TYPES[:count]]
    return _commit_all(storage, writer, [_one_row(spec, writer) for spec in specs], settings)


def count_up(storage: Storage, writer: str, count: int, **settings: Any) -> list[Done]:
    """`count` times, one more than the number that was read: again where somebody else was first.
    By sessions, which keep the storage compact meanwhile."""
    done: list[Done] = []
    with Session(storage.uri, config=storage.config(runtime_id=writer, **settings)) as session:
        _begin_together()
        started = time.monotonic()
        while len(done) < count:
            [counter] = session.query().entities(Customer).where(Customer.id == "all").collect()
            session.ensure(counter.replace(age=(counter.age or 0) + 1))
            try:
                commit_id = session.commit(isolation="snapshot")
            except ConcurrentWriteError:
                session.discard()
                continue
            assert commit_id is not None
            done.append(Done(writer, commit_id, 1, 0.0, time.monotonic() - started))
            started = time.monotonic()
    return done


def _one_row(spec: TypeSpec, writer: str) -> TypeInput:
    return TypeInput(spec, table_of(spec, [{"entity_key": writer, "id": writer, "value": 1}]))


def _commit_all(
    storage: Storage, writer: str, inputs: list[TypeInput], settings: dict[str, Any]
) -> list[Done]:
    repository = storage.open(runtime_id=writer, **settings)
    done = []
    _begin_together()
    for item in inputs:
        started = time.monotonic()
        result = commit(repository, item, holder={"writer": writer})
        seconds = time.monotonic() - started
        assert result is not None
        done.append(Done(writer, result.commit_id, result.attempts, result.lock_wait_ms, seconds))
    repository.close()
    return done

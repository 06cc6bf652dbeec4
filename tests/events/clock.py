"""Waiting without waiting, on storages that go by the real clock: time that is slept is skipped.

Leases can be as long as a busy machine needs, and run out at once. What a storage tells of when an
object was written is moved along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any
from unittest import mock

from storage_engine.events.sqlite import store as sqlite_events
from storage_engine.model import declarations
from storage_engine.objectstore import local, s3, s3_bulk
from storage_engine.objectstore.protocol import ObjectInfo
from storage_engine.repository.sqlite import engine as sqlite_engine

_CLOCKS = (declarations, local, s3, sqlite_events, sqlite_engine)
_STORES = (local.DirectoryStore, s3.S3Store, s3_bulk.S3Bulk)
_WRITES = ("put", "put_if_absent", "put_if_match")


@contextmanager
def skipped_sleep() -> Iterator[None]:
    skipped = timedelta(0)
    written: dict[tuple[str, str], timedelta] = {}  # by storage and key: skipped until then

    class AnyDatetime(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, datetime)

    class Later(datetime, metaclass=AnyDatetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + skipped

    def sleep(seconds: float) -> None:
        nonlocal skipped
        skipped += timedelta(seconds=max(0.0, seconds))

    def writing(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(store: Any, key: str, *given: Any, **more: Any) -> Any:
            written[store.uri, key] = skipped
            return write(store, key, *given, **more)

        return wrapped

    def listing(listed: Callable[..., Iterator[ObjectInfo]]) -> Callable[..., Any]:
        def wrapped(store: Any, prefix: str, **more: Any) -> Iterator[ObjectInfo]:
            for info in listed(store, prefix, **more):
                moved = written.get((store.uri, info.key), timedelta(0))
                yield replace(info, modified=info.modified + moved)

        return wrapped

    slept = SimpleNamespace(**{**vars(time), "sleep": sleep})
    with ExitStack() as patched:
        for module in _CLOCKS:
            patched.enter_context(mock.patch.object(module, "datetime", Later))
        for module in (local, s3, sqlite_events):
            patched.enter_context(mock.patch.object(module, "time", slept))
        for store in _STORES:
            for name in _WRITES:
                wrapped = writing(getattr(store, name))
                patched.enter_context(mock.patch.object(store, name, wrapped))
        for store in (local.DirectoryStore, s3.S3Store):
            patched.enter_context(mock.patch.object(store, "list", listing(store.list)))
        yield

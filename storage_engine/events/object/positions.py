"""How far each handler has come, kept for the next worker: `events/{namespace}/_positions/`.

A position is advisory: what it says is finished is finished, and without it more is read. Workers
of one handler write theirs by CAS, and what two of them found out is merged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import JsonVersion, rewrite
from storage_engine.commitlog.records import Head, from_json, to_json
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.events.protocol import Subscription
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """How far one handler has come: `events/{namespace}/_positions/{handler}.json`."""

    watermark: str = ""  # keys up to here are finished, events of later commits excepted
    commit_id: int | None = None  # events of commits up to here are finished or beyond
    finished: frozenset[str] = frozenset()  # ids beyond the watermark
    etag: str | None = None

    @classmethod
    def parse(cls, data: bytes | None, key: str, types: Sequence[str], log_id: str) -> Self:
        if data is None:
            return cls()
        raw = from_json(data, key=key)
        if raw.get("types") != list(types) or raw.get("log_id") != log_id:
            return cls()  # of other subscriptions, or of an erased storage
        try:
            return cls(raw["watermark"], raw["commit_id"], frozenset(raw["finished"]))
        except (KeyError, TypeError) as error:
            raise IntegrityError(f"{key} is not a position: {error!r}", key=key) from error

    def merged(self, theirs: Position) -> Position:
        """What two workers found out. Watermark and commit belong together: one pair or the
        other."""
        if theirs.commit_id is None:
            return self
        ahead = max(self, theirs, key=lambda p: (p.watermark, p.commit_id or 0))
        return replace(ahead, finished=self.finished | theirs.finished)


@dataclass(slots=True)
class Positions:
    """Those of the handlers of one worker."""

    store: ObjectStore
    chain: Chain
    namespace: str
    subscriptions: Sequence[Subscription]
    by_handler: dict[str, Position] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return bool(self.by_handler)

    @property
    def floor(self) -> str:
        """The key up to which all of the handlers are through."""
        return min(position.watermark for position in self.by_handler.values())

    def commit_id(self, projected: int) -> int:
        """The commit up to which all of them are through. One that never looked lists everything,
        and so finds what is `projected`."""
        commit_ids = [position.commit_id for position in self.by_handler.values()]
        return min(projected if commit_id is None else commit_id for commit_id in commit_ids)

    def open(self) -> Head:
        """Positions and head together: a cold start's first hop."""
        keys = [layout.position(self.namespace, s.handler_id) for s in self.subscriptions]
        reads: list[Callable[[], Any]] = [partial(self._get, key) for key in keys]
        *stored, version = self.store.parallel.gather([*reads, self.chain.read_head])
        head: Head = version.head
        for subscription, key, item in zip(self.subscriptions, keys, stored, strict=True):
            types = sorted(subscription.event_types)
            position = Position()
            if item is not None:
                parsed = Position.parse(item.data, key, types, head.log_id)
                position = replace(parsed, etag=item.etag)
            self.by_handler[subscription.handler_id] = position
        return head

    def save(self, moved: Mapping[str, Position]) -> None:
        """Keep new positions, by handler. One that cannot be kept now is kept another time."""
        saves = [
            partial(self._save, subscription, moved[subscription.handler_id])
            for subscription in self.subscriptions
            if subscription.handler_id in moved
        ]
        for outcome in self.store.parallel.gather_outcomes(saves):
            if isinstance(outcome, StorageBackendError):
                log.info("the position of a handler was not kept: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _get(self, key: str) -> StoredObject | None:
        try:
            return self.store.get(key)
        except ObjectNotFound:
            return None

    def _save(self, subscription: Subscription, position: Position) -> None:
        handler_id = subscription.handler_id
        key = layout.position(self.namespace, handler_id)
        types = sorted(subscription.event_types)
        version = self.chain.known_head()
        log_id = version.head.log_id if version is not None else ""
        ours = position

        def merge(stored: Position) -> Position:
            nonlocal ours
            if stored is not ours:
                ours = ours.merged(stored)
            return ours

        def encode(moved: Position, write_id: str) -> bytes:
            return to_json(
                {
                    "handler_id": handler_id,
                    "types": types,
                    "watermark": moved.watermark,
                    "commit_id": moved.commit_id,
                    "finished": sorted(moved.finished),
                    "saved_at": layout.event_time(self.store.now()),
                    "log_id": log_id,
                    "write_id": write_id,
                }
            )

        saved = rewrite(
            self.store,
            key,
            JsonVersion(position, position.etag),
            merge,
            parse=lambda _, data: Position.parse(data, key, types, log_id),
            encode=encode,
            losses=3,
        )
        if saved is not None:
            self.by_handler[handler_id] = replace(saved.value, etag=saved.etag)

"""How far each handler has come, kept for the next worker: `events/{namespace}/_positions/`.

A position is advisory: what it says is finished is finished, and without it more is read. Workers
of one handler write theirs by CAS, and what two of them found out is merged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import JsonVersion, rewrite
from storage_engine.commitlog.parsing import (
    FieldError,
    optional_int,
    optional_text,
    parsing,
    require_list,
)
from storage_engine.commitlog.records import Head, from_json, to_json
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.events.protocol import Subscription
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject
from storage_engine.repository.object.outbox import CLOCK_ERROR

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """How far one handler has come: `events/{namespace}/_positions/{handler}.json`."""

    watermark: str = ""  # keys up to here are finished, events of later commits excepted
    commit_id: int | None = None  # events of commits up to here are finished or beyond
    finished: frozenset[str] = frozenset()  # ids beyond the watermark
    etag: str | None = None

    def merged(self, theirs: Position) -> Position:
        """What two workers found out. Watermark and commit belong together: one pair or the
        other."""
        looked = [position for position in (self, theirs) if position.commit_id is not None]
        ahead = max(looked or [self], key=lambda p: (p.watermark, p.commit_id or 0))
        return replace(ahead, finished=self.finished | theirs.finished)


def parse_position(
    namespace: str, now: datetime, raw: Mapping[str, Any], key: str
) -> tuple[Position, list[Any], str]:
    """A position, the types that it was counted for, and its log."""
    first = layout.events(namespace)
    last = f"{first}{layout.event_time(now + CLOCK_ERROR)}"
    with parsing(key, "position"):
        watermark = optional_text(raw, "watermark", "")
        # Beyond now it would hide what is yet to come, elsewhere it would hide everything.
        if watermark and not first <= watermark <= last:
            raise FieldError("watermark", f"a key from {first} to now", watermark)
        finished = require_list(raw, "finished")
        if not all(type(name) is str for name in finished):
            raise FieldError("finished", "a list of texts", finished)
        position = Position(watermark, optional_int(raw, "commit_id"), frozenset(finished))
        return position, require_list(raw, "types"), optional_text(raw, "log_id", "")


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
            position = Position()
            if item is not None:
                parsed = self._parse(subscription, head.log_id, key, item.data)
                position = replace(parsed, etag=item.etag)
            self.by_handler[subscription.handler_id] = position
        if self._any_beyond(head):
            head = self.chain.read_head().head  # it has moved since, or was put back
            for handler_id, position in self.by_handler.items():
                if _is_beyond(position, head):
                    log.warning(
                        "%s looks from the beginning again: its position is of commit %d, and "
                        "head is %d",
                        handler_id,
                        position.commit_id,
                        head.commit_id,
                    )
                    self.by_handler[handler_id] = Position(etag=position.etag)
        return head

    def _any_beyond(self, head: Head) -> bool:
        return any(_is_beyond(position, head) for position in self.by_handler.values())

    def _parse(
        self, subscription: Subscription, log_id: str, key: str, data: bytes | None
    ) -> Position:
        """Nothing where it is of other types or an erased storage. One that cannot be read counts
        as nothing too: the handler looks from the beginning, claims tell what is finished, and
        the next save replaces it."""
        if data is None:
            return Position()
        try:
            raw = from_json(data, key=key)
            position, types, of_log = parse_position(self.namespace, self.store.now(), raw, key)
        except IntegrityError as error:
            log.warning("%s looks from the beginning again: %s", subscription.handler_id, error)
            return Position()
        ours = types == sorted(subscription.event_types) and of_log == log_id
        return position if ours else Position()

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

    def reload(self, handler_ids: Sequence[str]) -> None:
        """Learn what others have kept meanwhile: short requests where nothing has changed."""
        reloads = [
            partial(self._reload, subscription)
            for subscription in self.subscriptions
            if subscription.handler_id in handler_ids
        ]
        self.store.parallel.gather(reloads)

    def _reload(self, subscription: Subscription) -> None:
        key = layout.position(self.namespace, subscription.handler_id)
        position = self.by_handler[subscription.handler_id]
        try:
            if position.etag is not None:
                stored = self.store.get_if_changed(key, position.etag)
            else:
                stored = self.store.get(key)
        except ObjectNotFound:
            return
        if stored is not None:
            theirs = self._parse(subscription, self._log_id, key, stored.data)
            merged = replace(position.merged(theirs), etag=stored.etag)
            self.by_handler[subscription.handler_id] = merged

    @property
    def _log_id(self) -> str:
        version = self.chain.known_head()
        return version.head.log_id if version is not None else ""

    def _get(self, key: str) -> StoredObject | None:
        try:
            return self.store.get(key)
        except ObjectNotFound:
            return None

    def _save(self, subscription: Subscription, position: Position) -> None:
        handler_id = subscription.handler_id
        log_id = self._log_id
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
                    "types": sorted(subscription.event_types),
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
            layout.position(self.namespace, handler_id),
            JsonVersion(position, position.etag),
            merge,
            parse=partial(self._parse, subscription, log_id),
            encode=encode,
            losses=3,
        )
        if saved is not None:
            self.by_handler[handler_id] = replace(saved.value, etag=saved.etag)


def _is_beyond(position: Position, head: Head) -> bool:
    return position.commit_id is not None and position.commit_id > head.commit_id

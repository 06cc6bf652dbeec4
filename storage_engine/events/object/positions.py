"""How far handlers and the outbox have come, kept for the next worker.

A position (`events/{namespace}/_positions/`) says what a handler has finished, `_projected.json` up
to which commit all events are under `events/`. Both are advisory: without them more is read, and
events are created, never replaced. Workers write them by CAS, and what two of them found out about
a handler is merged.

Each names the manifest of the newest commit that was looked at. A head may be put back to an older
commit and go on from there: then that manifest is not in the log, and what is said belongs to
another history. It counts as absent and is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import JsonVersion, rewrite
from storage_engine.commitlog.parsing import (
    FieldError,
    optional_int,
    optional_text,
    parsing,
    require_int,
    require_list,
)
from storage_engine.commitlog.records import Head, Manifest, from_json, parse_timestamp, to_json
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.events.envelopes import parse_envelope
from storage_engine.events.protocol import Subscription
from storage_engine.events.records import Envelope
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject
from storage_engine.repository.object.outbox import CLOCK_ERROR, create, event_key

log = logging.getLogger(__name__)

_FEW = 20  # events that are created without asking first


@dataclass(frozen=True, slots=True)
class Position:
    """How far one handler has come: `events/{namespace}/_positions/{handler}.json`."""

    watermark: str = ""  # keys up to here are finished, events of later commits excepted
    commit_id: int | None = None  # events of commits up to here are finished or beyond
    finished: frozenset[str] = frozenset()  # ids beyond the watermark
    manifest_path: str = ""  # of the newest commit that was looked at: this is of its history
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
        position = Position(
            watermark,
            optional_int(raw, "commit_id"),
            frozenset(finished),
            optional_text(raw, "manifest_path", ""),
        )
        return position, require_list(raw, "types"), optional_text(raw, "log_id", "")


@dataclass(slots=True)
class Positions:
    """Those of the handlers of one worker."""

    store: ObjectStore
    chain: Chain
    namespace: str
    subscriptions: Sequence[Subscription]
    by_handler: dict[str, Position] = field(default_factory=dict)
    _ours: set[str] = field(default_factory=set)  # manifests that are proven to be in the log

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
        if any(not self._is_ours(position, head) for position in self.by_handler.values()):
            head = self.chain.read_head().head  # it has moved since, or was put back
            for handler_id, position in self.by_handler.items():
                self.by_handler[handler_id] = self._believed(handler_id, position, head)
        return head

    def forget(self) -> None:
        """The log is not the one that these were about."""
        self.by_handler = {name: Position(etag=p.etag) for name, p in self.by_handler.items()}
        self._ours.clear()

    def _is_ours(self, position: Position, head: Head) -> bool:
        """Whether a position is about the log that ends with `head`."""
        if position.commit_id is not None and position.commit_id > head.commit_id:
            return False
        path = position.manifest_path
        if path and path not in self._ours and path != head.manifest_path:
            if not self.chain.has(head, path):
                return False
            self._ours.add(path)
        return True

    def _believed(self, handler_id: str, position: Position, head: Head) -> Position:
        if self._is_ours(position, head):
            return position
        log.warning(
            "%s looks from the beginning again: its position is of commit %d of another history, "
            "and head is %d",
            handler_id,
            position.commit_id or 0,
            head.commit_id,
        )
        return Position(etag=position.etag)

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

    def _parse_theirs(
        self, subscription: Subscription, log_id: str, key: str, data: bytes | None
    ) -> Position:
        """What another worker has kept, which may have seen a newer head."""
        position = self._parse(subscription, log_id, key, data)
        version = self.chain.known_head()
        if version is None or self._is_ours(position, version.head):
            return position
        return self._believed(subscription.handler_id, position, self.chain.read_head().head)

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
            theirs = self._parse_theirs(subscription, self._log_id, key, stored.data)
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
                    "manifest_path": moved.manifest_path,
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
            parse=partial(self._parse_theirs, subscription, log_id),
            encode=encode,
            losses=3,
        )
        if saved is not None:
            self.by_handler[handler_id] = replace(saved.value, etag=saved.etag)


# -- the outbox -----------------------------------------------------------------------------------


def read_projected(
    store: ObjectStore, chain: Chain, namespace: str, head: Head
) -> JsonVersion[int]:
    """Up to which commit a namespace's events were all projected."""
    key = layout.projected(namespace)
    try:
        stored = store.get(key)
    except ObjectNotFound:
        return JsonVersion(0)
    return JsonVersion(_parse_projected(chain, head, key, stored.data), stored.etag)


def write_projected(
    store: ObjectStore, chain: Chain, namespace: str, head: Head, before: JsonVersion[int]
) -> None:
    """Say so, unless another did: it only saves work, so losing is fine."""
    rewrite(
        store,
        layout.projected(namespace),
        before,
        lambda commit_id: head.commit_id if head.commit_id > commit_id else None,
        parse=partial(_parse_projected, chain, head),
        encode=lambda commit_id, write_id: to_json(
            {
                "commit_id": commit_id,
                "manifest_path": head.manifest_path or "",
                "log_id": head.log_id,
                "write_id": write_id,
            }
        ),
        losses=1,
    )


def parse_projected(raw: Mapping[str, Any], key: str) -> tuple[int, str, str]:
    """The commit, its manifest and the log that it says."""
    with parsing(key, "mark of projected commits"):
        return (
            require_int(raw, "commit_id"),
            optional_text(raw, "manifest_path", ""),
            optional_text(raw, "log_id", ""),
        )


def _parse_projected(chain: Chain, head: Head, key: str, data: bytes | None) -> int:
    if data is None:
        return 0
    try:
        commit_id, path, log_id = parse_projected(from_json(data, key=key), key)
    except IntegrityError as error:
        log.warning("events of all commits are looked through once more: %s", error)
        return 0
    # Of an erased storage, or of one whose head was put back: not ours.
    if log_id != head.log_id or commit_id > head.commit_id:
        return 0
    return commit_id if not path or chain.has(head, path) else 0


def sent_events(
    manifest: Manifest, path: str, namespace: str
) -> Iterator[tuple[str, Envelope] | IntegrityError]:
    """The commit's events of a namespace with the keys of their objects, or what is wrong."""
    committed_at = parse_timestamp(manifest.created_at)
    for number, raw in enumerate(manifest.events):
        if raw.get("namespace") != namespace:
            continue
        try:
            envelope = parse_envelope(raw, namespace, key=f"{path} (event {number})")
            yield event_key(envelope, committed_at), envelope
        except IntegrityError as error:
            yield error


def project(store: ObjectStore, namespace: str, missing: Sequence[tuple[str, Envelope]]) -> None:
    """Create the objects of events that commits carry, where they are not there. Of many, a
    listing tells which are."""
    if len(missing) > _FEW:
        keys = sorted(key for key, _ in missing)
        there = _listed(store, layout.events(namespace), keys[0], keys[-1])
        missing = [event for event in missing if event[0] not in there]
    store.parallel.gather([partial(create, store, key, envelope) for key, envelope in missing])


def _listed(store: ObjectStore, prefix: str, first: str, last: str) -> set[str]:
    """The keys from one to another, both included."""
    keys: set[str] = set()
    for info in store.list(prefix, start_after=first[:-1]):
        if info.key > last:
            break
        keys.add(info.key)
    return keys


def project_outbox(store: ObjectStore, chain: Chain, namespace: str) -> None:
    """Bring out everything that commits have sent to a namespace so far."""
    head = chain.read_head().head
    projected = read_projected(store, chain, namespace, head)
    missing = [
        event
        for link, manifest in state.carriers(chain, head, "events", above=projected.value)
        for event in sent_events(manifest, link.path, namespace)
        if not isinstance(event, IntegrityError)
    ]
    project(store, namespace, missing)
    write_projected(store, chain, namespace, head, projected)

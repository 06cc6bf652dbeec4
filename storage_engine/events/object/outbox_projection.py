"""The outbox of a namespace: which commits' events are all under `events/`, and bringing out more.

`_projected.json` only saves work: whatever it says, events are created and never replaced. One that
cannot be read, or is of another history, counts as absent and is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import JsonVersion, rewrite
from storage_engine.commitlog.parsing import optional_text, parsing, require_int
from storage_engine.commitlog.records import Head, Manifest, from_json, parse_timestamp, to_json
from storage_engine.errors import IntegrityError
from storage_engine.events.envelopes import parse_envelope
from storage_engine.events.records import Envelope
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.outbox import create, event_key

log = logging.getLogger(__name__)

_FEW = 20  # events that are created without asking first


def read_projected(store: ObjectStore, namespace: str, head: Head) -> JsonVersion[int]:
    """Up to which commit a namespace's events were all projected."""
    key = layout.projected(namespace)
    try:
        stored = store.get(key)
    except ObjectNotFound:
        return JsonVersion(0)
    return JsonVersion(_parse(head, key, stored.data), stored.etag)


def write_projected(
    store: ObjectStore, namespace: str, head: Head, before: JsonVersion[int]
) -> None:
    """Say so, unless another did: it only saves work, so losing is fine."""
    rewrite(
        store,
        layout.projected(namespace),
        before,
        lambda commit_id: head.commit_id if head.commit_id > commit_id else None,
        parse=partial(_parse, head),
        encode=lambda commit_id, write_id: to_json(
            {"commit_id": commit_id, "log_id": head.log_id, "write_id": write_id}
        ),
        losses=1,
    )


def parse_projected(raw: Mapping[str, Any], key: str) -> tuple[int, str]:
    """The commit and the log that it says."""
    with parsing(key, "mark of projected commits"):
        return require_int(raw, "commit_id"), optional_text(raw, "log_id", "")


def _parse(head: Head, key: str, data: bytes | None) -> int:
    if data is None:
        return 0
    try:
        commit_id, log_id = parse_projected(from_json(data, key=key), key)
    except IntegrityError as error:
        log.warning("events of all commits are looked through once more: %s", error)
        return 0
    # Of an erased storage, or of one whose head was put back: not ours.
    return commit_id if log_id == head.log_id and commit_id <= head.commit_id else 0


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
    projected = read_projected(store, namespace, head)
    missing = [
        event
        for link, manifest in state.carriers(chain, head, "events", above=projected.value)
        for event in sent_events(manifest, link.path, namespace)
        if not isinstance(event, IntegrityError)
    ]
    project(store, namespace, missing)
    write_projected(store, namespace, head, projected)

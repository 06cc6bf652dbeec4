"""Objects of the bus that are not what they should be: set aside, counted, listed; others go on.

Every field of every kind of object is broken in every way, and every operation is tried on it: no
raw error reaches anybody, and no other event is kept from its handlers.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from storage_engine import Event, Field, HandlerContext, Session, on_event
from storage_engine.commitlog import layout
from storage_engine.config import OntologiaConfig
from storage_engine.errors import IntegrityError, OntologiaError
from storage_engine.events.protocol import EventStore, Subscription, open_event_store
from storage_engine.objectstore.memory import MemoryBackend
from storage_engine.runtime.core import SessionSettings
from storage_engine.runtime.session import session_on
from tests.commitlog.support import World, Writer, new_world
from tests.events.fuzz import mutations
from tests.events.test_pauses import at_request

NAMESPACE = "default"
CONFIG = OntologiaConfig(
    event_lease_ms=30_000, event_max_attempts=2, event_backoff_base_ms=1_000, event_claim_limit=10
)
HANDLER = "shop.bill"


class Ordered(Event):
    n: Field[int]


def handler(ran: Counter[str]) -> Any:
    @on_event(Ordered, id=HANDLER)
    def bill(ctx: HandlerContext[Ordered]) -> None:
        ran[ctx.event.id] += 1
        if ctx.event.n < 0:
            raise ValueError("a negative order")

    return bill


def session_of(writer: Writer) -> Session:
    return session_on(writer.repo, SessionSettings.of(CONFIG))


def store_of(writer: Writer) -> EventStore:
    return open_event_store(writer.repo, CONFIG)


@functools.cache
def populated() -> dict[str, bytes]:
    """A bus with an event handled, one failed once, a dead one, a pending one, one of a commit, a
    worker, a position and a mark of what is projected."""
    world = new_world()
    writer = world.open("first")
    session, ran = session_of(writer), Counter[str]()
    session.emit([Ordered(id="good", n=1), Ordered(id="dead", n=-1)])
    session.commit(event=Ordered(id="committed", n=2))
    session.drain([handler(ran)])
    world.backend.clock.sleep(5)
    session.drain([handler(ran)])
    session.emit(Ordered(id="failed", n=-2))
    session.run([handler(ran)], max_iterations=1)
    session.emit(Ordered(id="pending", n=3))
    store = store_of(writer)
    store.register_session(NAMESPACE, "worker", {"hostname": "here"})
    assert ran == Counter({"good": 1, "dead": 2, "committed": 1, "failed": 1})
    assert len(store.list_dead_letters(NAMESPACE, 10)) == 1
    world.close()
    return world.backend.objects()


def key_of(kind: str) -> str:
    event = {
        "event": "_pending.json",
        "claim": layout.claim(NAMESPACE, "failed", HANDLER),
        "dead letter": layout.dead_letter(NAMESPACE, "dead", HANDLER),
        "session": layout.event_session(NAMESPACE, "worker"),
        "position": layout.position(NAMESPACE, HANDLER),
        "projection": layout.projected(NAMESPACE),
    }[kind]
    (key,) = [key for key in populated() if key.endswith(event)]
    return key


def copied(**changed: bytes | None) -> World:
    backend = MemoryBackend("shop")
    backend.clock.sleep(60)
    for key, data in {**populated(), **changed}.items():
        if data is not None:
            backend.write(key, data)
    return World(backend, "v2")


def operations(store: EventStore, key: str) -> dict[str, Callable[[], object]]:
    """Everything that one can ask of a bus."""
    subscriptions = (Subscription(HANDLER, frozenset({"Ordered"})),)
    return {
        "list events": lambda: store.list_events(NAMESPACE, 100),
        "list acked": lambda: store.list_events(NAMESPACE, 100, status="acked"),
        "list malformed": lambda: store.list_malformed(NAMESPACE, 100),
        "list namespaces": lambda: store.list_namespaces(1_000),
        "list sessions": lambda: store.list_sessions(NAMESPACE, 1_000),
        "list dead letters": lambda: store.list_dead_letters(NAMESPACE, 10),
        "inspect": lambda: [store.inspect_event(n) for n in ("good", "failed", "dead")],
        "backlog": lambda: store.backlog(NAMESPACE, subscriptions, 10),
        "peek": lambda: store.peek(NAMESPACE, subscriptions),
        "heartbeat": lambda: store.heartbeat(NAMESPACE, "worker"),
        "replay": lambda: store.replay_event(NAMESPACE, "good"),
        "redrive": lambda: [store.redrive(x) for x in store.list_dead_letters(NAMESPACE, 10)],
        "enqueue": lambda: store.enqueue([Ordered(id="more", n=8).envelope(NAMESPACE)]),
        "cleanup": lambda: store.cleanup_events(
            NAMESPACE, store.now() - timedelta(days=1), apply=True
        ),
        "end session": lambda: store.end_session(NAMESPACE, "worker"),
    }


def refusals(store: EventStore) -> set[str]:
    """Objects that are named when one asks for the pending event itself."""
    keys = set()
    for ask in (store.inspect_event, partial(store.replay_event, NAMESPACE)):
        try:
            ask("pending")
        except IntegrityError as error:
            keys.add(error.key)
    return keys


def check(kind: str, what: str, data: bytes) -> None:
    key = key_of(kind)
    world = copied(**{key: data})
    writer = world.open("second")
    store = store_of(writer)
    for name, operation in operations(store, key).items():
        try:
            operation()
        except Exception as error:
            raise AssertionError(f"{kind} with {what}: {name} raised {error!r}") from error
    assert refusals(store) <= ({key} if kind == "event" else set()), (kind, what)
    ran: Counter[str] = Counter()
    world.backend.clock.sleep(600)
    with session_of(writer) as session:
        session.emit(Ordered(id="after", n=9))
        try:
            session.drain([handler(ran)])
        except Exception as error:
            raise AssertionError(f"{kind} with {what}: drain raised {error!r}") from error
    assert ran["after"] == 1, (kind, what)
    assert ran["pending"] == 1 or kind == "event", (kind, what)
    assert ran["good"] == ran["committed"] == 0, (kind, what, "ran again")
    world.close()


KINDS = ("event", "claim", "dead letter", "session", "position", "projection")


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_every_object_in_every_way(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for what, data in mutations(populated()[key_of(kind)]):
        check(kind, what, data)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_malformed_is_listed_with_its_key_and_what_it_should_be(kind: str) -> None:
    key = key_of(kind)
    world = copied(**{key: b'{"commit_id": -3}'})
    (listed,) = store_of(world.open("reader")).list_malformed(NAMESPACE, 10)
    assert (listed.kind, listed.key) == (kind, key)
    assert key in listed.error
    world.close()
    world = copied()
    assert store_of(world.open("reader")).list_malformed(NAMESPACE, 10) == []
    world.close()


def drained(world: World, ran: Counter[str]) -> Any:
    writer = world.open("worker")
    with session_of(writer) as session:
        totals = session.drain([handler(ran)])
    world.writers.remove(writer)
    return totals


def test_a_malformed_event_is_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    key = key_of("event")
    world, ran = copied(**{key: b"{}"}), Counter[str]()
    totals = drained(world, ran)

    assert totals.malformed == 1
    warnings = [r.getMessage() for r in caplog.records if key in r.getMessage()]
    assert len(warnings) == 1
    assert "show --malformed" in warnings[0]
    assert "id should be a text and is absent" in warnings[0]
    world.backend.clock.sleep(3600)
    assert drained(world, ran).malformed == 0  # the position names it
    world.backend.clock.sleep(3600)
    assert drained(world, ran).malformed == 0  # or is past it
    assert ran["pending"] == 0
    world.close()


def test_a_malformed_claim_is_neither_run_again_nor_forgotten() -> None:
    key = key_of("claim")
    world, ran = copied(**{key: b'{"attempts": "many"}'}), Counter[str]()
    world.backend.clock.sleep(600)
    totals = drained(world, ran)

    assert totals.malformed == 1
    assert ran["failed"] == 0
    store = store_of(world.open("reader"))
    (info,) = store.inspect_event("failed")
    assert [m.key for m in info.malformed] == [key]
    assert [m.key for m in store.list_malformed(NAMESPACE, 10)] == [key]
    world.close()


def test_a_malformed_session_is_dead_when_its_object_is_old() -> None:
    key = key_of("session")
    world = copied(**{key: b"\xff"})
    store = store_of(world.open("reader"))
    (session,) = store.list_sessions(NAMESPACE, 60_000)
    assert (session.session_id, session.is_dead) == ("worker", False)
    assert session.malformed is not None
    world.backend.clock.sleep(61)
    (session,) = store.list_sessions(NAMESPACE, 60_000)
    assert session.is_dead
    (namespace,) = store.list_namespaces(60_000)
    assert (namespace.sessions, namespace.dead_sessions) == (0, 1)
    store.heartbeat(NAMESPACE, "worker")  # it lives, and writes its record anew
    (session,) = store.list_sessions(NAMESPACE, 60_000)
    assert (session.is_dead, session.malformed) == (False, None)
    world.close()


@pytest.mark.parametrize(
    "position",
    [
        {"watermark": "zzz"},
        {"watermark": "events/other/2026"},
        {"watermark": "events/default/9999-01-01T00-00-00.000000+00-00_x.json"},
        {"commit_id": 10**6},
        {"finished": "pending"},
    ],
    ids=lambda position: json.dumps(position)[:40],
)
def test_a_position_that_would_hide_events_is_not_believed(position: dict[str, Any]) -> None:
    key = key_of("position")
    stored = json.loads(populated()[key])
    world, ran = copied(**{key: json.dumps({**stored, **position}).encode()}), Counter[str]()
    drained(world, ran)
    assert ran["pending"] == 1
    assert ran["good"] == 0
    kept = world.document(key)
    assert kept["watermark"] < "events/default/9"
    assert kept["commit_id"] == 1
    world.close()


def test_a_mark_of_projected_commits_beyond_head_is_not_believed() -> None:
    """As after a head was put back: the events of new commits must be brought out."""
    key = key_of("projection")
    stored = json.loads(populated()[key])
    world, ran = copied(**{key: json.dumps({**stored, "commit_id": 99}).encode()}), Counter[str]()
    writer = world.open("writer")
    with session_of(writer) as session:
        session.commit(event=Ordered(id="second", n=1))
    (event,) = [k for k in world.stored_keys("events/") if k.endswith("_second.json")]
    world.backend.remove([event])  # as if its committer had died
    drained(world, ran)
    assert ran["second"] == 1
    world.close()


NAMES = [
    "garbage",
    "garbage.json",
    "2026.json",
    "2026_.json",
    "2026-01-01T00-00-00.000000+00-00_folder/x.json",
    "Garbage_x.json",
    "0_0_0.json",
    "~x.json",
]


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_nobody_made(name: str) -> None:
    key = f"events/{NAMESPACE}/{name}"
    world, ran = copied(**{key: b"{}"}), Counter[str]()
    store = store_of(world.open("reader"))
    for operation in operations(store, key).values():
        operation()
    drained(world, ran)
    assert ran["pending"] == 1
    assert [m.key for m in store.list_malformed(NAMESPACE, 10)] == [key]
    world.backend.clock.sleep(3600)
    store.cleanup_events(NAMESPACE, store.now())
    assert key not in world.backend.objects()
    world.close()


@pytest.mark.parametrize(
    "key", ["events/stray", "claims/stray", "sessions/stray.json", "dead_letters/stray"]
)
def test_objects_that_lie_in_no_namespace(key: str) -> None:
    world = copied(**{key: b"{}"})
    store = store_of(world.open("reader"))
    for operation in operations(store, key).values():
        operation()
    assert [n.namespace for n in store.list_namespaces(60_000)] == [NAMESPACE]
    world.close()


@pytest.mark.parametrize("folder", ["claims", "dead_letters", "sessions"])
def test_odd_keys_of_other_kinds(folder: str) -> None:
    for name in ("x", "x/y", "x/y/z.json", "pending/y"):
        key = f"{folder}/{NAMESPACE}/{name}"
        world, ran = copied(**{key: b'{"event_id": "x"}'}), Counter[str]()
        store = store_of(world.open("reader"))
        for operation in operations(store, key).values():
            operation()
        drained(world, ran)
        assert ran["pending"] == 1
        world.close()


def test_an_object_of_another_event_under_this_key_is_malformed() -> None:
    claim, letter = key_of("claim"), key_of("dead letter")
    objects = populated()
    other_claim = objects[layout.claim(NAMESPACE, "good", HANDLER)]
    other_letter = objects[letter].replace(b'"dead"', b'"good"')
    event = objects[key_of("event")].replace(b'"pending"', b'"good"')
    world = copied(**{claim: other_claim, letter: other_letter, key_of("event"): event})
    store = store_of(world.open("reader"))

    assert {m.kind for m in store.list_malformed(NAMESPACE, 10)} == {
        "event",
        "claim",
        "dead letter",
    }
    assert store.list_dead_letters(NAMESPACE, 10) == []
    ran: Counter[str] = Counter()
    world.backend.clock.sleep(600)
    assert drained(world, ran).malformed == 2
    assert ran == {}
    world.close()


def test_a_malformed_event_of_a_manifest_is_set_aside() -> None:
    """Of a manifest from before they were checked by hash."""
    for what, broken in mutations(populated()[key_of("event")]):
        if not broken.startswith(b"{") or b"NaN" in broken or len(broken) > 10_000:
            continue
        try:
            event = json.loads(broken)
        except ValueError:
            continue
        world, ran = copied(), Counter[str]()
        writer = world.open("writer")
        with session_of(writer) as session:
            session.commit(event=[Ordered(id="first", n=1), Ordered(id="second", n=2)])
        head = writer.repo.objects.chain.read_head().head
        assert head.link is not None
        manifest = writer.repo.objects.chain.manifest(head.link)
        events = [{**event, "namespace": NAMESPACE}, manifest.events[1]]
        object.__setattr__(manifest, "events", tuple(events))
        for key in world.stored_keys("events/default/2026"):
            if key.endswith(("_first.json", "_second.json")):
                world.backend.remove([key])
        with session_of(writer) as session:
            session.drain([handler(ran)])
        assert ran["second"] == 1, what
        store_of(writer).cleanup_events(NAMESPACE, writer.store.now() - timedelta(days=1))
        world.close()


def test_malformed_objects_that_appear_while_a_worker_runs() -> None:
    """Between its requests: at each of them, each kind of object is broken once."""
    seen: list[tuple[str, str]] = []
    world, ran = copied(), Counter[str]()
    writer = world.open("counted")
    writer.store.on_request(lambda kind, key: seen.append((kind, key)))
    with session_of(writer) as session:
        session.drain([handler(ran)])
    world.close()
    touched = ("claims/", "events/", "sessions/", "dead_letters/")
    for number in range(len(seen)):
        world, ran = copied(), Counter[str]()
        writer = world.open("worker")

        def break_all(world: World = world) -> None:
            for stored in world.stored_keys():
                if stored.startswith(touched):
                    world.backend.write(stored, b'{"broken": true}')

        at_request(writer.store, number + 1, break_all, "before")
        with session_of(writer) as session:
            try:
                session.drain([handler(ran)])
            except OntologiaError as error:
                raise AssertionError(f"at {seen[number]}: {error!r}") from error
            session.emit(Ordered(id="after", n=9))
            session.drain([handler(ran)])
        assert ran["after"] == 1, seen[number]
        assert max(ran.values()) == 1, (seen[number], ran)
        world.close()

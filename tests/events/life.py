"""A shop that lives on a simulated store: it sends events, handles them, and is watched.

`Shop.run` handles in a process of its own. Whatever happens to that process, `verify` must hold
after others have gone on: what was promised is handled, nothing is handled once its ack has
landed, commits of handlers happen once, dead letters are there once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from storage_engine import Entity, Event, Field, HandlerContext, Session, on_event
from storage_engine.config import OntologiaConfig
from storage_engine.errors import OntologiaError
from storage_engine.objectstore.memory import MemoryBackend, SimulatedCrash
from storage_engine.runtime.core import SessionSettings
from storage_engine.runtime.session import session_on
from storage_engine.testing.faults import FaultPlan
from tests.commitlog.support import World, Writer, new_world

LEASE_MS = 30_000
MAX_ATTEMPTS = 2


class Ordered(Event):
    n: Field[int]


class Billed(Event):
    n: Field[int]


class Noted(Event):
    n: Field[int]


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    n: Field[int]


class Broken(AssertionError):
    """Something happened that must not."""


@dataclass
class Shop:
    world: World
    promised: dict[str, set[str]] = field(default_factory=dict)  # event id -> handlers
    ran: Counter[tuple[str, str]] = field(default_factory=Counter)

    # -- handlers -----------------------------------------------------------------------------

    def handlers(self) -> list[Any]:
        @on_event(Ordered, id="bill")
        def bill(ctx: HandlerContext[Ordered]) -> None:
            """Commits, and sends an event with the commit."""
            self.note("bill", ctx.event)
            ctx.ensure(Invoice(id=ctx.event.id, n=ctx.event.n))
            ctx.commit(event=Billed(n=ctx.event.n))

        @on_event(Ordered, id="tell")
        def tell(ctx: HandlerContext[Ordered]) -> None:
            """Sends an event and commits nothing."""
            self.note("tell", ctx.event)
            ctx.emit(Noted(n=ctx.event.n))

        @on_event(Ordered, id="fail")
        def fail(ctx: HandlerContext[Ordered]) -> None:
            self.note("fail", ctx.event)
            ctx.ensure(Invoice(id="never", n=0))
            raise ValueError("no such luck")

        @on_event(Billed, Noted, id="listen")
        def listen(ctx: HandlerContext[Any]) -> None:
            self.note("listen", ctx.event)

        return [bill, tell, fail, listen]

    def note(self, handler_id: str, event: Event) -> None:
        """A handler begins: its ack must not have landed."""
        self.ran[handler_id, event.id] += 1
        claim = self.claims().get((event.id, handler_id), {})
        if claim.get("ack_at") or claim.get("dead_lettered_at"):
            raise Broken(f"{handler_id} runs again on {event.id}, which is finished")
        if (event.id, handler_id) in self.acks():
            raise Broken(f"{handler_id} runs again on {event.id}, which a commit has handled")

    # -- processes ----------------------------------------------------------------------------

    @contextmanager
    def process(self, name: str, faults: FaultPlan | None = None) -> Iterator[Session]:
        """A process that may die: a crash ends the block."""
        writer = self.world.open(name)
        writer.store.faults = faults or FaultPlan()  # from its first request on
        session = open_session(writer)
        try:
            yield session
            writer.repo.flush()
        except SimulatedCrash:
            pass
        finally:
            writer.close()
            self.world.writers.remove(writer)

    def live(self, session: Session) -> None:
        """Send one event alone and one with a commit, and handle what there is."""
        alone, committed = Ordered(id="alone", n=1), Ordered(id="committed", n=2)
        self.sent(lambda: session.emit(alone), "alone")
        self.sent(lambda: session.commit(event=committed), "committed")
        self.drain(session)
        self.world.backend.clock.sleep(5)
        self.drain(session)  # what failed once fails for good

    def sent(self, send: Any, event_id: str) -> None:
        try:
            send()
        except OntologiaError:
            return  # not promised: it may be there, or not
        self.promised[event_id] = {"bill", "tell", "fail"}

    def drain(self, session: Session) -> None:
        try:
            session.drain(self.handlers())
        except OntologiaError:
            return

    def go_on(self, rounds: int = 4) -> None:
        """Others come, one after the other, past the leases and pauses of those before."""
        for number in range(rounds):
            self.world.backend.clock.sleep(LEASE_MS / 1000 + 1)
            with self.process(f"later-{number}") as session:
                self.drain(session)

    # -- what is stored -----------------------------------------------------------------------

    def documents(self, folder: str) -> dict[str, dict[str, Any]]:
        objects = self.world.backend.objects()
        return {k: json.loads(v) for k, v in objects.items() if k.startswith(folder)}

    def claims(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(c["event_id"], c["handler_id"]): c for c in self.documents("claims/").values()}

    def acks(self) -> Counter[tuple[str, str]]:
        return Counter(
            (ack["event_id"], ack["handler_id"]) for m in self.world.chain() for ack in m.acks
        )

    def events(self, type: str) -> Counter[str]:
        """Objects of a type by event id."""
        found = [e for k, e in self.documents("events/").items() if "/_" not in k]
        return Counter(e["id"] for e in found if e["type"] == type)

    # -- what must hold -----------------------------------------------------------------------

    def verify(self) -> None:
        self.follow_up()
        claims, letters = self.claims(), self.documents("dead_letters/")
        for event_id, handlers in self.promised.items():
            for handler_id in handlers:
                claim = claims.get((event_id, handler_id))
                if claim is None or not (claim["ack_at"] or claim["dead_lettered_at"]):
                    raise Broken(f"{event_id} was not finished for {handler_id}: {claim}")
        twice = {k: n for k, n in self.acks().items() if n > 1}
        if twice:
            raise Broken(f"handled by two commits: {twice}")
        dead = {k for k, c in claims.items() if c["dead_lettered_at"]}
        if {(x["event_id"], x["handler_id"]) for x in letters.values()} != dead:
            raise Broken(f"dead claims {dead} and dead letters {list(letters)} differ")
        told = self.events("event.dead_letter")
        if len(told) != len(dead) or set(told.values()) - {1}:
            raise Broken(f"{len(dead)} dead letters were told of by {told}")
        for type in ("Billed", "Noted"):
            again = {k: n for k, n in self.events(type).items() if n > 1 and type == "Billed"}
            if again:
                raise Broken(f"events of a commit are there twice: {again}")
        invoices = [m for m in self.world.chain() if any(f.type_name == "Invoice" for f in m.files)]
        billed = [k for k, c in claims.items() if k[1] == "bill" and c["ack_at"]]
        if len(invoices) != len(billed):
            raise Broken(f"{len(invoices)} commits of invoices for {billed}")

    def follow_up(self) -> None:
        """What handlers sent on success is promised too."""
        for (event_id, handler_id), claim in self.claims().items():
            sent = {"bill": "Billed", "tell": "Noted"}.get(handler_id)
            if sent is None or not claim["ack_at"]:
                continue
            folder = self.documents("events/").values()
            if not any(e.get("root_event_id") == event_id and e["type"] == sent for e in folder):
                raise Broken(f"{handler_id} handled {event_id}, and its {sent} is missing")
        for type in ("Billed", "Noted"):
            for event_id in self.events(type):
                self.promised[event_id] = {"listen"}


def open_session(writer: Writer) -> Session:
    config = OntologiaConfig(
        event_lease_ms=LEASE_MS,
        event_max_attempts=MAX_ATTEMPTS,
        event_backoff_base_ms=1_000,
        event_claim_limit=10,
        s3_lease_ttl_ms=LEASE_MS,
        s3_lock_timeout_ms=2 * LEASE_MS,
    )
    return session_on(writer.repo, SessionSettings.of(config))


def new_shop() -> Shop:
    return Shop(new_world("v2"))


def copy_of(objects: dict[str, bytes]) -> Shop:
    backend = MemoryBackend("shop")
    for key, data in objects.items():
        backend.write(key, data)
    return Shop(World(backend, "v2"))

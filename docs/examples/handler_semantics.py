"""What a handler leaves behind, when, and what is left when it raises.

Run it with `python docs/examples/handler_semantics.py`. It says what it sees, step by step.
"""

from __future__ import annotations

import tempfile

from storage_engine import (
    Entity,
    Event,
    EventDeadLetter,
    Field,
    HandlerContext,
    OntologiaConfig,
    Session,
    initialize_storage,
    on_event,
)


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    amount: Field[int]


class Attempt(Entity):
    id: Field[str] = Field(primary_key=True)
    count: Field[int]


class OrderPlaced(Event):
    order_id: Field[str]
    amount: Field[int]


class Billed(Event):
    order_id: Field[str]


class Parcel(Entity):
    id: Field[str] = Field(primary_key=True)


class Packed(Event):
    order_id: Field[str]


class Moved(Event, ordering_key="parcel"):
    parcel: Field[str]
    step: Field[int]


runs: dict[str, int] = {}
seen: list[tuple[str, int]] = []
steps: dict[str, list[int]] = {}


@on_event(OrderPlaced, id="shop.bill")
def bill(ctx: HandlerContext[OrderPlaced]) -> None:
    order = ctx.event.order_id
    runs[order] = runs.get(order, 0) + 1
    # A commit of its own: at once, and it stays whatever becomes of the handler.
    ctx.session.ensure(Attempt(id=order, count=runs[order]))
    ctx.session.commit()
    # The handler's work: asked for now, published when the handler has returned.
    ctx.ensure(Invoice(id=order, amount=ctx.event.amount))
    ctx.commit(event=Billed(order_id=order), meta={"order": order})
    visible = ctx.session.query().entities(Invoice).collect()
    print(f"{order}: run {runs[order]}, invoices seen after ctx.commit(): {len(visible)}")
    if order == "flaky" and runs[order] == 1:
        raise ConnectionError("the printer does not answer")
    if order == "bad":
        raise ValueError("no such customer")


@on_event(Billed, id="shop.thank")
def thank(ctx: HandlerContext[Billed]) -> None:
    print(f"{ctx.event.order_id}: thank you")


@on_event(EventDeadLetter, id="shop.alarm")
def alarm(ctx: HandlerContext[EventDeadLetter]) -> None:
    print(f"given up after {ctx.event.attempts} attempts: {ctx.event.last_error}")


@on_event(Packed, id="shop.count")
def count(ctx: HandlerContext[Packed]) -> None:
    # Its own commit is published together with those of the others, and yet it sees them.
    seen.append((ctx.event.order_id, ctx.session.query().entities(Parcel).count()))
    ctx.ensure(Parcel(id=ctx.event.order_id))


@on_event(Moved, id="shop.follow")
def follow(ctx: HandlerContext[Moved]) -> None:
    steps.setdefault(ctx.event.parcel, []).append(ctx.event.step)


def show(session: Session, when: str) -> None:
    invoices = sorted(invoice.id for invoice in session.query().entities(Invoice).collect())
    attempts = {a.id: a.count for a in session.query().entities(Attempt).collect()}
    print(f"{when}: invoices {invoices}, attempts {dict(sorted(attempts.items()))}")


def main() -> None:
    # Two attempts, and the second one as soon as possible.
    config = OntologiaConfig(event_max_attempts=2, event_backoff_base_ms=1)
    with tempfile.TemporaryDirectory() as folder:
        initialize_storage(f"{folder}/shop")
        with Session(f"{folder}/shop", config=config) as session:
            handlers = [bill, thank, alarm]
            session.emit(OrderPlaced(order_id="good", amount=10))
            session.drain(handlers)
            show(session, "it returned")

            session.emit(OrderPlaced(order_id="flaky", amount=20))
            session.run(handlers, max_iterations=1)
            show(session, "it raised")
            while runs["flaky"] < 2:
                session.drain(handlers)
            show(session, "it was tried again")

            session.emit(OrderPlaced(order_id="bad", amount=30))
            while runs.get("bad", 0) < 2:
                session.drain(handlers)
            session.drain(handlers)
            show(session, "it was given up")

            before = session.list_commits(limit=1)[0]["id"]
            session.emit([Packed(order_id=order) for order in ("o1", "o2", "o3")])
            session.drain([count])
            commits = session.list_commits(since_commit_id=before)
            print(f"in one round: {seen} parcels seen, and {len(commits)} commits")

            session.emit([Moved(parcel=p, step=n) for n in (1, 2, 3) for p in ("a", "b")])
            session.drain([follow], concurrency=8)
            print(f"eight at once, by order: {dict(sorted(steps.items()))}")


if __name__ == "__main__":
    main()

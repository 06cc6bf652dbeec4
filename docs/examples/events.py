"""A shop that reacts to events: orders are billed, failures are told of, the day is closed.

Run it with `python docs/examples/events.py [--storage PATH]`; the worker alone, against a storage
that has orders, with `onto events run --handlers events` from this folder.
"""

from __future__ import annotations

import argparse
import tempfile

from storage_engine import (
    Entity,
    Event,
    EventDeadLetter,
    Field,
    HandlerContext,
    OntologiaConfig,
    Schedule,
    Session,
    initialize_storage,
    on_event,
)


class Invoice(Entity):
    id: Field[str] = Field(primary_key=True)
    amount: Field[int]


class OrderPlaced(Event):
    order_id: Field[str]
    amount: Field[int]


class Billed(Event):
    order_id: Field[str]


class CloseDay(Event):
    pass


@on_event(OrderPlaced, priority=200, id="shop.bill")
def bill(ctx: HandlerContext[OrderPlaced]) -> None:
    """The invoice, the next event and the end of this one are published as one commit."""
    if ctx.event.amount < 0:
        raise ValueError(f"order {ctx.event.order_id} has a negative amount")
    ctx.ensure(Invoice(id=ctx.event.order_id, amount=ctx.event.amount))
    ctx.commit(event=Billed(order_id=ctx.event.order_id), meta={"handler": "bill"})


@on_event(Billed, id="shop.thank")
def thank(ctx: HandlerContext[Billed]) -> None:
    print(f"thank you for {ctx.event.order_id} (number {ctx.event.chain_depth} in its chain)")


@on_event(EventDeadLetter, id="shop.alarm")
def alarm(ctx: HandlerContext[EventDeadLetter]) -> None:
    print(f"{ctx.event.handler_id} gave up: {ctx.event.last_error}")


@on_event(CloseDay, id="shop.close_day")
def close_day(ctx: HandlerContext[CloseDay]) -> None:
    print(f"the day is closed (event of priority {ctx.event.priority})")


HANDLERS = [bill, thank, alarm, close_day]
EVERY_EVENING = Schedule(event=CloseDay, cron="0 18 * * mon-fri", timezone="Europe/Vienna")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", help="a directory for the ontology (default: a temporary one)")
    given = parser.parse_args().storage
    with tempfile.TemporaryDirectory() as folder:
        storage = given or f"{folder}/shop"
        initialize_storage(storage)
        with Session(storage, config=OntologiaConfig(event_max_attempts=1)) as session:
            session.emit([OrderPlaced(order_id="o1", amount=10), CloseDay()])
            session.ensure(Invoice(id="o0", amount=5))
            session.commit(event=OrderPlaced(order_id="o2", amount=-1))  # with the data, or not
            totals = session.drain(HANDLERS)
            print(f"{totals.handled} handled, {totals.failed} failed")
            for commit in session.list_commits():
                print(f"commit {commit['id']}: {commit['metadata']}")


if __name__ == "__main__":
    main()

"""What the shop does when something happens."""

from __future__ import annotations

from ontologia_dagster.defs.shop.models import Customer, LargeOrder, Voucher
from storage_engine import HandlerContext, on_event

PERCENT = 5


@on_event(LargeOrder, id="shop.thank_customer", writes=[Voucher], emits=[])
def thank_customer(ctx: HandlerContext[LargeOrder]) -> None:
    """The voucher and the end of the event are one commit. An order of a customer whom nobody
    knows fails, is tried again, and ends as a dead letter."""
    event = ctx.event
    customers = ctx.session.query().entities(Customer)
    if customers.where(Customer.id == event.customer).first() is None:
        raise LookupError(f"customer {event.customer} is not in the ontology")
    ctx.ensure(Voucher(order=event.order, customer=event.customer, percent=PERCENT))
    ctx.commit(meta={"handler": thank_customer.id})

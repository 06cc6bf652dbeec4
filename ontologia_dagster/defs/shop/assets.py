"""What the shop asks of its ontology: revenue by category, and orders that are large."""

# No `from __future__ import annotations`: Dagster reads annotations of assets as objects.

import hashlib

import dagster as dg

from ontologia_dagster import (
    EVENTS_POOL,
    OntologyResource,
    emits,
    on_new_data,
    query_asset,
    report_failures,
)
from ontologia_dagster.defs.shop.models import LargeOrder
from storage_engine import Session

LARGE = 500.0
GROUP = "shop"

revenue_by_category = query_asset(
    "revenue_by_category",
    "select p.category, sum(l.quantity * p.price) as revenue, count(distinct l.order) as orders "
    "from OrderLine l join Product p on p.sku = l.right_key "
    "group by p.category order by revenue desc",
    deps=["order_line", "product"],
    group=GROUP,
    description="What each category of products brought, as of any commit.",
    plot={"best_revenue": "revenue"},
)


@dg.asset(
    group_name=GROUP,
    deps=["order_line", "product"],
    kinds={"duckdb"},
    metadata=emits(LargeOrder),
    pool=EVENTS_POOL,
    automation_condition=on_new_data(),
    description=f"Orders that came to more than {LARGE:.0f}. Each is told once, as a LargeOrder.",
)
def large_orders(
    context: dg.AssetExecutionContext, ontology: OntologyResource
) -> dg.MaterializeResult[None]:
    with report_failures(context.instance), ontology.session(writes=True) as session:
        orders = find_large_orders(session)
        ids = "\n".join(order.id for order in orders)
        version = hashlib.sha256(ids.encode()).hexdigest()[:16]
        # The ids of events are those of their orders, and what was handled is not handled again.
        if orders:
            session.commit(event=orders, idempotency=("shop/large_orders", version))
    context.log.info("%d large orders", len(orders))
    shown = [dg.TableRecord(dict(order.model_dump())) for order in orders]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(version),
        metadata={
            "found": len(orders),
            **({"orders": dg.MetadataValue.table(shown)} if shown else {}),
        },
    )


def find_large_orders(session: Session) -> list[LargeOrder]:
    rows = session.sql(
        "select l.order, min(l.left_key) as customer, sum(l.quantity * p.price) as amount "
        "from OrderLine l join Product p on p.sku = l.right_key "
        "group by l.order having amount > $large order by l.order",
        {"large": LARGE},
    )
    return [LargeOrder(id=f"large_order/{row['order']}", **row) for row in rows.collect()]

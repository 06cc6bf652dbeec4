"""What people see of both locations in Dagster's UI, page by page, with pictures for the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.browser import keep, sees, sees_all, sees_no, wide
from tests.e2e.platform import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

EXAMPLE = 7  # assets that its first run materialises, vouchers for large orders among them
# Index, schema, deep verification and rows that fit; some types have an expectation, too, and
# flights a check of the audit.
ALL_CHECKS = {"4 / 4 Passed": 4, "5 / 5 Passed": 2, "6 / 6 Passed": 1}
NOTICES = "events/airport_notice"


def people_see_the_ontology(page: Page, address: str) -> None:
    """From the source to the types that handlers write."""
    page.goto(f"{address}/locations/flights/asset-groups/flights/lineage")
    sees(page, "flight_data", "weather_observation", "observed_at", "airline_punctuality")
    sees(page, "severe_delays", "severe_delay", "record_incident", "incident", "disruption")
    for passed, types in ALL_CHECKS.items():
        sees_all(page, passed, types)
    sees(page, "100% filled")
    sees_no(page, "Loading", "Never materialized", "Unsynced")
    keep(page, "asset-graph", height=3300)


def people_see_a_healthy_demo(page: Page, address: str) -> None:
    with wide(page):
        people_see_the_ontology(page, address)

    page.goto(f"{address}/assets/plane")
    # The latest run changed nothing, and so has no commit.
    sees(page, "rows_inserted", "rows_unchanged", "schema_version", "price_estimate_usd")
    page.get_by_text("Plots", exact=True).first.click()
    page.locator("canvas").first.wait_for(state="visible")
    sees(page, "rows_inserted")
    keep(page, "ingestion", height=1900)

    page.goto(f"{address}/assets/airline_punctuality")
    sees(page, "worst_average_delay", "as_of_commit", "How late each airline's flights left")
    page.get_by_text("Plots", exact=True).first.click()
    page.locator("canvas").first.wait_for(state="visible")
    sees(page, "worst_average_delay")
    keep(page, "materialisation")


def people_see_what_ran(page: Page, address: str) -> None:
    """Runs of `make run` belong to their location: the home page has them, and their jobs'."""
    page.goto(f"{address}/overview/activity/timeline")
    sees(page, "flights_ingest_all", "flights_deep_verify", "flights_redrive", "flights_compact")
    keep(page, "home", height=560)

    page.goto(f"{address}/locations/flights/jobs/flights_ingest_all/runs")
    sees(page, "Job in", "Latest run", "ontologia/executed_by: make run", "Success")


def people_find_launchpads_to_choose_in(page: Page, address: str) -> None:
    page.goto(f"{address}/locations/flights/jobs/flights_gc/playground")
    sees(page, "dry_run: true", "older_than: 7d", "purge_compacted: false", "No errors")
    sees_no(page, "storage_uri", "production_uris", "guarded")
    keep(page, "launchpad", height=960)

    page.goto(f"{address}/locations/ontologia/jobs/ontology_compact")
    sees(page, "Merge small files of types.", "At 02:00 AM")


def people_materialise_the_example(page: Page, address: str) -> None:
    """One click, on a storage that nobody has made."""
    page.goto(f"{address}/locations/ontologia/asset-groups/shop/lineage")
    sees(page, "customer", "product", "order_line", "recommended", "large_orders")
    page.get_by_text("Materialize all").first.click()
    sees(page, "Launching run", "Launched run", "Starting", "Materializing", any_of=True)


def people_see_the_example(page: Page, address: str) -> None:
    with wide(page):
        page.goto(f"{address}/locations/ontologia/asset-groups/shop/lineage")
        sees(page, "customer", "order_line", "large_orders", "revenue_by_category")
        sees(page, "large_order", "thank_customer", "voucher")
        sees_no(page, "Loading", "Materializing", "Failed")
        sees_all(page, "Materialized", EXAMPLE)
        keep(page, "example", height=1900)

    page.goto(f"{address}/assets/customer")
    sees(page, "Somebody who buys, or once did.", "rows_inserted", "Row count", "40", "Owners")
    page.goto(f"{address}/assets/customer?view=checks")
    sees(page, "index_verify", "schema_matches")

    page.goto(f"{address}/locations/ontologia/sensors/ontology_events")
    sees(page, "Looks whether events are due", "ontology_drain_events")
    page.goto(f"{address}/locations")
    sees(page, "2 code locations", "ontologia_dagster.demo.definitions", "Loaded")


def people_see_trouble(page: Page, address: str) -> None:
    page.goto(f"{address}/assets/flight?view=checks&checkDetail=deep_verify")
    sees(page, "Failed", "missing_endpoint", "2 flights go to 1 airport that is not there: XXX")
    assert page.locator("button", has_text="Execute").first.is_enabled()
    keep(page, "failed-check")

    page.goto(f"{address}/locations/flights/sensors/flights_events")
    sees(page, "flights_drain_events", "View logs", "1 run requested")
    keep(page, "sensor", height=860)


# -- a handler that fails -------------------------------------------------------------------------


def people_see_a_dead_letter(page: Page, address: str, run_id: str) -> None:
    """At home, on the run, and on the event's asset, with what to do about it."""
    page.goto(f"{address}/overview/activity/timeline")
    sees(page, "flights_drain_events")

    page.goto(f"{address}/runs/{run_id}")
    sees(page, "flights_drain_events", "no_dead_letters")
    keep(page, "dead-letter-run", height=960)

    page.goto(f"{address}/assets/{NOTICES}?view=checks&checkDetail=no_dead_letters")
    sees(page, "Failed", "airport XXX is not in the ontology", "flights_redrive")
    keep(page, "dead-letter", height=1300)


def people_send_it_again(page: Page, address: str) -> None:
    """From the launchpad, as it is offered."""
    page.goto(f"{address}/locations/flights/jobs/flights_redrive/playground")
    sees(page, "dry_run: false", "No errors")
    page.get_by_text("Launch Run", exact=True).first.click()
    sees(page, "Success")


def people_see_that_all_is_well(page: Page, address: str) -> None:
    """As soon as the run that handled it has ended: a page shows what was there when it came."""

    def passed() -> bool:
        page.goto(f"{address}/assets/{NOTICES}?view=checks&checkDetail=no_dead_letters")
        sees(page, "Latest execution")
        page.wait_for_timeout(2_000)
        return page.get_by_text("Passed", exact=True).count() > 0

    until(passed, "the check passes again")

"""The demo's own assets around the ingested types: the delivery before them, alarms and reports
after them."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.declaration import EVENTS_POOL, on_new_data
from ontologia_dagster.demo import alarms
from ontologia_dagster.demo.places import DELIVERY, GROUP, landing_folder
from ontologia_dagster.demo.reports import punctuality
from ontologia_dagster.demo.source import PACKAGE, deliver
from ontologia_dagster.demo.types import ENTITIES, RELATIONS
from ontologia_dagster.failures import reported_failures
from ontologia_dagster.metadata import request_metadata
from ontologia_dagster.queries import query_asset
from ontologia_dagster.resources import OntologyResource
from ontologia_dagster.tables import table
from storage_engine import Event, Session


class DeliveryConfig(dg.Config):
    corrected: bool = Field(
        default=True,
        description="false: the files as the package has them, with all their mistakes",
    )


@dg.asset(
    name=DELIVERY,
    group_name=GROUP,
    kinds={"csv"},
    description=f"The CSV files of the package {PACKAGE}, as a supplier would deliver them. "
    "Run it with `corrected: false` first to see deep checks fail, then with `true`.",
)
def flight_data(config: DeliveryConfig) -> dg.MaterializeResult[None]:
    done = deliver(landing_folder(), corrected=config.corrected)
    state = hashlib.sha256()
    for name in sorted(done.rows):
        state.update((done.folder / name).read_bytes())
    return dg.MaterializeResult(
        data_version=dg.DataVersion(state.hexdigest()[:16]),
        metadata={
            "dagster/uri": str(done.folder),
            "corrected": done.corrected,
            "rows": sum(done.rows.values()),
            "files": table(
                ["file", "rows", "changed"],
                [(name, rows, name in done.changed) for name, rows in done.rows.items()],
            ),
            "files_changed": len(done.changed),
        },
    )


def _alarm(
    name: str,
    find: Callable[[Session], Sequence[Event]],
    deps: Sequence[str],
    description: str,
) -> dg.AssetsDefinition:
    @dg.asset(
        name=name,
        group_name=GROUP,
        deps=list(deps),
        kinds={"duckdb"},
        pool=EVENTS_POOL,
        automation_condition=on_new_data(),
        description=description,
    )
    def alarm(
        context: dg.AssetExecutionContext, ontology: OntologyResource
    ) -> dg.MaterializeResult[None]:
        with reported_failures(context.instance), opened(ontology) as session:
            events = find(session)
            told = alarms.tell(session, name, events)
            requests = session.storage_info().get("requests", {})
        context.log.info("%d found, %d events sent", told.found, told.sent)
        metadata: dict[str, Any] = {
            "found": told.found,
            "events_sent": told.sent,
            **request_metadata(requests),
            "events": table(
                ["id", *_fields(events)],
                [(event.id, *event.model_dump().values()) for event in events],
            ),
        }
        if told.commit_id is not None:
            metadata["commit"] = told.commit_id
        version = hashlib.sha256("\n".join(sorted(event.id for event in events)).encode())
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version.hexdigest()[:16]), metadata=metadata
        )

    return alarm


def _fields(events: Sequence[Event]) -> list[str]:
    return list(events[0].model_dump()) if events else []


severe_delays = _alarm(
    "severe_delays",
    alarms.severe_delays,
    ["flight"],
    "Flights that left more than ten hours late. Each is told once, as a SevereDelay.",
)
disrupted_days = _alarm(
    "disrupted_days",
    alarms.disrupted_days,
    ["flight", "weather_observation"],
    "Days on which a quarter of an airport's flights left over an hour late, as a DisruptedDay.",
)
airport_notices = _alarm(
    "airport_notices",
    alarms.notices,
    ["flight", "airport"],
    "A notice about an airport that nobody knows: its handler fails until the airport is there.",
)


airline_punctuality = query_asset(
    "airline_punctuality",
    punctuality,
    deps=["flight", "airline"],
    group=GROUP,
    description="How late each airline's flights left, as of any commit.",
    plot={"worst_average_delay": "average_delay"},
)


def opened(ontology: OntologyResource) -> Session:
    return ontology.session(entity_types=ENTITIES, relation_types=RELATIONS)


ASSETS = (flight_data, severe_delays, disrupted_days, airport_notices, airline_punctuality)

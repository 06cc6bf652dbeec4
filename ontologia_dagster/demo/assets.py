"""The demo's own assets around the ingested types: the delivery before them, alarms and reports
after them."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from ontologia_dagster.declaration import EVENTS_POOL, on_new_data
from ontologia_dagster.demo import alarms, reports
from ontologia_dagster.demo.places import DELIVERY, GROUP, landing_folder
from ontologia_dagster.demo.source import PACKAGE, deliver
from ontologia_dagster.demo.types import ENTITIES, RELATIONS
from ontologia_dagster.failures import reported_failures
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
    "Run it with `corrected: false` to see checks fail, then with `true` to see them mended.",
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
        context.log.info("%d found, %d events sent", told.found, told.sent)
        metadata: dict[str, Any] = {
            "found": told.found,
            "events_sent": told.sent,
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


class ReportConfig(dg.Config):
    as_of: str | None = Field(
        default=None, description="A commit id, an instant or a tag; the latest if left out"
    )


@dg.asset(
    group_name=GROUP,
    deps=["flight", "airline"],
    kinds={"duckdb"},
    automation_condition=on_new_data(),
    description="How late each airline's flights left, as of any commit.",
)
def airline_punctuality(
    context: dg.AssetExecutionContext, config: ReportConfig, ontology: OntologyResource
) -> dg.MaterializeResult[None]:
    with reported_failures(context.instance), opened(ontology) as session:
        commit_id, rows = reports.punctuality(session, config.as_of)
    departed = sum(row.departed for row in rows)
    late = sum(row.departed * row.average_delay for row in rows)
    return dg.MaterializeResult(
        metadata={
            "as_of_commit": commit_id,
            "airlines": len(rows),
            "flights_departed": departed,
            "average_delay_minutes": round(late / departed, 2) if departed else 0.0,
            "preview": dg.MetadataValue.md(reports.as_markdown(rows)),
        }
    )


def opened(ontology: OntologyResource) -> Session:
    return ontology.session(entity_types=ENTITIES, relation_types=RELATIONS)


ASSETS = (flight_data, severe_delays, disrupted_days, airport_notices, airline_punctuality)

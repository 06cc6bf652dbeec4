"""What the demo shows at its end: figures beside those of the source, answers, and the cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from ontologia_dagster import OntologyResource
from ontologia_dagster.demo.assets import open_session, punctuality
from ontologia_dagster.demo.events import NOTICE, SEVERE_DELAY
from ontologia_dagster.demo.expected import Expected
from ontologia_dagster.demo.ontology import (
    ENTITIES,
    RELATIONS,
    Airport,
    Flight,
    Incident,
    Plane,
)
from ontologia_dagster.demo.run import DemoResult, corrections
from ontologia_dagster.demo.source import NOWHERE, SAME_MAKER
from ontologia_dagster.downstream.metadata import PER_REQUEST, price, request_total
from storage_engine import Session


@dataclass(frozen=True)
class Figure:
    """One number that was found, and what the source says it must be."""

    name: str
    found: Any
    expected: Any

    @property
    def right(self) -> bool:
        return bool(self.found == self.expected)


def figures(ontology: OntologyResource, outcome: DemoResult, expected: Expected) -> list[Figure]:
    """What is stored now, before the corrections, and what happened in between."""
    with open_session(ontology) as session:
        stored, sent = _counts(session), _events_sent(session)
        compared = [
            Figure("Airline", stored["Airline"], expected.airlines),
            Figure("Airport", stored["Airport"], expected.airports_then),
            Figure("Plane", stored["Plane"], expected.planes_then),
            Figure("WeatherObservation", stored["WeatherObservation"], expected.weather),
            Figure("Flight", stored["Flight"], expected.flights),
            Figure("Flight, by month", _by_month(session), expected.flights_by_month),
            Figure("Operates", stored["Operates"], expected.operates),
            Figure("ObservedAt", stored["ObservedAt"], expected.observed_at),
            Figure(
                "Incident of a delay", _incidents(session, SEVERE_DELAY), expected.severe_delays
            ),
            Figure("Incident, notices", _incidents(session, NOTICE), sent["airport_notices"]),
            Figure("Disruption", stored["Disruption"], expected.disrupted_days),
            *_changes(session, expected),
            Figure("SevereDelay events sent", sent["severe_delays"], expected.severe_delays),
            Figure("DisruptedDay events sent", sent["disrupted_days"], expected.disrupted_days),
        ]
        if outcome.first_commit:
            compared += _first_pass(session, outcome, expected)
        compared += _audited(session, outcome, expected)
    return [*compared, Figure("failed checks at the end", len(outcome.failed_last), 0)]


def _counts(session: Session) -> dict[str, int]:
    query = session.query()
    return {
        **{entity.__name__: query.entities(entity).count() for entity in ENTITIES},
        **{relation.__name__: query.relations(relation).count() for relation in RELATIONS},
    }


def _by_month(session: Session) -> dict[str, int]:
    rows = session.sql(
        "select strftime(date_trunc('month', day), '%Y-%m-%d') as month, count(*) as n "
        "from Flight group by month"
    ).collect()
    return {row["month"]: row["n"] for row in rows}


def _incidents(session: Session, kind: str) -> int:
    return session.query().entities(Incident).where(Incident.kind == kind).count()


def _changes(session: Session, expected: Expected) -> list[Figure]:
    """What the corrections changed, whichever run made them. A storage that saw only corrected
    files (from the UI) had nothing to unify or mend."""
    done = corrections(session)
    unified = expected.makers_unified if done.makers_wrong else 0
    mended = expected.times_mended if done.times_wrong else 0
    return [
        Figure("airports added as stubs", done.airports_added, len(expected.unknown_airports)),
        Figure("planes added as stubs", done.planes_added, expected.unknown_planes),
        Figure("manufacturers unified", done.makers_unified, unified),
        Figure("times of 2400 mended", done.times_mended, mended),
    ]


def _first_pass(session: Session, outcome: DemoResult, expected: Expected) -> list[Figure]:
    """The storage as the first pass left it, by time travel, and what the checks said of it."""
    then = session.at(outcome.first_commit).query()
    to_nowhere = session.at(outcome.first_commit).sql(
        "select count(*) as n from Flight where right_key not in (select faa from Airport)"
    )
    findings = " ".join(outcome.failed_first.values())
    return [
        Figure("Airport, first pass", then.entities(Airport).count(), expected.airports_first),
        Figure("Plane, first pass", then.entities(Plane).count(), expected.planes_first),
        Figure(
            "flights to unknown airports",
            to_nowhere.collect()[0]["n"],
            expected.flights_to_unknown_airports,
        ),
        Figure(
            "the same, by deep verify",
            f"{expected.flights_to_unknown_airports:,} flights go to "
            f"{len(expected.unknown_airports)} airports that are not there" in findings,
            True,
        ),
        Figure(
            "unknown planes, by deep verify",
            f"go to {expected.unknown_planes:,} planes that are not there" in findings,
            True,
        ),
        Figure("dead letters", outcome.dead_letters, 1),
        Figure("dead letters redriven", outcome.redriven, 1),
    ]


def _audited(session: Session, outcome: DemoResult, expected: Expected) -> list[Figure]:
    """The planted flight was stopped, no commit of main ever had it, and what the corrections
    changed came in one commit."""
    versions = session.query().relations(Flight).with_history().batches()
    seen = sum(pc.sum(pc.equal(batch.column("right_key"), NOWHERE)).as_py() for batch in versions)
    compared = [Figure("planted flights, ever seen", seen, 0)]
    if outcome.stopped is not None:
        compared.append(Figure("planted flights, stopped", outcome.stopped, 1))
        compared.append(
            Figure(
                "corrections, in one commit",
                outcome.published,
                {
                    "Airport": len(expected.unknown_airports),
                    "Plane": expected.unknown_planes + expected.makers_unified,
                    "Flight": expected.times_mended,
                },
            )
        )
    return compared


def _events_sent(session: Session) -> Counter[str]:
    """By all runs together, as their commits say: nothing was forgotten, nothing told twice."""
    sent: Counter[str] = Counter()
    for commit in session.list_commits(limit=max(1, session.snapshot)):
        meta = commit["metadata"]
        if "alarm" in meta:
            sent[meta["alarm"]] += int(meta["events"])
    return sent


# -- shown ----------------------------------------------------------------------------------------


def show(
    console: Console,
    ontology: OntologyResource,
    outcome: DemoResult,
    compared: Sequence[Figure],
    seconds: float,
) -> None:
    with open_session(ontology) as session:
        _show_figures(console, compared)
        _show_question(console, session)
        _show_time_travel(console, session, outcome)
        _show_commits(console, session)
    _show_cost(console, outcome)
    console.print(
        f"\nDone in {seconds:.0f} s. The storage is {ontology.storage_uri}", soft_wrap=True
    )


def verdict(console: Console, compared: Sequence[Figure]) -> bool:
    """Whether every figure is as the source says; those that are not are named."""
    wrong = [figure for figure in compared if not figure.right]
    if wrong:
        console.print(f"\n[red]{len(wrong)} figures are not what the source says:[/red]")
        for figure in wrong:
            line = f"  {figure.name}: found {figure.found}, the source has {figure.expected}"
            console.print(line, soft_wrap=True)
    return not wrong


def _show_figures(console: Console, compared: Sequence[Figure]) -> None:
    table = Table(title="Found, beside what the source says", title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("found", justify="right", no_wrap=True)
    table.add_column("source", justify="right", no_wrap=True)
    table.add_column("")
    for figure in compared:
        mark = "[green]✓[/green]" if figure.right else "[red]✗[/red]"
        table.add_row(figure.name, _shown(figure.found), _shown(figure.expected), mark)
    console.print()
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        months = any("-" in name for name in value)
        return f"{len(value)} {'months' if months else 'types'}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _show_question(console: Console, session: Session) -> None:
    rows = punctuality(session.at(session.snapshot))
    console.print("\n[bold]A typed question: which airlines left latest?[/bold]")
    _code(
        console,
        "session.query().relations(Flight).where(Flight.departure_delay.is_not_null())",
        "    .group_by(Flight.carrier).agg(departed=count(), late=avg(Flight.departure_delay))",
    )
    table = Table("airline", "flights", "minutes late on average")
    for row in rows[:5]:
        table.add_row(row["airline"], f"{row['flights']:,}", f"{row['average_delay']:.1f}")
    console.print(table)


def _show_time_travel(console: Console, session: Session, outcome: DemoResult) -> None:
    """Makers' names before and after the corrections, from one and the same storage."""
    first = outcome.first_commit or max(1, (corrections(session).first_commit or 1) - 1)
    console.print("\n[bold]Time travel: the makers of planes, then and now[/bold]")
    _code(
        console,
        "session.query().entities(Plane).as_of(commit).where(Plane.manufacturer == name).count()",
    )
    table = Table("manufacturer", f"as of commit {first}", "now")
    planes = session.query().entities(Plane)
    for name in sorted({*SAME_MAKER, *SAME_MAKER.values()}):
        made = planes.where(Plane.manufacturer == name)
        table.add_row(name, f"{made.as_of(first).count():,}", f"{made.count():,}")
    console.print(table)


def _code(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)


def _show_commits(console: Console, session: Session) -> None:
    console.print("\n[bold]The history[/bold]")
    head = session.snapshot
    table = Table("commit", "made by", "types")
    shown = [*session.list_commits(limit=6)]
    for commit in shown:
        meta = commit["metadata"]
        merged = commit["kind"] == "merge" and "publication"
        who = meta.get("dagster/asset_key") or meta.get("handler") or meta.get("alarm") or merged
        table.add_row(str(commit["id"]), who or "", ", ".join(commit["types"]))
    if head > len(shown):
        table.add_row("...", f"{head - len(shown)} before", "")
    console.print(table)


def _show_cost(console: Console, outcome: DemoResult) -> None:
    requests, files = outcome.requests, outcome.files_by_spark
    kinds = ", ".join(f"{kind} {requests[kind]:,}" for kind in PER_REQUEST if kind in requests)
    cost = price({**requests, "PUT": requests["PUT"] + files})
    console.print("\n[bold]What it took[/bold]")
    console.print(f"  {request_total(requests):,} requests to the store ({kinds})", soft_wrap=True)
    console.print(f"  and {files:,} files that Spark's workers wrote; on S3 about ${cost:.4f}")

"""Runs the whole demo once, in this process.

The runs are ordinary Dagster runs of the demo's jobs on a Dagster instance that stays: afterwards
the UI shows all of them. What to do is decided by what is stored, so that a demo that was stopped
anywhere goes on, and a storage that has been through it is left as it is. What the corrections did
is read from the storage's history for the same reason: it is true whichever run did it.

Every request is counted that goes through the resource in this process: of writes, reads, checks,
events, maintenance. Spark's Python workers are other processes, and are not counted.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from ontologia_dagster import OntologyResource, SparkResource
from ontologia_dagster.dagster_compat import runs_of_location
from ontologia_dagster.demo import definitions as location
from ontologia_dagster.demo.assets import DESTINATIONS_KNOWN, open_session
from ontologia_dagster.demo.definitions import (
    ALARM_JOB,
    CHECK_JOB,
    CORRECT_JOB,
    HANDLER_MODULE,
    INGEST_JOB,
    LOCATION,
    demo_definitions,
)
from ontologia_dagster.demo.events import file_notice
from ontologia_dagster.demo.instance import DELIVERY, OWN_RUN, STORAGE, home
from ontologia_dagster.demo.narrator import LOGGER, Narrator, findings
from ontologia_dagster.demo.ontology import Airport, Flight, Plane
from ontologia_dagster.demo.source import NOT_MIDNIGHT, SAME_MAKER
from ontologia_dagster.ingestion.source_sensor import RANGE_END, RANGE_START
from ontologia_dagster.resources.branches import AUDITED
from ontologia_dagster.storage.events import load_handlers, read_backlog
from ontologia_dagster.storage.publication_defs import discard_config
from ontologia_dagster.storage.unpublished import RUN_BRANCHES, discard_job_name, publication_key
from storage_engine import Session
from storage_engine.repository.protocol import Repository
from storage_engine.wording import counted

_MIDNIGHT = int(NOT_MIDNIGHT)
_PATIENCE_S = 60.0  # for events that a killed run had claimed; far longer than their lease
_LOOKED_AT = 1_000
# Of the process, as Dagster makes a new copy of a resource for each run.
_meters: list[Any] = []


@dataclass
class DemoResult:
    """What the passes came to; figures are read from the storage by `summary`."""

    corrected_before: bool = False  # the corrections had begun when this run did
    first_commit: int = 0  # where the first pass ended, where this run did it
    last_commit: int = 0
    failed_first: dict[str, str] = field(default_factory=dict)
    failed_last: dict[str, str] = field(default_factory=dict)
    dead_letters: int = 0
    redriven: int = 0
    files_by_spark: int = 0
    stopped: int | None = None  # flights to nowhere that the check has found, where one was planted
    published: dict[str, int] | None = None  # rows by type of the commit that the corrections are
    requests: Counter[str] = field(default_factory=Counter)


class Demo:
    """One run through all of it."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        ontology: OntologyResource,
        spark: SparkResource,
        narrator: Narrator,
    ) -> None:
        self._instance = instance
        self._ontology = ontology
        self._spark = spark
        self._narrator = narrator
        heard = dg.Definitions(loggers={LOGGER: narrator.definition()})
        self._definitions = dg.Definitions.merge(demo_definitions(ontology), heard)
        audited = MeteredOntology.of(ontology, publish=AUDITED)
        self._audited = dg.Definitions.merge(demo_definitions(audited), heard)
        self.outcome = DemoResult()

    def run(self) -> DemoResult:
        outcome, chapter = self.outcome, self._narrator.chapter
        at_start = requests()
        before = self._prepare()
        with chapter("Spark"), stderr_in(home() / "spark.log"):
            self._spark.session()
            self._narrator.say("started", f"its log is {home() / 'spark.log'}")
        if not outcome.corrected_before:
            with chapter("First pass: the files as they are"):
                self._ingest(corrected=False)
                outcome.first_commit = self._head()
            with chapter("Read everything back: does it hold together?"):
                outcome.failed_first = self._verify()
            with chapter("Look for trouble, and handle it"):
                self._execute(ALARM_JOB)
                self._drain()
                self._tell_dead_letters()
        if not outcome.corrected_before:
            with chapter("Corrections, audited: one file has a flight to nowhere"):
                outcome.stopped = self._correct(flawed=True)
        again = "Corrections once more: only what is missing is written"
        mended = "That file mended: all types in one commit"
        with chapter(again if outcome.corrected_before else mended):
            self._correct()
        with chapter("Read everything back again"):
            outcome.failed_last = self._verify()
        with chapter("Look again, and give dead letters another chance"):
            self._execute(ALARM_JOB)
            outcome.redriven = self._redrive()
            self._drain()
        with chapter("Tidy up"):
            self._tidy()
        outcome.last_commit = self._head()
        outcome.requests = requests() - at_start
        if outcome.last_commit == before:
            self._narrator.say("nothing new", f"still commit {before}: all of it was there")
        return outcome

    # -- steps ------------------------------------------------------------------------------------

    def _prepare(self) -> int:
        """The head before anything is done; a storage that is not there yet is made."""
        head = self._head()
        if head:
            with open_session(self._ontology) as session:
                self.outcome.corrected_before = corrections(session).first_commit is not None
        return head

    def _head(self) -> int:
        with self._ontology.repository() as repository:
            return repository.head_commit_id()

    def _ingest(self, *, corrected: bool) -> None:
        """All types, flights for the whole range of months in the same run."""
        months = self._definitions.resolve_assets_def("flight").partitions_def
        assert months is not None
        keys = months.get_partition_keys()
        self._execute(
            INGEST_JOB,
            {"ops": {DELIVERY: {"config": {"corrected": corrected}}}},
            tags={RANGE_START: keys[0], RANGE_END: keys[-1]},
        )

    def _correct(self, *, flawed: bool = False) -> int | None:
        """The corrected files, on a branch that is published when the check has passed. Of a
        flawed one the first month is enough; what the check has found."""
        months = self._audited.resolve_assets_def("flight").partitions_def
        assert months is not None
        keys = months.get_partition_keys()
        result = self._execute(
            CORRECT_JOB,
            {"ops": {DELIVERY: {"config": {"corrected": True, "flawed": flawed}}}},
            tags={RANGE_START: keys[0], RANGE_END: keys[0] if flawed else keys[-1]},
            definitions=self._audited,
            may_fail=flawed,
        )
        if not flawed:
            for event in result.get_asset_materialization_events():
                if event.asset_key == publication_key(STORAGE):
                    facts = event.step_materialization_data.materialization.metadata
                    listed: Any = facts.get("types")
                    rows = [record.data for record in listed.records] if listed else []
                    self.outcome.published = {row["type"]: row["rows"] for row in rows}
            return None
        head = self._head()
        self._narrator.say("main", f"still commit {head}: nobody has seen any of it")
        self._discard(f"{RUN_BRANCHES}{result.run_id}")
        counts: Any = [
            evaluation.metadata["flights_to_nowhere"].value
            for evaluation in result.get_asset_check_evaluations()
            if evaluation.check_name == DESTINATIONS_KNOWN
        ]
        return int(counts[0])

    def _discard(self, branch: str) -> None:
        config = discard_config(STORAGE, branch)
        done = self._output(self._execute(discard_job_name(STORAGE), config))
        commits = counted(done["commits_discarded"], "commit")
        summary = f"{branch} thrown away, with {commits}"
        self._narrator.say("branch", summary)

    def _verify(self) -> dict[str, str]:
        """The deep checks that failed, with what they found."""
        result = self._execute(f"{STORAGE}_deep_verify")
        evaluations = result.get_asset_check_evaluations()
        failed = {}
        for evaluation in evaluations:
            if not evaluation.passed:
                asset = evaluation.asset_key.to_user_string()
                failed[asset] = "; ".join(what for _, what in findings(evaluation))
        self._narrator.say("deep verify", f"{len(evaluations) - len(failed)} checks passed")
        return failed

    def _drain(self) -> None:
        """Until no event is left: failed ones wait for their next attempt, and those that a killed
        run had claimed for the end of its lease."""
        handlers = load_handlers([HANDLER_MODULE])
        deadline = time.monotonic() + _PATIENCE_S
        left = None
        while left is None or (left.due and time.monotonic() < deadline):
            done = self._observed(self._execute(f"{STORAGE}_drain_events"))
            self._narrator.say("events", f"{done['handled']} handled, {done['failed']} failed")
            left = read_backlog(self._ontology, handlers)
            while left.waiting and not left.due and time.monotonic() < deadline:
                time.sleep(0.2)
                left = read_backlog(self._ontology, handlers)
        if left.due or left.waiting:
            self._narrator.say("events", f"{left.due + left.waiting} are not handled", good=False)

    def _tell_dead_letters(self) -> None:
        with self._ontology.bus() as bus:
            letters = bus.list_dead_letters(self._ontology.namespace, _LOOKED_AT)
        self.outcome.dead_letters = len(letters)
        for letter in letters:
            self._narrator.say("dead letter", f"{letter.event_id}: {letter.last_error}", good=False)

    def _redrive(self) -> int:
        """With the config that one would give in the launchpad."""
        config = {"handler": file_notice.id}
        redrive = {f"{STORAGE}_redrive_dead_letters": {"config": config}}
        done = self._output(self._execute(f"{STORAGE}_redrive", {"ops": redrive}))
        self._narrator.say("dead letters", f"{done['sent']} sent again to {file_notice.id}")
        return int(done["sent"])

    def _tidy(self) -> None:
        done = self._output(self._execute(f"{STORAGE}_compact"))
        summary = f"{done['rows_rewritten']:,} rows merged, {done['files']} files now"
        self._narrator.say("compaction", summary)
        self._collect_garbage()
        checks = self._execute(CHECK_JOB).get_asset_check_evaluations()
        good = sum(evaluation.passed for evaluation in checks)
        self._narrator.say(
            "checks of types", f"{good} of {len(checks)} passed", good=good == len(checks)
        )

    def _collect_garbage(self) -> None:
        """What compaction replaced is shown; it is deleted when its grace is over, as somebody may
        be reading it just now, such as a question in the UI."""
        at_once = {"dry_run": True, "older_than": "0s", "purge_compacted": True}
        planned = self._gc(at_once)
        size = sum(row.data["bytes"] for row in planned["plan"].records) / 1024**2
        summary = f"{planned['objects_planned']} objects are needed no more, {size:.1f} MiB"
        self._narrator.say("garbage", summary)
        done = self._gc({"dry_run": False, "purge_compacted": True})
        summary = f"{done['objects_deleted']} objects deleted that are older than a week"
        self._narrator.say("garbage collection", summary)

    def _gc(self, config: Mapping[str, Any]) -> dict[str, Any]:
        collect = {f"{STORAGE}_collect_garbage": {"config": dict(config)}}
        return self._output(self._execute(f"{STORAGE}_gc", {"ops": collect}))

    # -- Dagster ----------------------------------------------------------------------------------

    def _execute(
        self,
        job: str,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        *,
        definitions: dg.Definitions | None = None,
        may_fail: bool = False,
    ) -> dg.ExecuteInProcessResult:
        """One run; a failed step ends the demo with that step's error, unless it may fail."""
        definition = (definitions or self._definitions).resolve_job_def(job)
        with runs_of_location(self._instance, location.__name__, LOCATION, definition):
            result = definition.execute_in_process(
                instance=self._instance,
                run_config={**(config or {}), "loggers": {LOGGER: {}}},
                tags={**OWN_RUN, **(tags or {})},
                raise_on_error=not may_fail,
            )
        self._count_files(result)
        return result

    def _count_files(self, result: dg.ExecuteInProcessResult) -> None:
        """Files that Spark's workers put into the store, in processes of their own."""
        told: set[Any] = set()
        for event in result.get_asset_materialization_events():
            facts = event.step_materialization_data.materialization.metadata
            if "rows_read" in facts and event.asset_key not in told:
                told.add(event.asset_key)
                files: Any = facts["files"].value
                self.outcome.files_by_spark += files

    def _observed(self, result: dg.ExecuteInProcessResult) -> dict[str, Any]:
        """What a run has left on the storage's log."""
        log = dg.AssetKey([STORAGE, "log"])
        [told] = [
            event.asset_observation_data.asset_observation
            for event in result.get_asset_observation_events()
            if event.asset_key == log
        ]
        return {name: value.value for name, value in told.metadata.items()}

    def _output(self, result: dg.ExecuteInProcessResult) -> dict[str, Any]:
        """What the only step of a job said of its work."""
        [event] = [event for event in result.all_events if event.event_type_value == "STEP_OUTPUT"]
        return {name: value.value for name, value in event.step_output_data.metadata.items()}


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """Processes started meanwhile write their stderr to `path`, for as long as they live."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with open(path, "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)


# -- requests -------------------------------------------------------------------------------------


class MeteredOntology(OntologyResource):
    @classmethod
    def of(cls, ontology: OntologyResource, **other: Any) -> MeteredOntology:
        """The same, with other settings where there are some. Made anew: a copy would be bound to
        the settings that it was made with."""
        names = type(ontology).model_fields
        return cls(**{**{name: getattr(ontology, name) for name in names}, **other})

    @contextmanager
    def repository(self, *, branch: str | None = None) -> Iterator[Repository]:
        with super().repository(branch=branch) as opened:
            _count(opened)
            yield opened

    def session(self, **settings: Any) -> Session:
        opened = super().session(**settings)
        _count(opened.repository)
        return opened


def requests() -> Counter[str]:
    """By kind, to all storages that were opened so far."""
    total: Counter[str] = Counter()
    for meter in _meters:
        total.update(meter.requests)
    return total


def _count(repository: Repository) -> None:
    if (objects := repository.objects) is not None:
        _meters.append(objects.store.meter)


# -- corrections ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corrections:
    """Rows that are corrected, those that were ever stored wrong, and the earliest commit that
    corrected one of them (None: none is)."""

    airports_added: int
    planes_added: int
    makers_wrong: int
    makers_unified: int
    times_wrong: int
    times_mended: int
    first_commit: int | None


def corrections(session: Session) -> Corrections:
    airports = session.query().entities(Airport).where(Airport.stub.is_true()).collect()
    planes = session.query().entities(Plane).where(Plane.stub.is_true()).collect()
    makers = _makers_ever_wrong(session)
    unified = [plane for plane in makers if plane.manufacturer not in SAME_MAKER]
    flights = _times_ever_wrong(session)
    mended = [flight for flight in flights if _MIDNIGHT not in (flight.departure, flight.arrival)]
    corrected: list[Airport | Plane | Flight] = [*airports, *planes, *unified, *mended]
    return Corrections(
        airports_added=len(airports),
        planes_added=len(planes),
        makers_wrong=len(makers),
        makers_unified=len(unified),
        times_wrong=len(flights),
        times_mended=len(mended),
        first_commit=min((row.meta().commit_id for row in corrected), default=None),
    )


def _makers_ever_wrong(session: Session) -> list[Plane]:
    """Planes whose maker has or had another name, as they are now."""
    planes = session.query().entities(Plane)
    versions = planes.with_history().where(Plane.manufacturer.in_(list(SAME_MAKER))).collect()
    tailnums = sorted({plane.tailnum for plane in versions})
    return planes.where(Plane.tailnum.in_(tailnums)).collect() if tailnums else []


def _times_ever_wrong(session: Session) -> list[Flight]:
    """Flights that leave or come, or once did, at 24:00, as they are now."""
    flights = session.query().relations(Flight)
    wrong = (Flight.departure == _MIDNIGHT) | (Flight.arrival == _MIDNIGHT)
    versions = flights.with_history().where(wrong).collect()
    identities = {_identity(flight) for flight in versions}
    names = sorted({flight.flight for flight in versions})
    now = flights.where(Flight.flight.in_(names)).collect() if names else []
    return [flight for flight in now if _identity(flight) in identities]


def _identity(flight: Flight) -> tuple[str, str, str]:
    return flight.flight, flight.left_key, flight.right_key

"""Runs the whole demo once, in this process, and compares what came of it with the source.

The runs are ordinary Dagster runs of the demo's jobs on a Dagster instance that stays: afterwards
the UI shows all of them. A storage that has been through the demo is left as it is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from ontologia_dagster.demo.assets import opened
from ontologia_dagster.demo.definitions import (
    ALARM_JOB,
    CHECK_JOB,
    INGEST_JOB,
    demo_definitions,
)
from ontologia_dagster.demo.narrator import LOGGER, Narrator, findings
from ontologia_dagster.demo.places import DELIVERY, home
from ontologia_dagster.demo.quiet import stderr_in
from ontologia_dagster.demo.types import Airport
from ontologia_dagster.platform import STORAGE
from ontologia_dagster.resources import OntologyResource
from ontologia_dagster.spark import SparkResource
from storage_engine import initialize_storage
from storage_engine.errors import UninitializedStorageError

RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
_PATIENCE = 20  # drain runs until a failing event must have become a dead letter


@dataclass
class Outcome:
    """What the passes came to; figures are read from the storage by `summary`."""

    repeated: bool = False
    first_commit: int = 0
    last_commit: int = 0
    failed_first: dict[str, str] = field(default_factory=dict)
    failed_last: dict[str, str] = field(default_factory=dict)
    checks_passed: int = 0
    events_sent: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0
    redriven: int = 0
    requests: dict[str, int] = field(default_factory=dict)


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
        self._definitions = dg.Definitions.merge(
            demo_definitions(), dg.Definitions(loggers={LOGGER: narrator.definition()})
        )
        self.outcome = Outcome()

    def run(self) -> Outcome:
        outcome, chapter = self.outcome, self._narrator.chapter
        before = self._prepare()
        with chapter("Spark"), stderr_in(home() / "spark.log"):
            self._spark.session()
            self._narrator.say("started", f"its log is {home() / 'spark.log'}")
        if not outcome.repeated:
            with chapter("First pass: the files as they are"):
                self._ingest(corrected=False)
                outcome.first_commit = self._head()
            with chapter("Read everything back: does it hold together?"):
                outcome.failed_first = self._verify()
            with chapter("Look for trouble, and handle it"):
                self._look()
                self._drain_until_dead()
        again = "Once more: this storage has been through it, so nothing should differ"
        with chapter(again if outcome.repeated else "Corrections: the files again, mended"):
            self._ingest(corrected=True)
        with chapter("Read everything back again"):
            outcome.failed_last = self._verify()
        with chapter("Look again, and give dead letters another chance"):
            self._look()
            outcome.redriven = self._redrive()
            self._drain()
        with chapter("Tidy up"):
            self._tidy()
        outcome.last_commit = self._head()
        if outcome.last_commit == before:
            self._narrator.say("nothing new", f"still commit {before}: all of it was there")
        return outcome

    # -- steps ------------------------------------------------------------------------------------

    def _prepare(self) -> int:
        """The head before anything is done; a storage that is not there yet is made."""
        try:
            head = self._head()
        except UninitializedStorageError:
            initialize_storage(self._ontology.storage_uri, config=self._ontology.config())
            head = 0
        if head:
            with opened(self._ontology) as session:
                stubs = session.query().entities(Airport).where(Airport.stub.is_true())
                self.outcome.repeated = stubs.first() is not None
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

    def _verify(self) -> dict[str, str]:
        """The deep checks that failed, with what they found."""
        result = self._execute(f"{STORAGE}_deep_verify")
        evaluations = result.get_asset_check_evaluations()
        failed = {}
        for found in evaluations:
            if not found.passed:
                failed[found.check_name] = "; ".join(what for _, what in findings(found))
        self.outcome.checks_passed = len(evaluations) - len(failed)
        self._narrator.say("deep verify", f"{len(evaluations) - len(failed)} checks passed")
        return failed

    def _look(self) -> None:
        result = self._execute(ALARM_JOB)
        for event in result.get_asset_materialization_events():
            facts = event.step_materialization_data.materialization.metadata
            if "events_sent" in facts:
                name = event.asset_key.to_user_string() if event.asset_key else ""
                sent: Any = facts["events_sent"].value
                self.outcome.events_sent[name] = self.outcome.events_sent.get(name, 0) + sent

    def _drain_until_dead(self) -> None:
        """The planted event fails; it is tried again after a pause, until its handler gives up."""
        for _ in range(_PATIENCE):
            self._drain()
            with self._ontology.bus() as bus:
                letters = bus.list_dead_letters(self._ontology.namespace, 100)
            if letters:
                break
            time.sleep(0.5)
        self.outcome.dead_letters = len(letters)
        for letter in letters:
            self._narrator.say("dead letter", f"{letter.event_id}: {letter.last_error}", good=False)

    def _drain(self) -> None:
        done = self._output(self._execute(f"{STORAGE}_drain_events"))
        self._narrator.say("events", f"{done['handled']} handled, {done['failed']} failed")

    def _redrive(self) -> int:
        done = self._output(self._execute(f"{STORAGE}_redrive"))
        self._narrator.say("dead letters", f"{done['sent']} sent again")
        return int(done["sent"])

    def _tidy(self) -> None:
        done = self._output(self._execute(f"{STORAGE}_compact"))
        said = f"{done['rows_rewritten']:,} rows merged, {done['files']} files now"
        self._narrator.say("compaction", said)
        # Nobody else reads this storage, so nothing has to be kept for readers.
        config = {"dry_run": False, "older_than": "0s", "purge_compacted": True}
        collect = {f"{STORAGE}_collect_garbage": {"config": config}}
        done = self._output(self._execute(f"{STORAGE}_gc", {"ops": collect}))
        size = done["bytes_deleted"] / 1024**2
        said = f"{done['objects_deleted']} objects deleted, {size:.1f} MiB"
        self._narrator.say("garbage collection", said)
        checks = self._execute(CHECK_JOB).get_asset_check_evaluations()
        good = sum(found.passed for found in checks)
        self._narrator.say(
            "index checks", f"{good} of {len(checks)} passed", good=good == len(checks)
        )

    # -- Dagster ----------------------------------------------------------------------------------

    def _execute(
        self,
        job: str,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        """One run; a failed step ends the demo with that step's error."""
        result = self._definitions.resolve_job_def(job).execute_in_process(
            instance=self._instance,
            run_config={**(config or {}), "loggers": {LOGGER: {}}},
            tags=dict(tags or {}),
        )
        self._count(result)
        return result

    def _count(self, result: dg.ExecuteInProcessResult) -> None:
        """Requests to the store that the run's steps tell of."""
        told: set[str | None] = set()
        for event in result.all_events:
            facts: Mapping[str, Any] = {}
            if event.event_type_value == "ASSET_MATERIALIZATION":
                facts = event.step_materialization_data.materialization.metadata
            elif event.event_type_value == "STEP_OUTPUT":
                facts = event.step_output_data.metadata
            if "requests_by_kind" in facts and event.step_key not in told:
                told.add(event.step_key)
                for kind, count in facts["requests_by_kind"].value.items():
                    self.outcome.requests[kind] = self.outcome.requests.get(kind, 0) + count

    def _output(self, result: dg.ExecuteInProcessResult) -> dict[str, Any]:
        """What the only step of a job said of its work."""
        [event] = [one for one in result.all_events if one.event_type_value == "STEP_OUTPUT"]
        return {name: one.value for name, one in event.step_output_data.metadata.items()}

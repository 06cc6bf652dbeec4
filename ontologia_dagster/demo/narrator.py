"""Tells at the terminal what Dagster does, one line a finished step, while it does it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg
from rich.console import Console
from rich.status import Status
from rich.text import Text

from ontologia_dagster.storage.unpublished import FACTS, PUBLISHED
from storage_engine.wording import counted

LOGGER = "narrator"


class Narrator:
    """Speaks to a console. As a Dagster logger (`definition`), it hears of every event."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._began: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()
        self._found: set[str] = set()  # steps whose check has failed, as was told
        self._start = time.monotonic()

    # -- said by the program ----------------------------------------------------------------------

    @contextmanager
    def chapter(self, title: str) -> Iterator[None]:
        self.console.print(f"\n[bold]{title}[/bold]")
        with self.console.status("starting") as self._status:
            yield
        self._status = None

    def say(
        self, what: str, outcome: str, *, good: bool = True, seconds: float | None = None
    ) -> None:
        line = Text("  ")
        line.append("✓ " if good else "✗ ", "green" if good else "red")
        line.append(f"{what:<26} ")
        line.append(outcome)
        if seconds is not None:
            line.append(f"  {seconds:.1f} s", "dim")
        self.console.print(line, soft_wrap=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    # -- heard from Dagster -----------------------------------------------------------------------

    def definition(self) -> dg.LoggerDefinition:
        narrator = self

        @dg.logger
        def narrating(_init: dg.InitLoggerContext) -> logging.Logger:
            logger = logging.Logger(LOGGER, logging.DEBUG)  # not shared: one for each run
            logger.addHandler(_LogHandler(narrator))
            return logger

        return narrating

    def hear(self, event: dg.DagsterEvent) -> None:
        step = event.step_key or ""
        match event.event_type_value:
            case "STEP_START":
                self._began[step] = time.monotonic()
                self._told = {told for told in self._told if told[0] != step}
                self._found.discard(step)
                if self._status is not None:
                    self._status.update(f"{_readable(step)} ...")
            case "ASSET_MATERIALIZATION":
                self._materialised(event, step)
            case "ASSET_OBSERVATION":
                self._observed(event, step)
            case "ASSET_CHECK_EVALUATION":
                self._checked(step, event.asset_check_evaluation_data)
            case "STEP_FAILURE" | "STEP_UP_FOR_RETRY" if step not in self._found:
                self.say(_readable(step), "failed", good=False)

    def _materialised(self, event: dg.DagsterEvent, step: str) -> None:
        done = event.step_materialization_data.materialization
        if PUBLISHED not in done.metadata:  # that was told when it was made
            self._made(step, done.asset_key, done.metadata)

    def _made(self, step: str, key: dg.AssetKey, metadata: Mapping[str, Any]) -> None:
        name = key.to_user_string()
        if (step, name) in self._told:
            return  # a range of partitions has an event for each; one line is enough
        self._told.add((step, name))
        facts: dict[str, Any] = {name: value.value for name, value in metadata.items()}
        if "run" in facts:  # of a range of partitions all together
            facts |= {
                row.data["figure"]: list(row.data.values())[1] for row in facts["run"].records
            }
        took = time.monotonic() - self._began.get(step, time.monotonic())
        self.say(name, _outcome(facts), seconds=took)

    def _observed(self, event: dg.DagsterEvent, step: str) -> None:
        """What a step has made on the run's branch, before it is published."""
        observed = event.asset_observation_data.asset_observation
        if FACTS in observed.metadata:
            self._made(step, observed.asset_key, observed.metadata)

    def _checked(self, step: str, evaluation: dg.AssetCheckEvaluation) -> None:
        if not evaluation.passed:
            self._found.add(step)
            for name, what in findings(evaluation):
                self.say(name, what, good=False)


class _LogHandler(logging.Handler):
    def __init__(self, narrator: Narrator) -> None:
        super().__init__(logging.DEBUG)  # what Dagster logs events at
        self._narrator = narrator

    def emit(self, record: logging.LogRecord) -> None:
        meta: Mapping[str, Any] = getattr(record, "dagster_meta", {})
        event = meta.get("dagster_event")
        if event is not None:
            self._narrator.hear(event)


def _readable(step: str) -> str:
    return step.replace("__", "/").replace("_", " ")


def _outcome(facts: Mapping[str, Any]) -> str:
    """What a materialisation says of itself, in a few words."""
    if "rows_read" in facts:
        counts = [
            f"{facts[name]:,} {word}"
            for name, word in (
                ("rows_inserted", "inserted"),
                ("rows_changed", "changed"),
                ("rows_unchanged", "unchanged"),
            )
            if facts.get(name)
        ]
        return f"{_commit(str(facts.get('commit') or ''))}: {', '.join(counts) or 'nothing read'}"
    if "rows_published" in facts:
        if not facts.get("commit"):
            return "nothing new"
        rows, types = facts["rows_published"], facts["types_published"]
        what = f"{counted(rows, 'row')} of {counted(types, 'type')}"
        return f"published as commit {facts['commit']}: {what}"
    if "commit_list" in facts:
        return f"{counted(facts['commits'], 'commit')} of {facts['handlers']}"
    if "events_sent" in facts:
        return f"{facts['found']:,} found, {counted(facts['events_sent'], 'event')} sent"
    if "files_changed" in facts:
        edition = "corrected" if facts["corrected"] else "as the package has it"
        changed = counted(facts["files_changed"], "file")
        return f"{facts['rows']:,} rows, {edition}, {changed} changed"
    if "as_of_commit" in facts:
        return f"{facts['dagster/row_count']} rows as of commit {facts['as_of_commit']}"
    return "done"


def _commit(reference: str) -> str:
    """Of a branch its name would say nothing: it is the run's."""
    if "@" in reference:
        return "on the run's branch"
    return f"commit {reference}" if reference else "no commit"


def findings(check: dg.AssetCheckEvaluation) -> list[tuple[str, str]]:
    """What a failed check found, type by type; the check itself where it has no list."""
    listed: Any = check.metadata.get("finding_list")
    if listed is None or not listed.records:
        return [(check.check_name, check.description or "failed")]
    return [(str(record.data["type"]), str(record.data["what"])) for record in listed.records]

"""Ingestion: read a source with Spark, map it to a type, publish what is new or changed.

    spark-submit jobs/ingest.py --storage-uri s3://bucket/shop --models shop.models \\
        --type Customer --source 's3a://landing/customers/*.parquet'

`--help` tells all options, docs/spark.md explains them. From Python: `ingest(spark, order)`.
Nothing is published unless everything went well; the exit code says what went wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from storage_engine.cli.output import printable
from storage_engine.errors import ConfigurationError
from storage_engine.runtime.arguments import declared_types
from storage_engine.spark.ingest_spec import DRIFTED, DriftPolicy, IngestSpec, Source
from storage_engine.spark.jobs.arguments import IngestCall, parse_ingest
from storage_engine.spark.jobs.program import (
    MISMATCH,
    OK,
    Reporter,
    explained,
    opened,
    reporting,
    run,
    start_spark,
    version_of,
)
from storage_engine.spark.jobs.program import progress as shown
from storage_engine.spark.missing_policy import MissingPolicy, field_marks
from storage_engine.spark.results import WriteProgress, WriteResult
from storage_engine.wording import counted
from storage_engine.wording import size as as_size

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from storage_engine.model.spec import TypeSpec
    from storage_engine.runtime.session import Session

__all__ = ["DriftPolicy", "IngestSpec", "Source", "ingest", "main", "parse"]

Progress = Callable[[WriteProgress], None]


def parse(argv: Sequence[str]) -> IngestSpec:
    """The order that arguments state: `parse(order.to_arguments()) == order`."""
    return parse_ingest(argv).spec


def ingest(
    spark: SparkSession,
    spec: IngestSpec,
    *,
    session: Session | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    replay: str | None = None,
) -> WriteResult:
    """Carry out an order. A given session is used and stays open; else one is opened for it.

    dry_run:  count what would be written; publish and set aside nothing
    replay:   a side table, or a file of one, whose rows are taken instead of the source's. This is
              a unit of work of its own, named by what the rows are
    """
    from storage_engine.spark.jobs.mapping import prepare
    from storage_engine.spark.jobs.replay import replayed
    from storage_engine.spark.writer import write_type

    type_spec = type_of(spec)
    options = spec.write_options()
    with explained(), opened(spec.storage_uri, session, branch=spec.branch) as using:
        if replay is None:
            prepared = prepare(spark, spec, type_spec)
        else:
            prepared, options["idempotency"] = replayed(spark, spec, type_spec, replay)
            options["missing"] = MissingPolicy()  # these rows are no full extract
        result = write_type(
            prepared.frame, type_spec, using, progress=progress, dry_run=dry_run, **options
        )
    drift = (*prepared.drift, *drifted(result))
    return replace(result, drift=drift, outside=prepared.outside)


def drifted(result: WriteResult) -> list[str]:
    """What the writer found drifted while it read values, and has set aside."""
    return [
        f"{reason} in {counted(count, 'row')}"
        for reason, count in result.reasons.items()
        if reason.startswith(DRIFTED)
    ]


def type_of(spec: IngestSpec) -> TypeSpec:
    """The declared type that an order is about; ConfigurationError when there is none, or the
    order names fields for it that it does not have."""
    declared = declared_types(spec.models, option="models")
    matches = [type_spec for (_, name), type_spec in declared.items() if name == spec.type]
    if not matches:
        names = ", ".join(sorted({name for _, name in declared}))
        raise ConfigurationError(f"type {spec.type!r} is not in {spec.models}, which has {names}")
    if len(matches) > 1:
        raise ConfigurationError(
            f"type {spec.type!r}: {spec.models} has an entity and a relation of that name"
        )
    field_marks(spec.missing, matches[0])
    return matches[0]


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, lambda arguments: _run(parse_ingest(arguments)))


def _run(call: IngestCall) -> int:
    spec = call.spec
    type_of(spec)  # before Spark is started: most mistakes are here
    work = "replay into" if call.run.replay_quarantine is not None else "ingest"
    what = f"{'preview' if call.run.dry_run else work} {spec.type}"
    with reporting() as reporter, shown(what, reporter.log) as tell:

        def advance(now: WriteProgress) -> None:
            tell(now.stage, now.done, now.total)

        tell("start", 0, None)
        spark = start_spark(f"ontologia {what}", call.run)
        result = ingest(
            spark,
            spec,
            progress=advance,
            dry_run=call.run.dry_run,
            replay=call.run.replay_quarantine,
        )
        if not call.run.dry_run:
            _report(reporter, spec, result)
    _print(result, call)
    return OK if result.problem is None else MISMATCH


def _report(reporter: Reporter, spec: IngestSpec, result: WriteResult) -> None:
    reporter.log(summary(result))
    reporter.materialized(
        {
            **result.as_dict(),
            "dagster/table_name": result.type_name,
            "dagster/uri": spec.storage_uri,
        },
        data_version=version_of(result.type_commit_id, spec.branch),
    )


def summary(result: WriteResult) -> str:
    """One sentence for people."""
    counts = [
        f"{count} {name}"
        for name, count in (
            ("inserted", result.inserted),
            ("updated", result.updated),
            ("unchanged", result.unchanged),
            ("marked as missing", result.marked),
            ("quarantined", result.quarantined),
            ("duplicates", result.duplicates),
            ("older than stored", result.stale),
            ("left to another commit", result.kept),
            ("in no partition", result.outside),
        )
        if count or name in ("inserted", "updated", "unchanged")
    ]
    if result.already_applied:
        outcome = f"applied before by commit {result.commit_id}"
    elif result.commit_id is None:
        outcome = "nothing to publish"
    else:
        outcome = f"commit {result.commit_id}"
    told = f"{result.type_name}: {outcome}; {counted(result.rows, 'row')} read, {', '.join(counts)}"
    if result.stored_bytes_read < result.stored_bytes:
        read, stored = as_size(result.stored_bytes_read), as_size(result.stored_bytes)
        told += f"; compared by {read} of the {stored} stored"
    return told


def _print(result: WriteResult, call: IngestCall) -> None:
    if call.run.json:
        extra = {"dry_run": True} if call.run.dry_run else {}
        sys.stdout.write(json.dumps({**result.as_dict(), **extra}, default=str) + "\n")
    else:
        lines = [summary(result), *(f"drift: {sentence}" for sentence in result.drift)]
        lines += [f"{counted(count, 'row')}: {reason}" for reason, count in result.reasons.items()]
        lines += [f"note: {note}" for note in result.notes]
        if result.quarantine is not None:
            lines.append(
                f"quarantined rows are in {result.quarantine}; once they are put right, "
                f"--replay-quarantine {result.quarantine} takes them"
            )
        if call.run.dry_run:
            if result.problem is not None:
                lines.append(f"It would be refused: {result.problem}")
            lines.append("Nothing was published: this was a dry run.")
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stdout.flush()

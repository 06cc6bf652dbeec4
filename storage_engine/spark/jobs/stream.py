"""Streaming ingestion: the same order, over and over, for what arrives.

    spark-submit jobs/stream.py --order customers.yaml --checkpoint s3a://bucket/checkpoints/c \\
        --trigger '1 minute'

Each micro-batch is one commit with exactly-once effect: a batch that runs again after a crash
finds itself in the log and publishes nothing. Keep the checkpoint; it is what says how far the
query has come. Spark follows the names of files; what is in them is opened batch by batch as any
source, so that drift is dealt with as `jobs/ingest.py` does.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from storage_engine.cli.output import printable
from storage_engine.errors import ConfigurationError
from storage_engine.spark.ingest_spec import IngestSpec
from storage_engine.spark.jobs.arguments import (
    Parser,
    add_run_options,
    add_spec_options,
    program_name,
    run_options,
    spec_of,
)
from storage_engine.spark.jobs.ingest import drifted, summary, type_of
from storage_engine.spark.jobs.program import (
    OK,
    Nobody,
    Reporter,
    explained,
    reporting,
    run,
    start_spark,
    storage_config,
)
from storage_engine.spark.results import WriteResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

AVAILABLE = "available-now"


def stream_parser() -> Parser:
    parser = Parser(
        program_name("stream"),
        "Follow a folder of files with Spark and publish each batch of what arrives once.",
        "The source is a folder or pattern of csv, json or parquet files, and needs --schema.\n"
        "Each batch is a unit of work of its own: --app-id is put before the query's id.\n"
        "Exit codes: as jobs/ingest.py.",
    )
    add_spec_options(parser)
    add = parser.add_argument_group("streaming").add_argument
    add("--checkpoint", required=True, metavar="DIR", help="where Spark keeps how far it has come")
    add(
        "--trigger",
        default=AVAILABLE,
        metavar="INTERVAL",
        help="how often to look, such as '1 minute'; available-now (the default) takes what is "
        "there and ends",
    )
    add("--max-files", type=int, metavar="N", help="at most so many files in a batch")
    add_run_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, lambda arguments: _run(stream_parser().parse_args(arguments)))


def stream(
    spark: SparkSession,
    spec: IngestSpec,
    checkpoint: str,
    *,
    trigger: str = AVAILABLE,
    max_files: int | None = None,
    batches: Batches | None = None,
) -> StreamingQuery:
    """Start following the order's source. The caller awaits and stops the query."""
    from storage_engine.spark.jobs.sources import followed
    from storage_engine.spark.streaming import start_query

    type_spec = type_of(spec)
    _check(spec)
    files = followed(spark, spec.source, max_files)
    starting = files.writeStream.foreachBatch(batches or Batches(spec))
    starting = starting.option("checkpointLocation", checkpoint)
    starting = starting.queryName(f"ontologia {type_spec.name}")
    if trigger == AVAILABLE:
        return start_query(starting.trigger(availableNow=True))
    return start_query(starting.trigger(processingTime=trigger))


class Batches:
    """What `foreachBatch` calls: opens the files of one batch and ingests them."""

    def __init__(
        self, spec: IngestSpec, reporter: Reporter | None = None, *, app_id: str | None = None
    ) -> None:
        """`app_id` is put before the query's id in the unit of work, if not that of the order."""
        self._spec = spec
        self._app_id = app_id or (spec.idempotency[0] if spec.idempotency else None)
        self._reporter = reporter or Nobody()
        self.done = 0
        self.failure: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Spark Connect sends the function to its server, where nobody listens."""
        return {**vars(self), "_reporter": Nobody()}

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        try:
            with explained():
                self._ingest(frame, batch_id)
        except Exception as error:
            self.failure = error  # Spark passes on no more than its text
            raise
        self.done += 1

    def _ingest(self, frame: DataFrame, batch_id: int) -> None:
        from storage_engine.spark.jobs.mapping import mapped
        from storage_engine.spark.jobs.sources import arrived, open_source
        from storage_engine.spark.streaming import batch_writer

        spec = self._spec
        type_spec = type_of(spec)
        files = sorted(row["path"] for row in frame.collect())
        opened = open_source(frame.sparkSession, arrived(spec.source, files))
        prepared = mapped(opened, spec, type_spec)

        def tell(result: WriteResult) -> None:
            whole = replace(result, drift=(*prepared.drift, *drifted(result)))
            self._reporter.log(f"batch {batch_id}: {summary(whole)}")
            lines = [summary(whole), *(f"drift: {sentence}" for sentence in whole.drift)]
            for line in lines:
                sys.stderr.write(f"batch {batch_id}: {printable(line)}\n")

        options: dict[str, Any] = spec.write_options()
        del options["idempotency"]  # each batch is a unit of work of its own
        write = batch_writer(
            type_spec,
            spec.storage_uri,
            branch=spec.branch,
            app_id=self._app_id,
            config=storage_config(),
            on_result=tell,
            **options,
        )
        write(prepared.frame, batch_id)


def _check(spec: IngestSpec) -> None:
    source = spec.source
    if spec.missing.marks:
        raise ConfigurationError(
            "missing: a batch of a stream is no full extract, so nothing is missing from it; "
            "leave it out, or ingest full extracts"
        )
    if source.format == "jdbc":
        raise ConfigurationError("source.format: a database cannot be followed; ingest it instead")
    if source.row_schema is None:
        raise ConfigurationError("source.schema is needed: a stream infers nothing from values")
    if len(source.paths) > 1:
        raise ConfigurationError("source.paths: a stream follows one folder or pattern")
    if source.paths[0].lower().endswith(".zip"):
        raise ConfigurationError("source.paths: zipped files cannot be followed; ingest them")


def _run(given: Namespace) -> int:
    from pyspark.errors import PySparkException

    if given.app_version is not None:
        raise ConfigurationError("--app-version: a stream counts its batches itself; leave it out")
    app_id, given.app_id = given.app_id, None
    spec, options = spec_of(given), run_options(given)
    _check(spec)
    type_of(spec)
    with reporting() as reporter:
        spark = start_spark(f"ontologia stream {spec.type}", options)
        batches = Batches(spec, reporter, app_id=app_id)
        query = stream(
            spark,
            spec,
            given.checkpoint,
            trigger=given.trigger,
            max_files=given.max_files,
            batches=batches,
        )
        try:
            query.awaitTermination()
        except PySparkException:
            if batches.failure is not None:
                raise batches.failure from None
            raise
        finally:
            if query.isActive:
                query.stop()
    # On a Spark Connect server the batches were counted there.
    count = batches.done or sum(p.numInputRows > 0 for p in query.recentProgress)
    if options.json:
        sys.stdout.write(json.dumps({"batches": count, "query": str(query.id)}) + "\n")
    else:
        sys.stdout.write(f"{spec.type}: {count} batches of {query.id}\n")
    return OK

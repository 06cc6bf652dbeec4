"""Streaming ingestion: the same order, over and over, for what arrives.

    spark-submit jobs/stream.py --order customers.yaml --checkpoint s3a://bucket/checkpoints/c \\
        --trigger '1 minute'

Each micro-batch is one commit with exactly-once effect: a batch that runs again after a crash
finds itself in the log and publishes nothing. Keep the checkpoint; it is what says how far the
query has come.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.arguments import Parser, add_order_options, add_run_options, order_of, run_options
from jobs.boundary import OK, run
from jobs.environment import storage_config
from jobs.ingest import drifted, summary, type_of, write_options
from jobs.orders import IngestOrder
from jobs.program import start_spark
from jobs.reporting import Nobody, Reporter, reporting
from storage_engine.cli.output import printable
from storage_engine.errors import ConfigurationError
from storage_engine.spark.results import WriteResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

AVAILABLE = "available-now"


def stream_parser() -> Parser:
    parser = Parser(
        "jobs/stream.py",
        "Follow a folder of files with Spark and publish each batch of what arrives once.",
        "The source is csv, json or parquet and needs --schema: a stream infers nothing.\n"
        "Exit codes: as jobs/ingest.py.",
    )
    add_order_options(parser)
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
    order: IngestOrder,
    checkpoint: str,
    *,
    trigger: str = AVAILABLE,
    max_files: int | None = None,
    reporter: Reporter | None = None,
) -> StreamingQuery:
    """Start following the order's source. The caller awaits and stops the query."""
    spec = type_of(order)
    _check(order)
    write = _Batches(order, reporter or Nobody())
    frame = _source(spark, order, max_files)
    starting = frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    starting = starting.queryName(f"ontologia {spec.name}")
    if trigger == AVAILABLE:
        return starting.trigger(availableNow=True).start()
    return starting.trigger(processingTime=trigger).start()


class _Batches:
    """What `foreachBatch` calls: mapping, expectations and the write of one batch."""

    def __init__(self, order: IngestOrder, reporter: Reporter) -> None:
        self._order = order
        self._reporter = reporter

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        from jobs.mapping import mapped
        from jobs.sources import Opened
        from storage_engine.spark.streaming import batch_writer

        order = self._order
        spec = type_of(order)
        opened = Opened(frame, textual=order.source.format in ("csv", "json"))
        prepared = mapped(opened, order, spec)

        def tell(result: WriteResult) -> None:
            whole = replace(result, drift=(*prepared.drift, *drifted(result)))
            self._reporter.log(f"batch {batch_id}: {summary(whole)}")
            sys.stderr.write(f"batch {batch_id}: {printable(summary(whole))}\n")

        options: dict[str, Any] = write_options(order)
        app = options.pop("idempotency")
        write = batch_writer(
            spec,
            order.storage_uri,
            app_id=app[0] if app else None,
            config=storage_config(),
            on_result=tell,
            **options,
        )
        write(prepared.frame, batch_id)


def _source(spark: SparkSession, order: IngestOrder, max_files: int | None) -> DataFrame:
    from jobs.sources import stream_source

    return stream_source(spark, order.source, max_files)


def _check(order: IngestOrder) -> None:
    source = order.source
    if source.format == "jdbc":
        raise ConfigurationError("source.format: a database cannot be followed; ingest it instead")
    if source.schema is None:
        raise ConfigurationError("source.schema is needed: a stream infers nothing from values")
    if len(source.paths) > 1:
        raise ConfigurationError("source.paths: a stream follows one folder or pattern")
    if source.paths[0].lower().endswith(".zip"):
        raise ConfigurationError("source.paths: zipped files cannot be followed; ingest them")


def _run(given: Namespace) -> int:
    order, options = order_of(given), run_options(given)
    _check(order)
    type_of(order)
    with reporting() as reporter:
        spark = start_spark(f"ontologia stream {order.type}", options)
        query = stream(
            spark,
            order,
            given.checkpoint,
            trigger=given.trigger,
            max_files=given.max_files,
            reporter=reporter,
        )
        try:
            query.awaitTermination()
        finally:
            if query.isActive:
                query.stop()
        progress = [p for p in query.recentProgress if p["numInputRows"]]
    if options.json:
        sys.stdout.write(json.dumps({"batches": len(progress), "query": str(query.id)}) + "\n")
    return OK


if __name__ == "__main__":
    sys.exit(main())

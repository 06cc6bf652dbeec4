"""`python -m benchmarks [WORKLOAD ...]`: run workloads, print their tables, keep the figures.

With `QUICK=1` everything is small: that it works is seen in minutes, and nothing is kept."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks import (
    branches,
    commits,
    compaction,
    copy,
    events,
    exchange,
    explore,
    gc,
    growth,
    ingest,
    location,
    many_types,
    migration,
    missing,
    plots,
    processes,
    queries,
    sensors,
    spark,
    spark_csv,
    spark_read,
    spark_small,
    sql,
    startup,
    writers,
)
from benchmarks.harness import QUICK, Report

WORKLOADS: dict[str, Callable[[], Report]] = {
    "branches": branches.run,
    "commits": commits.run,
    "compaction": compaction.run,
    "copy": copy.run,
    "events": events.run,
    "exchange": exchange.run,
    "explore": explore.run,
    "gc": gc.run,
    "growth": growth.run,
    "ingest": ingest.run,
    "location": location.run,
    "many_types": many_types.run,
    "migration": migration.run,
    "missing": missing.run,
    "processes": processes.run,
    "queries": queries.run,
    "sensors": sensors.run,
    "spark": spark.run,
    "spark_csv": spark_csv.run,
    "spark_read": spark_read.run,
    "spark_small": spark_small.run,
    "sql": sql.run,
    "startup": startup.run,
    "writers": writers.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workload", nargs="*", choices=[*WORKLOADS, []], help="default: all")
    chosen = parser.parse_args().workload or list(WORKLOADS)
    for name in chosen:
        report = WORKLOADS[name]()
        report.print()
        report.save()
    if not QUICK:
        plots.main()


if __name__ == "__main__":
    main()

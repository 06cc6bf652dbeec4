"""Compaction: many small files of types become few large ones, by Spark where there is much.

    spark-submit jobs/compact.py --storage-uri s3://bucket/shop --spark-above 4GB --apply

Runs of files below `--spark-above` are merged by DuckDB in the driver, and Spark is started for
larger ones only. Without `--apply` the plan is shown and nothing is changed. Reads stay the same
meanwhile and after; every merge is proven before it is published.
"""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from storage_engine.errors import ConfigurationError
from storage_engine.maintenance.compaction.plan import SPARK_ABOVE
from storage_engine.spark.jobs.arguments import (
    Parser,
    RunOptions,
    add_run_options,
    program_name,
    run_options,
    size,
)
from storage_engine.spark.jobs.program import OK, opened, reporting, run, start_spark
from storage_engine.spark.jobs.program import progress as shown
from storage_engine.wording import counted
from storage_engine.wording import size as as_size

if TYPE_CHECKING:
    from storage_engine.maintenance.compaction import CompactionPlan, CompactionReport
    from storage_engine.maintenance.compaction.run import CompactionProgress


def compact_parser() -> Parser:
    parser = Parser(
        program_name("compact"),
        "Merge the small files of types into large ones; reads stay the same, history is kept.",
        "Exit codes: 0 done, 2 an option is wrong, 3 damaged files, 5 the storage failed,\n"
        "1 anything else.",
    )
    add = parser.add_argument_group("what").add_argument
    add("--storage-uri", required=True, metavar="URI", help="the storage")
    add("--branch", metavar="NAME", help=SUPPRESS)  # refused, and told why
    add("--type", action="append", metavar="NAME", help="only this type; may be repeated")
    add(
        "--spark-above",
        type=size,
        default=SPARK_ABOVE,
        metavar="SIZE",
        help="merge runs of at least this size with Spark, others in the driver (default 1GiB)",
    )
    add(
        "--min-entries",
        type=int,
        default=8,
        metavar="N",
        help="leave runs of fewer entries alone (default 8)",
    )
    add(
        "--ratio",
        type=float,
        default=1.5,
        metavar="X",
        help="an entry of up to this many times the rows of those after it joins them "
        "(default 1.5)",
    )
    add("--apply", action="store_true", help="do it; without, the plan is shown")
    add_run_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, lambda arguments: _run(compact_parser().parse_args(arguments)))


def _run(given: Namespace) -> int:
    from storage_engine.maintenance.compaction import (
        CompactionPolicy,
        compact,
        plan_compaction,
    )
    from storage_engine.spark.compaction import spark_builds

    options = run_options(given)
    try:
        policy = CompactionPolicy(given.min_entries, given.ratio)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    with reporting() as reporter, opened(given.storage_uri, None, branch=given.branch) as session:
        repository = session.repository
        plan = plan_compaction(repository, policy, given.type)
        if not given.apply or plan.empty:
            _print({**plan.as_dict(), "applied": False}, _planned(plan, given), options)
            return OK
        with shown("compact", reporter.log) as tell:

            def advance(now: CompactionProgress) -> None:
                tell(f"{now.type_name} {now.stage}", now.done, now.total)

            start = partial(start_spark, "ontologia compact", options)
            build = spark_builds(start, repository, given.spark_above)
            report = compact(repository, plan, advance, build=build)
        described = report.as_dict()
        reporter.materialized(described, data_version=str(plan.head_commit_id))
    _print({**plan.as_dict(), "applied": True, "report": described}, _done(report), options)
    return OK


def _planned(plan: CompactionPlan, given: Namespace) -> list[str]:
    if plan.note is not None:
        return [plan.note]
    lines = []
    for item in plan.types:
        by_spark = sum(run.bytes >= given.spark_above for run in item.runs)
        who = f", {by_spark} of {len(item.runs)} runs by Spark" if by_spark else ""
        lines.append(f"{item.type_name}: {item.reason}{who}")
    rows = sum(run.rows for run in plan.runs)
    amount = as_size(sum(run.bytes for run in plan.runs))
    if plan.empty:
        return [*lines, "Nothing to compact."]
    return [*lines, f"Would rewrite {counted(rows, 'row')} ({amount}). Add --apply to do it."]


def _done(report: CompactionReport) -> list[str]:
    lines = [
        f"{each.type_name} commits {each.min_commit_id}-{each.max_commit_id}: {each.outcome}, "
        f"{counted(each.files_in, 'file')} of {as_size(each.bytes_in)} into {each.files_out} of "
        f"{as_size(each.bytes_out)}"
        for each in report.runs
    ]
    lines += [f"{name} left out: {why}" for name, why in report.skipped.items()]
    return [*lines, f"{counted(report.rows_rewritten, 'row')} rewritten."]


def _print(document: dict[str, Any], lines: Sequence[str], options: RunOptions) -> None:
    text = json.dumps(document, default=str) if options.json else "\n".join(lines)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

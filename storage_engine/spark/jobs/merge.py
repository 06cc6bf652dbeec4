"""Merge of a branch into its parent, or update from it, by Spark where much has changed.

    spark-submit jobs/merge.py --storage-uri s3://bucket/shop --source run/42 --apply

As `onto branch merge`, except that types of which the branch has changed at least `--spark-above`
rows are compared and staged by executors. Without `--apply` it is shown what would come, and all
conflicts; Spark is started only where it is needed.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from storage_engine.cli.errors import CONFLICT
from storage_engine.cli.output import printable
from storage_engine.errors import ConfigurationError
from storage_engine.runtime.arguments import imported_module
from storage_engine.spark.jobs.arguments import (
    Parser,
    RunOptions,
    add_run_options,
    program_name,
    run_options,
)
from storage_engine.spark.jobs.program import OK, opened, reporting, run, start_spark, version_of

if TYPE_CHECKING:
    from storage_engine.repository.object.merge import MergeReport

_SPARK_ABOVE = 1_000_000
_POLICIES = ("fail", "ours", "theirs", "fields")
_SHOWN = 20


def merge_parser() -> Parser:
    parser = Parser(
        program_name("merge"),
        "Bring the changes of a branch into its parent as one commit, or those of its parent\n"
        "into a branch.",
        "Exit codes: 0 done, 2 an option is wrong, 5 the storage failed, 6 there are conflicts,\n"
        "1 anything else. Nothing is published unless the code is 0.",
    )
    add = parser.add_argument_group("what").add_argument
    add("--storage-uri", required=True, metavar="URI", help="the storage")
    add("--source", metavar="NAME", help="the branch to merge into its parent")
    add("--update", metavar="NAME", help="the branch to update from its parent instead")
    add(
        "--on-conflict",
        choices=_POLICIES,
        default="fail",
        help="of a row that both sides have changed: fail (the default) lists all of them and does "
        "nothing; ours keeps the row of the side that is merged into, theirs takes the other one, "
        "fields combines changes to different fields",
    )
    add(
        "--upgraders",
        metavar="MODULE",
        help="a module with functions marked @upgrader, for rows of one side where the other has "
        "migrated the type",
    )
    add(
        "--spark-above",
        type=int,
        default=_SPARK_ABOVE,
        metavar="ROWS",
        help="compare types with at least so many changed rows with Spark, others in the driver "
        "(default 1000000)",
    )
    add("--apply", action="store_true", help="do it; without, it is shown what would come")
    add_run_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, lambda arguments: _run(merge_parser().parse_args(arguments)))


def _run(given: Namespace) -> int:
    from storage_engine.runtime.branches import branches_of
    from storage_engine.schema.upgraders import load_upgraders
    from storage_engine.spark.merge import SparkMerger, merge_by

    options = run_options(given)
    if (given.source is None) == (given.update is None):
        raise ConfigurationError("give --source, the branch to merge, or --update, one to update")
    module = imported_module(given.upgraders, "--upgraders") if given.upgraders else None
    merger = SparkMerger(partial(start_spark, "ontologia merge", options), given.spark_above)
    with reporting() as reporter:
        target = given.update
        if target is None:
            with opened(given.storage_uri, None) as main_session:
                fork = branches_of(main_session.repository).head(given.source).fork
            if fork is None:
                raise ConfigurationError(f"--source {given.source}: main has no parent")
            target = fork.parent
        with opened(given.storage_uri, None, branch=target) as session:
            report = merge_by(
                merger,
                session,
                given.source,
                on_conflict=given.on_conflict,
                upgraders=load_upgraders(module) if module is not None else None,
                dry_run=not given.apply,
                meta=None,
            )
        described = {**report.as_dict(), "by_spark": merger.types, "applied": given.apply}
        if given.apply:
            version = version_of(report.commit_id, report.target)
            reporter.materialized(described, data_version=version)
    _print(described, _told(report), options)
    return CONFLICT if report.conflicts else OK


def _told(report: MergeReport) -> list[str]:
    lines = [
        f"{each.type_name}: {each.inserted} inserted, {each.updated} updated"
        + (f", {each.resolved} conflicts decided" if each.resolved else "")
        + (", files adopted" if each.adopted else "")
        + (f", {each.schema}" if each.schema else "")
        for each in report.types
    ]
    lines += [f"conflict: {conflict.message}" for conflict in report.conflicts[:_SHOWN]]
    if len(report.conflicts) > _SHOWN:
        lines.append(f"... and {len(report.conflicts) - _SHOWN} more conflicts")
    if report.commit_id is not None:
        return [*lines, f"{report.source} came into {report.target} as commit {report.commit_id}."]
    if report.empty or not report.dry_run:
        return [*lines, f"{report.source} has nothing that {report.target} lacks."]
    return [*lines, "Nothing was changed. To do it: --apply"]


def _print(document: dict[str, Any], lines: Sequence[str], options: RunOptions) -> None:
    text = (
        json.dumps(document, default=str)
        if options.json
        else "\n".join(printable(line) for line in lines)
    )
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

"""Migration: the classes of a module become the schema of a storage, by Spark where there is much.

    spark-submit --py-files shop.zip jobs/migrate.py --storage-uri s3://bucket/shop \\
        --models shop.models --upgraders shop.upgraders --apply --token 41-0123456789abcdef

As `onto migrate`, except that the rows of types with files of at least `--spark-above` are
rewritten by executors. Without `--apply` it is shown what would be done, and the token.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from storage_engine.cli.output import printable
from storage_engine.errors import ConfigurationError
from storage_engine.runtime.arguments import declared_types, imported_module
from storage_engine.spark.jobs.arguments import (
    Parser,
    RunOptions,
    add_run_options,
    program_name,
    run_options,
    size,
)
from storage_engine.spark.jobs.program import (
    MISMATCH,
    OK,
    opened,
    reporting,
    run,
    start_spark,
    version_of,
)
from storage_engine.spark.jobs.program import progress as shown
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec
    from storage_engine.schema.preview import MigrationPreview, MigrationResult

_GIB = 1024**3


def migrate_parser() -> Parser:
    parser = Parser(
        program_name("migrate"),
        "Bring a storage to the classes of a module: new schema versions, with the latest rows\n"
        "rewritten for them, in one commit.",
        "Exit codes: 0 done, 2 an option is wrong, 3 upgraders are missing, 4 the token is old or\n"
        "a row cannot be migrated, 5 the storage failed, 1 anything else. Nothing is published\n"
        "unless the code is 0.",
    )
    add = parser.add_argument_group("what").add_argument
    add("--storage-uri", required=True, metavar="URI", help="the storage")
    add("--branch", metavar="NAME", help="the branch to migrate instead of main")
    add(
        "--models",
        action="append",
        required=True,
        metavar="MODULE",
        help="a module that declares types; may be repeated",
    )
    add("--type", action="append", metavar="NAME", help="only this type; may be repeated")
    add(
        "--upgraders",
        metavar="MODULE",
        help="a module with functions marked @upgrader, which executors can import too; without "
        "it, those that the models load",
    )
    add(
        "--spark-above",
        type=size,
        default=4 * _GIB,
        metavar="SIZE",
        help="rewrite types whose latest rows have files of at least this size with Spark, others "
        "in the driver (default 4GiB)",
    )
    add("--apply", action="store_true", help="do it; without, it is shown what would be done")
    add("--token", metavar="T", help="the token that was shown; needed for --apply")
    add("--force", action="store_true", help="apply without a token")
    add_run_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, lambda arguments: _run(migrate_parser().parse_args(arguments)))


def _run(given: Namespace) -> int:
    from storage_engine.runtime import migration
    from storage_engine.schema.upgraders import load_upgraders
    from storage_engine.spark.migration import SparkStager

    options = run_options(given)
    if (given.token or given.force) and not given.apply:
        raise ConfigurationError("--token and --force are for --apply")
    declared = _declared(given)
    module = imported_module(given.upgraders, "--upgraders") if given.upgraders else None
    ways = load_upgraders(module) if module is not None else None
    with reporting() as reporter, opened(given.storage_uri, None, branch=given.branch) as session:
        repository = session.repository
        preview = migration.preview(repository, declared, ways)
        if not given.apply:
            _print({**preview.as_dict(), "applied": False}, _planned(preview), options)
            return OK if preview.possible else MISMATCH
        total, done = sum(preview.estimated_rows.values()), 0
        with shown("migrate", reporter.log) as tell:

            def advance(type_name: str, rows: int) -> None:
                nonlocal done
                done += rows
                tell(type_name, done, max(total, done))

            start = partial(start_spark, "ontologia migrate", options)
            stager = SparkStager(start, repository, given.spark_above)
            result = migration.apply(
                repository,
                declared,
                ways,
                token=given.token,
                force=given.force,
                progress=advance,
                stager=stager,
            )
        described = {**result.as_dict(), "by_spark": stager.types}
        version = version_of(result.commit_id, given.branch)
        reporter.materialized(described, data_version=version)
    _print({**described, "applied": result.commit_id is not None}, _done(result), options)
    return OK


def _declared(given: Namespace) -> list[TypeSpec]:
    specs = [spec for module in given.models for spec in declared_types(module).values()]
    names = {spec.name for spec in specs}
    unknown = sorted(set(given.type or ()) - names)
    if unknown:
        raise ConfigurationError(
            f"--type {', '.join(unknown)}: --models declares {', '.join(sorted(names))}"
        )
    return [spec for spec in specs if not given.type or spec.name in given.type]


def _planned(preview: MigrationPreview) -> list[str]:
    if not preview.has_changes:
        return ["Nothing to migrate: the storage has the types as they are declared."]
    lines = []
    for diff in preview.diffs:
        what = "; ".join(diff.sentences()) or "new, or stored otherwise"
        lines.append(f"{diff.type_name} {diff.from_version or '-'} -> {diff.to_version}: {what}")
        lines += [f"{diff.type_name}: {diff.refusal}"] if diff.refusal is not None else []
    lines += [
        f"{name}: {counted(rows, 'row')} to rewrite"
        for name, rows in preview.estimated_rows.items()
    ]
    lines += [
        f"missing: @upgrader({name!r}, from_version={version})"
        for name, version in preview.missing_upgraders
    ]
    if preview.possible:
        return [*lines, f"Nothing was changed. To migrate: --apply --token {preview.token}"]
    return [*lines, "It cannot be applied as it stands. Nothing was changed."]


def _done(result: MigrationResult) -> list[str]:
    if result.commit_id is None:
        return ["Nothing to migrate: the storage has the types as they are declared."]
    lines = [
        f"{name}: version {result.new_schema_versions[name]}, "
        f"{counted(result.rows_migrated.get(name, 0), 'row')} rewritten"
        for name in result.types_migrated
    ]
    return [*lines, f"Migrated as commit {result.commit_id} in {result.duration_s:.1f} s."]


def _print(document: dict[str, Any], lines: Sequence[str], options: RunOptions) -> None:
    text = (
        json.dumps(document, default=str)
        if options.json
        else "\n".join(printable(line) for line in lines)
    )
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

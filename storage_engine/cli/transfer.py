"""`onto copy` and `onto migrate-engine`: whole storages on the move. Without `--apply` they only
say what they would do."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from storage_engine.cli.arguments import Invocation, written_options
from storage_engine.cli.errors import MISMATCH
from storage_engine.cli.output import Output, progress
from storage_engine.commitlog.layout import MAIN
from storage_engine.errors import ConfigurationError
from storage_engine.wording import counted, size

if TYPE_CHECKING:
    from storage_engine.config import OntologiaConfig
    from storage_engine.transfer import CopyReport, EngineMigration, StorageComparison

TargetConfig = Annotated[
    str | None,
    typer.Option(
        "--target-config",
        metavar="FILE",
        help="A TOML file with settings of the target, where they are not those of the source.",
    ),
]


def copy(
    invocation: Invocation,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The storage to copy.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where to.")],
    apply: Annotated[
        bool, typer.Option("--apply", help="Copy, and compare; without it, only say what.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare the two; nothing is copied.")
    ] = False,
    engine_version: Annotated[
        Literal["v1", "v2"] | None,
        typer.Option(
            "--engine-version", help="Engine of a target that the copy makes (v2 unless told)."
        ),
    ] = None,
    target_config: TargetConfig = None,
) -> None:
    """Copy a storage with its whole history into an empty one, or bring such a copy up to date."""
    from storage_engine.transfer import compare_uris, copy_storage

    if apply and verify:
        raise ConfigurationError("--apply compares at its end: leave out --verify")
    if invocation.settings.storage_uri is not None or invocation.settings.db is not None:
        raise ConfigurationError(
            "the two storages are named as arguments: leave out --storage-uri and --db"
        )
    invocation.names_storages = True
    config, settings = invocation.config(), _settings(invocation, target_config)
    with progress("comparing" if verify else "copying") as advance:
        if verify:
            comparison = compare_uris(
                source,
                target,
                config=config,
                target_config=settings,
                progress=lambda _what, done, total: advance(done, total),
                branch=invocation.settings.branch,
            )
        else:
            report = copy_storage(
                source,
                target,
                apply=apply,
                engine_version=engine_version,
                config=config,
                target_config=settings,
                progress=lambda _what, done, total: advance(done, total),
                branch=invocation.settings.branch,
            )
    if verify:
        _show_comparison(invocation.output, comparison)
        _exit(comparison)
        return
    if invocation.output.json:
        invocation.output.document(report.as_dict())
    else:
        _show_copy(invocation.output, report)
        if not apply:
            options = written_options(
                ("--config", invocation.settings.config),
                ("--branch", report.branch if report.branch != MAIN else None),
                ("--engine-version", engine_version),
                ("--target-config", target_config),
            )
            names = f"{shlex.quote(source)} {shlex.quote(target)}"
            invocation.output.line(
                f"Nothing was written. To copy: onto copy {names}{options} --apply"
            )
    _exit(report.comparison)


def migrate_engine(
    invocation: Invocation,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="Where the v2 storage is built; beside the source, with -v2, unless told.",
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Build it, and compare; needs the token of a preview.")
    ] = False,
    token: Annotated[
        str | None, typer.Option("--token", metavar="T", help="The token that the preview printed.")
    ] = None,
    target_config: TargetConfig = None,
) -> None:
    """Build a v2 storage from a v1 one, with its whole history; the v1 storage stays as it is."""
    from storage_engine.transfer import migrate_engine as migrate

    invocation.refuse_branch("migrate-engine")
    with progress("migrating") as advance:
        migration = migrate(
            invocation.target(),
            to,
            apply=apply,
            token=token,
            config=invocation.config(),
            target_config=_settings(invocation, target_config),
            progress=lambda _what, done, total: advance(done, total),
        )
    if invocation.output.json:
        invocation.output.document(migration.as_dict())
    else:
        _show_copy(invocation.output, migration.copy)
        options = written_options(("--to", to), ("--target-config", target_config))
        _show_next(invocation, migration, options)
    _exit(migration.copy.comparison)


def _settings(invocation: Invocation, path: str | None) -> OntologiaConfig:
    from storage_engine.config import OntologiaConfig

    return OntologiaConfig.from_file(path) if path is not None else invocation.config()


def _show_copy(output: Output, report: CopyReport) -> None:
    since = f" (commits {report.since + 1} to {report.upto})" if report.commits else ""
    made = ", made by the copy" if report.creates else ""
    output.facts(
        [
            ("source", f"{report.source}, engine {report.source_engine}"),
            ("target", f"{report.target}, engine {report.target_engine}{made}"),
            ("branch", report.branch if report.branch != MAIN else None),
            ("there before", f"commit {report.since}" if report.since else None),
            ("commits", f"{report.commits}{since}"),
            ("types", report.types),
            ("rows", report.rows),
            ("bytes", size(report.bytes) if report.bytes else None),
            ("tags", report.tags),
            ("events not done", report.events),
            ("dead letters", report.letters),
        ]
    )
    output.line()
    if report.branches:
        others = counted(len(report.branches), "branch", "branches")
        names = ", ".join(report.branches[:3]) + (", ..." if report.branches[3:] else "")
        output.line(
            f"{others} not copied with it ({names}): merge what is to come along, or copy one "
            "with --branch."
        )
    if report.comparison is not None:
        _show_comparison(output, report.comparison)
    if report.behind:
        output.line(
            f"The source has made {counted(report.behind, 'commit')} meanwhile: run it again to "
            "bring them."
        )


def _show_next(invocation: Invocation, migration: EngineMigration, options: str) -> None:
    output = invocation.output
    if not migration.applied:
        output.line(f"Nothing was written. Token: {migration.token}")
        output.line("To build it (writers may go on; the source is not changed):")
        given = invocation.repeated() + options
        output.line(f"  onto migrate-engine{given} --apply --token {migration.token}")
        return
    target = shlex.quote(migration.copy.target)
    output.line("To switch over: stop what writes to the source, run the preview and this command")
    output.line("once more (they bring the rest), and point your programs at the new storage:")
    output.line(f"  onto info --storage-uri {target}")
    output.line("The source is as it was: keep it until you no longer need to go back.")


def _show_comparison(output: Output, comparison: StorageComparison) -> None:
    if output.json:
        output.document(comparison.as_dict())
        return
    if comparison.ahead:
        output.line(
            f"The target has {counted(comparison.ahead, 'commit')} more, not looked at here."
        )
    if comparison.ok:
        output.line(
            f"The same: {counted(comparison.commits, 'commit')}, "
            f"{counted(comparison.rows, 'row')}, {counted(comparison.tags, 'tag')}."
        )
        return
    output.table(
        ["what", "which", "commit", "source", "target"],
        [(d.what, d.name, d.commit_id, d.source, d.target) for d in comparison.differences],
    )
    more = comparison.total - len(comparison.differences)
    output.line(
        f"{counted(comparison.total, 'difference')}{f', {more} of them not shown' if more else ''}."
    )


def _exit(comparison: StorageComparison | None) -> None:
    if comparison is not None and not comparison.ok:
        raise typer.Exit(MISMATCH)

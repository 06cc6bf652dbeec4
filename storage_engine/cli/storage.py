"""`onto init`, `onto info` and `onto lock`: make or erase a storage, say what one is and how it
stands, show who holds the write lock and take it away.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from storage_engine.cli.arguments import Invocation, with_settings
from storage_engine.cli.errors import CommandError
from storage_engine.cli.output import Output, shown_time, size
from storage_engine.errors import PROCESS_FACTS, ConfigurationError, IntegrityError

if TYPE_CHECKING:
    from storage_engine.repository import InitPlan, Repository
    from storage_engine.repository.object.engine import ObjectRepository
    from storage_engine.repository.open import Location


def init(
    invocation: Invocation,
    engine_version: Annotated[
        Literal["v1", "v2"], typer.Option("--engine-version", help="Engine of the new storage.")
    ] = "v2",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would happen, write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Erase what is there; needs the token of a dry run.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="T", help="The token that --force --dry-run printed."),
    ] = None,
) -> None:
    """Create an empty storage, or erase one and start again."""
    from storage_engine.repository import initialize_storage

    target = invocation.target()
    plan = initialize_storage(
        target,
        engine_version,
        invocation.config(),
        dry_run=dry_run,
        force=force,
        token=token,
    )
    if invocation.output.json:
        invocation.output.document(_as_dict(plan))
    else:
        _show_init(invocation.output, plan, target, invocation.settings.db)


def _as_dict(plan: InitPlan) -> dict[str, Any]:
    return {
        "uri": plan.uri,
        "backend": plan.backend,
        "engine_version": plan.engine_version,
        "applied": plan.applied,
        "objects": list(plan.objects),
        "erases": dict(plan.erases) if plan.erases is not None else None,
        "token": plan.token,
    }


def _show_init(output: Output, plan: InitPlan, target: Location, db: str | None) -> None:
    if plan.erases is not None:
        output.line(f"{'Erased' if plan.applied else 'Would erase'} {_erased(plan)}")
    verb = "Created" if plan.applied else "Would create"
    output.line(f"{verb} an empty {plan.engine_version} storage at {plan.uri}:")
    for name in plan.objects:
        output.line(f"  {name}")
    storage = f"--db {shlex.quote(db)}" if db else f"--storage-uri {shlex.quote(target.uri)}"
    engine = f" --engine-version {plan.engine_version}"
    output.line()
    if plan.applied:
        output.line("Next: declare types, open the storage and commit:")
        output.line(f"  from storage_engine import Session; Session({target.uri!r})")
        output.line(f"  onto info {storage}")
    elif plan.token is not None:
        output.line(f"Nothing was changed. Token: {plan.token}")
        output.line("To erase for good (the token holds until the storage changes):")
        output.line(f"  onto init {storage}{engine} --force --token {plan.token}")
    else:
        output.line("Nothing was written. To create it:")
        output.line(f"  onto init {storage}{engine}")


def _erased(plan: InitPlan) -> str:
    assert plan.erases is not None
    head = plan.erases["head_commit_id"]
    held = f" with its {head} commits" if head else ", which has no commits"
    commits = f"{plan.uri}{', whose head cannot be read' if head is None else held}"
    tables = plan.erases.get("tables")
    if tables is None:
        objects = plan.erases["objects"]
        return f"{commits}: {objects} objects, {size(plan.erases['bytes'])}, all that is under it"
    rows = ", ".join(f"{name} ({count} rows)" for name, count in tables.items())
    return f"{commits}: {rows}"


_KINDS = {"entity": 0, "relation": 1}


def info(invocation: Invocation) -> None:
    """Show what a storage is, where its head stands, its types, and who holds its lock."""
    with invocation.repository() as repository:
        report = _report(repository)
    for warning in report["index_warnings"]:
        invocation.output.warning(warning)
    if invocation.output.json:
        invocation.output.document(report)
    else:
        _show_info(invocation.output, report)


def _report(repository: Repository) -> dict[str, Any]:
    """`storage_info()` with the same shape on every backend, and the state of lock and indices."""
    report = repository.storage_info()
    newest = repository.list_commits(1)
    report["head"] = newest[0].as_dict() if newest else None
    report["lock"] = None
    report["index_warnings"] = []
    report["types"] = _types(report["types"])
    if (objects := repository.objects) is not None:
        report["lock"] = objects.lock_info()
        report["index_warnings"] = objects.index_warnings()
        report["requests"] = repository.requests()  # the last, so that it has them all
    return report


def _types(types: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    listed = (
        {
            "kind": facts["type_kind"],
            # Types of both kinds that share a name are told apart by a prefix there.
            "type_name": name.removeprefix(f"{facts['type_kind']}:"),
            "schema_version_id": facts["schema_version_id"],
            "last_commit_id": facts["last_commit_id"],
        }
        for name, facts in types.items()
    )
    return sorted(listed, key=lambda t: (_KINDS[t["kind"]], t["type_name"]))


def _show_info(output: Output, report: dict[str, Any]) -> None:
    head = report["head"]
    requests = report.get("requests")
    output.facts(
        [
            ("storage", report["uri"]),
            ("backend", _backend(report)),
            ("engine", f"{report['engine_version']}, format {report['format']}"),
            ("bucket", report.get("bucket")),
            ("prefix", report.get("prefix") or None),
            ("database", report.get("db_path")),
            ("head", _head(head)),
            ("head written", shown_time(report.get("head_updated_at"))),
            ("checkpoint", _checkpoint(report)),
            ("write lock", _lock(report["lock"]) if requests is not None else None),
            ("requests", _requests(requests) if requests is not None else None),
        ]
    )
    output.line()
    if not report["types"]:
        output.line("No types yet: the first commit of a type registers it.")
        return
    output.table(
        ["type", "kind", "schema version", "last commit"],
        [
            (t["type_name"], t["kind"], t["schema_version_id"], t["last_commit_id"])
            for t in report["types"]
        ],
    )


def _backend(report: dict[str, Any]) -> str:
    store = report.get("store")
    return report["backend"] if store in (None, report["backend"]) else f"{store} store"


def _head(head: dict[str, Any] | None) -> str:
    if head is None:
        return "no commits yet"
    return f"commit {head['id']} of {shown_time(head['created_at'])} by {head['runtime_id']}"


def _checkpoint(report: dict[str, Any]) -> str | None:
    if "checkpoint_commit_id" not in report:
        return None
    commit_id = report["checkpoint_commit_id"]
    return "none yet" if commit_id is None else f"commit {commit_id}"


def _lock(lock: dict[str, Any] | None) -> str:
    if lock is None:
        return "free"
    holder = ", ".join(f"{k} {v}" for k, v in lock["holder"].items() if k not in PROCESS_FACTS)
    until = f"since {shown_time(lock['acquired_at'])}, lease until {shown_time(lock['expires_at'])}"
    state = "expired, the next writer takes it over" if lock["expired"] else "held"
    return f"{state}: {lock['owner_id']}{f' ({holder})' if holder else ''} {until}"


def _requests(requests: dict[str, int]) -> str:
    kinds = [
        f"{kind} {count}"
        for kind, count in sorted(requests.items())
        if kind not in ("total", "bytes_read", "bytes_written")
    ]
    return f"{requests['total']} ({', '.join(kinds)}), {size(requests['bytes_read'])} read"


lock_app = typer.Typer()


class NoLockObject(CommandError):
    """The storage has no write lock of this kind."""


@lock_app.callback()
@with_settings
def lock_group(_invocation: Invocation) -> None:
    """See who holds the write lock, and take it from a holder that will not give it back."""


@lock_app.command("show")
@with_settings
def lock_show(invocation: Invocation) -> None:
    """Show who holds the write lock, since when, until when, and by which token."""
    with _objects(invocation) as objects:
        lock, problem = _read(objects)
    if invocation.output.json:
        invocation.output.document({"lock": lock, "problem": problem})
    elif problem is not None:
        invocation.output.line(problem)
    elif lock is None:
        invocation.output.line("Nobody holds the write lock.")
    else:
        invocation.output.facts(
            [
                ("owner", lock["owner_id"]),
                ("holder", ", ".join(f"{name} {value}" for name, value in lock["holder"].items())),
                ("since", lock["acquired_at"]),
                ("lease until", f"{lock['expires_at']} ({_state(lock)})"),
                ("token", lock["token"]),
            ]
        )


@lock_app.command("break")
@with_settings
def lock_break(
    invocation: Invocation,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help="The token that `onto lock show` prints; a lock that is unreadable has none.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it, without asking first.")] = False,
) -> None:
    """Take the write lock away from its holder."""
    with _objects(invocation) as objects:
        lock, problem = _read(objects)
        if problem is None and lock is not None and token is None:
            raise ConfigurationError("name the lock that is meant: --token, from `onto lock show`")
        if not yes:
            meant = objects.break_lock(token, apply=False)  # whoever is asked can say yes
            _ask(f"the write lock of {meant['owner_id']}" if meant else "the write lock")
        broken = objects.break_lock(token)
    if invocation.output.json:
        invocation.output.document({"broken": True, "lock": broken})
    else:
        whose = f"of {broken['owner_id']}" if broken is not None else "that nobody could read"
        invocation.output.line(f"Broke the write lock {whose}: the next writer takes it.")


def _ask(what: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody is there to be asked: say --yes")
    typer.confirm(f"Break {what}? A holder that lives loses its work", abort=True)


@contextmanager
def _objects(invocation: Invocation) -> Iterator[ObjectRepository]:
    with invocation.repository() as repository:
        if repository.objects is None:
            raise NoLockObject(
                "a SQLite storage has no lock of ours: SQLite itself locks the file, for as long "
                "as a transaction lasts, and frees it when the process ends"
            )
        yield repository.objects


def _read(objects: ObjectRepository) -> tuple[dict[str, Any] | None, str | None]:
    """The lock, and what is wrong with it when it cannot be read."""
    try:
        return objects.lock_info(), None
    except IntegrityError as error:
        return None, str(error)


def _state(lock: dict[str, Any]) -> str:
    if lock["expired"]:
        return "expired: the next writer takes it over"
    if lock["gone"]:
        return "its process has ended: the next writer of this machine takes it over"
    return "held"

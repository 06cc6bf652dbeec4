"""`onto init`, `info`, `lock` and `doctor`: make or erase a storage, say what one is and how it
stands, show who holds the write lock and take it away, look whether all is there that it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from storage_engine.cli.arguments import Invocation, with_settings
from storage_engine.cli.errors import MISMATCH, CommandError
from storage_engine.cli.output import Output, printable, shown_time
from storage_engine.errors import PROCESS_FACTS, ConfigurationError, IntegrityError
from storage_engine.wording import counted, size

if TYPE_CHECKING:
    from storage_engine.config import OntologiaConfig
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
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Leave a storage that is there as it is.")
    ] = False,
) -> None:
    """Create an empty storage, or erase one and start again."""
    from storage_engine.repository import initialize_storage

    invocation.refuse_branch("init")
    target = invocation.target()
    plan = initialize_storage(
        target,
        engine_version,
        invocation.config(),
        dry_run=dry_run,
        force=force,
        token=token,
        exist_ok=exist_ok,
    )
    if invocation.output.json:
        invocation.output.document(_as_dict(plan))
    else:
        _show_init(invocation.output, plan, target, invocation.repeated())


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


def _show_init(output: Output, plan: InitPlan, target: Location, given: str) -> None:
    if not plan.objects:
        output.line(f"{plan.uri} is there already, with engine {plan.engine_version}.")
        return
    if plan.erases is not None:
        output.line(f"{'Erased' if plan.applied else 'Would erase'} {_erased(plan)}")
    verb = "Created" if plan.applied else "Would create"
    output.line(f"{verb} an empty {plan.engine_version} storage at {plan.uri}:")
    for name in plan.objects:
        output.line(f"  {name}")
    engine = f" --engine-version {plan.engine_version}"
    output.line()
    if plan.applied:
        output.line("Next: declare types, open the storage and commit:")
        output.line(f"  from storage_engine import Session; Session({target.uri!r})")
        output.line(f"  onto info{given}")
    elif plan.token is not None:
        output.line(f"Nothing was changed. Token: {plan.token}")
        output.line("To erase for good (the token holds until the storage changes):")
        output.line(f"  onto init{given}{engine} --force --token {plan.token}")
    else:
        output.line("Nothing was written. To create it:")
        output.line(f"  onto init{given}{engine}")


def _erased(plan: InitPlan) -> str:
    assert plan.erases is not None
    head = plan.erases["head_commit_id"]
    held = f" with its {counted(head, 'commit')}" if head else ", which has no commits"
    commits = f"{plan.uri}{', whose head cannot be read' if head is None else held}"
    tables = plan.erases.get("tables")
    if tables is None:
        objects = counted(plan.erases["objects"], "object")
        return f"{commits}: {objects}, {size(plan.erases['bytes'])}, all that is under it"
    rows = ", ".join(f"{name} ({counted(count, 'row')})" for name, count in tables.items())
    return f"{commits}: {rows}"


def info(invocation: Invocation) -> None:
    """Show what a storage is, where its head stands, its types in figures, and what to do next."""
    with invocation.repository() as repository:
        report = _report(repository, invocation.config())
    if invocation.output.json:
        invocation.output.document(report)
    else:
        _show_info(invocation.output, report)


def _report(repository: Repository, config: OntologiaConfig) -> dict[str, Any]:
    """`storage_info()` with the same shape on every backend, and the state of all that is in it."""
    from storage_engine.cli.events import namespace_document
    from storage_engine.events.protocol import open_event_store
    from storage_engine.maintenance.metrics import collect
    from storage_engine.maintenance.overview import advise, type_overviews

    report = repository.storage_info()
    newest = repository.list_commits(1)
    report["head"] = newest[0].as_dict() if newest else None
    report["lock"] = None
    metrics = collect(repository)
    report["index_warnings"] = list(metrics.index_warnings)
    overviews = type_overviews(repository, report["types"], metrics)
    report["types"] = [each.as_dict() for each in overviews]
    namespaces = open_event_store(repository, config).list_namespaces(config.session_ttl_ms)
    report["events"] = [namespace_document(each) for each in namespaces]
    if (objects := repository.objects) is not None:
        report["lock"] = objects.lock_info()
        if objects.may_have_branches:
            report["branches"] = [branch.as_dict() for branch in objects.branches.list()[1:]]
    report["advice"] = [
        each.as_dict() for each in advise(repository, report["index_warnings"], namespaces)
    ]
    if repository.objects is not None:
        report["requests"] = repository.requests()  # the last, so that it has them all
    return report


def _show_info(output: Output, report: dict[str, Any]) -> None:
    head = report["head"]
    requests = report.get("requests")
    output.facts(
        [
            ("storage", report["uri"]),
            ("backend", report["backend"]),
            ("engine", f"{report['engine_version']}, format {report['format']}"),
            ("bucket", report.get("bucket")),
            ("prefix", report.get("prefix") or None),
            ("database", report.get("db_path")),
            ("head", _head(head)),
            ("head written", shown_time(report.get("head_updated_at"))),
            ("checkpoint", _checkpoint(report)),
            ("write lock", _lock(report["lock"]) if requests is not None else None),
            ("indices", _indices(report) if requests is not None else None),
            ("branches", _branches(report.get("branches"))),
            *((f"events of {each['namespace']}", _events(each)) for each in report["events"]),
            ("requests", _requests(requests) if requests is not None else None),
        ]
    )
    output.line()
    if report["types"]:
        _show_types(output, report["types"])
    else:
        output.line("No types yet: the first commit of a type registers it.")
    for each in report["advice"]:
        output.line()
        output.line(f"{each['why'][0].upper()}{each['why'][1:]}:")
        output.line(f"  {each['run']}")


def _show_types(output: Output, types: list[dict[str, Any]]) -> None:
    files = any(each["files"] is not None for each in types)
    own = ["files", "size"] if files else []
    output.table(
        ["type", "kind", "rows", "versions", *own, "schema version", "last commit"],
        [
            (
                each["type_name"],
                each["kind"],
                each["rows"],
                each["versions"],
                *([each["files"], size(each["bytes"] or 0)] if files else []),
                each["schema_version_id"],
                each["last_commit_id"],
            )
            for each in types
        ],
    )


def _branches(branches: list[dict[str, Any]] | None) -> str | None:
    if not branches:
        return None
    names = ", ".join(branch["name"] for branch in branches[:5])
    return f"{len(branches)}: {names}{', ...' if branches[5:] else ''}"


def _indices(report: dict[str, Any]) -> str:
    behind = report["index_warnings"]
    return "all agree with the log" if not behind else "; ".join(behind)


def _events(facts: dict[str, Any]) -> str:
    oldest = f", the oldest of {shown_time(facts['oldest'])}" if facts["oldest"] else ""
    return (
        f"{counted(facts['events'], 'event')}{oldest}; {counted(facts['sessions'], 'worker')}, "
        f"{counted(facts['dead_letters'], 'dead letter')}"
    )


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
    """Show who holds the write lock, since when, until when, by which token, and who waits."""
    with _objects(invocation) as objects:
        lock, problem = _read(objects)
        waiting = objects.lock.waiting()
    if invocation.output.json:
        invocation.output.document({"lock": lock, "problem": problem, "waiting": waiting})
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
                ("in line", ", ".join(_waiter(ticket) for ticket in waiting) or "nobody"),
            ]
        )


def _waiter(ticket: dict[str, Any]) -> str:
    return f"{ticket['owner_id']} since {ticket['since']}"


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
    if sys.stdin is None or not sys.stdin.isatty():
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
    if lock["offered"]:
        return "offered, as it was next in line: its own for a second, then open to all"
    if lock["gone"]:
        return "its process has ended: the next writer of this machine takes it over"
    return "held"


_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "red"}


def doctor(invocation: Invocation) -> None:
    """Look whether this machine and this storage have what they need; exit code 3 if not."""
    from storage_engine.maintenance.doctor import examine

    findings = []
    invocation.refuse_branch("doctor")
    for finding in examine(invocation.target(), invocation.config()):
        findings.append(finding)
        if not invocation.output.json:
            invocation.output.styled(
                Text.assemble(
                    (f"{finding.state:8}", _STYLES[finding.state]),
                    f"{finding.about}: {printable(finding.what)}",
                )
            )
            if finding.do is not None:
                invocation.output.line(f"        {finding.do}")
    good = not any(finding.state == "problem" for finding in findings)
    if invocation.output.json:
        document = {"ok": good, "findings": [finding.as_dict() for finding in findings]}
        invocation.output.document(document)
    if not good:
        raise typer.Exit(MISMATCH)

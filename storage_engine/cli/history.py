"""`onto log`, `onto diff` and `onto du`: commits as they land, what differs, what takes room."""

from __future__ import annotations

import difflib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage_engine.cli.arguments import Invocation
from storage_engine.cli.output import Output, moment
from storage_engine.errors import IntegrityError, StorageBackendError, UnsupportedEngineError
from storage_engine.wording import counted, size

if TYPE_CHECKING:
    from storage_engine.repository import CommitRecord, Repository

LOG_LIMIT = 20
_POLL_S = 1.0
_PAGE = 1000
_RUN = "dagster/run_id"  # in the metadata of commits that Dagster's runs make


def log(
    invocation: Invocation,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="How many to begin with.")
    ] = LOG_LIMIT,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for later ones, until Ctrl-C.")
    ] = False,
) -> None:
    """Show commits in the order in which they landed: who, which run, what and how many rows."""
    with invocation.repository() as repository:
        log_id = repository.history.identity() if follow else ""
        records = list(reversed(repository.list_commits(limit))) if limit else []
        _show_log(invocation.output, records)
        last = records[-1].id if records else repository.head_commit_id()
    if follow:
        follower = _Follower(invocation, log_id, last)
        while True:
            follower.watch()


@dataclass(slots=True)
class _Follower:
    """Tells of later commits, also of those of a log that was begun anew under the same name."""

    invocation: Invocation
    log_id: str  # empty as long as there is none
    last: int
    is_cut_off: bool = False

    def watch(self) -> None:
        """Until the log is another one: that may have another engine, and is opened again."""
        try:
            with self.invocation.repository() as repository:
                while self._look(repository):
                    self.is_cut_off = False
                    time.sleep(_POLL_S)
        except (IntegrityError, UnsupportedEngineError):
            # Perhaps an erasure took away what was being read, or the engine is another one now.
            with self.invocation.repository() as repository:
                if repository.history.identity() == self.log_id:
                    raise
        except StorageBackendError as error:
            if not error.retryable:
                raise
            if not self.is_cut_off:  # told once, however long it lasts
                self.invocation.output.warning(f"{error}; waiting for it to come back")
            self.is_cut_off = True
            time.sleep(_POLL_S)

    def _look(self, repository: Repository) -> bool:
        head = repository.head_commit_id()
        if head == self.last:
            return True
        log_id = repository.history.identity()
        if self.log_id and not log_id:
            return True  # erased a moment ago; what comes next is not there yet
        if self.log_id and log_id != self.log_id:
            self.invocation.output.note("the storage was initialised anew: its commits begin again")
            self.log_id, self.last = log_id, 0
            return False
        self.log_id = log_id
        if head < self.last:
            self.invocation.output.note(f"head was put back from commit {self.last} to {head}")
            self.last = head
        for first in range(self.last, head, _PAGE):
            page = repository.commits_between(first, min(first + _PAGE, head))
            _show_log(self.invocation.output, page)
            self.last = page[-1].id if page else self.last
        return True


def _show_log(output: Output, records: Sequence[CommitRecord]) -> None:
    for record in records:
        if output.json:
            output.text(json.dumps(record.as_dict(), default=str) + "\n")
        else:
            output.line(_line(record))


def _line(record: CommitRecord) -> str:
    run = record.metadata.get(_RUN)
    by = f"{record.runtime_id}, run {run[:8]}" if run else record.runtime_id
    wrote = ", ".join(f"{name} {rows:,}" for name, rows in record.rows.items())
    what = wrote or (", ".join(record.types) if record.types else "no rows")
    kind = "" if record.kind == "data" else f"{record.kind}: "
    return f"{record.id:>6}  {moment(record.created_at)}  {by}  {kind}{what}"


DIFF_LIMIT = 50
# What is told of a type as a whole, and not of one of its rows.
_OF_TYPES = {
    "schema": "versions differ",
    "migrate": "versions differ",
    "drop": "the type has ended",
}


def diff(
    invocation: Invocation,
    before: Annotated[str, typer.Argument(metavar="A", help="Commit id, time or tag.")],
    after: Annotated[
        str, typer.Argument(metavar="B", help="A later one; the latest commit unless told.")
    ] = "",
    type_name: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="Only this type.")
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", metavar="N", min=0, help="How many to show; all are counted."),
    ] = DIFF_LIMIT,
) -> None:
    """Show what differs between two commits: new rows, and fields before and after."""
    from storage_engine.runtime.history import differences

    with invocation.repository() as repository:
        older = _commit(repository, before, "A")
        newer = _commit(repository, after, "B") if after else repository.head_commit_id()
        if older > newer:
            raise typer.BadParameter(f"the older commit comes first: onto diff {after} {before}")
        if type_name is not None:
            _check_type(repository, type_name)
        changes = differences(repository, older, newer, invocation.models(), {}, type_name)
        document = counted_changes(older, newer, iter(changes), limit)
    if invocation.output.json:
        invocation.output.document(document)
    else:
        show_diff(invocation.output, document)


def counted_changes(
    before: int | str, after: int | str, changes: Iterator[dict[str, Any]], limit: int
) -> dict[str, Any]:
    """The first of the changes, and how many there are."""
    shown = list(itertools.islice(changes, limit))
    counts: dict[tuple[str, str], int] = {}
    for change in itertools.chain(shown, changes):
        key = (change["type_name"], change["operation"])
        counts[key] = counts.get(key, 0) + 1
    return {
        "before": before,
        "after": after,
        "changes": shown,
        "counts": [
            {"type_name": name, "operation": operation, "count": count}
            for (name, operation), count in counts.items()
        ],
        "more": sum(counts.values()) - len(shown),
    }


def _commit(repository: Repository, text: str, argument: str) -> int:
    """Its id; 0 is before the first."""
    from storage_engine.cli.commits import parse_commit

    reference = parse_commit(text, argument)
    return 0 if reference == 0 else repository.require_commit(reference)


def _check_type(repository: Repository, name: str) -> None:
    names = sorted({stored for _, stored in repository.type_histories()})
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none yet'}"
        raise typer.BadParameter(f"the storage has no type {name!r}: {hint}")


def show_diff(output: Output, document: dict[str, Any]) -> None:
    from storage_engine.cli.commits import shown_identity

    before, after = document["before"], document["after"]
    if not document["counts"]:
        commits = "commits " if isinstance(before, int) else ""
        output.line(f"Nothing differs between {commits}{before} and {after}.")
        return
    rows = []
    for change in document["changes"]:
        operation, type_name = change["operation"], change["type_name"]
        if operation in _OF_TYPES:
            what = change.get("not_upgraded", _OF_TYPES[operation])
            rows.append((operation, type_name, "", None, None, what))
            continue
        first = (operation, type_name, shown_identity(change))
        if "not_upgraded" in change:
            rows.append((*first, None, None, change["not_upgraded"]))
            continue
        fields: dict[str, Any] = change.get("after") or {}
        old: dict[str, Any] = change.get("before") or {}
        told: list[tuple[Any, Any, Any]]
        told = [(name, old.get(name) if old else None, value) for name, value in fields.items()]
        rows += [
            (*(first if number == 0 else ("", "", "")), *each)
            for number, each in enumerate(told or [(None, None, None)])
        ]
    if rows:
        output.table(["operation", "type", "identity", "field", "before", "after"], rows)
        output.line()
    output.table(
        ["type", "operation", "rows"],
        [(each["type_name"], each["operation"], each["count"]) for each in document["counts"]],
    )
    if document["more"]:
        output.line(f"{counted(document['more'], 'change')} not shown: raise --limit.")


def du(
    invocation: Invocation,
) -> None:
    """Show what takes how much room: objects and bytes, data files by type."""
    from storage_engine.maintenance.usage import usage

    invocation.refuse_branch("du")
    with invocation.repository() as repository:
        tallied = usage(repository)
    total = {
        "objects": sum(each.objects for each in tallied),
        "bytes": sum(each.bytes for each in tallied),
    }
    if invocation.output.json:
        document = {"usage": [each.as_dict() for each in tallied], "total": total}
        invocation.output.document(document)
        return
    on_branches = any(each.branch is not None for each in tallied)

    def line(what: str, type_name: str, branch: str, objects: int, size: str) -> tuple[Any, ...]:
        return (what, type_name, *([branch] if on_branches else []), objects, size)

    invocation.output.table(
        ["what", "type", *(["written on"] if on_branches else []), "objects", "size"],
        [
            *(
                line(
                    each.what,
                    each.type_name or "",
                    each.branch or "",
                    each.objects,
                    size(each.bytes),
                )
                for each in tallied
            ),
            line("total", "", "", total["objects"], size(total["bytes"])),
        ],
    )

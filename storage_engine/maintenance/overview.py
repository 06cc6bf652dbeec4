"""How a storage stands, at a glance: its types in figures, its bus, and what to do next.

Everything is read from the log, the indices and names of objects; no data file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage_engine.commitlog.records import TypeRef
from storage_engine.maintenance.compaction.plan import types_worth_compacting
from storage_engine.maintenance.metrics import Metrics
from storage_engine.repository.protocol import Repository
from storage_engine.wording import counted

if TYPE_CHECKING:
    from storage_engine.events.protocol import NamespaceInfo


@dataclass(frozen=True, slots=True)
class TypeOverview:
    """`rows` are the identities, None where only a scan can count them; `versions` all rows of
    their history. `files` and `bytes` are None where a type has no files of its own."""

    kind: str
    type_name: str
    schema_version_id: int
    last_commit_id: int
    rows: int | None
    versions: int
    files: int | None
    bytes: int | None
    index_lag: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that somebody may want to do, and the command that does or shows it."""

    why: str
    run: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def type_overviews(
    repository: Repository, stored: Mapping[str, Mapping[str, Any]], metrics: Metrics
) -> list[TypeOverview]:
    """Of the types that `storage_info()` has told of: entities first, each kind by name."""
    figures = _figures(repository, metrics)
    overviews = []
    for label, facts in stored.items():
        kind = facts["type_kind"]
        # Types of both kinds that share a name are told apart by a prefix there.
        name = label.removeprefix(f"{kind}:")
        overviews.append(
            TypeOverview(
                kind,
                name,
                facts["schema_version_id"],
                facts["last_commit_id"],
                **figures.get((kind, name), _NOTHING),
            )
        )
    return sorted(overviews, key=lambda each: (each.kind != "entity", each.type_name))


_NOTHING: dict[str, Any] = {"rows": 0, "versions": 0, "files": 0, "bytes": 0, "index_lag": 0}


def _figures(repository: Repository, metrics: Metrics) -> dict[TypeRef, dict[str, Any]]:
    if (database := repository.database) is not None:
        return {
            ref: {"rows": rows, "versions": versions, "files": None, "bytes": None, "index_lag": 0}
            for ref, (rows, versions) in database.row_counts().items()
        }
    return {
        (each.kind, each.type_name): {
            "rows": each.identities,
            "versions": each.rows,
            "files": each.files,
            "bytes": each.bytes,
            "index_lag": each.index_lag,
        }
        for each in metrics.types
    }


def advise(
    repository: Repository, warnings: Sequence[str], namespaces: list[NamespaceInfo]
) -> Iterator[Advice]:
    """What to do next, what matters most first."""
    if warnings:
        yield Advice("some type indices are behind the log; reads are right, and slower", _REPAIR)
    for namespace in namespaces:
        if namespace.dead_letters:
            letters = counted(namespace.dead_letters, "dead letter")
            where = f" --namespace {namespace.namespace}"
            yield Advice(f"handlers gave up on {letters}", f"onto events dead-letters{where}")
    if (objects := repository.objects) is not None:
        worth = types_worth_compacting(objects)
        if worth:
            names = ", ".join(worth[:3]) + (f" and {len(worth) - 3} more" if worth[3:] else "")
            yield Advice(f"reads of {names} open many small files", "onto compact --apply")
    if repository.engine_version == "v1":
        yield Advice("engine v1 reads all schema versions together", "onto migrate-engine")
    if not repository.head_commit_id():
        yield Advice("there is nothing in it yet", "onto import --help")


_REPAIR = "onto index repair --apply"

"""Schema verify and repair for an opened object storage: types.json, the registry, version
histories, markers of dropped types and the layout catalog, against what the log says.

Repair rebuilds what differs, under the write lock and without touching head; what stands is written
over only if it is still what was looked at. What the log knows nothing of, such as types that
another implementation has registered and never written, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from storage_engine.commitlog.json_object import Document, Documents
from storage_engine.commitlog.lock import Tenure
from storage_engine.commitlog.records import Head
from storage_engine.commitlog.type_heads import LiveTypes
from storage_engine.errors import ConfigurationError, HeadMismatchError, SchemaMetadataError
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.stored_schema import recorded_histories
from storage_engine.schema.catalogs import history_changes

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class CatalogFinding:
    """A catalog object that says something else than the log: `missing`, `unreadable` or
    `differs`."""

    key: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"key": self.key, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class CatalogRepair:
    """The catalog writes that are needed at `repair_head`, or were made when `applied`."""

    repair_head: int
    catalogs: tuple[CatalogFinding, ...]
    checked: int
    applied: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "repair_head": self.repair_head,
            "applied": self.applied,
            "checked": self.checked,
            "catalogs": [finding.as_dict() for finding in self.catalogs],
        }


def repair_catalogs(repository: ObjectRepository, *, apply: bool = False) -> CatalogRepair:
    """Plan the catalog writes that the log calls for, or (with `apply`) make them. They tell of
    main: a branch has none."""
    if repository.fork is not None:
        raise ConfigurationError(
            f"catalogs tell of main's types, not of those of {repository.branch!r}: repair them on "
            "main"
        )
    repository.flush()
    if not apply:
        head = repository.chain.read_head().head
        return _CatalogCheck(repository, head).described(applied=False)
    for _ in range(_ATTEMPTS):
        with Tenure() as tenure, tenure:
            lease = repository.lock.acquire(tenure)
            version = repository.chain.read_head()
            check = _CatalogCheck(repository, version.head)
            lease.guard()
            if repository.chain.read_head().etag != version.etag:
                continue
            for key, document in check.corrections.items():
                lease.guard()
                check.write(key, document)
            return check.described(applied=True)
    raise HeadMismatchError(_ATTEMPTS)


class _CatalogCheck:
    """All catalogs as of a head. Nothing that the repository remembers of them is believed."""

    def __init__(self, repository: ObjectRepository, head: Head) -> None:
        chain = repository.chain
        self._head = head
        self._documents = Documents(repository.store)
        self._changes = history_changes(
            recorded_histories(chain, head),
            types=list(LiveTypes(chain.type_heads_at(head))),
            engine_version=repository.engine_version,
            now=repository.store.now(),
        )
        self._findings: list[CatalogFinding] = []
        self.corrections: dict[str, Document] = {}
        keys = list(self._changes)
        for key, examined in zip(keys, chain.parallel.map(self._examine, keys), strict=True):
            if examined is not None:
                self.corrections[key], reason = examined
                self._findings.append(CatalogFinding(key, reason))

    def described(self, *, applied: bool) -> CatalogRepair:
        return CatalogRepair(
            self._head.commit_id, tuple(self._findings), len(self._changes), applied
        )

    def write(self, key: str, document: Document) -> None:
        self._documents.replace_broken(key, document, lambda d: self._right(key, d))

    def _examine(self, key: str) -> tuple[Document, str] | None:
        """What should stand there, and why it does not."""
        change = self._changes[key]
        reason = "differs"
        try:
            stored = self._documents.read(key)
            if stored is None:
                reason = "missing"
            right = change(stored)
        except SchemaMetadataError:
            reason, right = "unreadable", _made(change)
        return (right, reason) if right is not None else None

    def _right(self, key: str, document: Document | None) -> bool:
        try:
            return document is not None and self._changes[key](document) is None
        except SchemaMetadataError:
            return False


def _made(change: Callable[[Document | None], Document | None]) -> Document:
    made = change(None)
    assert made is not None, "an empty catalog differs from what there is to say"
    return made

"""What one request sees: the storage at one commit, its types, and rows as JSON.

A view is made for each request and fixes the head, so that everything on a page is of one state.
What is committed later is on the next page. Views share the opened storage, which may be used from
any thread; what can never change (how many rows there are as of a head) is kept between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_
from types import MappingProxyType

from storage_engine.commitlog.branches import Branch
from storage_engine.commitlog.layout import MAIN
from storage_engine.config import OntologiaConfig
from storage_engine.errors import StorageBackendError, UnsupportedEngineError
from storage_engine.explore.links import KeyName, LongKey, object_path
from storage_engine.explore.open_branches import OpenBranches
from storage_engine.explore.rows import (
    Identity,
    Row,
    both,
    described,
    following,
    identity_column,
    is_identity,
)
from storage_engine.model.expressions import Comparison, Filter, In, TextTest
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.query.reference import parse_reference
from storage_engine.query.results import Diagnostic, SqlExecutor
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.object.branches import Branches
from storage_engine.repository.protocol import (
    CommitRecord,
    Repository,
    TypeRef,
    labels,
    no_branches,
)
from storage_engine.runtime.branches import branches_of
from storage_engine.schema.history import TypeHistory
from storage_engine.schema.lineage import Lineage, Stage, lineage

FilterReader = Callable[[Repository, TypeSpec, Sequence[Sequence[str]]], Filter | None]
"""Makes a condition of filters as `onto query` takes them: path, operator and perhaps JSON."""

_COMMITS_KEPT = 5_000
_SPLITS_KEPT = 500
_KEYS_LOOKED_AT = 100_000  # for one that an address names by its digest


class PageError(Exception):
    """What a user asked for cannot be shown; `advice` says what can."""

    status = 400

    def __init__(self, message: str, advice: str = "") -> None:
        self.advice = advice
        super().__init__(message)


class NothingThere(PageError):
    """No such type, object, commit or event."""

    status = 404


@dataclass
class Storage:
    """The opened storage, and what requests share; of a branch, `trunk` is that of main."""

    repository: Repository
    config: OntologiaConfig
    read_filters: FilterReader
    declared: Mapping[TypeRef, TypeSpec] = field(default_factory=dict)  # what classes say of types
    branch: Branch | None = None  # as it was when it was opened
    trunk: Storage | None = None
    _counts: tuple[int, Mapping[TypeRef, int | None]] = (-1, MappingProxyType({}))
    _highest: int = 0
    _commits: dict[int, CommitRecord] = field(default_factory=dict)
    _splits: dict[tuple[TypeRef, When], Sequence[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, name: str | None) -> AbstractContextManager[Storage]:
        """The storage on another branch, for one request. UnknownBranchError names the nearest."""
        if self.trunk is not None:
            return self.trunk.on(name)
        if name in (None, MAIN):
            return nullcontext(self)
        assert name is not None
        if self._open_branches is None:
            raise NothingThere(str(no_branches(self.repository)))
        return self._open_branches.reading(name)

    @cached_property
    def branches(self) -> Branches | None:
        """None where a storage can have none."""
        try:
            return branches_of(self.repository)
        except UnsupportedEngineError:
            return None

    @cached_property
    def _open_branches(self) -> OpenBranches | None:
        if self.branches is None:
            return None

        def make(repository: Repository, branch: Branch) -> Storage:
            return Storage(
                repository, self.config, self.read_filters, self.declared, branch, trunk=self
            )

        return OpenBranches(self.branches, make)

    def close(self) -> None:
        """What was opened beside it; of a branch, itself."""
        if self.trunk is not None:
            self.repository.close()
        elif "_open_branches" in vars(self) and self._open_branches is not None:
            self._open_branches.close()

    def view(self, as_of: str | None = None) -> StorageView:
        """The latest state, or the one that a commit, a time or a tag names."""
        head = self.head()
        if as_of is None or not as_of.strip():
            return StorageView(self, head, head, None)
        return StorageView(self, head, self._commit(as_of, head), as_of.strip())

    def head(self) -> int:
        was = self._highest  # read before: another request may see a later head meanwhile
        head = self.repository.head_commit_id()
        with self._lock:
            self._highest = max(self._highest, head)
        if head < was:
            self._forget()  # commits of the same numbers may come, which are others
            raise StorageBackendError(
                f"{self.repository.uri} is at commit {head} and was at {was}: it was erased, moved "
                "or put back while it was shown; if that is right, start `onto explore` again"
            )
        return head

    def _forget(self) -> None:
        with self._lock:
            self._commits.clear()
            self._splits.clear()
            self._counts = (-1, MappingProxyType({}))

    def _commit(self, as_of: str, head: int) -> int:
        try:
            reference = parse_reference(as_of)
            commit_id = self.repository.commit_at(reference)
        except ValueError as error:
            raise PageError(
                str(error),
                "As of takes a commit's number, a time such as 2026-01-31T12:00, or a tag.",
            ) from None
        if commit_id == 0:
            raise PageError(f"as of {as_of}: there was no commit yet", "The first one is commit 1.")
        if isinstance(reference, int) and reference > head:
            raise PageError(f"commit {as_of} is not there yet: the latest is {head}")
        return min(commit_id, head)

    def commit(self, commit_id: int) -> CommitRecord | None:
        """A commit never changes."""
        record = self._commits.get(commit_id)
        if record is None:
            record = self.repository.get_commit(commit_id)
            if record is not None:
                with self._lock:
                    if len(self._commits) >= _COMMITS_KEPT:
                        self._commits.clear()
                    self._commits[commit_id] = record
        return record

    def key_splits(self, spec: TypeSpec, when: When) -> Sequence[str]:
        """Of a type as of a commit: that never changes."""
        place = (spec.ref, when)
        splits = self._splits.get(place)
        if splits is None:
            splits = self.repository.key_splits(spec, when)
            with self._lock:
                if len(self._splits) >= _SPLITS_KEPT:
                    self._splits.clear()
                self._splits[place] = splits
        return splits

    def row_counts(self, head: int) -> Mapping[TypeRef, int | None]:
        """By type, how many objects there are as of the head; None where the log cannot tell."""
        at, counts = self._counts
        if at != head:
            counts = self.repository.identity_counts()
            if self.repository.head_commit_id() == head:
                self._counts = (head, counts)
        return counts


@dataclass(frozen=True)
class StorageView:
    """The storage as of `commit_id`, looked at when `head` was its latest."""

    storage: Storage
    head: int
    commit_id: int
    as_of: str | None

    @property
    def repository(self) -> Repository:
        return self.storage.repository

    @property
    def branch(self) -> Branch | None:
        """None of main."""
        return self.storage.branch

    @property
    def branch_name(self) -> str | None:
        """As addresses have it."""
        return self.branch.name if self.branch is not None else None

    @cached_property
    def executor(self) -> SqlExecutor:
        return self.repository.executor(self.commit_id)

    # --- types ----------------------------------------------------------------------------------

    @cached_property
    def histories(self) -> Mapping[TypeRef, TypeHistory]:
        return self.repository.type_histories()

    @cached_property
    def labels(self) -> Mapping[TypeRef, str]:
        """What types are called in addresses: the name, with the kind where two share it."""
        refs = sorted(self.histories)
        return dict(zip(refs, labels(refs), strict=True))

    def label(self, ref: TypeRef) -> str:
        return self.labels.get(ref, ref[1])

    def type(self, label: str) -> ShownType:
        """The type of that name, also `entity:Name`; NothingThere names the nearest."""
        for ref, own in self.labels.items():
            if label in (own, f"{ref[0]}:{ref[1]}"):
                return self.shown(ref)
        of_name = [self.labels[ref] for ref in self.labels if ref[1] == label]
        if of_name:
            raise NothingThere(
                f"{label} is the name of an entity and of a relation type",
                f"Say which: {' or '.join(of_name)}.",
            )
        if not self.labels:
            raise NothingThere(
                f"there is no type {label}", "The storage has no types yet: commit something first."
            )
        raise NothingThere(unknown_name(label, list(self.labels.values()), what="type"))

    def shown(self, ref: TypeRef) -> ShownType:
        line = lineage(ref, self.histories)
        assert line is not None, "histories have versions"
        return ShownType(self, line, line.at(self.commit_id))

    @cached_property
    def relation_types(self) -> list[ShownType]:
        """Those that were there at the commit."""
        every = [self.shown(ref) for ref in sorted(self.histories) if ref[0] == "relation"]
        return [shown for shown in every if shown.stage is not None]


@dataclass(frozen=True)
class ShownType:
    """A type as a view sees it. `stage` is the schema version of that commit, None when the type
    was not there."""

    view: StorageView
    line: Lineage
    stage: Stage | None

    @property
    def ref(self) -> TypeRef:
        return self.line.history.ref

    @property
    def name(self) -> str:
        return self.ref[1]

    @property
    def label(self) -> str:
        return self.view.label(self.ref)

    @property
    def spec(self) -> TypeSpec:
        """As of the view's commit, or the last that there was."""
        return self.line.last.spec if self.stage is None else self.stage.spec

    def url(self, identity: Identity) -> str:
        return object_path(self.label, identity)

    # --- rows -----------------------------------------------------------------------------------

    def rows(
        self, where: Filter | None = None, *, limit: int, after: Identity | None = None
    ) -> tuple[list[Row], tuple[Diagnostic, ...]]:
        """Rows by identity, as of the view's commit, the first `limit` after an identity.

        A large type is read part by part, in the order of keys, until there are enough: of a
        condition that many rows meet, the first part has them all.
        """
        rows: list[Row] = []
        remarks: tuple[Diagnostic, ...] = ()
        for number, part in enumerate(self._parts(after)):
            told = self._read(both(where, part), limit - len(rows))
            rows += told[0]
            remarks = remarks if number else told[1]
            if len(rows) >= limit:
                break
        return rows, remarks

    def _read(self, where: Filter | None, limit: int) -> tuple[list[Row], tuple[Diagnostic, ...]]:
        if self.stage is None:
            return [], ()
        asked = QuerySpec(self.stage.spec, where=where, limit=limit, when=self.when)
        answer = self.view.executor.rows(asked)
        return list(described(self.stage.spec, answer.batches)), answer.diagnostics

    def _parts(self, after: Identity | None) -> Iterator[Filter | None]:
        """What comes after an identity, in parts that grow."""
        start = following(self.spec, after) if after is not None else None
        column = identity_column(self.spec, self.spec.identity[0])
        splits = [key for key in self._splits() if after is None or key > after[0]]
        place, step = 0, 1
        while place < len(splits):
            end = splits[min(place + step, len(splits)) - 1]
            yield both(start, Comparison(column, "<=", end))
            start = Comparison(column, ">", end)
            place, step = place + step, step * 2
        yield start

    def _splits(self) -> Sequence[str]:
        if self.stage is None:
            return ()
        return self.view.storage.key_splits(
            self.stage.spec,
            When(as_of=self.view.commit_id, schema_version=self.when.schema_version),
        )

    def row(self, identity: Identity) -> Row | None:
        rows, _ = self._read(is_identity(self.spec, identity), 1)
        return rows[0] if rows else None

    def written(
        self, commit_id: int, *, limit: int, after: Identity | None = None
    ) -> tuple[list[Row], Stage | None]:
        """What a commit wrote, by identity; and the schema version under which it did."""
        stage = self.line.at(commit_id)
        if stage is None:
            return [], None
        spec = stage.spec
        asked = QuerySpec(
            spec,
            where=following(spec, after) if after is not None else None,
            limit=limit,
            when=When(history=True, since=commit_id - 1, schema_version=self._version(stage)),
        )
        answer = self.view.repository.executor(commit_id).rows(asked)
        return list(described(spec, answer.batches)), stage

    def changed_since(
        self, base: int, *, limit: int, after: Identity | None = None
    ) -> tuple[list[Identity], bool]:
        """Identities of which there are versions after a commit, in order, and whether there may
        be more: as many as `limit` versions have."""
        if self.stage is None:
            return [], False
        spec = self.stage.spec
        when = When(history=True, since=base, schema_version=self._version(self.stage))
        identities: dict[Identity, None] = {}
        versions = 0
        for part in self._parts(after):
            asked = QuerySpec(spec, where=part, limit=limit - versions, when=when)
            for batch in self.view.executor.rows(asked).batches:
                columns = [batch.column(name).to_pylist() for name in spec.identity]
                identities |= dict.fromkeys(zip(*columns, strict=True))
                versions += batch.num_rows
            if versions >= limit:
                return list(identities), True
        return list(identities), False

    def rows_at(self, commit_id: int, identities: Sequence[Identity]) -> dict[Identity, Row]:
        """Of these, what was there as of a commit, in the schema version of then."""
        stage = self.line.at(commit_id) if commit_id > 0 else None
        if stage is None or not identities:
            return {}
        spec = stage.spec
        columns = zip(spec.identity, zip(*identities, strict=True), strict=True)
        where = reduce(
            and_,
            [In(identity_column(spec, name), tuple(sorted(set(keys)))) for name, keys in columns],
        )
        when = When(as_of=commit_id, schema_version=self._version(stage))
        answer = self.view.repository.executor(commit_id).rows(
            QuerySpec(spec, where=where, when=when)
        )
        rows = {tuple(row["identity"]): row for row in described(spec, answer.batches)}
        return {identity: rows[identity] for identity in identities if identity in rows}

    def versions(self, identity: Identity) -> Iterator[tuple[Stage, Row]]:
        """Every version of an object up to the view's commit, oldest first."""
        for stage in self.line.between(0, self.view.commit_id):
            spec = stage.spec
            when = When(history=True, schema_version=self._version(stage))
            asked = QuerySpec(spec, where=is_identity(spec, identity), when=when)
            for row in described(spec, self.view.executor.rows(asked).batches):
                yield stage, row

    @property
    def when(self) -> When:
        """How a query sees the view's commit."""
        version = self._version(self.stage) if self.stage is not None else None
        return (
            When() if version is None else When(as_of=self.view.commit_id, schema_version=version)
        )

    def _version(self, stage: Stage) -> int | None:
        """None for what typed reads see anyway."""
        return None if stage is self.line.last and stage.until is None else stage.number

    # --- identities -----------------------------------------------------------------------------

    def identity(self, names: Sequence[KeyName]) -> Identity:
        """The identity that an address means."""
        keys: list[str] = []
        for column, name in zip(self.spec.identity, names, strict=True):
            keys.append(name if isinstance(name, str) else self._key(column, name, keys))
        return tuple(keys)

    def _key(self, column: str, name: LongKey, before: Sequence[str]) -> str:
        place = identity_column(self.spec, column)
        where: Filter = TextTest(place, "startswith", name.prefix)
        for earlier, key in zip(self.spec.identity, before, strict=False):
            where = Comparison(identity_column(self.spec, earlier), "==", key) & where
        if self.stage is not None:
            asked = QuerySpec(self.spec, where=where, limit=_KEYS_LOOKED_AT, when=self.when)
            for batch in self.view.executor.rows(asked).batches:
                for key in batch.column(column).to_pylist():
                    if name.is_of(key):
                        return str(key)
        raise self.missing((f"{name.prefix}…",))

    def missing(self, identity: Identity) -> NothingThere:
        at = f" as of commit {self.view.commit_id}" if self.view.as_of is not None else ""
        return NothingThere(
            f"there is no {self.name} {' → '.join(filter(None, identity))}{at}",
            "Nothing is ever deleted: the key may be another, or the object came later.",
        )

"""Types of a merge with more changed rows than one process should hold: others compare them, such
as a cluster, and stage what comes in parts that the merge's commit then names.

`RowMerger` is asked to do that. What it has staged is announced, looked at again before the swap,
and withdrawn if it was not published, as all that is staged; after an unknown outcome it stays.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import CommitFile, Entry, TypeRef
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.object.merge.report import Conflict
from storage_engine.repository.object.merge.rows import MergedRows, Policy
from storage_engine.repository.object.merge.sides import MergeSide
from storage_engine.repository.object.read.plan import CommitWindow, TypePlan
from storage_engine.repository.object.write.bulk import encode_part
from storage_engine.repository.object.write.staged_write import PartFolder, Staging

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


@dataclass(frozen=True)
class RowSet:
    """The rows of a type on one side, as of a window."""

    side: MergeSide
    spec: TypeSpec
    window: CommitWindow

    def plan(self) -> TypePlan:
        return self.side.repository.reader().plan_at(self.side.head, self.spec, self.window)


@dataclass(frozen=True)
class LargeType:
    """A type to compare, as `merge_rows` does: identities of `theirs` come into question (only
    those that `own` entries have, where these are given), `shared` is what both sides knew, and
    `ours` what the target has now; None: the first of `shared`."""

    spec: TypeSpec
    policy: Policy
    theirs: RowSet
    ours: RowSet | None
    shared: Sequence[RowSet]
    own: Sequence[Entry] | None = None
    adoptable: int | None = None  # rows of files that need no copy, if all of them come

    @property
    def ref(self) -> TypeRef:
        return self.spec.ref


@dataclass(frozen=True)
class LargeVerdict:
    """What a comparison has come to: rows that are taken (of these `inserted` are new), in parts;
    conflicts that the policy has decided by itself; and the rows of all others, in the versioned
    schema, for whoever decides these.

    `adopts`: all of the adoptable rows come, so that there are no parts."""

    rows: int
    inserted: int
    resolved: int = 0
    adopts: bool = False
    parts: Sequence[Mapping[str, Any]] = ()
    theirs: pa.Table | None = None
    ours: pa.Table | None = None
    shared: Sequence[pa.Table] = ()


class RowMerger(Protocol):
    """Compares the rows of large types elsewhere."""

    def takes(self, changed_rows: int) -> bool:
        """Whether so many rows of a type are for it."""

    def compare(self, asked: LargeType, folder: PartFolder | None) -> LargeVerdict:
        """Parts go into the folder; None: nothing is to be staged, only counted."""

    def cancel(self) -> None:
        """What is staged cannot be published any more. Called from any thread."""


@dataclass(frozen=True)
class MergedParts:
    """What was compared elsewhere has come to: rows in parts of their own, of which a preview has
    none; or all of the adoptable ones (`adopts`)."""

    rows: int
    inserted: int
    resolved: int = 0
    files: Sequence[CommitFile] = ()
    conflicts: Sequence[Conflict] = ()
    adopts: bool = False


class BulkMerge:
    """What one merge has others compare, from the first question to the end."""

    def __init__(
        self,
        merger: RowMerger,
        target: ObjectRepository,
        holder: Mapping[str, Any],
        *,
        rehearsal: bool,
    ) -> None:
        self._merger = merger
        self._target = target
        self._holder = holder
        self._rehearsal = rehearsal
        self._staging: Staging | None = None
        self._beginning = threading.Lock()  # types are compared together, and staged as one attempt
        self._versions: dict[TypeRef, int] = {}
        self._known: dict[Hashable, MergedParts] = {}

    @property
    def used(self) -> bool:
        """Whether anything was compared."""
        return bool(self._known)

    def takes(self, changed_rows: int) -> bool:
        return self._merger.takes(changed_rows)

    def compare(
        self,
        state: Hashable,
        asked: LargeType,
        schema_version_id: int,
        decide: Callable[[LargeVerdict], MergedRows],
    ) -> MergedParts:
        """`state` is all that the answer depends on: a head that has moved by other types' commits
        alone is no reason to ask again. `decide` is for the conflicts that are left."""
        key = (asked.ref, state)
        if key not in self._known:
            folder = None
            if not self._rehearsal:
                folder = self._folder(asked.spec, schema_version_id)
            compared = self._merger.compare(asked, folder)
            decided = decide(compared) if compared.theirs is not None else None
            self._known[key] = self._staged(asked, compared, decided, schema_version_id)
        return self._known[key]

    def _staged(
        self,
        asked: LargeType,
        compared: LargeVerdict,
        decided: MergedRows | None,
        schema_version_id: int,
    ) -> MergedParts:
        files = [CommitFile.parse(dict(part)) for part in compared.parts]
        rows, inserted, resolved = compared.rows, compared.inserted, compared.resolved
        if decided is not None:
            rows += decided.rows.num_rows
            inserted += decided.inserted
            resolved += decided.resolved
            if self._staging is not None and decided.rows.num_rows and not decided.conflicts:
                files.append(self._stage(asked.spec, decided, schema_version_id))
        numbered = [replace(file, part=number) for number, file in enumerate(files)]
        conflicts = decided.conflicts if decided is not None else ()
        return MergedParts(rows, inserted, resolved, numbered, conflicts, compared.adopts)

    def _stage(self, spec: TypeSpec, decided: MergedRows, schema_version_id: int) -> CommitFile:
        """What a policy has made of conflicts, as a part beside the others."""
        assert self._staging is not None
        with tempfile.TemporaryDirectory(prefix="ontologia-part-") as scratch:
            part = encode_part(
                spec,
                decided.rows,
                Path(scratch) / "part.parquet",
                schema_version_id=schema_version_id,
                inserted=decided.inserted,
            )
            return self._staging.stage(spec, part)

    def _folder(self, spec: TypeSpec, schema_version_id: int) -> PartFolder:
        target = self._target
        with self._beginning:
            if self._staging is None:
                self._staging = Staging(
                    target.store,
                    schema_versions=self._versions,
                    beat_s=target.config.s3_lease_ttl_ms / 3000,
                    attempt=layout.on_chain(layout.new_id(), target.chain.incarnation),
                )
            self._versions[spec.ref] = schema_version_id
            self._staging.begin(self._holder, self._merger.cancel)
            attempt = self._staging.attempt
        return PartFolder(
            target.uri, target.config, attempt, spec.without_class(), schema_version_id
        )

    def check(self, files: Sequence[CommitFile]) -> None:
        """Under the lock: the parts are ours and there, whole."""
        if self._staging is not None and files:
            self._staging.check(files)

    def close(self, published: Sequence[CommitFile], *, outcome_known: bool) -> None:
        """Withdraw what was not published."""
        if self._staging is None:
            return
        if outcome_known:
            self._staging.end(published, listed=True)
        else:
            self._staging.leave()

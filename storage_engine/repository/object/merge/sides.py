"""One type as one side of a merge has it: its rows as of any commit, in the version that the merge
ends with.

Where a side was migrated meanwhile, rows of earlier versions are brought up: from one stored
version to the next by upgraders, by themselves where the change is additive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.commitlog.records import Head, Manifest, TypeHead, TypeRef, entry_of
from storage_engine.model.spec import TypeSpec
from storage_engine.query.aggregates import count
from storage_engine.query.dialects import quoted
from storage_engine.query.spec import QuerySpec
from storage_engine.repository.object.read.files import versioned_schema
from storage_engine.repository.object.read.plan import CommitWindow
from storage_engine.schema.lineage import Lineage, Stage, lineage
from storage_engine.schema.upgraders import Upgrader, UpgraderKey

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


@dataclass(frozen=True)
class MergeSide:
    """A type on one branch, as of a head that was read."""

    repository: ObjectRepository
    head: Head
    ref: TypeRef

    @property
    def branch(self) -> str:
        return self.repository.branch

    @cached_property
    def top(self) -> TypeHead | None:
        return self.repository.chain.type_heads_at(self.head).get(self.ref)

    @cached_property
    def spec(self) -> TypeSpec:
        """As it is stored now."""
        (spec,) = self.repository.types_at(self.head, [self.ref])
        return spec

    @cached_property
    def past(self) -> Lineage | None:
        """Its versions, under this name."""
        return lineage(self.ref, self.repository.histories_at(self.head, [self.ref]))

    def has_been(self, other: MergeSide) -> bool:
        """Whether the version that the other side has is this one's, or was before."""
        return self.stage_of(other.top) is not None

    def stage_of(self, top: TypeHead | None) -> Stage | None:
        """The stage here that is the version of a type's head elsewhere."""
        if top is None or self.past is None or self.top is None:
            return None
        if top.first_version_id != self.top.first_version_id:
            return None  # the name was given to another type since
        return self.stage(top.schema_version_id, top.schema_sha256)

    def stage(self, number: int, schema_sha256: str) -> Stage | None:
        for stage in self.past.stages if self.past is not None else ():
            if (stage.ref, stage.number) == (self.ref, number):
                return stage if stage.version.schema_sha256 == schema_sha256 else None
        return None

    def read(self, spec: TypeSpec, window: CommitWindow, keys: pa.Table | None = None) -> pa.Table:
        return self.repository.reader().read_at(self.head, spec, window, keys)

    def identities(self, written: Sequence[Manifest]) -> pa.Table:
        """The identities that these commits wrote, in whichever version."""
        entries = [entry for m in written if (entry := entry_of(m, self.ref)) is not None]
        bare = TypeSpec(kind=self.ref[0], name=self.ref[1], fields=())  # type: ignore[arg-type]
        keys = ", ".join(quoted(name) for name in bare.identity)
        with self.repository.versions.scan(bare, entries) as cursor:
            return cursor.execute(f"SELECT DISTINCT {keys} FROM versions").to_arrow_table()

    def row_count(self) -> int:
        """How many identities there are now."""
        asked = QuerySpec(self.spec, aggregates=(("rows", count()),))
        answer = self.repository.executor(self.head.commit_id).aggregate(asked)
        return int(answer.column("rows")[0].as_py())


@dataclass(frozen=True)
class VersionedReader:
    """Reads rows of both sides in the version of one of them, `ahead`. MissingUpgraderError where
    there is no way up from what was stored."""

    ahead: MergeSide
    upgraders: Mapping[UpgraderKey, Upgrader] = field(default_factory=dict)

    @property
    def spec(self) -> TypeSpec:
        return self.ahead.spec

    def read(self, side: MergeSide, window: CommitWindow, keys: pa.Table | None = None) -> pa.Table:
        """The rows of a window, each as of its end, with `commit_id`."""
        top = side.top
        if top is None:
            return self.empty()
        if self.is_current(side, window):
            return side.read(self.spec, window, keys)
        stage = side.past.at(window.upto) if side.past is not None else None
        if stage is None or stage.ref != side.ref:
            return self.empty()
        rows = side.read(stage.spec, replace(window, schema_version=stage.number), keys)
        return self.brought_up(rows, stage) if rows.num_rows else self.empty()

    def is_current(self, side: MergeSide, window: CommitWindow) -> bool:
        """Whether the rows of a window are of the version that counts."""
        top = side.top
        assert top is not None
        assert self.ahead.top is not None
        same = _version(top) == _version(self.ahead.top)
        return same and top.activation_commit_id <= window.upto

    def brought_up(self, rows: pa.Table, stage: Stage) -> pa.Table:
        """Rows of a stage of either side as rows of the version that counts."""
        here = self.ahead.stage(stage.number, stage.version.schema_sha256)
        past = self.ahead.past
        assert past is not None
        if here is None:
            return self.empty()  # of a version that this side never had: nothing it knows of
        made = past.rewrite(here, self.upgraders)(rows.drop_columns(["commit_id"]))
        columns = [rows.column("commit_id"), *made.columns]
        return pa.Table.from_arrays(columns, schema=versioned_schema(self.spec))

    def empty(self) -> pa.Table:
        return versioned_schema(self.spec).empty_table()


def _version(top: TypeHead) -> tuple[int, str, int]:
    return top.schema_version_id, top.schema_sha256, top.first_version_id

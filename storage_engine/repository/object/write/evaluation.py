"""What a commit request comes to on a given head: refused, applied before, nothing, or deltas.

Evaluating writes nothing. It runs without the lock first, so that the common refusals and no-ops
never take it, and again under the lock for whatever has moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.records import Head, TypeHead, TypeRef, sha256
from storage_engine.errors import (
    ConcurrentWriteError,
    ExpectedVersionMismatchError,
    SchemaOutdatedError,
)
from storage_engine.model.arrow import row_schema
from storage_engine.model.canonical import canonical_json
from storage_engine.model.spec import TypeSpec, schema_differences
from storage_engine.repository.object.commit_history import applied_by
from storage_engine.repository.object.read.latest import Versions
from storage_engine.repository.object.write.bulk import BulkParts, PartsSource
from storage_engine.repository.object.write.reconcile import (
    Delta,
    all_new,
    changed_since,
    reconcile,
    reconcile_resident,
    resident_changed_since,
)
from storage_engine.repository.protocol import CommitRequest

FIRST_VERSION = 1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome on one head. `applied_by` is set when the idempotency key had been applied."""

    version: HeadVersion
    deltas: Mapping[TypeRef, tuple[TypeSpec, Delta]]
    bulk: Mapping[TypeRef, tuple[TypeSpec, BulkParts]]
    register: tuple[TypeSpec, ...] = ()
    applied_by: int | None = None

    @property
    def empty(self) -> bool:
        return not self.deltas and not self.bulk


class Evaluator:
    """Evaluates one request, keeping what stays true from one head to the next."""

    def __init__(
        self,
        chain: Chain,
        versions: Versions,
        request: CommitRequest,
        bulk: Mapping[TypeRef, PartsSource],
        check_log: Callable[[Head], None],
    ) -> None:
        """`check_log` refuses a head that this engine may not write after."""
        self._chain = chain
        self._check_log = check_log
        self._versions = versions
        self._request = request
        self._bulk = bulk
        self._deltas: dict[TypeRef, tuple[TypeHead | None, Delta]] = {}  # as of the type's head

    def evaluate(self, version: HeadVersion) -> Evaluation:
        head = version.head
        request = self._request
        self._check_log(head)
        if request.idempotency is not None:
            applied = applied_by(self._chain, head, request.idempotency)
            if applied is not None:
                return Evaluation(version, {}, {}, applied_by=applied)
        heads = state.type_heads(self._chain, head)
        self._check_expected(heads)
        deltas: dict[TypeRef, tuple[TypeSpec, Delta]] = {}
        parts: dict[TypeRef, tuple[TypeSpec, BulkParts]] = {}
        register = []
        for item in request.inputs:
            spec, top = item.spec, heads.get(item.spec.ref)
            if check_schema(self._chain, head, spec, top):
                register.append(spec)
            spec = aligned(self._chain, head, spec, top)
            if item.table is not None:
                intents = item.table.select(row_schema(spec).names)
                delta = self._delta(spec, head, top, intents)
                if delta.rows.num_rows:
                    deltas[spec.ref] = (spec, delta)
            else:
                found = self._bulk[spec.ref].parts(head, top, snapshot=request.snapshot)
                if found.rows:
                    parts[spec.ref] = (spec, found)
        changed = {*deltas, *parts}
        return Evaluation(
            version, deltas, parts, tuple(spec for spec in register if spec.ref in changed)
        )

    def _delta(self, spec: TypeSpec, head: Head, top: TypeHead | None, intents: pa.Table) -> Delta:
        if (known := self._deltas.get(spec.ref)) is not None and known[0] == top:
            return known[1]
        if top is None:
            delta = all_new(spec, intents)
        else:
            delta = self._against_stored(spec, head, intents, as_of=top.commit_id)
        self._deltas[spec.ref] = (top, delta)
        return delta

    def _against_stored(
        self, spec: TypeSpec, head: Head, intents: pa.Table, *, as_of: int
    ) -> Delta:
        snapshot = self._request.snapshot
        if snapshot is not None and as_of <= snapshot:
            snapshot = None  # nothing of this type changed since
        resident = self._versions.resident(spec, head)
        if resident is not None:
            if snapshot is not None:
                found = resident_changed_since(resident, intents, snapshot)
                raise_on_conflict(spec, found, snapshot)
            return reconcile_resident(spec, resident, intents)
        with self._versions.open(spec, head, intents, intents=intents) as stored:
            if snapshot is not None:
                raise_on_conflict(spec, changed_since(stored.cursor, spec, snapshot), snapshot)
            return reconcile(stored.cursor, spec, unique=stored.unique)

    def _check_expected(self, heads: Mapping[TypeRef, TypeHead]) -> None:
        for (kind, name), expected in self._request.expect.items():
            top = heads.get((kind, name))
            actual = top.commit_id if top is not None else 0
            if actual != expected:
                raise ExpectedVersionMismatchError(type=name, expected=expected, actual=actual)


def layout_sha256(spec: TypeSpec) -> str:
    return sha256(canonical_json(spec.schema_dict()).encode())


def aligned(chain: Chain, head: Head, spec: TypeSpec, top: TypeHead | None) -> TypeSpec:
    """The type with the field order and ids that its files have: a line moved in a class is no
    change of schema, and must not be one of columns."""
    if top is None or not top.layout_sha256 or top.layout_sha256 == layout_sha256(spec):
        return spec
    record = state.schema_record(chain, head, spec.ref, top)
    return spec.aligned(record["schema"]) if record is not None else spec


def check_schema(chain: Chain, head: Head, spec: TypeSpec, top: TypeHead | None) -> bool:
    """Refuse a class that differs from what is stored; True when nothing is stored of it yet."""
    if top is None or not top.schema_sha256:
        return True
    if top.schema_sha256 == spec.schema_sha256:
        return False
    record = state.schema_record(chain, head, spec.ref, top)
    raise _schema_outdated(spec, top.schema_version_id, record["schema"] if record else {})


def raise_on_conflict(spec: TypeSpec, identities: list[object], snapshot: int) -> None:
    if identities:
        raise ConcurrentWriteError(type=spec.name, identities=identities, snapshot=snapshot)


def _schema_outdated(
    spec: TypeSpec, stored_version: int, stored: Mapping[str, Any]
) -> SchemaOutdatedError:
    differences = schema_differences(dict(stored), spec.schema_dict()) if stored else []
    listed = "; ".join(differences) or "its stored schema differs"
    return SchemaOutdatedError(
        f"class {spec.name} differs from schema version {stored_version} in the storage: {listed}. "
        "Declare the class as it was stored, or store the new one under another name",
        type=spec.name,
        stored_version=stored_version,
        differences=differences,
    )

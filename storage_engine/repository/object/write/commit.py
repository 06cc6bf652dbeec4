"""One commit request from start to end: evaluate, stage what is bulky, draft, answer.

Who publishes the drafts, of one request or of several, is `write.group`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow.parquet as pq

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.publisher import Publisher
from storage_engine.commitlog.records import (
    CommitFile,
    Head,
    TypeHead,
    TypeRef,
)
from storage_engine.commitlog.series import Draft, Mark, Upload
from storage_engine.commitlog.swap import Base, PublishedCommit
from storage_engine.config import OntologiaConfig
from storage_engine.errors import CommitStateUnknownError, OntologiaError
from storage_engine.model.arrow import row_schema
from storage_engine.model.columns import EngineVersion
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.duck import Duck
from storage_engine.repository.object.commit_history import applied
from storage_engine.repository.object.read.latest import Resident, Versions
from storage_engine.repository.object.stored_schema import (
    FIRST_VERSION,
    aligned,
    check_schema,
)
from storage_engine.repository.object.write.bulk import BulkInput, BulkParts, PartsSource
from storage_engine.repository.object.write.parquet import (
    EncodedPart,
    encode_bytes,
    encode_file,
    stored_table,
)
from storage_engine.repository.object.write.reconcile import (
    Delta,
    DraftedRows,
    Evaluation,
    Evaluator,
)
from storage_engine.repository.object.write.staged_write import Staging
from storage_engine.repository.protocol import (
    AppliedUnit,
    ClaimLost,
    CommitRequest,
    CommitResult,
    TypeChange,
    end_notes,
    overtaken_note,
    repetition_note,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The collaborators of a commit, all owned by the repository."""

    chain: Chain
    publisher: Publisher
    versions: Versions
    resident: Resident
    duck: Duck
    config: OntologiaConfig
    engine_version: EngineVersion
    check_log: Callable[[Head], None]


class AlreadyApplied(Exception):
    def __init__(self, unit: AppliedUnit) -> None:
        self.unit = unit


class CommitRun:
    """Carries out one request. Use once; leaving it stops what works in the background."""

    def __init__(self, parts: Parts, request: CommitRequest) -> None:
        self._chain = parts.chain
        self._versions = parts.versions
        self._duck = parts.duck
        self._config = parts.config
        self._engine_version = parts.engine_version
        self._request = request
        self._attempts = {i.spec.ref: i.staged for i in request.inputs if i.staged is not None}
        self._bulk: dict[TypeRef, PartsSource] = {**self._attempts}
        self._spooled: list[BulkInput] = []
        self._staging: Staging | None = None
        self._evaluator = Evaluator(
            parts.chain, parts.versions, request, self._bulk, parts.check_log
        )
        self._last: Evaluation | None = None
        self._published: PublishedCommit | None = None
        self._answer: CommitResult | None = None
        self._error: Exception | None = None
        self._settled = True  # False while what is staged may have been published
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.leave()

    def answered_unlocked(self) -> bool:
        """Read what is to be staged, and look at the request without the lock: most that have
        nothing to do, and most that are refused, need not take it. Only for who has nobody before
        it whose commit is still to come."""
        self._spool_streams()
        first = self._evaluate_unlocked()
        if first.applied is not None:
            self._answer = first.applied.result()
            return True
        if self._is_void(first):
            return True
        self.begin_publishing()
        return False

    def look(self) -> None:
        """What can be known before the lock is held, so that less remains to be done then. Only
        drafts tell what is so."""
        remembered = self._chain.known_head()
        if remembered is not None:
            with suppress(OntologiaError):
                self._evaluate(remembered, None)

    def begin_publishing(self) -> None:
        """From here on what is staged may become part of a commit, until `settle`."""
        self._settled = False
        for attempt in self._attempts.values():
            attempt.publishing()

    def settle(self, outcome: Callable[[], PublishedCommit | None]) -> None:
        """What became of the draft is known: the answer follows from it."""
        try:
            self._published = outcome()
            if self._published is not None:
                self._answer = self._result(self._published)
            self._settled = True
        except AlreadyApplied as earlier:
            self._answer = earlier.unit.result()
            self._settled = True
        except Exception as error:  # noqa: BLE001 - it is the answer
            self._settled = not isinstance(error, CommitStateUnknownError)
            self._error = error

    def answer(self) -> CommitResult | None:
        """Of a request that was answered or settled; raises its error."""
        if self._error is not None:
            raise self._error
        return self._answer

    def clean_up(self) -> None:
        """At the end, whatever it was."""
        for bulk in self._spooled:
            bulk.close()
        files: Sequence[CommitFile] = self._published.manifest.files if self._published else ()
        for attempt in self._attempts.values():
            attempt.settle(files if self._settled else None)
        if self._scratch is not None:
            self._scratch.cleanup()
        if self._staging is not None:
            if self._settled:
                self._staging.end(files)
            else:
                self._staging.leave()

    # -- before the lock ----------------------------------------------------------------------

    def _spool_streams(self) -> None:
        streams = [item for item in self._request.inputs if item.stream is not None]
        if not streams:
            return
        head = self._chain.read_head().head
        if (mark := self._request.idempotency) is not None:
            earlier = applied(self._chain, head, mark)
            if earlier is not None:
                raise AlreadyApplied(earlier)  # before anything is read or staged
        heads = self._chain.type_heads_at(head)
        for item in streams:  # before all of it is read for nothing
            check_schema(self._chain, head, item.spec, heads.get(item.spec.ref))
        schema_versions = {item.spec.ref: _version(heads.get(item.spec.ref)) for item in streams}
        if self._engine_version == "v2":
            self._staging = Staging(
                self._chain.store,
                schema_versions=schema_versions,
                beat_s=self._config.s3_lease_ttl_ms / 3000,
                attempt=layout.on_chain(layout.new_id(), self._chain.incarnation),
            )
            self._staging.begin(self._request.holder)
        for item in streams:
            bulk = BulkInput(
                aligned(self._chain, head, item.spec, heads.get(item.spec.ref)),
                self._versions,
                self._duck,
                schema_version_id=schema_versions[item.spec.ref],
                part_bytes=self._config.target_part_bytes,
                stage=self._staging.stage if self._staging is not None else None,
            )
            self._bulk[item.spec.ref] = bulk
            self._spooled.append(bulk)
            assert item.stream is not None
            bulk.spool(item.stream, stage_at_once=item.spec.ref not in heads)

    def _evaluate_unlocked(self) -> Evaluation:
        """On the head we know; on the real one before a no-op or a refusal is believed."""
        remembered = self._chain.known_head()
        # Staged long ago: what came since is best looked at now, not under the lock.
        if remembered is not None and not self._attempts:
            try:
                evaluation = self._evaluate(remembered, None)
                if not evaluation.empty:
                    return evaluation
            except OntologiaError:
                if self._chain.read_head().etag == remembered.etag:
                    raise
        return self._evaluate(self._chain.read_head(), None)

    def _is_void(self, evaluation: Evaluation) -> bool:
        """Whether there is nothing to publish, not even that it was tried."""
        return evaluation.empty and not self._request.events and self._request.idempotency is None

    def _evaluate(self, version: HeadVersion, drafted: DraftedRows | None) -> Evaluation:
        if self._last is None or self._last.version.etag != version.etag:
            self._last = self._evaluator.evaluate(version, drafted)
        return self._last

    # -- under the lock -----------------------------------------------------------------------

    def draft(self, base: Base, drafted: DraftedRows | None) -> Draft | Mark | None:
        """`drafted`: by those before it, when there are any."""
        evaluation = self._evaluate(base.version, drafted)
        if evaluation.applied is not None:
            raise AlreadyApplied(evaluation.applied)
        if evaluation.empty and not self._request.events:
            unit = self._request.idempotency
            return Mark(unit.app_id, unit.version) if unit is not None else None
        self._check_acks(base.head)
        heads = self._chain.type_heads_at(base.head)
        files: list[CommitFile] = []
        uploads: list[Upload] = []
        prefix = layout.attempt_prefix(base.commit_id, base.attempt)
        if incarnation := self._chain.incarnation:
            # As staged parts, which leave the commit to the manifest: a merge can adopt them.
            prefix = layout.staged_prefix(layout.on_chain(layout.new_id(), incarnation))
        for ref, (spec, delta) in evaluation.deltas.items():
            version = _version(heads.get(ref))
            table = stored_table(
                spec,
                delta.rows,
                engine_version=self._engine_version,
                schema_version_id=version,
                commit_id=None if self._chain.incarnation else base.commit_id,
            )
            encoded = encode_bytes(spec, table)
            part = 0 if self._chain.incarnation else None
            file, upload = self._place(prefix, spec, version, encoded, part, delta.inserted)
            files.append(file)
            uploads.append(upload)
        staged: list[CommitFile] = []
        for ref, (spec, bulk) in evaluation.bulk.items():
            if bulk.staged is not None:
                staged += bulk.staged
                if ref in self._attempts:
                    self._attempts[ref].check(bulk.staged)
            else:
                version = _version(heads.get(ref))
                for file, upload in self._rewritten(base, prefix, spec, version, bulk):
                    files.append(file)
                    uploads.append(upload)
        spooled = [file for file in staged if file.ref not in self._attempts]
        if spooled and self._staging is not None:
            self._staging.check(spooled)
        return Draft(
            files=[*files, *staged],
            uploads=uploads,
            touched={
                spec.ref: self._type_head(spec, heads.get(spec.ref), base.commit_id)
                for spec, _ in [*evaluation.deltas.values(), *evaluation.bulk.values()]
            },
            metadata=self._request.metadata,
            schema=self._registrations(evaluation, heads),
            events=self._request.events,
            acks=[ack.as_dict() for ack in self._request.acks],
            idempotency=self._idempotency(),
        )

    def _check_acks(self, head: Head) -> None:
        """A worker that lost its claim unawares must not publish the handler's work twice."""
        if not self._request.acks:
            return
        since = min(ack.since for ack in self._request.acks)
        acks = {(ack.namespace, ack.event_id, ack.handler_id): ack for ack in self._request.acks}
        for name in state.acked_since(self._chain, head, since, acks):
            raise ClaimLost(acks[name])

    def _place(
        self,
        prefix: str,
        spec: TypeSpec,
        version: int,
        encoded: EncodedPart,
        part: int | None,
        inserted: int,
    ) -> tuple[CommitFile, Upload]:
        key = layout.data_file(
            prefix,
            spec.kind,
            spec.name,
            self._engine_version,
            version,
            part,
        )
        file = encoded.describe(
            spec,
            key,
            schema_version_id=version,
            part=part,
            inserted=inserted,
            commit_id_source="manifest" if self._chain.incarnation else "column",
        )
        return file, Upload(key, encoded.content)

    def _rewritten(
        self, base: Base, prefix: str, spec: TypeSpec, version: int, bulk: BulkParts
    ) -> list[tuple[CommitFile, Upload]]:
        """v1 has no staged parts: bulk rows get their commit id and JSON now."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="ontologia-commit-")
        placed = []
        for number, part in enumerate(bulk.parts):
            rows = pq.read_table(part.encoded.content, columns=row_schema(spec).names)
            table = stored_table(
                spec,
                rows.cast(row_schema(spec)),
                engine_version=self._engine_version,
                schema_version_id=version,
                commit_id=base.commit_id,
            )
            name = f"{base.commit_id}-{base.attempt}-{spec.kind}-{spec.name}-{number}.parquet"
            encoded = encode_file(spec, table, Path(self._scratch.name) / name)
            position = number if len(bulk.parts) > 1 else None
            placed.append(self._place(prefix, spec, version, encoded, position, part.inserted))
        return placed

    def _type_head(self, spec: TypeSpec, before: TypeHead | None, commit_id: int) -> TypeHead:
        """Commit id and path are the publisher's; version and schema are ours."""
        if before is None:
            before = TypeHead(commit_id, "", FIRST_VERSION, activation_commit_id=commit_id)
        return replace(
            before,
            schema_sha256=before.schema_sha256 or spec.schema_sha256,
            layout_sha256=before.layout_sha256 or spec.layout_sha256,
            manifest_sha256="",
            empty=False,
        )

    def _registrations(
        self, evaluation: Evaluation, heads: Mapping[TypeRef, TypeHead]
    ) -> dict[str, Any]:
        if not evaluation.register:
            return {}
        return {
            "registered": [
                {
                    "kind": spec.kind,
                    "type_name": spec.name,
                    "schema_version_id": _version(heads.get(spec.ref)),
                    "schema_sha256": spec.schema_sha256,
                    "schema": spec.schema_dict(),
                }
                for spec in evaluation.register
            ]
        }

    def _idempotency(self) -> dict[str, Any] | None:
        mark = self._request.idempotency
        return {"app_id": mark.app_id, "version": mark.version} if mark is not None else None

    @property
    def deltas(self) -> Mapping[TypeRef, tuple[TypeSpec, Delta]]:
        """Of the latest draft."""
        return self._last.deltas if self._last is not None else {}

    # -- after the CAS ------------------------------------------------------------------------

    def _result(self, published: PublishedCommit) -> CommitResult:
        changes: dict[TypeRef, TypeChange] = {}
        for file in published.manifest.files:
            before = changes.get(file.ref, TypeChange(file.kind, file.type_name, 0, 0))
            changes[file.ref] = replace(
                before,
                inserted=before.inserted + (file.inserted or 0),
                updated=before.updated + (file.updated or 0),
            )
        return CommitResult(
            published.manifest.commit_id,
            tuple(changes.values()),
            attempts=published.attempts,
            lock_wait_ms=published.lock_wait_ms,
            notes=self._notes(published),
        )

    def _notes(self, published: PublishedCommit) -> list[str]:
        """What is known without asking the store."""
        notes = [
            repetition_note(bulk.spec, bulk.repeated) for bulk in self._spooled if bulk.repeated
        ]
        assert self._last is not None
        for spec, delta in self._last.deltas.values():
            if delta.overtaken:
                notes.append(overtaken_note(spec, delta.overtaken))
        written = [spec for spec, _ in [*self._last.deltas.values(), *self._last.bulk.values()]]
        if any(spec.kind == "relation" for spec in written):
            stored = {spec.ref for spec in written}
            try:
                stored |= {*self._chain.type_heads_at(published.base.head)}
            except OntologiaError:  # it was read for the draft; after the CAS nothing raises
                return notes
            for spec in written:
                notes += end_notes(spec, stored.__contains__)
        return notes


def _version(top: TypeHead | None) -> int:
    return top.schema_version_id if top is not None else FIRST_VERSION

"""Publishes commits of another log as they were: many manifests, one swap of head.

Each keeps its id, time, author, schema records and unit of work; what belongs to the chain (parent,
hashes, skip pointers, type heads, checkpoint) is made anew. Parts and manifests go up together,
then head is swung once, so it only ever names a whole prefix of the other log: a crash before the
swap leaves orphans, which garbage collection knows as attempts that can never be published.

Every such manifest says which log it comes from (`origin`). That is how a copy that was interrupted
recognises its own work, and a storage that has commits of its own is told from one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain, HeadVersion
from storage_engine.commitlog.json_object import StillUnknown, Won, create, write_conditionally
from storage_engine.commitlog.lock import Tenure, WriteLock
from storage_engine.commitlog.records import CommitFile, Head, TypeHead, TypeRef, UnitVersion
from storage_engine.commitlog.series import Draft, Mark, Series, Upload
from storage_engine.errors import CommitStateUnknownError, CopyRefusedError


class ActivatedVersion(NamedTuple):
    """A schema version that becomes the current one with a commit."""

    schema_version_id: int
    schema_sha256: str
    layout_sha256: str


@dataclass(frozen=True, slots=True)
class ReplayedCommit:
    """A commit of another log, with its files as they shall lie in this one. `versions`: what its
    schema records activate."""

    commit_id: int
    attempt: str
    created_at: str
    runtime_id: str
    kind: str
    metadata: Mapping[str, str]
    files: Sequence[CommitFile]
    uploads: Sequence[Upload]
    versions: Mapping[TypeRef, ActivatedVersion]
    schema: Mapping[str, Any] = field(default_factory=dict)
    idempotency: Mapping[str, Any] | None = None
    marks: Mapping[str, UnitVersion] = field(default_factory=dict)
    merged_marks: Mapping[str, Sequence[UnitVersion]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return layout.manifest(self.commit_id, self.attempt)

    @property
    def purges(self) -> list[TypeRef]:
        """The types whose rows the log forgets with it."""
        dropped = self.schema.get("dropped", ())
        return [(drop["kind"], drop["type_name"]) for drop in dropped if drop.get("purge")]


class Replay:
    """Appends to one log what another one has."""

    def __init__(
        self, chain: Chain, lock: WriteLock, *, runtime_id: str, checkpoint_interval: int
    ) -> None:
        self._chain = chain
        self._store = chain.store
        self._lock = lock
        self._runtime_id = runtime_id
        self._checkpoint_interval = checkpoint_interval

    def publish(self, commits: Sequence[ReplayedCommit], origin: str) -> Head:
        """All of them or none; only the last may purge types. Raises CopyRefusedError when head is
        not where they go on from, and CommitStateUnknownError when the store does not say whether
        it was swung."""
        with Tenure() as tenure, tenure:
            lease = self._lock.acquire(tenure)
            version = self._chain.read_head()
            self._check(version.head, commits[0].commit_id)
            with Series(self._chain, version) as series:
                for commit in commits:
                    last = commit is commits[-1]
                    self._add(series, commit, origin, checkpoint=last and self._is_due(series))
                self._upload([upload for commit in series.commits for upload in commit.uploads])
                lease.guard()
                lease.note_head(None)
                self._swap(version, series.head)
                series.note_published()
        return series.head

    def _add(
        self, series: Series, commit: ReplayedCommit, origin: str, *, checkpoint: bool
    ) -> None:
        for app_id, unit in commit.marks.items():
            series.mark(Mark(app_id, unit))
        series.add(
            _draft(commit, self._chain.type_heads_at(series.head)),
            attempt=commit.attempt,
            now=self._store.now(),
            runtime_id=self._runtime_id,
            author=commit.runtime_id,
            created_at=commit.created_at,
            origin=origin,
            with_checkpoint=checkpoint,
        )

    def _check(self, head: Head, first: int) -> None:
        if head.commit_id != first - 1:
            raise CopyRefusedError(
                f"{self._store.uri} is at commit {head.commit_id} and was at {first - 1} a moment "
                "ago: another copy or writer is at work on it; let one of them end, then run the "
                "copy again, which goes on from where the storage stands",
                target=self._store.uri,
            )

    def _is_due(self, series: Series) -> bool:
        """Whether the series, of which one commit is still to be added, comes past a point at
        which there is to be a checkpoint."""
        step = self._checkpoint_interval
        return (series.head.commit_id + 1) // step > series.stored.head.commit_id // step

    def _upload(self, uploads: Sequence[Upload]) -> None:
        requests: list[Callable[[], None]] = [partial(self._write, upload) for upload in uploads]
        self._chain.parallel.gather(requests)

    def _write(self, upload: Upload) -> None:
        if isinstance(upload.content, Path):
            self._store.put_file(upload.key, upload.content)
        elif not create(self._store, upload.key, upload.content):
            # The same id and the same eight characters: head may name it by now.
            raise CopyRefusedError(
                f"{upload.key} is in {self._store.uri} already, with other content: another copy "
                "is at work on it; run this one again when that has ended",
                target=self._store.uri,
            )

    def _swap(self, version: HeadVersion, head: Head) -> None:
        try:
            outcome = write_conditionally(
                self._store,
                self._chain.head_key,
                head.to_bytes(),
                write_id=head.write_id,
                etag=version.etag,
            )
        except StillUnknown as error:
            raise CommitStateUnknownError(
                commit_id=head.commit_id,
                manifest_path=head.manifest_path or "",
                write_id=head.write_id,
            ) from error
        if isinstance(outcome, Won):
            self._chain.note_head(HeadVersion(head, outcome.etag))
            return
        raise CopyRefusedError(
            f"{self._store.uri} was changed by somebody else while commits were copied into it: "
            "stop what writes there, then run the copy again",
            target=self._store.uri,
        )


def _draft(commit: ReplayedCommit, heads: Mapping[TypeRef, TypeHead]) -> Draft:
    """`heads`: of the types before it."""
    written = {file.ref for file in commit.files}
    touched: dict[TypeRef, TypeHead] = {}
    amended: dict[TypeRef, TypeHead] = {}
    for drop in commit.schema.get("dropped", ()):
        ref = (drop["kind"], drop["type_name"])
        if (before := heads.get(ref)) is not None:
            amended[ref] = _ended(before, drop, commit.commit_id)
    for ref in dict.fromkeys([*commit.versions, *written]):
        head = heads.get(ref)
        if (version := commit.versions.get(ref)) is not None:
            head = _activated(head, version, commit.commit_id)
        assert head is not None, "a type without a schema is registered by its first commit"
        amended.pop(ref, None)
        if ref in written:
            touched[ref] = replace(head, manifest_sha256="", empty=False)
        else:
            amended[ref] = head
    return Draft(
        files=commit.files,
        uploads=commit.uploads,
        touched=touched,
        amended=amended,
        purged=commit.purges,
        metadata=commit.metadata,
        kind=commit.kind,
        schema=commit.schema,
        idempotency=commit.idempotency,
        merged_marks=commit.merged_marks,
    )


def _activated(before: TypeHead | None, version: ActivatedVersion, commit_id: int) -> TypeHead:
    """A type's head with another version; whether there are rows of it is not said yet."""
    head = before if before is not None else TypeHead(commit_id, "", empty=True)
    named = replace(head, schema_sha256=version.schema_sha256, layout_sha256=version.layout_sha256)
    began_anew = before is None or before.is_dropped
    if not began_anew and head.schema_version_id == version.schema_version_id:
        return named  # recorded late: logs of others do not say what the version is
    return replace(
        named,
        schema_version_id=version.schema_version_id,
        activation_commit_id=commit_id,
        dropped_commit_id=None,
        renamed_to=None,
        first_version_id=version.schema_version_id if began_anew else head.first_version_id,
        past_versions=before.succeeded(commit_id) if before is not None else (),
    )


def _ended(before: TypeHead, drop: Mapping[str, Any], commit_id: int) -> TypeHead:
    after = before
    if not before.is_dropped:
        after = replace(before, dropped_commit_id=commit_id, renamed_to=drop.get("renamed_to"))
    if drop.get("purge") and not before.empty:  # as if no row had ever been written
        after = replace(
            after, commit_id=commit_id, manifest_path="", manifest_sha256="", empty=True
        )
    return after

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

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain, HeadVersion, skip_pointers
from storage_engine.commitlog.json_object import StillUnknown, Won, create, write_conditionally
from storage_engine.commitlog.lock import Tenure, WriteLock
from storage_engine.commitlog.publisher import FORMAT, Upload, proven_head
from storage_engine.commitlog.records import (
    CheckpointRef,
    CommitFile,
    Head,
    Manifest,
    ManifestLink,
    Previous,
    TypeHead,
    TypeRef,
    UnitVersion,
    sha256,
    timestamp,
)
from storage_engine.commitlog.type_heads import (
    BucketedTypeHeads,
    BucketObject,
    next_type_heads,
    parse_buckets,
)
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
            series = _Series(self._chain, version.head, origin)
            for commit in commits[:-1]:
                series.add(commit)
            checkpoint = self._checkpoint_for(version.head, commits[-1])
            head = series.finish(
                commits[-1], checkpoint, runtime_id=self._runtime_id, now=self._store.now()
            )
            self._upload([*series.uploads, *(u for commit in commits for u in commit.uploads)])
            lease.guard()
            self._swap(version, head)
        self._chain.note_manifest(*series.last)
        return head

    def _check(self, head: Head, first: int) -> None:
        if head.commit_id != first - 1:
            raise CopyRefusedError(
                f"{self._store.uri} is at commit {head.commit_id} and was at {first - 1} a moment "
                "ago: another copy or writer is at work on it; let one of them end, then run the "
                "copy again, which goes on from where the storage stands",
                target=self._store.uri,
            )

    def _checkpoint_for(self, head: Head, last: ReplayedCommit) -> bool:
        """Whether a checkpoint is due within this series."""
        step = self._checkpoint_interval
        return bool(last.purges) or last.commit_id // step > head.commit_id // step

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


class _Series:
    """Manifests that build on one another, before any of them is stored."""

    def __init__(self, chain: Chain, head: Head, origin: str) -> None:
        self._chain = chain
        self._base = head
        self._origin = origin
        self._parent = chain.head_manifest(head)
        self._link = head.link
        self._heads = chain.type_heads_at(head)
        self._marks = dict(head.marks)
        self._buckets: dict[str, BucketObject] = {}
        self._before: list[tuple[ManifestLink, Manifest]] = []
        self.uploads: list[Upload] = []
        self.last: tuple[str, Manifest, bytes]

    def add(self, commit: ReplayedCommit) -> None:
        self._keep(commit, self._manifest(commit))

    def finish(
        self, commit: ReplayedCommit, with_checkpoint: bool, *, runtime_id: str, now: Any
    ) -> Head:
        manifest = self._manifest(commit)
        ref = self._base.checkpoint
        if with_checkpoint:
            ref = self._checkpoint(commit, manifest)
            manifest = replace(manifest, checkpoint=ref)
        self._keep(commit, manifest)
        assert self._link is not None
        return Head(
            commit_id=commit.commit_id,
            manifest_path=commit.path,
            updated_at=timestamp(now),
            runtime_id=runtime_id,
            log_id=self._base.log_id,
            write_id=manifest.write_id,
            commit_sha256=self._link.sha256,
            checkpoint=ref,
        )

    def _manifest(self, commit: ReplayedCommit) -> Manifest:
        files = [replace(file, previous=self._previous(file.ref)) for file in commit.files]
        heads = next_type_heads(
            self._heads,
            self._next_heads(commit),
            self._link,
            lambda number: layout.type_head_bucket(commit.commit_id, commit.attempt, number),
        )
        for key, data in heads.uploads:
            self._buckets[key] = parse_buckets(data, key=key)
            self.uploads.append(Upload(key, data))
        if heads.table is not None:
            self._heads = BucketedTypeHeads(heads.table, self._load)
        else:
            self._heads = heads.inline or {}
        marks, self._marks = {**self._marks, **commit.marks}, {}
        return Manifest(
            commit_id=commit.commit_id,
            parent_commit_id=self._link.commit_id if self._link else None,
            parent_manifest_path=self._link.path if self._link else None,
            created_at=commit.created_at,
            runtime_id=commit.runtime_id,
            metadata=dict(commit.metadata),
            files=tuple(files),
            format=FORMAT,
            log_id=self._base.log_id,
            write_id=layout.new_write_id(),
            kind=commit.kind,
            schema=dict(commit.schema),
            idempotency=commit.idempotency,
            checkpoint=self._base.checkpoint,
            skip=skip_pointers(self._parent, self._link) if self._parent and self._link else (),
            type_heads=heads.inline,
            type_head_buckets=heads.table,
            parent_sha256=self._link.sha256 if self._link else "",
            marks=marks,
            origin=self._origin,
        )

    def _next_heads(self, commit: ReplayedCommit) -> dict[TypeRef, TypeHead]:
        """Of the types that a commit writes rows of, or whose schema it changes."""
        heads: dict[TypeRef, TypeHead] = {}
        for drop in commit.schema.get("dropped", ()):
            ref = (drop["kind"], drop["type_name"])
            if (before := self._heads.get(ref)) is not None:
                ended = _ended(before, drop, commit.commit_id)
                if not ended.manifest_path:
                    ended = replace(ended, manifest_path=commit.path)
                heads[ref] = proven_head(ended, self._link)
        written = {file.ref for file in commit.files}
        for ref in dict.fromkeys([*commit.versions, *written]):
            head = self._heads.get(ref)
            if (version := commit.versions.get(ref)) is not None:
                head = _activated(head, version, commit.commit_id)
            assert head is not None, "a type without a schema is registered by its first commit"
            if ref in written or (head.empty and not head.manifest_path):
                heads[ref] = replace(
                    head,
                    commit_id=commit.commit_id,
                    manifest_path=commit.path,
                    manifest_sha256="",
                    empty=ref not in written,
                )
            else:
                heads[ref] = proven_head(head, self._link)
        return heads

    def _previous(self, ref: TypeRef) -> Previous | None:
        top = self._heads.get(ref)
        if top is None or top.empty:
            return None
        if self._link is not None and top.manifest_path == self._link.path:
            return Previous(top.commit_id, top.manifest_path, self._link.sha256)
        return Previous(top.commit_id, top.manifest_path, top.manifest_sha256)

    def _load(self, refs: Sequence[Any]) -> list[BucketObject]:
        return [self._buckets.get(r.path) or self._chain.load_buckets([r])[0] for r in refs]

    def _checkpoint(self, commit: ReplayedCommit, manifest: Manifest) -> CheckpointRef:
        own = ManifestLink(commit.commit_id, commit.path)  # the checkpoint is named in it
        checkpoint = state.checkpoint_after(
            self._chain, self._base, [*self._before, (own, manifest)]
        )
        checkpoint = state.without_rows(checkpoint, commit.purges)
        checkpoint, pages = state.with_pages(checkpoint)
        data = checkpoint.to_bytes()
        key = layout.checkpoint(checkpoint.commit_id, commit.attempt)
        ref = CheckpointRef(key, sha256(data), checkpoint.commit_id)
        self._chain.note_checkpoint(ref, checkpoint)
        self.uploads += [Upload(*page, shared=True) for page in pages]
        self.uploads.append(Upload(key, data))
        return ref

    def _keep(self, commit: ReplayedCommit, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        self.uploads.append(Upload(commit.path, data))
        self._parent = manifest
        self._link = ManifestLink(commit.commit_id, commit.path, sha256(data))
        self._before.append((self._link, manifest))
        self.last = commit.path, manifest, data


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

"""Makes the snapshot of a run, as one announced attempt to publish it.

`LocalBuild` does it on this machine: the merge, its proof, then the upload. It may need scratch
space for the run; `storage_engine.spark.compaction` is for runs that have outgrown it.

While the attempt's heartbeat stands, garbage collection leaves its outputs alone. Whoever wants to
collect those of a silent attempt deletes the heartbeat first, then fences head; the attempt checks
its heartbeat under the lock right before it publishes. So either the collector sees the outputs
published, or the attempt sees that it was given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from storage_engine.commitlog import layout
from storage_engine.commitlog.heartbeat import GivenUp, Heartbeat
from storage_engine.commitlog.json_object import Won, write_conditionally
from storage_engine.commitlog.records import CommitFile, Entry
from storage_engine.config import MIB
from storage_engine.errors import LeaseExpiredError
from storage_engine.maintenance.compaction.inputs import open_inputs
from storage_engine.maintenance.compaction.merge import IDENTITY, MergedFile, MergeOrder, merge
from storage_engine.maintenance.compaction.plan import RunPlan
from storage_engine.maintenance.compaction.proof import Digest, demand, prove
from storage_engine.maintenance.compaction.workspace import Workspace, open_workspace
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository.object.write.parquet import EncodedPart, SnapshotSettings

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


class Attempt:
    """One announced attempt; use as a context manager, twice where Ctrl-C may come."""

    def __init__(self, store: ObjectStore, *, holder: Mapping[str, Any], beat_s: float) -> None:
        self.id = layout.new_id()
        self._heartbeat = Heartbeat(store, self.id, holder=holder, beat_s=beat_s)

    def __enter__(self) -> Attempt:
        return self

    def announce(self) -> None:
        self._heartbeat.start()

    def __exit__(self, *_: object) -> None:
        self._heartbeat.end()

    def check(self) -> None:
        """Renew now; raises LeaseExpiredError when somebody has given the attempt up."""
        try:
            self._heartbeat.beat()
        except GivenUp as error:
            raise self._expired() from error

    def check_known(self) -> None:
        """The same as far as the last beat could tell, without a request."""
        if self._heartbeat.given_up:
            raise self._expired()

    def _expired(self) -> LeaseExpiredError:
        return LeaseExpiredError(
            f"compaction attempt {self.id} was silent for too long and its files were given "
            "up to garbage collection; nothing was published, compact again"
        )


_SMALL = 2 * MIB  # of a run
_CREATE_WHOLE = 128 * MIB  # what a conditional create takes, which needs it in memory

Tell = Callable[[str, int], None]  # stage, rows done
Guard = Callable[[], None]  # raises when the type's lease is no longer safe


class Build(Protocol):
    """Makes a snapshot: merged, proven against its inputs, and in the store. IntegrityError when
    the inputs are damaged or the merge cannot be proven."""

    def __call__(self, run: RunPlan, attempt: Attempt, *, tell: Tell, guard: Guard) -> Entry: ...


class LocalBuild:
    """`Build` on this machine."""

    def __init__(self, repository: ObjectRepository) -> None:
        self._repository = repository
        self._store = repository.store
        self._config = repository.config
        self._settings = SnapshotSettings.of(repository.config)

    def __call__(self, run: RunPlan, attempt: Attempt, *, tell: Tell, guard: Guard) -> Entry:
        small = self._repository.duck.cursor if run.bytes <= _SMALL else None
        with open_workspace(self._config.s3_duckdb_memory_limit, small) as workspace:
            outputs = self._merge(run, attempt, workspace, tell)
            guard()
            tell("upload", 0)
            return self._upload(run, attempt, outputs)

    def _merge(
        self, run: RunPlan, attempt: Attempt, workspace: Workspace, tell: Tell
    ) -> list[MergedFile]:
        tell("read", 0)
        inputs = open_inputs(self._store.bulk, run.entries, workspace.folder)
        merged = 0

        def advance(count: int) -> None:
            nonlocal merged
            merged += count
            tell("merge", merged)

        order = MergeOrder(
            run.kind,
            self._repository.engine_version,
            self._settings,
            expected_rows=run.rows,
            expected_bytes=run.expected_bytes,
            mark=attempt.id,
        )
        outputs, digest = merge(workspace, inputs, order, advance)
        tell("prove", run.rows)
        counted = Digest(run.rows, digest.content)
        demand(counted, digest, "the rows that the log counts and those of its files")
        by_role: dict[str | None, list[Path]] = {}
        for output in outputs:
            by_role.setdefault(output.role, []).append(output.path)
        prove(
            workspace,
            digest,
            by_role,
            columns=inputs.varying.names,
            identity=IDENTITY[run.kind],
            constants=inputs.constants,
        )
        return outputs

    def _upload(self, run: RunPlan, attempt: Attempt, outputs: Sequence[MergedFile]) -> Entry:
        counts = {role: sum(o.role == role for o in outputs) for role in {o.role for o in outputs}}
        numbers = dict.fromkeys(counts, 0)
        named: list[tuple[CommitFile, MergedFile]] = []
        for output in outputs:
            number = numbers[output.role] if counts[output.role] > 1 else None
            numbers[output.role] += 1
            key = _key(run, attempt, output, number)
            named.append((described(run, key, output.role, output.part, number), output))
        files = self._store.parallel.map(lambda item: self._put(attempt, *item), named)
        return run.snapshot(files)

    def _put(self, attempt: Attempt, file: CommitFile, output: MergedFile) -> CommitFile:
        if output.role is not None:
            self._store.put_file(file.path, output.path)
            return file
        # v1: the specification's key, which has no attempt in it, is taken only if it is free.
        if file.bytes <= _CREATE_WHOLE:
            won = write_conditionally(
                self._store, file.path, output.path.read_bytes(), write_id=attempt.id, etag=None
            )
            if isinstance(won, Won):
                return file
        own = replace(file, path=layout.with_attempt(file.path, attempt.id))
        self._store.put_file(own.path, output.path)
        return own


def _key(run: RunPlan, attempt: Attempt, output: MergedFile, number: int | None) -> str:
    if output.role is None:
        return layout.snapshot(*run.ref, run.min_commit_id, run.max_commit_id)
    return layout.snapshot_part(folder_of(run, attempt.id), output.role, number)


def folder_of(run: RunPlan, attempt: str) -> str:
    """Where an attempt puts the files of its snapshot (v2)."""
    return layout.snapshot_folder(*run.ref, run.min_commit_id, run.max_commit_id, attempt)


def labelled_part(folder: str, role: str, label: str) -> str:
    """The key of a part in such a folder, by a label that is unique in the attempt."""
    return layout.snapshot_part(folder, role, label)


def described(
    run: RunPlan, key: str, role: str | None, part: EncodedPart, number: int | None
) -> CommitFile:
    return CommitFile(
        kind=run.kind,
        type_name=run.type_name,
        path=key,
        row_count=part.rows,
        schema_version_id=run.entries[0].schema_version_id,
        content_sha256=part.sha256,
        bytes=part.size,
        part=number,
        role=role,
        stats=part.stats,
        key_range=part.key_range,
        previous=run.entries[0].files[0].previous,
    )

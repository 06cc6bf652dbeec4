"""Commits that this instance has no materialisation for become materialisations without a run.

Handlers, other instances, the command line and runs that were killed after their commit all write
commits that Dagster does not know. What counts is the event log: a commit is known when the asset
of its type (the partition, for those that are cut) has a materialisation of that data version or a
later one. The commit of a run that is still going is left to that run, but not for ever: its
process may be gone, and a commit that is told twice does no harm.

The first look at a storage, whatever its length, tells the last change of each type (and of each
partition): without it nothing would be known of a type that changes rarely, and what is downstream
of it would wait.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import latest_versions, version_of, version_tags
from ontologia_dagster.declaration import TypeAsset, find_type_assets
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.resources.ontology import report_failures
from ontologia_dagster.storage.events import UNFINISHED, is_past

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.repository.protocol import CommitRecord, Repository

_INTERVAL_S = 30
_PER_TICK = 200  # commits
_PER_QUERY = 10_000  # partitions
# A run reports its commit as soon as it has counted rows. One that has not by then never will.
_LEFT_TO_RUN = timedelta(minutes=15)


@dataclass
class TailPosition:
    """Commits up to `commit` are dealt with, except those held for a run that is going on."""

    commit: int = 0
    held: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str | None, head: int) -> "TailPosition | None":
        """None at first, and when the storage was begun anew."""
        raw = json.loads(text) if text else None
        if raw is None or raw["commit"] > head:
            return None
        return cls(raw["commit"], list(raw["held"]))

    def __str__(self) -> str:
        return json.dumps({"commit": self.commit, "held": self.held})


def log_tail_sensor(
    storage: str,
    *,
    status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{storage}_log_tail",
        minimum_interval_seconds=_INTERVAL_S,
        required_resource_keys={storage},
        default_status=status,
        description="Reports commits that no run of this instance has reported.",
    )
    def log_tail(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        ontology: OntologyResource = getattr(context.resources, storage)
        with report_failures(), ontology.repository() as repository:
            return _tick(context, repository, storage)

    return log_tail


def _tick(
    context: dg.SensorEvaluationContext, repository: "Repository", storage: str
) -> dg.SensorResult:
    head = repository.head_commit_id()
    cursor = TailPosition.parse(context.cursor, head)
    if cursor is not None and head == cursor.commit and not cursor.held:
        return dg.SensorResult(skip_reason=f"commit {head} is the latest", cursor=str(cursor))
    assert context.repository_def is not None
    tail = _Tail(context.instance, repository, find_type_assets(context.repository_def, storage))
    if cursor is None:
        upto = head
        events = list(tail.last_changes(anew=bool(context.cursor)))
    else:
        upto = min(head, cursor.commit + _PER_TICK)
        events = list(tail.changes(_commits(repository, cursor, upto)))
    after = str(TailPosition(upto, tail.held))
    if not events:
        waits = f", {len(tail.held)} left to runs that go on" if tail.held else ""
        return dg.SensorResult(skip_reason=f"all up to commit {upto} is known{waits}", cursor=after)
    return dg.SensorResult(asset_events=events, cursor=after)


def _commits(repository: "Repository", cursor: TailPosition, upto: int) -> "Iterator[CommitRecord]":
    """Oldest first: those held, then the new ones."""
    for commit_id in cursor.held:
        record = repository.get_commit(commit_id)
        if record is not None:
            yield record
    if upto - cursor.commit < _PER_TICK:
        newest_first = repository.list_commits(10 * _PER_TICK, cursor.commit)
        yield from (commit for commit in reversed(newest_first) if commit.id <= upto)
        return
    # Far behind: the log is read from its end, so all of it would be read at every tick.
    for commit_id in range(cursor.commit + 1, upto + 1):
        record = repository.get_commit(commit_id)
        if record is not None:
            yield record


class _Tail:
    """One look at the log. `held` are commits that are left to their runs."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        repository: "Repository",
        followed: Sequence[TypeAsset],
    ) -> None:
        self.held: list[int] = []
        self._instance = instance
        self._repository = repository
        self._specs = {spec.name: spec for spec in repository.known_types()}
        self._followed = [asset for asset in followed if asset.type_name in self._specs]

    def changes(self, commits: "Iterator[CommitRecord]") -> Iterator[dg.AssetMaterialization]:
        """What each of these commits changed, and nobody has told."""
        for commit in commits:
            if self._is_left_to_run(commit):
                continue
            for asset in self._followed:
                if asset.type_name in commit.types:
                    keys = self._partitions_of(asset, commit)
                    versions = self._known_versions(asset.key, keys)
                    untold = [key for key in keys if versions.get(key, 0) < commit.id]
                    for partition, at in self._versions(asset, untold, commit.id).items():
                        if versions.get(partition, -1) < at:
                            yield _materialisation(asset, commit.id, partition, commit, at)

    def last_changes(self, *, anew: bool) -> Iterator[dg.AssetMaterialization]:
        """The last change of each type and partition. `anew`: what was told before was of another
        log, whose numbers mean nothing here."""
        recent = {commit.id: commit for commit in self._repository.list_commits(_PER_TICK)}
        for asset in self._followed:
            changed = self._last_commits(asset)
            versions = self._known_versions(asset.key, list(changed))
            for partition, commit_id in changed.items():
                told = versions.get(partition, 0)
                if told == commit_id or (told > commit_id and not anew):
                    continue
                commit = recent.get(commit_id)
                if commit is None or not self._is_left_to_run(commit):
                    yield _materialisation(asset, commit_id, partition, commit, commit_id)

    def _is_left_to_run(self, commit: "CommitRecord") -> bool:
        run_id = commit.metadata.get(provenance.RUN_ID)
        if not run_id or is_past(commit.created_at, _LEFT_TO_RUN):
            return False
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.status not in UNFINISHED:
            return False
        if commit.id not in self.held:
            self.held.append(commit.id)
        return True

    def _last_commits(self, asset: TypeAsset) -> dict[str | None, int]:
        """By partition; of those that have rows."""
        spec = self._specs[asset.type_name]
        if asset.partition_by is None:
            last = self._repository.type_head(spec)
            return {None: last} if last else {}
        every = partitions.partitions_def(asset.partition_by).get_partition_keys()
        versions = self._versions(asset, every)
        return {key: commit_id for key, commit_id in versions.items() if commit_id}

    def _versions(
        self, asset: TypeAsset, keys: Sequence[str | None], as_of: int | None = None
    ) -> dict[str | None, int]:
        """The commit that last changed a row of each of these partitions (0: it has none). A run
        on several may have changed some of them alone."""
        if asset.partition_by is None:
            return dict.fromkeys(keys, as_of or 0)
        executor, spec = self._repository.executor(as_of), self._specs[asset.type_name]
        versions: dict[str | None, int] = {}
        for first in range(0, len(keys), _PER_QUERY):
            some = [key for key in keys[first : first + _PER_QUERY] if key is not None]
            held = partitions.read_states(executor, spec, asset.partition_by, some)
            versions |= {key: state.commit_id for key, state in held.items()}
        return versions

    def _partitions_of(self, asset: TypeAsset, commit: "CommitRecord") -> Sequence[str | None]:
        """As the manifest says where the asset itself wrote it, else by the rows of the commit."""
        if asset.partition_by is None:
            return [None]
        written = commit.metadata.get(provenance.PARTITIONS)
        if written and commit.metadata.get(provenance.ASSET_KEY) == asset.key.to_user_string():
            keys = partitions.parse_keys(asset.partition_by, written)
            if keys is not None:
                return keys
        from storage_engine.repository.protocol import ReadWindow

        spec = self._specs[asset.type_name]
        rows = self._repository.read(spec, ReadWindow(as_of=commit.id, since=commit.id - 1))
        values = rows.column(asset.partition_by.field).unique().to_pylist()
        named = {partitions.key_of(asset.partition_by, value) for value in values}
        return sorted(key for key in named if key is not None)

    def _known_versions(
        self, key: dg.AssetKey, keys: Sequence[str | None]
    ) -> Mapping[str | None, int]:
        """The commits that the latest materialisations stand for, by partition."""
        if None in keys:
            event = self._instance.get_latest_materialization_event(key)
            made = event.asset_materialization if event is not None else None
            return {None: version_of(made.tags or {})} if made is not None else {}
        some = (
            [partition for partition in keys if partition is not None]
            if len(keys) <= _PER_QUERY
            else None
        )
        return dict(latest_versions(self._instance, key, some).items())


def _materialisation(
    asset: TypeAsset,
    commit_id: int,
    partition: str | None,
    commit: "CommitRecord | None",
    version: int,
) -> dg.AssetMaterialization:
    """`commit` None: one so old that its manifest was not read. `version` is less than the commit
    for a partition that its run left as it was."""
    metadata: dict[str, Any] = {"commit": commit_id}
    if commit is not None:
        metadata |= {
            "committed_at": dg.MetadataValue.timestamp(commit.created_at),
            "runtime_id": commit.runtime_id,
            **{f"commit/{name}": text for name, text in commit.metadata.items()},
        }
    return dg.AssetMaterialization(
        asset_key=asset.key,
        partition=partition,
        description=f"Commit {commit_id}, made outside this instance's runs.",
        metadata=metadata,
        tags=version_tags(version),
    )

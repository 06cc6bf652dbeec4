"""Commits that this instance has no materialisation for become materialisations without a run.

Handlers, other instances, the command line and runs that were killed after their commit all write
commits that Dagster does not know. What counts is the event log: a commit is known when the asset
of its type (the partition, for those that are cut) has a materialisation of that data version or a
later one. The commit of a run that is still going is left to that run.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg
from dagster._core.definitions.data_version import (
    DATA_VERSION_IS_USER_PROVIDED_TAG,
    DATA_VERSION_TAG,
)

from ontologia_dagster import partitions, provenance
from ontologia_dagster.bus import UNFINISHED
from ontologia_dagster.failures import reported_failures
from ontologia_dagster.located import Located, located

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import CommitRecord, Repository

_INTERVAL_S = 30
_PER_TICK = 200  # commits


@dataclass
class Cursor:
    """Commits up to `commit` are dealt with, except those held for a run that is going on."""

    commit: int = 0
    held: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str | None, head: int) -> "Cursor":
        """At first, the latest commits are looked at: older ones are history, not news."""
        if not text:
            return cls(max(0, head - _PER_TICK))
        raw = json.loads(text)
        if raw["commit"] > head:
            return cls()  # the storage was begun anew
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
        with reported_failures(), ontology.repository() as repository:
            return _tick(context, repository, storage)

    return log_tail


def _tick(
    context: dg.SensorEvaluationContext, repository: "Repository", storage: str
) -> dg.SensorResult:
    head = repository.head_commit_id()
    cursor = Cursor.parse(context.cursor, head)
    if head == cursor.commit and not cursor.held:
        return dg.SensorResult(skip_reason=f"commit {head} is the latest", cursor=str(cursor))
    assert context.repository_def is not None
    followed = located(context.repository_def, storage)
    specs = {spec.name: spec for spec in repository.known_types()}
    upto = min(head, cursor.commit + _PER_TICK)
    events: list[dg.AssetMaterialization] = []
    held: list[int] = []
    for commit in _commits(repository, cursor, upto):
        if _is_of_a_going_run(context.instance, commit):
            held.append(commit.id)
            continue
        for asset in followed:
            if asset.type_name in commit.types:
                spec = specs[asset.type_name]
                events += _unknown(context.instance, repository, asset, spec, commit)
    after = str(Cursor(upto, held))
    if not events:
        waits = f", {len(held)} left to runs that go on" if held else ""
        return dg.SensorResult(skip_reason=f"all up to commit {upto} is known{waits}", cursor=after)
    return dg.SensorResult(asset_events=events, cursor=after)


def _commits(repository: "Repository", cursor: Cursor, upto: int) -> "Iterator[CommitRecord]":
    """Oldest first: those held, then the new ones."""
    for commit_id in cursor.held:
        known = repository.get_commit(commit_id)
        if known is not None:
            yield known
    if upto - cursor.commit < _PER_TICK:
        newest_first = repository.list_commits(10 * _PER_TICK, cursor.commit)
        yield from (commit for commit in reversed(newest_first) if commit.id <= upto)
        return
    # Far behind: the log is read from its end, so all of it would be read at every tick.
    for commit_id in range(cursor.commit + 1, upto + 1):
        known = repository.get_commit(commit_id)
        if known is not None:
            yield known


def _is_of_a_going_run(instance: dg.DagsterInstance, commit: "CommitRecord") -> bool:
    run_id = commit.metadata.get(provenance.RUN_ID)
    run = instance.get_run_by_id(run_id) if run_id else None
    return run is not None and run.status in UNFINISHED


def _unknown(
    instance: dg.DagsterInstance,
    repository: "Repository",
    asset: Located,
    spec: "TypeSpec",
    commit: "CommitRecord",
) -> Iterator[dg.AssetMaterialization]:
    for partition in _partitions_of(repository, asset, spec, commit):
        if _known_version(instance, asset.key, partition) < commit.id:
            yield _materialisation(asset, commit, partition)


def _partitions_of(
    repository: "Repository", asset: Located, spec: "TypeSpec", commit: "CommitRecord"
) -> Sequence[str | None]:
    """As the manifest says where the asset itself wrote it, else by the rows of the commit."""
    if asset.partition_by is None:
        return [None]
    said = commit.metadata.get(provenance.PARTITIONS)
    if said and commit.metadata.get(provenance.ASSET_KEY) == asset.key.to_user_string():
        return said.split(",")
    from storage_engine.repository.protocol import Window

    rows = repository.read(spec, Window(as_of=commit.id, since=commit.id - 1))
    values = rows.column(asset.partition_by.field).unique().to_pylist()
    keys = {partitions.key_of(asset.partition_by, value) for value in values}
    return sorted(key for key in keys if key is not None)


def _known_version(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None) -> int:
    """The commit that the latest materialisation stands for; 0 when there is none."""
    wanted = dg.AssetRecordsFilter(
        asset_key=key, asset_partitions=[partition] if partition is not None else None
    )
    for record in instance.fetch_materializations(wanted, limit=1).records:
        materialisation = record.asset_materialization
        tags = materialisation.tags if materialisation is not None else None
        version = (tags or {}).get(DATA_VERSION_TAG, "")
        return int(version) if version.isdigit() else 0
    return 0


def _materialisation(
    asset: Located, commit: "CommitRecord", partition: str | None
) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        asset_key=asset.key,
        partition=partition,
        description=f"Commit {commit.id}, made outside this instance's runs.",
        metadata={
            "commit": commit.id,
            "committed_at": dg.MetadataValue.timestamp(commit.created_at),
            "runtime_id": commit.runtime_id,
            **{f"commit/{name}": text for name, text in commit.metadata.items()},
        },
        tags={DATA_VERSION_TAG: str(commit.id), DATA_VERSION_IS_USER_PROVIDED_TAG: "true"},
    )

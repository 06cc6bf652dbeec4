"""Commits that this instance has no materialisation for become materialisations without a run.

Handlers, other instances, the command line and runs that were killed after their commit all write
commits that Dagster does not know. What counts is the event log: a commit is known when the asset
of its type (the partition, for those that are cut) has a materialisation of that data version or a
later one. The commits of a run that is still going are left to that run, but not for ever, unless
it is seen to work on the bus: its process may be gone, and a commit that is told twice does no
harm.

The sensor follows the log commit by commit. An asset that it has not followed so far, and all of
them when it is far behind, are caught up with at once: the last change of each type and partition
is told, whatever the length of the log, as otherwise nothing would be known of a type that changes
rarely, and what is downstream of it would wait. Partitions are told from what the log knows of
files; those are opened only where that does not tell.

A tick works for a bounded time and tells a bounded number of changes, each tick goes on where the
one before it ended, and says how far behind it is.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import (
    last_record_id,
    latest_materialisations,
    latest_versions,
    retry_of,
    version_of,
    version_tags,
    will_be_retried,
)
from ontologia_dagster.declaration import TypeAsset, find_type_assets
from ontologia_dagster.downstream.metadata import SCHEMA_VERSION, column_changes, version_told
from ontologia_dagster.ingestion import partitions, provenance
from ontologia_dagster.resources.ontology import SchemaAdvice, report_failures
from ontologia_dagster.storage.events import UNFINISHED, is_past, list_workers
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import CommitRecord, Repository, TypeRef
    from storage_engine.schema.history import TypeHistory

_INTERVAL_S = 30
# Dagster ends a tick after 60 s, and then nothing of it is kept.
_TICK_S = 1.0  # after which nothing new is begun
_LOOK_S = 12.0  # after which files are no longer read
_ALONE_S = 3.0  # what begins before that has the tick to itself
_PER_TICK = 50  # changes told: for each of them the daemon makes a record, within the tick
_PAGE = 100  # commits read together
_FAR = 1_000  # commits: who is further behind than that is told of last changes alone
_RECENT = 200  # commits whose runs may still be going
_PER_QUERY = 10_000  # partitions
# A run reports its commit as soon as it has counted rows. One that has not by then never will.
_LEFT_TO_RUN = timedelta(minutes=15)


@dataclass(frozen=True)
class TailPosition:
    """How far the log has been told.

    commit:  the last one that was followed, and
    at:      when it was made: in another history that is another commit
    assets:  for each asset up to where its commits are told; those behind `commit` are caught up
             with, those that are not named have not been looked at
    held:    by run that goes on, the first and the last commit up to `commit` that is left to it,
             and when the first was made; of thousands that it may make no other is named
    early:   assets with rows of a partition that is not there yet, by the first commit that wrote
             one, and the latest partition that was there
    after:   the record of the event log after which versions are of this history
    page:    how many commits are read together; fewer where these took too long
    """

    commit: int
    at: str = ""
    assets: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    early: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    after: int = 0
    page: int = _PAGE

    @classmethod
    def parse(cls, text: str | None, followed: Sequence[TypeAsset]) -> "TailPosition | None":
        """None at first, and for a text that is no position. That of an earlier release says
        nothing of assets: all were followed."""
        if not text:
            return None
        try:
            raw = json.loads(text)
            commit = _number(raw["commit"])
            told = raw.get("assets", {_name(asset): commit for asset in followed})
            return cls(
                commit,
                str(raw.get("at", "")),
                {str(name): _number(upto) for name, upto in told.items()},
                _held(raw["held"]),
                {
                    str(name): (_number(first), str(last))
                    for name, (first, last) in raw.get("early", {}).items()
                },
                _number(raw.get("after", 0)),
                min(max(1, _number(raw.get("page", _PAGE))), _PAGE),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def __str__(self) -> str:
        raw = {
            "commit": self.commit,
            "at": self.at,
            "assets": dict(sorted(self.assets.items())),
            "held": {run_id: list(held) for run_id, held in sorted(self.held.items())},
            "early": {name: list(first) for name, first in sorted(self.early.items())},
            "after": self.after,
            "page": self.page,
        }
        return json.dumps(raw, separators=(",", ":"))


def _held(raw: Any) -> dict[str, tuple[int, int, str]]:
    """An earlier release named commits, and not their runs: these are looked at again."""
    if isinstance(raw, list):
        commits = [_number(commit) for commit in raw]
        return {"": (min(commits), max(commits), "")} if commits else {}
    return {
        str(run_id): (_number(first), _number(last), str(at))
        for run_id, (first, last, at) in raw.items()
    }


def _number(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise ValueError(f"{raw!r} is no commit id")
    return raw


def _name(asset: TypeAsset) -> str:
    return asset.key.to_user_string()


class _OutOfTimeError(Exception):
    """There is more to read than this tick has time for."""


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
        assert context.repository_def is not None
        followed = find_type_assets(context.repository_def, storage)
        advice = SchemaAdvice.of(ontology, storage)
        with report_failures(None, advice), ontology.repository() as repository:
            tail = _Tail(context, ontology, repository, followed)
            tail.advance()
        summary = tail.summary()
        context.log.info("%s", summary)
        return dg.SensorResult(
            asset_events=tail.events, cursor=str(tail.position), skip_reason=summary
        )

    return log_tail


class _Tail:
    """One tick: `events` are told, `position` is where the next one goes on."""

    def __init__(
        self,
        context: dg.SensorEvaluationContext,
        ontology: "OntologyResource",
        repository: "Repository",
        followed: Sequence[TypeAsset],
    ) -> None:
        self._ontology = ontology
        self.events: list[dg.AssetMaterialization] = []
        self._began = time.monotonic()
        self._instance = context.instance
        self._log = context.log
        self._repository = repository
        self._followed = followed
        self._specs: dict[str, TypeSpec] = {}
        self._histories: dict[str, TypeHistory] = {}
        self._schemas_told: dict[str, int | None] = {}
        self._made: dict[dg.AssetKey, tuple[int, dg.AssetMaterialization] | None] = {}
        self._finders: dict[str, partitions.KeyFinder] = {}
        self._recent: dict[int, CommitRecord] = {}
        self._unfinished: dict[str, bool] = {}
        self.head = repository.head_commit_id()
        self.position = self._start(context.cursor)
        # Whatever the look at the log took: each tick comes further than the one before.
        self._began = time.monotonic()
        self._advanced = False

    # -- where it begins --------------------------------------------------------------------------

    def _start(self, cursor: str | None) -> TailPosition:
        position = TailPosition.parse(cursor, self._followed)
        if position is not None and self._is_history(position):
            if self.head - position.commit > _FAR:
                position = replace(position, commit=self.head, at=self._made_at(self.head))
            return self._with_new_partitions(position)
        after = 0
        if position is not None:
            # What was told before was of another log, whose numbers mean nothing here.
            after = last_record_id(self._instance)
            self._log.warning(
                "commit %d of the cursor is not in this log: it was begun anew, or its head was "
                "put back; all types are told as they are",
                position.commit,
            )
        elif cursor:
            self._log.warning("the cursor %.100r cannot be read; beginning anew", cursor)
        return TailPosition(self.head, self._made_at(self.head), after=after)

    def _is_history(self, position: TailPosition) -> bool:
        if position.commit > self.head:
            return False
        return not position.at or self._made_at(position.commit) == position.at

    def _made_at(self, commit_id: int) -> str:
        records = self._repository.commits_between(commit_id - 1, commit_id) if commit_id else []
        return records[0].created_at.isoformat() if records else ""

    def _with_new_partitions(self, position: TailPosition) -> TailPosition:
        """Rows whose partition is there now, and was not when they were written."""
        assets = dict(position.assets)
        early: dict[str, tuple[int, str]] = {}
        for asset in self._followed:
            name = _name(asset)
            if name not in position.early or asset.partition_by is None:
                continue
            first, last = position.early[name]
            if self._finder(asset).last_key() == last:
                early[name] = first, last
            else:
                assets[name] = min(first - 1, assets.get(name, 0))
        return replace(position, assets=assets, early=early)

    # -- its work ---------------------------------------------------------------------------------

    def advance(self) -> None:
        self._tell_held()
        lagging = [asset for asset in self._followed if self._lag(asset)]
        self._look_up(lagging)
        for asset in lagging:
            if not self._catch_up(asset):
                return
        while self.position.commit < self.head and not self._is_enough():
            page = self.position.page
            upto = min(self.head, self.position.commit + page)
            records = self._repository.commits_between(self.position.commit, upto)
            try:
                last = self._follow(records)
            except _OutOfTimeError:
                self.position = replace(self.position, page=max(1, page // 4))
                return
            self._move(upto if last is None else last)
            self._advanced = True
            self.position = replace(self.position, page=min(2 * page, _PAGE))

    def summary(self) -> str:
        behind = self.head - self.position.commit
        waiting = sum(self._lag(asset) for asset in self._followed)
        text = f"{len(self.events)} changes told up to commit {self.position.commit}"
        if behind:
            text += f", {counted(behind, 'commit')} behind"
        if waiting:
            text += f", {waiting} assets to be caught up with"
        if self.position.held:
            text += f", commits of {len(self.position.held)} runs that go on are left to these"
        return text

    def _lag(self, asset: TypeAsset) -> bool:
        behind = self.position.assets.get(_name(asset), -1) < self.position.commit
        return behind and asset.type_name in self._refs

    def _is_enough(self) -> bool:
        """Something is done in every tick, however slow the machine is."""
        out_of_time = self._advanced and time.monotonic() - self._began > _TICK_S
        return len(self.events) >= _PER_TICK or out_of_time

    def _move(self, commit_id: int) -> None:
        records = [r for r in self._recent.values() if r.id == commit_id]
        at = records[0].created_at.isoformat() if records else self._made_at(commit_id)
        assets = {_name(asset): commit_id for asset in self._followed}
        self.position = replace(self.position, commit=commit_id, at=at, assets=assets)

    def _tell_held(self) -> None:
        """Those of runs that still go on stay held, and none of them is read."""
        for run_id, (first, last, at) in self.position.held.items():
            if self._goes_on(run_id) and not self._is_given_up(run_id, _instant(at)):
                continue
            others = {each: held for each, held in self.position.held.items() if each != run_id}
            self.position = replace(self.position, held=others)
            told = first - 1
            while told < last and not self._is_enough():
                upto = min(last, told + _PAGE)
                records = [
                    record
                    for record in self._repository.commits_between(told, upto)
                    if record.metadata.get(provenance.RUN_ID) == run_id or not run_id
                ]
                cut = self._follow(records)
                told = upto if cut is None else cut
            if told < last:
                self._hold(run_id, told + 1, last, at)

    def _catch_up(self, asset: TypeAsset) -> bool:
        """Tell the last change of an asset, of each of its partitions; whether all was told."""
        if self._is_enough():
            return False
        name, upto = _name(asset), self.position.commit
        since = self.position.assets.get(name, 0)
        try:
            changed = self._last_changes(asset, since, upto)
        except _OutOfTimeError:
            return False
        versions = self._versions_told(asset.key, list(changed))
        recent = max(0, upto - _RECENT)
        for partition, commit_id in sorted(
            changed.items(), key=lambda item: (item[1], item[0] or "")
        ):
            if versions.get(partition, 0) >= commit_id:
                continue
            if commit_id > recent and upto not in self._recent:
                self._keep(self._repository.commits_between(recent, upto))
            commit = self._recent.get(commit_id)
            if commit is not None and self._is_left_to_run(commit):
                continue
            if len(self.events) >= _PER_TICK:
                return False
            self._tell(asset, commit_id, partition, commit, commit_id)
        assets = {**self.position.assets, name: upto}
        self.position = replace(self.position, assets=assets)
        self._advanced = True
        return True

    def _last_changes(self, asset: TypeAsset, since: int, upto: int) -> dict[str | None, int]:
        if asset.partition_by is None:
            last = self._repository.type_head(self._spec(asset))
            return {None: last} if since < last <= upto else {}  # a later one is followed
        changed: dict[str | None, int] = {}
        alone = not self._advanced or time.monotonic() - self._began < _ALONE_S
        for commit_id, key in self._partitions_written(asset, since, upto, alone):
            changed[key] = max(commit_id, changed.get(key, 0))
        return changed

    def _follow(self, records: "Sequence[CommitRecord]") -> int | None:
        """Tell what each of these commits changed, oldest first, and nobody has told; the last
        one that was dealt with, where that was enough for a tick."""
        self._keep(records)
        free = [record for record in records if not self._is_left_to_run(record)]
        keys: dict[tuple[int, str], Sequence[str | None]] = {}
        versions: dict[str, dict[str | None, int]] = {}
        changed_types = {name for record in free for name in record.types}
        changed_assets = [asset for asset in self._followed if asset.type_name in changed_types]
        self._look_up(changed_assets)
        for asset in changed_assets:
            touched = [record for record in free if asset.type_name in record.types]
            if asset.type_name in self._refs:
                name = _name(asset)
                alone = len(records) == 1
                for record, changed in self._partitions_of(asset, touched, alone):
                    keys[record.id, name] = changed
                every = dict.fromkeys(key for of in keys for key in keys[of] if of[1] == name)
                versions[name] = self._versions_told(asset.key, list(every))
        for record in records:
            for asset in self._followed:
                name = _name(asset)
                changed = keys.get((record.id, name), ())
                if changed:
                    self._tell_changes(asset, record, changed, versions[name])
            if len(self.events) >= _PER_TICK:
                return record.id
        return None

    def _tell_changes(
        self,
        asset: TypeAsset,
        record: "CommitRecord",
        keys: Sequence[str | None],
        versions: dict[str | None, int],
    ) -> None:
        untold = [key for key in keys if versions.get(key, 0) < record.id]
        at: dict[str | None, int] = dict.fromkeys(untold, record.id)
        listed = self._listed_keys(asset, record) or ()
        if asset.partition_by is not None and len(listed) > 1:
            # A run on several may have changed some of them alone.
            executor = self._repository.executor(record.id)
            for first in range(0, len(untold), _PER_QUERY):
                some = [key for key in untold[first : first + _PER_QUERY] if key is not None]
                spec, cut = self._spec(asset), asset.partition_by
                states = partitions.read_states(executor, spec, cut, some)
                at |= {key: state.commit_id for key, state in states.items()}
        for key in untold:
            if versions.get(key, -1) < at[key]:
                self._tell(asset, record.id, key, record, at[key])
                versions[key] = at[key]

    # -- which partitions -------------------------------------------------------------------------

    def _partitions_of(
        self, asset: TypeAsset, records: "Sequence[CommitRecord]", alone: bool
    ) -> "Iterator[tuple[CommitRecord, Sequence[str | None]]]":
        """As the manifest says where the asset itself wrote it, else by what the commit wrote."""
        if asset.partition_by is None:
            yield from ((record, [None]) for record in records)
            return
        unlisted = []
        for record in records:
            listed = self._listed_keys(asset, record)
            if listed is None:
                unlisted.append(record)
            else:
                yield record, listed
        if not unlisted:
            return
        written: dict[int, set[str]] = {}
        since, upto = unlisted[0].id - 1, unlisted[-1].id
        for commit_id, key in self._partitions_written(asset, since, upto, alone):
            written.setdefault(commit_id, set()).add(key)
        yield from ((record, sorted(written.get(record.id, ()))) for record in unlisted)

    def _listed_keys(self, asset: TypeAsset, record: "CommitRecord") -> list[str] | None:
        text = record.metadata.get(provenance.PARTITIONS)
        if not text or asset.partition_by is None:
            return None
        if record.metadata.get(provenance.ASSET_KEY) != _name(asset):
            return None
        return partitions.parse_keys(asset.partition_by, text)

    def _partitions_written(
        self, asset: TypeAsset, since: int, upto: int, alone: bool
    ) -> Iterator[tuple[int, str]]:
        """Commits with the partitions that they wrote rows of. `alone`: a tick cannot do less, and
        ends with what it has read when that takes too long."""
        assert asset.partition_by is not None
        finder, spec, name = self._finder(asset), self._spec(asset), _name(asset)
        partitions.field_type(spec, asset.partition_by)
        values = self._repository.written_values(
            spec, asset.partition_by.field, since=since, upto=upto, alike=finder.alike
        )
        for number, (commit_id, value) in enumerate(values):
            key = finder.key_of(value)
            if key is not None:
                yield commit_id, key
            elif finder.is_early(value):
                first, last = self.position.early.get(name, (commit_id, finder.last_key()))
                early = {**self.position.early, name: (min(first, commit_id), last)}
                self.position = replace(self.position, early=early)
            if number % 1_000 == 0 and time.monotonic() - self._began > _LOOK_S:
                if not alone:
                    raise _OutOfTimeError
                self._log.warning(
                    "%s: commits %d to %d have more rows than can be read in a tick; what was not "
                    "read is told when it changes again, or when the asset is materialised",
                    name,
                    since + 1,
                    upto,
                )
                return

    @cached_property
    def _refs(self) -> "dict[str, TypeRef]":
        """The types that the storage has, by name."""
        return {name: (kind, name) for kind, name in self._repository.type_refs()}

    def _finder(self, asset: TypeAsset) -> partitions.KeyFinder:
        name = _name(asset)
        if name not in self._finders:
            assert asset.partition_by is not None
            self._finders[name] = partitions.KeyFinder(asset.partition_by)
        return self._finders[name]

    def _spec(self, asset: TypeAsset) -> "TypeSpec":
        name = asset.type_name
        if name not in self._specs:
            [self._specs[name]] = self._repository.stored_types([self._refs[name]])
        return self._specs[name]

    # -- what is told -----------------------------------------------------------------------------

    def _keep(self, records: "Iterable[CommitRecord]") -> None:
        self._recent |= {record.id: record for record in records}

    def _is_left_to_run(self, commit: "CommitRecord") -> bool:
        run_id = commit.metadata.get(provenance.RUN_ID)
        if not run_id or not self._goes_on(run_id):
            return False
        if self._is_given_up(run_id, commit.created_at):
            return False
        self._hold(run_id, commit.id, commit.id, commit.created_at.isoformat())
        return True

    def _goes_on(self, run_id: str) -> bool:
        if run_id not in self._unfinished:
            run = self._instance.get_run_by_id(run_id) if run_id else None
            self._unfinished[run_id] = run is not None and (
                run.status in UNFINISHED or self._is_retried(run)
            )
        return self._unfinished[run_id]

    def _is_retried(self, run: dg.DagsterRun) -> bool:
        """Whether another run is to finish what this one began, and to tell its commits."""
        retry = retry_of(run)
        return will_be_retried(run) and (retry is None or self._goes_on(retry))

    def _is_given_up(self, run_id: str, made_at: datetime) -> bool:
        """Whether a commit was made too long ago for its run to tell it still."""
        return is_past(made_at, _LEFT_TO_RUN) and run_id not in self._workers

    @cached_property
    def _workers(self) -> set[str]:
        """Runs that are seen to handle events."""
        from storage_engine.events.protocol import open_event_store

        bus = open_event_store(self._repository, self._ontology.config())
        return list_workers(self._ontology, bus)[0]

    def _hold(self, run_id: str, first: int, last: int, at: str) -> None:
        held = self.position.held.get(run_id)
        if held is not None:
            first, last, at = min(first, held[0]), max(last, held[1]), min(at, held[2])
        span = {**self.position.held, run_id: (first, last, at)}
        self.position = replace(self.position, held=span)

    def _look_up(self, assets: Sequence[TypeAsset]) -> None:
        """What is known of assets, together: for each it would be most of a tick's time."""
        keys = [asset.key for asset in assets]
        latest = latest_materialisations(self._instance, keys)
        self._made |= {key: latest.get(key) for key in keys}

    def _versions_told(self, key: dg.AssetKey, keys: Sequence[str | None]) -> dict[str | None, int]:
        """The commits that the latest materialisations stand for, by partition."""
        after = self.position.after or None
        if None in keys:
            last = self._made[key]
            if last is None or last[0] <= self.position.after:
                return {}
            return {None: version_of(last[1].tags or {})}
        some = [partition for partition in keys if partition is not None]
        if not some:
            return {}
        asked = some if len(some) <= _PER_QUERY else None
        return dict(latest_versions(self._instance, key, asked, after).items())

    def _tell(
        self,
        asset: TypeAsset,
        commit_id: int,
        partition: str | None,
        commit: "CommitRecord | None",
        version: int,
    ) -> None:
        """`commit` None: one so old that its manifest was not read. `version` is less than the
        commit for a partition that its run left as it was."""
        metadata: dict[str, Any] = {"commit": commit_id, **self._schema(asset, commit_id)}
        if commit is not None:
            metadata |= {
                "committed_at": dg.MetadataValue.timestamp(commit.created_at),
                "runtime_id": commit.runtime_id,
                **{f"commit/{name}": text for name, text in commit.metadata.items()},
            }
        self.events.append(
            dg.AssetMaterialization(
                asset_key=asset.key,
                partition=partition,
                description=f"Commit {commit_id}, made outside this instance's runs.",
                metadata=metadata,
                tags=version_tags(version),
            )
        )

    def _schema(self, asset: TypeAsset, commit_id: int) -> dict[str, Any]:
        """The schema version at a commit and, at the first that has another one than was told
        last, what became of its columns."""
        name = asset.type_name
        if name not in self._histories:
            self._histories |= {
                history.name: history
                for history in self._repository.type_histories([self._refs[name]]).values()
            }
        version = self._histories[name].active_at(commit_id)
        if version is None:
            return {}
        key = _name(asset)
        if key not in self._schemas_told:
            last = self._made[asset.key]
            self._schemas_told[key] = version_told(last[1] if last is not None else None)
        before, self._schemas_told[key] = self._schemas_told[key], version.version
        changes = column_changes(self._histories[name], before, version.version)
        return {SCHEMA_VERSION: version.version, **changes}


def _instant(text: str) -> datetime:
    """Of a text that nobody can read, long ago."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)

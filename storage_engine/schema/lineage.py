"""What a type was before: its earlier versions, under whatever name, and the way from each of them
to what it is now.

Typed reads cover the current version. Whoever wants more (`upgraded`, the change feed, `diff`)
reads each version as it was stored and brings its rows up, from one stored version to the next: by
upgraders where there are any, by themselves where the change is additive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pyarrow as pa

from storage_engine.errors import MissingUpgraderError
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.schema.diff import SchemaDiff, diff_types
from storage_engine.schema.history import SchemaVersion, TypeHistory, TypeRef
from storage_engine.schema.rewrite import Rewrite, rewrite
from storage_engine.schema.upgraders import Upgrader, UpgraderKey, steps_from


@dataclass(frozen=True, slots=True)
class Stage:
    """One version in a type's past. Rows of it were written by the commits from `since` up to, and
    without, `until`.

    `continued`: the rows of its first commit are those of the stage before, rewritten, and these
    are still there.
    """

    ref: TypeRef  # of the time
    version: SchemaVersion
    continued: bool = False

    @property
    def spec(self) -> TypeSpec:
        return self.version.spec

    @property
    def number(self) -> int:
        return self.version.version

    @property
    def since(self) -> int:
        return self.version.activation_commit_id

    @property
    def until(self) -> int | None:
        return self.version.superseded_at_commit_id

    @property
    def purged_upto(self) -> int | None:
        return self.version.purged_upto


@dataclass(frozen=True, slots=True)
class Lineage:
    """The versions of a type and of those whose rows it took over, oldest first."""

    history: TypeHistory
    stages: tuple[Stage, ...]

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def at(self, commit_id: int) -> Stage | None:
        """The one that was current at a commit."""
        for stage in reversed(self.stages):
            if stage.since <= commit_id:
                return stage if stage.until is None or commit_id < stage.until else None
        return None

    def between(self, since: int, upto: int) -> list[Stage]:
        """Those that have rows of the commits after `since`, up to `upto`."""
        return [
            stage
            for stage in self.stages
            if stage.since <= upto and (stage.until is None or stage.until - 1 > since)
        ]

    def after(self, stage: Stage) -> tuple[Stage, ...]:
        return self.stages[self.stages.index(stage) + 1 :]

    def upto(self, stage: Stage) -> Lineage:
        """As if a stage were the last."""
        return replace(self, stages=self.stages[: self.stages.index(stage) + 1])

    def before(self, stage: Stage) -> Stage | None:
        """The one whose rows a stage took over."""
        return self.stages[self.stages.index(stage) - 1] if stage.continued else None

    def rewrite(
        self,
        stage: Stage,
        upgraders: Mapping[UpgraderKey, Upgrader],
        declared: TypeSpec | None = None,
    ) -> Rewrite:
        """From rows of one stage to rows of the last: MissingUpgraderError where nothing leads on.

        `declared` is the class of today, if there is one: defaults that are computed are known to
        it alone.
        """
        final = self.final(declared)
        chain = [
            _step(before, after, final, upgraders)
            for before, after in pairwise((stage, *self.after(stage)))
        ]
        return _SuccessiveRewrites(chain)

    def final(self, declared: TypeSpec | None = None) -> TypeSpec:
        """What the rows of all stages become: as the class has it, in the order that is stored."""
        stored = self.last.spec
        return stored if declared is None else declared.aligned(stored.schema_dict())


class _SuccessiveRewrites:
    def __init__(self, chain: Sequence[Rewrite]) -> None:
        self._chain = chain

    def __call__(self, table: pa.Table) -> pa.Table:
        for change in self._chain:
            table = change(table)
        return table


def lineage(ref: TypeRef, histories: Mapping[TypeRef, TypeHistory]) -> Lineage | None:
    """Of a type, all that had its name included; None when it was never stored."""
    history = histories.get(ref)
    if history is None or not history.versions:
        return None
    stages: list[Stage] = []
    at: tuple[TypeHistory, int] | None = (history, len(history.versions) - 1)
    while at is not None:
        owner, place = at
        before = _predecessor(owner, place, histories)
        continued = _kept(owner.versions[place], before) is not None
        stages.append(Stage(owner.ref, owner.versions[place], continued))
        at = before or ((owner, place - 1) if place else None)
    return Lineage(history, tuple(reversed(stages)))


def lives(histories: Mapping[TypeRef, TypeHistory]) -> list[Lineage]:
    """Every stored version once, in lines of those that took over each other's rows: from the
    creation of a type to its end, or to now, through renames."""
    predecessors = {
        (history.ref, place): _kept(
            history.versions[place], _predecessor(history, place, histories)
        )
        for history in histories.values()
        for place in range(len(history.versions))
    }
    continued = {(owner.ref, place) for owner, place in filter(None, predecessors.values())}
    lines = []
    for ref, place in predecessors:
        if (ref, place) in continued:
            continue
        stages: list[Stage] = []
        at: tuple[TypeHistory, int] | None = (histories[ref], place)
        while at is not None:
            owner, number = at
            at = predecessors[owner.ref, number]
            stages.append(Stage(owner.ref, owner.versions[number], continued=at is not None))
        lines.append(Lineage(histories[ref], tuple(reversed(stages))))
    return sorted(lines, key=lambda line: (line.last.ref, line.last.number))


def _predecessor(
    history: TypeHistory, place: int, histories: Mapping[TypeRef, TypeHistory]
) -> tuple[TypeHistory, int] | None:
    """The version whose rows a version took over: the one before it, or the last of a type that
    ended by a rename. None for a type that began without rows."""
    version = history.versions[place]
    begun = version.activation_commit_id
    if place and history.versions[place - 1].superseded_at_commit_id == begun:
        return history, place - 1
    old = histories.get((history.kind, version.renamed_from or ""))
    for number, earlier in enumerate(old.versions if old is not None else ()):
        if earlier.superseded_at_commit_id == begun:
            assert old is not None
            return old, number
    return None


def _kept(
    version: SchemaVersion, before: tuple[TypeHistory, int] | None
) -> tuple[TypeHistory, int] | None:
    """The version before, unless its rows were purged since, as those of an old name can be."""
    if before is None or version.purged_upto is not None:
        return before
    owner, place = before
    return before if owner.versions[place].purged_upto is None else None


def diff_versions(before: SchemaVersion, after: SchemaVersion) -> SchemaDiff:
    """What changed from one stored version to a later one. Renames show by the ids of fields."""
    diff = diff_types(before.spec, _marked(before.spec, after.spec, after.spec))
    return replace(diff, from_version=before.version, to_version=after.version)


def _step(
    before: Stage, after: Stage, final: TypeSpec, upgraders: Mapping[UpgraderKey, Upgrader]
) -> Rewrite:
    renamed = before.ref != after.ref
    target = _marked(before.spec, after.spec, final)
    names = list(dict.fromkeys([after.ref[1], before.ref[1], final.name]))
    gap = after.number - before.number
    steps = steps_from(upgraders, names, before.number)[: max(gap, 1)]
    if steps and (renamed or len(steps) == gap):
        return rewrite(before.spec, target, steps)
    ends = {
        was: now
        for was, now in ((before.spec.left, target.left), (before.spec.right, target.right))
        if after.continued and was is not None and now is not None
    }
    diff = diff_types(before.spec, target, renames=ends)
    if not diff.additive:
        raise MissingUpgraderError([(before.ref[1], before.number)], diff.sentences(), reading=True)
    return rewrite(before.spec, target, ())


def _marked(before: TypeSpec, after: TypeSpec, final: TypeSpec) -> TypeSpec:
    """A stored version with what only classes know: which field had another name before (it kept
    its id) and what computes a default."""
    names = {f.field_id: f.name for f in before.fields}
    declared = {f.field_id: f for f in final.fields}

    def marked(field: FieldSpec) -> FieldSpec:
        was = names.get(field.field_id, field.name)
        current = declared.get(field.field_id)
        factory = current.default_factory if current is not None else None
        if field.default is not MISSING or field.required:
            factory = None
        return replace(
            field, renamed_from=was if was != field.name else None, default_factory=factory
        )

    return replace(after, fields=tuple(map(marked, after.fields)), python_class=None)

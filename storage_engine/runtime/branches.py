"""Branches as sessions have them: made, looked at, compared, merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import pyarrow as pa

from storage_engine.commitlog.branches import Branch, check_name
from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.records import Head, TypeRef
from storage_engine.errors import ConfigurationError, UnknownBranchError
from storage_engine.model.expectations import (
    Expectation,
    parse_expectation,
    parse_expectations,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.query.reference import Reference, checked_reference
from storage_engine.repository.object.branches import Branches, branch_reference
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.object.merge import MergeTerms, Policy
from storage_engine.repository.object.merge.rows import POLICIES
from storage_engine.repository.object.merge.sides import MergeSide
from storage_engine.repository.object.read.plan import CommitWindow
from storage_engine.repository.protocol import Repository, no_branches
from storage_engine.runtime import arguments
from storage_engine.runtime.arguments import BoundTypes, StoredClass
from storage_engine.runtime.stage_rows import Change, described
from storage_engine.schema.lineage import Stage
from storage_engine.schema.upgraders import UpgraderSource, resolve_upgraders


def branches_of(repository: Repository) -> Branches:
    """UnsupportedEngineError where a storage has none."""
    objects = repository.objects
    if objects is None or objects.engine_version == "v1":
        raise no_branches(repository)
    return objects.branches


def checked_branch_name(name: str) -> str:
    """ConfigurationError where no branch can have that name."""
    return check_name(name)


def create_branch(
    repository: Repository,
    name: str,
    at: Reference | None = None,
    *,
    owner: str | None = None,
    expires_in: timedelta | None = None,
) -> Branch:
    branches = branches_of(repository)
    owner = arguments.text("owner", owner) if owner is not None else None
    commit_id: int | None = None
    if at is not None:
        commit_id = repository.require_commit(checked_reference(at, "at"))
    return branches.create(name, at=commit_id, owner=owner, expires_in=expires_in)


PerType = Mapping[StoredClass | str, Sequence[Expectation | Mapping[str, Any]]]


def merge_terms(
    types: BoundTypes,
    repository: Repository,
    *,
    on_conflict: Policy | Mapping[StoredClass | str, Policy] = "fail",
    expectations: PerType | None = None,
    upgraders: UpgraderSource | None = None,
    metadata: Mapping[str, str] | None = None,
    holder: Mapping[str, Any] | None = None,
) -> MergeTerms:
    """What a session, or a command, says of a merge."""
    policies: dict[TypeRef | None, Policy] = {}
    unknown: set[str] = set()
    if isinstance(on_conflict, Mapping):
        for named, policy in on_conflict.items():
            refs = _refs(named, types, repository, unknown)
            policies |= dict.fromkeys(refs, _policy(policy))
    else:
        policies[None] = _policy(on_conflict)
    if expectations is not None and not isinstance(expectations, Mapping):
        raise ConfigurationError(
            "expectations are given by type, such as {Customer: [{'unique': 'email'}]}, not as "
            f"{expectations!r}"
        )
    rules: dict[TypeRef, tuple[Expectation, ...]] = {}
    for named, given in (expectations or {}).items():
        refs = _refs(named, types, repository, unknown)
        rules |= dict.fromkeys(refs, _expectations(given))
    return MergeTerms(
        policies,
        rules,
        resolve_upgraders(upgraders),
        dict(metadata or {}),
        dict(holder or {}),
        unknown=frozenset(unknown),
    )


def _refs(
    named: StoredClass | str, types: BoundTypes, repository: Repository, unknown: set[str]
) -> list[TypeRef]:
    if not isinstance(named, str):
        return [types.find(named).ref]
    refs = [ref for ref in repository.type_refs() if ref[1] == named]
    if refs:
        return refs
    unknown.add(named)  # the branch may have it
    return [("entity", named), ("relation", named)]


def _expectations(given: Any) -> tuple[Expectation, ...]:
    """As they are, or as dicts."""
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        return parse_expectations(given)
    return tuple(
        each if isinstance(each, Expectation) else parse_expectation(each) for each in given
    )


def _policy(given: Policy) -> Policy:
    if not callable(given) and given not in POLICIES:
        raise ConfigurationError(
            f"on_conflict: {given!r} is none of {', '.join(POLICIES)}, and no function"
        )
    return given


# -- two branches compared ------------------------------------------------------------------------


def names_branch(repository: Repository, reference: Reference) -> bool:
    """Whether a reference means another branch: by its name, or as `name@commit`."""
    objects = repository.objects
    if not isinstance(reference, str) or objects is None or objects.engine_version == "v1":
        return False
    name = _branch_in(reference)
    if name == repository.branch:
        return reference == name  # `name@commit` is an ordinary reference there
    if name == MAIN:
        return True
    try:
        objects.branches.head(name)
    except UnknownBranchError:
        return False
    return True


def named_elsewhere(repository: Repository, reference: str) -> str | None:
    """The other branch that `name@commit` means."""
    at = branch_reference(reference)
    if at is None or at[0] == repository.branch or not names_branch(repository, reference):
        return None
    return at[0]


def _branch_in(reference: str) -> str:
    at = branch_reference(reference)
    return at[0] if at is not None else reference


def diff_branches(repository: Repository, before: Reference, after: Reference) -> list[Change]:
    """What `after` has otherwise than `before`, which may be on different branches: only what
    either side has changed since they parted is looked at."""
    branches = branches_of(repository)
    with ExitStack() as opened:
        old, new = (_side(repository, branches, opened, ref) for ref in (before, after))
        parted = _parted(old, new)
        return [
            change
            for ref in _types(old, new, parted)
            for change in _type_diff(old.type(ref), new.type(ref), parted)
        ]


class _DiffSide:
    """A branch as of one of its commits."""

    def __init__(self, repository: ObjectRepository, commit_id: int | None) -> None:
        self.repository = repository
        self.head: Head = repository.chain.read_head().head
        last = self.head.commit_id
        self.commit_id = last if commit_id is None else min(commit_id, last)

    def line(self) -> list[tuple[str, int]]:
        """The chains that it goes through, back to main, each with the last commit that counts."""
        chains = [(self.head.incarnation, self.commit_id)]
        fork, upto = self.head.fork, self.commit_id
        while fork is not None:
            upto = min(upto, fork.base_commit)
            chains.append((fork.parent_incarnation, upto))
            fork = self.repository.branches.head(fork.parent).fork
        return chains

    def type(self, ref: TypeRef) -> _DiffType:
        side = MergeSide(self.repository, self.head, ref)
        return _DiffType(side, self.commit_id)


@dataclass(frozen=True)
class _DiffType:
    """One type there: what it was then, which is not always what it is now."""

    side: MergeSide
    commit_id: int

    @cached_property
    def stage(self) -> Stage | None:
        past = self.side.past
        stage = past.at(self.commit_id) if past is not None else None
        return stage if stage is not None and stage.ref == self.side.ref else None

    @property
    def has_ended(self) -> bool:
        past = self.side.past
        return self.stage is None and past is not None and past.stages[0].since <= self.commit_id

    def rows(self, *, since: int = 0, keys: pa.Table | None = None) -> pa.Table | None:
        """None where there is no such type."""
        stage, top = self.stage, self.side.top
        if stage is None or top is None:
            return None
        is_current = stage.number == top.schema_version_id and not top.is_dropped
        version = None if is_current else stage.number
        window = CommitWindow(self.commit_id, since, schema_version=version)
        return self.side.read(stage.spec, window, keys)


def _side(
    repository: Repository, branches: Branches, opened: ExitStack, reference: Reference
) -> _DiffSide:
    objects = repository.objects
    assert objects is not None
    if not names_branch(repository, reference):
        return _DiffSide(objects, repository.commit_at(reference))
    assert isinstance(reference, str)
    at = branch_reference(reference)
    other = opened.enter_context(branches.opened(_branch_in(reference)))
    return _DiffSide(other, at[1] if at is not None else None)


def _parted(old: _DiffSide, new: _DiffSide) -> int:
    """The last commit that both have."""
    ours = dict(old.line())
    for incarnation, upto in new.line():
        if incarnation in ours:
            return min(upto, ours[incarnation])
    raise AssertionError("all branches go back to main")


def _types(old: _DiffSide, new: _DiffSide, parted: int) -> list[TypeRef]:
    """Those that either side has changed since they parted."""
    changed = (side.repository.branches.changed_types(side.head, parted) for side in (old, new))
    return sorted(set().union(*changed))


def _type_diff(old: _DiffType, new: _DiffType, parted: int) -> Iterator[Change]:
    (kind, name), was, now = new.side.ref, old.stage, new.stage
    if was is None and now is None:
        return
    if was is not None and new.has_ended:
        yield {"kind": kind, "type_name": name, "operation": "drop"}
        return
    if was is not None and now is not None and was.spec.schema_sha256 != now.spec.schema_sha256:
        yield {"kind": kind, "type_name": name, "operation": "schema"}
        return
    spec = (now or was).spec  # type: ignore[union-attr]
    # Of a type that one side ended, or ended and made anew, all rows differ: not the changed alone.
    alike = was is not None and now is not None and was.number == now.number
    since = parted if alike else 0
    names = list(spec.identity)
    changed = [rows.select(names) for t in (old, new) if (rows := t.rows(since=since)) is not None]
    keys = pa.concat_tables(changed).group_by(names).aggregate([])
    rows_before = _by_identity(spec, old.rows(keys=keys))
    rows_after = _by_identity(spec, new.rows(keys=keys))
    for identity in sorted({*rows_before, *rows_after}):
        change = _difference(spec, rows_before.get(identity), rows_after.get(identity))
        if change is not None:
            yield change


_Row = tuple[Mapping[str, Any], Change]  # as stored, and as it is shown


def _by_identity(spec: TypeSpec, table: pa.Table | None) -> dict[tuple[str, ...], _Row]:
    if table is None:
        return {}
    columns = [table.column(name).to_pylist() for name in spec.identity]
    shown = described(spec, spec.name, table)
    rows: Sequence[Mapping[str, Any]] = table.to_pylist()
    return dict(zip(zip(*columns, strict=True), zip(rows, shown, strict=True), strict=True))


def _difference(spec: TypeSpec, was: _Row | None, now: _Row | None) -> Change | None:
    shown = now or was
    assert shown is not None
    # As stored: in JSON 1, 1.0 and true are three values, which Python takes for one.
    names = [
        f.name
        for f in spec.fields
        if was is None or now is None or was[0][f.name] != now[0][f.name]
    ]
    if was is not None and now is not None and not names:
        return None
    change = {name: value for name, value in shown[1].items() if name != "fields"}
    operation = "insert" if was is None else "update" if now is not None else "delete"
    return {
        **change,
        "operation": operation,
        "before": {n: was[1]["fields"][n] for n in names} if was is not None else None,
        "after": {n: now[1]["fields"][n] for n in names} if now is not None else None,
    }


__all__ = [
    "Branch",
    "branches_of",
    "create_branch",
    "diff_branches",
    "merge_terms",
    "named_elsewhere",
    "names_branch",
]

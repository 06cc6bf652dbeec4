"""Branches: which there are, what one has otherwise than its parent, and what a merge would do.

All of it is looked at in pieces: a page of heads, of rows that either side has changed since they
parted, of conflicts. A merge is tried out whole only where the branch is small; of a large one the
page says how much there is, and which command looks at all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from storage_engine.commitlog.branches import Branch
from storage_engine.commitlog.layout import MAIN
from storage_engine.config import MIB
from storage_engine.explore import commits
from storage_engine.explore.links import (
    KeyName,
    branch_path,
    identity_path,
    object_path,
    type_path,
    with_query,
)
from storage_engine.explore.objects import called, changes
from storage_engine.explore.rows import Identity, Row
from storage_engine.explore.values import plain
from storage_engine.explore.view import NothingThere, ShownType, Storage, StorageView
from storage_engine.repository.object.branches import BranchExtent
from storage_engine.repository.object.merge.report import Conflict
from storage_engine.repository.object.merge.rows import Policy
from storage_engine.repository.object.merge.run import MergeTerms
from storage_engine.repository.protocol import TypeRef, no_branches
from storage_engine.schema.lineage import diff_versions
from storage_engine.wording import counted

BRANCHES = 50  # on a page of the list
TYPES = 12  # shown with rows on one page
CHANGED = 25  # rows of each
CONFLICTS = 50
MERGED_COMMITS, MERGED_ROWS, MERGED_BYTES = 500, 50_000, 32 * MIB  # tried out at most
_AT_ONCE = 100  # identities that are compared at once
_LOOKED_AT = 2_000  # of one type, on one page
_PLACE = re.compile(r"/(types|commits)(/[^?#]*)?")

Document = dict[str, Any]


# --- which there are ----------------------------------------------------------------------------


def listed(trunk: Storage, after: str | None, place: str | None) -> Document:
    """A page of branches, main first; none where the storage cannot have any. `place`: the page
    that whoever chooses a branch came from, and goes on at."""
    document: Document = {
        "branches": [],
        "next_url": None,
        "why_none": None,
        "place": _checked_place(place),
    }
    if trunk.branches is None:
        document["why_none"] = str(no_branches(trunk.repository))
        return document
    main = Branch.of(trunk.branches.head(MAIN))
    page, last = trunk.branches.page(after, BRANCHES)
    heads = {branch.name: branch.commit_id for branch in (main, *page)}
    shown = page if after is not None else [main, *page]
    document["branches"] = [described(branch, heads) for branch in shown]
    if last is not None:
        document["next_url"] = with_query("/branches", {"after": last, "place": place})
    return document


def described(branch: Branch, heads: dict[str, int]) -> Document:
    parent_head = heads.get(branch.parent) if branch.parent is not None else None
    return {
        **branch.as_dict(),
        "commits": branch.commits if branch.parent is not None else None,
        "parent_commits": None if parent_head is None else parent_head - branch.base_commit_id,
        "url": branch_path(branch.name) if branch.parent is not None else "/branches",
    }


def _checked_place(text: str | None) -> str:
    """Where to go on a branch: a page of types or commits, never another site."""
    return text if text is not None and _PLACE.fullmatch(text) else "/types"


# --- a branch and its parent --------------------------------------------------------------------


@dataclass(frozen=True)
class BranchComparison:
    """A branch beside its parent, each as of its head when the page was made."""

    trunk: Storage
    branch: Branch
    theirs: StorageView  # the branch
    ours: StorageView  # its parent

    @property
    def base(self) -> int:
        return self.branch.base_commit_id

    @property
    def facts(self) -> Document:
        parent = self.branch.parent or MAIN
        heads = {parent: self.ours.head}
        name = self.branch.name
        return {
            **described(self.branch, heads),
            "commits": self.theirs.head - self.base,
            "commit_id": self.theirs.head,
            "diff_url": branch_path(name, "diff"),
            "merge_url": branch_path(name, "merge"),
            "view_url": with_query("/types", {"branch": name}),
        }

    def shown(self, label: str) -> ShownType:
        """A type of the branch, or of its parent alone."""
        try:
            return self.theirs.type(label)
        except NothingThere:
            return self.ours.type(label)

    def label(self, ref: TypeRef) -> str:
        return (self.theirs if ref in self.theirs.labels else self.ours).label(ref)

    def changed_types(self) -> list[TypeRef]:
        """That either side has touched since they parted."""
        branches = self.trunk.branches
        assert branches is not None
        return sorted(
            {
                ref
                for name in (self.branch.name, self.branch.parent or MAIN)
                for ref in branches.changed_types(branches.head(name), self.base)
            }
        )


@contextmanager
def compared(storage: Storage, name: str) -> Iterator[BranchComparison]:
    """A branch beside its parent; NothingThere for main, which has none."""
    trunk = storage.trunk or storage
    if name == MAIN:
        raise NothingThere(
            f"{MAIN} has no parent", "The others were forked from it: see /branches."
        )
    with ExitStack() as opened:
        theirs = opened.enter_context(trunk.on(name))
        branch = theirs.branch
        assert branch is not None
        ours = opened.enter_context(trunk.on(branch.parent))
        parent = ours.branch.incarnation if ours.branch is not None else ""
        fork = theirs.repository.objects
        assert fork is not None
        assert fork.fork is not None
        if parent != fork.fork.parent_incarnation:
            raise NothingThere(
                f"the branch {branch.parent} that {name} was forked from is gone",
                "Another of that name is there now: it was never its parent.",
            )
        yield BranchComparison(trunk, branch, theirs.view(), ours.view())


def branch(comparison: BranchComparison, before: int | None) -> Document:
    """A branch with its own commits, newest first."""
    view, base = comparison.theirs, comparison.base
    upto = view.head if before is None else min(before - 1, view.head)
    since = max(upto - commits.COMMITS, base)
    records = view.repository.commits_between(since, upto) if upto > base else []
    return {
        **comparison.facts,
        "own_commits": [commits.described(record, view) for record in reversed(records)],
        "older": since + 1 if since > base else None,
    }


# --- what differs -------------------------------------------------------------------------------


def diff(comparison: BranchComparison, only: str | None, after: Sequence[KeyName]) -> Document:
    """What the branch has otherwise than its parent, by type: the first rows of each, or of one
    type those after an identity."""
    refs = comparison.changed_types()
    names = {ref: comparison.label(ref) for ref in refs}
    if only is not None:
        wanted = comparison.shown(only).ref
        refs = [ref for ref in refs if ref == wanted]
    start: Identity | None = None
    if only is not None and after:
        start = comparison.shown(only).identity(after)
    diffs = [_type_diff(comparison, ref, names[ref], start) for ref in refs[:TYPES]]
    here = comparison.facts["diff_url"]
    return {
        **comparison.facts,
        "only": only,
        "parent_commit_id": comparison.ours.head,
        "diffs": [each for each in diffs if each["rows"] or each["schema"] or each["after"]],
        "other_types": [
            {"type": names[ref], "url": with_query(here, {"type": names[ref]})}
            for ref in refs[TYPES:]
        ],
    }


def _type_diff(
    comparison: BranchComparison, ref: TypeRef, label: str, after: Identity | None
) -> Document:
    ours, theirs = (
        view.shown(ref) if ref in view.histories else None
        for view in (comparison.ours, comparison.theirs)
    )
    was = ours.stage if ours is not None else None
    now = theirs.stage if theirs is not None else None
    document: Document = {
        "type": label,
        "kind": ref[0],
        "url": type_path(label),
        "schema": [],
        "rows": [],
        "after": None,
    }
    if theirs is None or now is None:
        gone = theirs is not None and (theirs.line.history.dropped_commit_id or 0) > comparison.base
        if was is not None:
            document["schema"] = ["ended on the branch" if gone else "not on the branch"]
        return document
    if ours is not None and was is not None:
        if was.spec.schema_sha256 != now.spec.schema_sha256:
            sentences = diff_versions(was.version, now.version).sentences()
            document["schema"] = list(sentences) or ["another schema version"]
            return document
        if was.number != now.number:
            who = "the branch" if now.since > comparison.base else "the parent"
            document["schema"] = [f"ended and made anew on {who}: its earlier rows are gone there"]
    elif now.since > comparison.base:
        document["schema"] = ["new on the branch"]
    else:
        document["schema"] = ["ended on the parent"]
    document["rows"], document["after"] = _rows(comparison, ours, theirs, after)
    return document


def _rows(
    comparison: BranchComparison, ours: ShownType | None, theirs: ShownType, after: Identity | None
) -> tuple[list[Document], str | None]:
    """Rows that differ, by identity, and after which the others come. What both sides have changed
    to the same is looked at and left out, so that a page may be short."""
    rows: list[Document] = []
    looked = 0
    while True:
        touched, last = _touched(comparison, ours, theirs, after)
        identities = sorted(touched)
        before = ours.rows_at(comparison.ours.head, identities) if ours is not None else {}
        there = theirs.rows_at(comparison.theirs.head, identities)
        for number, identity in enumerate(identities):
            row = _row(comparison, ours, theirs, before.get(identity), there.get(identity))
            if row is None:
                continue
            rows.append({**row, "changed_by": touched[identity]})
            more = last is not None or number + 1 < len(identities)
            if len(rows) == CHANGED and more:
                return rows, identity_path(identity)
        looked += len(identities)
        if last is None:
            return rows, None
        if looked >= _LOOKED_AT:
            return rows, identity_path(last)
        after = last


def _touched(
    comparison: BranchComparison, ours: ShownType | None, theirs: ShownType, after: Identity | None
) -> tuple[dict[Identity, str], Identity | None]:
    """The next identities that either side has changed since they parted, with who did; and up to
    where they are all, None if there are no more."""
    touched: dict[Identity, str] = {}
    ends: list[Identity] = []
    for who, side in (("branch", theirs), ("parent", ours)):
        if side is None:
            continue
        identities, more = side.changed_since(comparison.base, limit=_AT_ONCE, after=after)
        if more:
            ends.append(identities[-1])
        for identity in identities:
            touched[identity] = "both" if identity in touched else who
    last = min(ends, default=None)
    if last is not None:
        touched = {identity: who for identity, who in touched.items() if identity <= last}
    return touched, last


def _row(
    comparison: BranchComparison,
    ours: ShownType | None,
    theirs: ShownType,
    was: Row | None,
    now: Row | None,
) -> Document | None:
    """How the branch's row differs from the parent's; None if it does not."""
    shown = now or was
    if shown is None:
        return None
    old_stage = ours.stage if ours is not None and was is not None else None
    differing: list[Document] = []
    if now is not None:
        assert theirs.stage is not None
        differing = changes(theirs.stage, now, old_stage, was)
        if was is not None and not differing:
            return None
    identity = tuple(shown["identity"])
    on = comparison.branch.name if now is not None else comparison.branch.parent
    return {
        "identity": list(identity),
        "name": called(shown),
        "url": with_query(
            object_path(theirs.label, identity), {"branch": on if on != MAIN else None}
        ),
        "operation": "insert" if was is None else "update" if now is not None else "delete",
        "changes": differing,
    }


# --- what a merge would do ----------------------------------------------------------------------


def merge_preview(comparison: BranchComparison, policy: Policy) -> Document:
    """What merging the branch now would bring, and all that is in its way."""
    branches = comparison.trunk.branches
    assert branches is not None
    name = comparison.branch.name
    extent = branches.extent(name, most_commits=MERGED_COMMITS)
    document: Document = {
        **comparison.facts,
        "on_conflict": policy,
        "parent_commit_id": comparison.ours.head,
        "written": _written(comparison, extent),
        "too_large": _too_large(comparison, extent),
        "types": [],
        "conflicts": [],
        "conflicts_total": 0,
        "events": 0,
        "is_empty": False,
        "command": f"onto branch merge {name}"
        + (f" --on-conflict {policy}" if policy != "fail" else ""),
    }
    if document["too_large"] is not None:
        return document
    parent = comparison.ours.repository.objects
    assert parent is not None
    report = parent.branches.merge(name, MergeTerms({None: policy}), dry_run=True)
    return document | {
        "types": [_merged_type(comparison, merged.as_dict()) for merged in report.types],
        "conflicts": [_conflict(comparison, each) for each in report.conflicts[:CONFLICTS]],
        "conflicts_total": len(report.conflicts),
        "events": report.events,
        "is_empty": report.empty,
    }


def _written(comparison: BranchComparison, extent: BranchExtent | None) -> list[Document] | None:
    if extent is None:
        return None
    return [
        {"type": comparison.label(ref), "kind": ref[0], "rows": rows}
        for ref, rows in sorted(extent.rows.items())
    ]


def _too_large(comparison: BranchComparison, extent: BranchExtent | None) -> str | None:
    """Why the merge is not tried out on a page."""
    if extent is None:
        return f"{counted(comparison.theirs.head - comparison.base, 'commit')} of its own"
    rows = sum(extent.rows.values())
    if rows > MERGED_ROWS:
        return f"{counted(rows, 'row')} written"
    if extent.bytes > MERGED_BYTES:
        return f"{extent.bytes / MIB:,.0f} MiB written"
    return None


def _merged_type(comparison: BranchComparison, merged: Document) -> Document:
    label = comparison.theirs.label((merged["kind"], merged["type_name"]))
    url = with_query(branch_path(comparison.branch.name, "diff"), {"type": label})
    return {**merged, "type": label, "diff_url": url}


def _conflict(comparison: BranchComparison, conflict: Conflict) -> Document:
    label = comparison.theirs.label((conflict.type_kind, conflict.type_name))
    sides = {"base": conflict.base, "ours": conflict.ours, "theirs": conflict.theirs}
    url = None
    if conflict.identity:
        path = object_path(label, conflict.identity)
        url = with_query(path, {"branch": comparison.branch.name})
    return {
        "conflict": conflict.kind,
        "type": label,
        "identity": list(conflict.identity),
        "url": url,
        "message": conflict.message,
        "fields": [
            {
                "field": name,
                **{
                    side: plain(row[name]) if row is not None and name in row else None
                    for side, row in sides.items()
                },
            }
            for name in conflict.fields
        ],
    }

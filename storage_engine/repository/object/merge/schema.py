"""Schemas of one type on both sides of a merge: what rides along, and what cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage_engine.commitlog.records import Manifest, PastVersion, TypeHead, TypeRef
from storage_engine.errors import MissingUpgraderError
from storage_engine.repository.object.merge.report import Conflict
from storage_engine.repository.object.merge.sides import MergeSide


@dataclass(frozen=True)
class SchemaChange:
    """What the source made of a type's schema: nothing, new versions, or its end. Registrations
    and activations take the id of the commit that brings them."""

    ref: TypeRef
    theirs: TypeHead
    is_new: bool = False  # the target has no type of the name
    registered: Sequence[Mapping[str, Any]] = ()
    dropped: Mapping[str, Any] | None = None
    target_ahead: bool = False  # the target has a later version, which rows are brought up to
    anew: bool = False  # the source ended the target's type and made another of the name

    @property
    def migrates(self) -> bool:
        """Whether all rows of the target are brought into another version."""
        return bool(self.registered) and not self.is_new

    @property
    def what(self) -> str:
        if self.dropped:
            return "dropped"
        if not self.registered:
            return ""
        return "registered" if self.is_new else "migrated"

    def head_after(self, before: TypeHead | None, commit_id: int, *, written: bool) -> TypeHead:
        """The type's head on the target; commit and path are the publisher's where rows are
        written."""
        if before is None or self.is_new:
            head = TypeHead(commit_id, "", empty=not written)
            past: tuple[PastVersion, ...] = before.succeeded(commit_id) if before else ()
        else:
            head, past = before, before.past_versions
        if self.dropped:
            return replace(
                head, dropped_commit_id=commit_id, renamed_to=self.dropped.get("renamed_to")
            )
        if not self.registered:
            return replace(head, manifest_sha256="", empty=False) if written else head
        numbers = [record["schema_version_id"] for record in self.registered]
        if before is not None and not self.is_new:
            past = before.succeeded(commit_id)
        past += tuple(PastVersion(number, commit_id, commit_id) for number in numbers[:-1])
        return replace(
            head,
            schema_version_id=numbers[-1],
            schema_sha256=self.theirs.schema_sha256,
            activation_commit_id=commit_id,
            layout_sha256=self.theirs.layout_sha256,
            manifest_sha256="" if written else head.manifest_sha256,
            empty=head.empty and not written,
            dropped_commit_id=None,
            renamed_to=None,
            first_version_id=self.theirs.first_version_id,
            past_versions=past,
        )


def schema_change(
    ours: MergeSide,
    theirs: MergeSide,
    own: Sequence[Manifest],
    *,
    changed_by_others: Callable[[], bool],
) -> SchemaChange | Conflict:
    """`own` are the commits that are merged; `changed_by_others`: whether the target has changed
    the type since the two agreed, and not by what the source has brought. One side may be ahead of
    the other by any number of versions; where each has versions that the other has not, nobody can
    say what rows should become."""
    ref, our, their = theirs.ref, ours.top, theirs.top
    assert their is not None, "a commit of the source touched it"
    registered = [
        {k: v for k, v in record.items() if k != "activation_commit_id"}
        for manifest in own
        for record in manifest.schema.get("registered", ())
        if (record["kind"], record["type_name"]) == ref
    ]
    drops = [
        drop
        for manifest in own
        for drop in manifest.schema.get("dropped", ())
        if (drop["kind"], drop["type_name"]) == ref
    ]

    def conflict(why: str) -> Conflict:
        return Conflict("schema", ref[0], ref[1], f"{ref[1]}: {why}")

    if our is None:
        if their.is_dropped:
            return SchemaChange(ref, their)  # it came and went
        return SchemaChange(ref, their, is_new=True, registered=registered)
    renamed = our.renamed_to != their.renamed_to
    if our.is_dropped and their.is_dropped and drops and renamed and changed_by_others():
        # Its rows would be there under two names, or come back under another one.
        return conflict(f"{_ended(ours.branch, our)}, and {_ended(theirs.branch, their)}")
    if _version(our) == _version(their) or (our.is_dropped and their.is_dropped):
        return SchemaChange(ref, their)
    if their.is_dropped:
        if changed_by_others():
            return conflict(f"{theirs.branch!r} dropped it, and {ours.branch!r} changed it since")
        # A branch that is told of a purge keeps the rows that it shares: it only ends the type.
        ended = {k: v for k, v in drops[-1].items() if k != "purge"}
        return SchemaChange(ref, their, dropped=ended)
    anew = their.first_version_id != our.first_version_id and not changed_by_others()
    if our.is_dropped and not anew:
        return conflict(f"{ours.branch!r} dropped it, and {theirs.branch!r} changed it since")
    if ours.has_been(theirs):
        return SchemaChange(ref, their, target_ahead=True)
    if not (anew or theirs.has_been(ours)):
        return conflict(
            f"{theirs.branch!r} migrated it to version {their.schema_version_id}, and "
            f"{ours.branch!r} to another version {our.schema_version_id}"
        )
    newer = [r for r in registered if anew or r["schema_version_id"] > our.schema_version_id]
    return SchemaChange(ref, their, registered=newer, anew=anew)


def _ended(branch: str, top: TypeHead) -> str:
    how = f"renamed it to {top.renamed_to}" if top.renamed_to is not None else "dropped it"
    return f"{branch!r} {how}"


def _version(top: TypeHead) -> tuple[object, ...]:
    """Also which type it is: one that was ended and made anew may look the same."""
    return top.schema_sha256, top.schema_version_id, top.first_version_id, top.is_dropped


def missing_upgrader(ours: MergeSide, theirs: MergeSide, error: MissingUpgraderError) -> Conflict:
    """Rows of one side cannot be brought along to the version of the other."""
    kind, name = theirs.ref
    versions = ", ".join(
        f"{side.branch!r} has version {side.top.schema_version_id}"
        for side in (ours, theirs)
        if side.top is not None
    )
    missing = ", ".join(f"{of} from version {version}" for of, version in error.missing)
    why = f" ({'; '.join(error.differences)})" if error.differences else ""
    return Conflict(
        "schema",
        kind,
        name,
        f"{name}: {versions}, and there is no upgrader of {missing}{why} to bring rows along: "
        "give it (upgraders=..., --upgraders MODULE)",
    )

"""Schemas of one type on both sides of a merge: what rides along, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage_engine.commitlog.records import Manifest, PastVersion, TypeHead, TypeRef
from storage_engine.repository.object.merge.report import Conflict


@dataclass(frozen=True)
class SchemaChange:
    """What the source made of a type's schema: nothing, new versions, or its end. Registrations
    and activations take the id of the commit that brings them."""

    ref: TypeRef
    theirs: TypeHead
    is_new: bool = False  # the target has no type of the name
    registered: Sequence[Mapping[str, Any]] = ()
    dropped: Mapping[str, Any] | None = None

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
    ref: TypeRef,
    ours: TypeHead | None,
    theirs: TypeHead | None,
    own: Sequence[Manifest],
    *,
    target_moved: bool,
    source_branch: str,
    target_branch: str,
) -> SchemaChange | Conflict:
    """`ours` and `theirs` are the type's heads on both sides, `own` the commits that are merged;
    `target_moved`: the target has changed the type since the two agreed."""
    assert theirs is not None, "a commit of the source touched it"
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
        message = f"{ref[1]}: {why}"
        return Conflict("schema", ref[0], ref[1], message)

    if ours is None:
        if theirs.is_dropped:
            return SchemaChange(ref, theirs)  # it came and went
        return SchemaChange(ref, theirs, is_new=True, registered=registered)
    same = (ours.schema_sha256, ours.schema_version_id, ours.is_dropped) == (
        theirs.schema_sha256,
        theirs.schema_version_id,
        theirs.is_dropped,
    )
    if same:
        return SchemaChange(ref, theirs)
    if theirs.is_dropped:
        if target_moved:
            return conflict(f"{source_branch!r} dropped it, and {target_branch!r} changed it since")
        return SchemaChange(ref, theirs, dropped=dict(drops[-1]))
    if not registered:
        if ours.is_dropped:
            return conflict(f"{target_branch!r} dropped it, and {source_branch!r} changed its rows")
        return conflict(
            f"{target_branch!r} migrated it to version {ours.schema_version_id}, and "
            f"{source_branch!r} changed rows of version {theirs.schema_version_id}"
        )
    if target_moved:
        return conflict(
            f"{source_branch!r} migrated it to version {theirs.schema_version_id}, and "
            f"{target_branch!r} has changed it since (version {ours.schema_version_id})"
        )
    return SchemaChange(ref, theirs, registered=registered)

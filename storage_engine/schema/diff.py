"""What changed between two schemas of a type, field by field and inside nested values.

A change is additive when every stored row becomes a row of the new class by itself: a field is
added that has a default or may be null, a type is widened, a name changes by `renamed_from`.
Whatever else changes needs an upgrader; a change of identity cannot be migrated at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from storage_engine.errors import SchemaOutdatedError
from storage_engine.model.field_types import describe, has_encoded_leaves, is_primitive, unordered
from storage_engine.model.spec import FIRST_FIELD_ID, MISSING, FieldSpec, TypeSpec

Change = Literal["added", "removed", "renamed", "retyped", "required", "default", "index", "end"]

_ARTICLE = {"entity": "an entity", "relation": "a relation"}
_TYPE_FACTS = {
    "kind": "kind",
    "name": "name",
    "primary_key": "primary key",
    "instance_key": "instance key",
    "left": "left endpoint",
    "right": "right endpoint",
}


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One change. `path` is the field, with the way into it where a nested type changed; empty for
    what concerns the type as a whole."""

    path: str
    change: Change
    before: str | None
    after: str | None
    additive: bool
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "change": self.change,
            "before": self.before,
            "after": self.after,
            "additive": self.additive,
        }


@dataclass(frozen=True, slots=True)
class SchemaDiff:
    """How a declared type differs from what is stored of it.

    `from_version` is None when nothing is stored (any more). `refusal` says why it cannot be
    migrated as it is declared; None when it can, be it with an upgrader.
    """

    kind: str
    type_name: str
    changes: tuple[FieldChange, ...]
    from_version: int | None = None
    to_version: int = 1
    renamed_from: str | None = None
    refusal: str | None = None

    @property
    def additive(self) -> bool:
        return self.refusal is None and all(change.additive for change in self.changes)

    def sentences(self) -> list[str]:
        return [change.sentence for change in self.changes]

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "type_name": self.type_name,
            "from_version": self.from_version,
            "to_version": self.to_version,
            "renamed_from": self.renamed_from,
            "additive": self.additive,
            "refusal": self.refusal,
            "changes": [change.as_dict() for change in self.changes],
        }


def diff_types(
    stored: TypeSpec, declared: TypeSpec, *, renames: Mapping[str, str] | None = None
) -> SchemaDiff:
    """What changed from one to the other; nothing where only the order of fields did.

    `renames`: entity types that are renamed, old name -> new name; a relation's ends follow.
    """
    whole = list(_type_changes(stored, declared, renames or {}))
    before = {f.name: f for f in stored.fields}
    sources = source_fields(stored, declared)
    taken = set(sources.values())
    changes = [
        FieldChange(name, "removed", describe(f.type_spec), None, False, f"field {name!r} removed")
        for name, f in before.items()
        if name not in taken
    ]
    for field in declared.fields:
        if field.name in sources:
            changes += _field_changes(before[sources[field.name]], field)
        else:
            changes.append(_added(field))
    return SchemaDiff(
        declared.kind,
        declared.name,
        (*whole, *changes),
        renamed_from=stored.name if stored.name != declared.name else None,
        refusal=_refusal(declared, [c for c in whole if not c.additive]),
    )


def source_fields(stored: TypeSpec, declared: TypeSpec) -> dict[str, str]:
    """For each declared field that has one, the stored field that its values come from.

    The marker of a rename counts while the old name is stored and the new one is not, so it may
    stay in the class after the migration. One whose old name is still declared says two things at
    once (`contradictions`).
    """
    before = {f.name for f in stored.fields}
    after = {f.name for f in declared.fields}
    sources = {}
    for field in declared.fields:
        old = field.renamed_from
        if field.name in before:
            sources[field.name] = field.name
        elif old is not None and old in before and old not in after:
            sources[field.name] = old
    return sources


def contradictions(stored: TypeSpec, declared: TypeSpec) -> list[str]:
    """Of fields that would take over the values of a field which stays: an upgrader can tell what
    is meant, a rename cannot."""
    before = {f.name for f in stored.fields}
    after = {f.name for f in declared.fields}
    return [
        f"field {f.name!r} is marked as renamed from {f.renamed_from!r}, which is stored and still "
        f"declared. To rename it, leave {f.renamed_from!r} out (it can come back as a new field "
        f"with the next migration); to add {f.name!r} as a new field, take renamed_from away; to "
        "fill it from the other, write an upgrader"
        for f in declared.fields
        if f.name not in before and f.renamed_from in before & after
    ]


def evolved(stored: TypeSpec, declared: TypeSpec, *, highest_id: int = 0) -> TypeSpec:
    """The declared type with the ids and order of the stored one, for the files that will hold it.

    A renamed field keeps its id. Ids are never used again: `highest_id` is of all versions so far.
    """
    sources = source_fields(stored, declared)
    by_source = {old: declared.field(new) for new, old in sources.items()}
    kept = [
        by_source[f.name].aligned({"id": f.field_id, "type_spec": f.type_spec})
        for f in stored.fields
        if f.name in by_source
    ]
    highest = max([highest_id, FIRST_FIELD_ID - 1, *(f.field_id for f in stored.fields)])
    new = [f for f in declared.fields if f.name not in sources]
    added = [replace(f, field_id=highest + n) for n, f in enumerate(new, start=1)]
    return replace(declared, fields=(*kept, *added))


def outdated(declared: TypeSpec, version: int, stored: TypeSpec | None) -> SchemaOutdatedError:
    """What readers and writers say to a class that differs from what is stored."""
    differences = diff_types(stored, declared).sentences() if stored is not None else []
    listed = "; ".join(differences) or "its stored schema differs"
    return SchemaOutdatedError(
        f"class {declared.name} differs from schema version {version} in the storage: {listed}. "
        "See what a migration would do (`onto migrate`, `session.migrate()`), or declare the class "
        "as it was stored",
        type=declared.name,
        stored_version=version,
        differences=differences,
    )


def not_renamed_yet(declared: TypeSpec, version: int) -> SchemaOutdatedError:
    """What readers and writers say to a class with a new name for a type that still has the old:
    as another type it would begin without the rows."""
    old = declared.renamed_from
    return SchemaOutdatedError(
        f"class {declared.name} is the new name of {old}, which the storage still has (schema "
        f"version {version}). Migrate first: `onto migrate`, `session.migrate()` show what that "
        f"would do. If {declared.name} shall be a type of its own, take renamed_from away",
        type=declared.name,
        stored_version=version,
        differences=[f"name was {old}, is {declared.name}"],
    )


# --- one type -----------------------------------------------------------------------------------


def _type_changes(
    stored: TypeSpec, declared: TypeSpec, renames: Mapping[str, str]
) -> Iterator[FieldChange]:
    before, after = stored.schema_dict(), declared.schema_dict()
    for key, label in _TYPE_FACTS.items():
        was, now = before[key], after[key]
        if was == now:
            continue
        sentence = f"{label} was {was}, is {now}"
        if key == "name":
            yield FieldChange("", "renamed", was, now, True, sentence)
        elif key in ("left", "right"):
            follows = was is not None and renames.get(was) == now
            yield FieldChange("", "end", was, now, follows, sentence)
        else:
            renamed = key.endswith("_key") and _is_renamed(declared, was, now)
            yield FieldChange("", "renamed" if renamed else "retyped", was, now, renamed, sentence)


def _is_renamed(declared: TypeSpec, was: str | None, now: str | None) -> bool:
    """Whether a key field has only another name."""
    if was is None or now is None:
        return False
    if declared.instance_key == now:
        return True  # identity only: its values are in a column of their own
    return any(f.name == now and f.renamed_from == was for f in declared.fields)


def _refusal(declared: TypeSpec, changes: Iterable[FieldChange]) -> str | None:
    sentences = [change.sentence for change in changes]
    if not sentences:
        return None
    return (
        f"{'; '.join(sentences)}: what identifies {_ARTICLE[declared.kind]} cannot change. Store "
        "the new class under another name, and what was stored stays"
    )


def _added(field: FieldSpec) -> FieldChange:
    shown = describe(field.type_spec)
    fills = field.default is not MISSING or field.default_factory is not None or field.nullable
    return FieldChange(
        field.name, "added", None, shown, fills, f"field {field.name!r} added ({shown})"
    )


def _field_changes(before: FieldSpec, now: FieldSpec) -> Iterator[FieldChange]:
    name = now.name
    subject = f"field {name!r}"
    if before.name != name:
        yield FieldChange(
            name, "renamed", before.name, name, True, f"field {before.name!r} renamed to {name!r}"
        )
    if unordered(before.type_spec) != unordered(now.type_spec):
        additive = widens(before.type_spec, now.type_spec)
        inner = list(_nested(name, before.type_spec, now.type_spec))
        old, new = describe(before.type_spec), describe(now.type_spec)
        what = f"was {old}, is {new}" if old != new else f"of type {new} changed inside"
        yield FieldChange(name, "retyped", old, new, additive, f"{subject} {what}")
        yield from (replace(change, additive=additive or change.additive) for change in inner)
    if before.required != now.required:
        was, is_ = _required(before), _required(now)
        yield FieldChange(name, "required", was, is_, True, f"{subject} was {was}, is {is_}")
    if _default(before) != _default(now):  # as texts: 1, 1.0 and True are different defaults
        had, has = _default(before), _default(now)
        yield FieldChange(name, "default", had, has, True, f"{subject} had {had}, has {has}")
    if before.index != now.index:
        what = "is now indexed" if now.index else "is no longer indexed"
        yield FieldChange(
            name, "index", str(before.index), str(now.index), True, f"{subject} {what}"
        )


def _required(field: FieldSpec) -> str:
    return "required" if field.required else "optional"


def _default(field: FieldSpec) -> str:
    return "no default" if field.default is MISSING else f"default {field.default!r}"


# --- inside a type ------------------------------------------------------------------------------


def _nested(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[FieldChange]:
    """Where two descriptions of the same shape differ inside."""
    if unordered(before) == unordered(now):
        return
    match before["kind"], now["kind"]:
        case "list", "list":
            yield from _inside(f"{path}[]", before["item"], now["item"])
        case "dict", "dict":
            yield from _inside(f"{path}.*", before["value"], now["value"])
        case "typed_dict", "typed_dict":
            yield from _keys(path, before["fields"], now["fields"])
        case "union", "union":
            yield from _members(path, before["members"], now["members"])


def _inside(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[FieldChange]:
    deeper = list(_nested(path, before, now))
    if deeper:
        yield from deeper
    elif unordered(before) != unordered(now):
        old, new = describe(before), describe(now)
        additive = widens(before, now)
        yield FieldChange(path, "retyped", old, new, additive, f"{path} was {old}, is {new}")


def _keys(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[FieldChange]:
    for key, old in before.items():
        place = f"{path}.{key}"
        if key not in now:
            shown = describe(old["type"])
            yield FieldChange(place, "removed", shown, None, False, f"{place} removed")
            continue
        yield from _inside(place, old["type"], now[key]["type"])
        if old["required"] != now[key]["required"]:
            was, is_ = ("required" if each["required"] else "optional" for each in (old, now[key]))
            additive = bool(old["required"])
            yield FieldChange(place, "required", was, is_, additive, f"{place} was {was}, is {is_}")
    for key, new in now.items():
        if key not in before:
            place, shown = f"{path}.{key}", describe(new["type"])
            yield FieldChange(
                place, "added", None, shown, not new["required"], f"{place} added ({shown})"
            )


def _members(path: str, before: list[Any], now: list[Any]) -> Iterator[FieldChange]:
    """Of unions: the member that changed inside, where exactly one of each has another form."""
    gone = [m for m in before if unordered(m) not in [unordered(n) for n in now]]
    new = [m for m in now if unordered(m) not in [unordered(b) for b in before]]
    if len(gone) == len(new) == 1:
        yield from _nested(path, gone[0], new[0])


def widens(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    around: frozenset[tuple[str, str]] = frozenset(),
) -> bool:
    """Whether every value of the one type is a value of the other, also once it is stored.

    `around`: names of the TypedDicts that enclose the two, which references are to.
    """
    if unordered(before) == unordered(now):
        return True  # a reference is to the type around it, which is being compared
    if before["kind"] == "union":
        return all(widens(member, now, around) for member in before["members"])
    if now["kind"] == "union":
        return any(widens(before, member, around) for member in now["members"])
    if is_primitive(now) and now["name"] == "Any":
        return not has_encoded_leaves(before)  # their strings would come back as texts
    match before["kind"], now["kind"]:
        case "primitive", "primitive":
            return (before["name"], now["name"]) == ("int", "float")
        case "primitive", "decimal":
            return before["name"] == "int" and _whole_digits(now) >= _INT64_DIGITS
        case "decimal", "decimal":
            return now["scale"] >= before["scale"] and _whole_digits(now) >= _whole_digits(before)
        case "literal", "literal":
            return set(before["values"]) <= set(now["values"])
        case "literal", "primitive":
            return {type(value).__name__ for value in before["values"]} == {now["name"]}
        case "list", "list":
            return widens(before["item"], now["item"], around)
        case "dict", "dict":
            return widens(before["value"], now["value"], around)
        case "typed_dict", "typed_dict":
            inside = around | {(before["name"], now["name"])}
            return _widens_keys(before["fields"], now["fields"], inside)
        case "ref", "ref":
            return (before["name"], now["name"]) in around
    return False


_INT64_DIGITS = 19


def _whole_digits(decimal: Mapping[str, Any]) -> int:
    return int(decimal["precision"]) - int(decimal["scale"])


def _widens_keys(
    before: Mapping[str, Any], now: Mapping[str, Any], around: frozenset[tuple[str, str]]
) -> bool:
    return all(
        key in now
        and (field["required"] or not now[key]["required"])
        and widens(field["type"], now[key]["type"], around)
        for key, field in before.items()
    ) and not any(field["required"] for key, field in now.items() if key not in before)

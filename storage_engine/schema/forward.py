"""Engine v1 reads the rows of all schema versions together, in the current one.

Rows of older versions are brought forward while they are read: fields are followed by their ids,
through renames, and what is new has its stored default. That works where the change is additive;
whoever comes upon rows that would need an upgrader is told where else to read them.
"""

from __future__ import annotations

from dataclasses import replace

from storage_engine.errors import SchemaOutdatedError
from storage_engine.model.spec import MISSING, TypeSpec
from storage_engine.schema.diff import diff_types, widens
from storage_engine.schema.rewrite import Rewrite, rewrite


def refusal(before: TypeSpec, now: TypeSpec) -> str | None:
    """Why rows do not become rows of the new version by themselves; None when they do."""
    stored = {f.field_id: f for f in before.fields}
    gone = [f.name for f in before.fields if f.field_id not in {g.field_id for g in now.fields}]
    if gone:
        return f"field {gone[0]!r} was removed"
    for field in now.fields:
        source = stored.get(field.field_id)
        if source is None:
            if field.default is MISSING and not field.nullable:
                return f"field {field.name!r} was added without a stored default"
        elif not widens(source.type_spec, field.type_spec):
            return f"field {field.name!r} changed its type"
    return None


def forward(before: TypeSpec, now: TypeSpec) -> Rewrite:
    """From rows of an older version to rows of the current one, which `refusal` has no word on."""
    names = {f.field_id: f.name for f in now.fields}
    renamed = {f.name: names[f.field_id] for f in before.fields}
    current = replace(before, fields=tuple(replace(f, name=renamed[f.name]) for f in before.fields))
    change = rewrite(current, now, ())
    return lambda rows: change(rows.rename_columns([renamed.get(n, n) for n in rows.column_names]))


def not_forward(spec: TypeSpec, before: TypeSpec, version: int, why: str) -> SchemaOutdatedError:
    """What a reader is told who comes upon rows of a version that an upgrader led on from."""
    return SchemaOutdatedError(
        f"{spec.name} has rows of schema version {version} here, which do not become rows of "
        f"the current one by themselves ({why}). Read them through the upgraders with "
        f".upgraded(), or as they were stored with .raw({spec.name!r}, "
        f"schema_version={version}); reads of the latest state have none of them",
        type=spec.name,
        stored_version=version,
        differences=diff_types(before, spec).sentences(),
    )

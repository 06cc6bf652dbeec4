"""Rows of one type, three ways: what both sides knew, what is there now, what comes.

A row is taken where the target still has what the source knew of it, and left where it says
nothing that the target does not know. What the two knew of each other is the parent's row as of
the base or the last update, or the branch's own row as of its last merge, whichever came later.
(The parent's row as of that merge is not: it may have come from others, and the branch has never
seen it.) Of a merge and an update at the same time each counts: a row says nothing if it is as both
have it, and is in conflict if it is as one of them: it may be old, or have been taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import ConfigurationError, ValidationError
from storage_engine.model.arrow import row_schema, rows_to_table, table_to_rows
from storage_engine.model.spec import TypeSpec
from storage_engine.model.validation import explain, validator
from storage_engine.query.dialects import quoted
from storage_engine.repository.duck import Duck
from storage_engine.repository.object.merge.report import Conflict, Row

Decide = Callable[[Row | None, Row | None, Row], Row]
Policy = Literal["fail", "ours", "theirs", "fields"] | Decide
POLICIES = ("fail", "ours", "theirs", "fields")
_TAKE, _CONFLICT = 1, 2


@dataclass(frozen=True, slots=True)
class MergedRows:
    """The rows to write (in the row schema, by identity), and what stays in conflict."""

    rows: pa.Table
    inserted: int
    resolved: int = 0
    conflicts: tuple[Conflict, ...] = ()

    @property
    def updated(self) -> int:
        return int(self.rows.num_rows) - self.inserted


def merge_rows(
    duck: Duck,
    spec: TypeSpec,
    policy: Policy,
    *,
    theirs: pa.Table,
    ours: pa.Table,
    shared: Sequence[pa.Table],
) -> MergedRows:
    """`theirs` has one row for each identity that comes into question; `ours`, and the states that
    both sides knew (`shared`), have those of the same identities, where there are any."""
    verdicts = _verdicts(duck, spec, theirs, ours, shared)
    names = row_schema(spec).names
    taken = verdicts.filter(pc.equal(verdicts.column("verdict"), _TAKE))
    rows = taken.select(names).cast(row_schema(spec))
    inserted = int(pc.sum(pc.cast(taken.column("is_new"), pa.int64())).as_py() or 0)
    disputed = verdicts.filter(pc.equal(verdicts.column("verdict"), _CONFLICT))
    if not disputed.num_rows:
        return MergedRows(rows, inserted)
    keys = disputed.select(list(spec.identity))
    sides = [_by_identity(spec, table, keys) for table in (ours, theirs, *shared)]
    resolved: list[dict[str, Any]] = []
    conflicts: list[Conflict] = []
    count = new = 0
    for identity in identities(spec, keys):
        our, their = sides[0].get(identity), sides[1][identity]
        base = next((side[identity] for side in reversed(sides[2:]) if identity in side), None)
        decided, conflict = _decide(spec, policy, identity, base, our, their)
        if conflict is not None:
            conflicts.append(conflict)
            continue
        count += 1
        if decided is not None and (our is None or _differing(spec, decided, our)):
            resolved.append(decided.row)
            new += our is None
    if resolved:
        rows = pa.concat_tables([rows, rows_to_table(spec, resolved)])
        rows = rows.sort_by([(name, "ascending") for name in spec.identity])
    return MergedRows(rows, inserted + new, count, tuple(conflicts))


def _verdicts(
    duck: Duck, spec: TypeSpec, theirs: pa.Table, ours: pa.Table, shared: Sequence[pa.Table]
) -> pa.Table:
    """Each row of `theirs` that is taken or in conflict."""
    keys = ", ".join(quoted(name) for name in spec.identity)
    joins = [f"LEFT JOIN ours o USING ({keys})"]
    joins += [f"LEFT JOIN known_{n} k{n} USING ({keys})" for n in range(len(shared))]
    as_agreed = [_same(spec, "t", f"k{n}") for n in range(len(shared))] or ["false"]
    unmoved = [
        f"(o.commit_id IS NULL AND k{n}.commit_id IS NULL OR {_same(spec, 'o', f'k{n}')})"
        for n in range(len(shared))
    ] or ["o.commit_id IS NULL"]
    columns = ", ".join(f"t.{quoted(name)}" for name in row_schema(spec).names)
    sql = f"""
        SELECT {columns}, o.commit_id IS NULL AS is_new,
            CASE WHEN ({" OR ".join(unmoved)}) AND NOT ({" OR ".join(as_agreed)})
                THEN {_TAKE} ELSE {_CONFLICT} END AS verdict
        FROM theirs t {" ".join(joins)}
        WHERE NOT ({_same(spec, "t", "o")} OR {" AND ".join(as_agreed)})
        ORDER BY {keys}
    """
    with duck.cursor() as cursor, duck.errors():
        cursor.register("theirs", theirs)
        cursor.register("ours", ours)
        for number, table in enumerate(shared):
            cursor.register(f"known_{number}", table)
        return duck.run(cursor, lambda: cursor.execute(sql).to_arrow_table())


def _same(spec: TypeSpec, a: str, b: str) -> str:
    """Whether both are there and say the same."""
    fields = [
        f"{a}.{quoted(f.name)} IS NOT DISTINCT FROM {b}.{quoted(f.name)}" for f in spec.fields
    ]
    there = f"{a}.commit_id IS NOT NULL AND {b}.commit_id IS NOT NULL"
    return f"({' AND '.join([there, *fields])})"


@dataclass(frozen=True, slots=True)
class _Version:
    """A row for people, and as it is stored. The latter is what is compared: in JSON 1, 1.0 and
    true are three values, which Python takes for one."""

    row: dict[str, Any]
    stored: Mapping[str, Any]


def _versions(spec: TypeSpec, table: pa.Table) -> list[_Version]:
    pairs = zip(table_to_rows(spec, table), table.to_pylist(), strict=True)
    return [_Version(row, stored) for row, stored in pairs]


def _by_identity(
    spec: TypeSpec, table: pa.Table, keys: pa.Table
) -> dict[tuple[str, ...], _Version]:
    wanted = {*identities(spec, keys)}
    places = [n for n, identity in enumerate(identities(spec, table)) if identity in wanted]
    chosen = table.take(pa.array(places, pa.int64()))
    return dict(zip(identities(spec, chosen), _versions(spec, chosen), strict=True))


def _differing(spec: TypeSpec, a: _Version | None, b: _Version | None) -> list[str]:
    """The fields in which two versions are not the same; all of them where one is not there."""
    if a is None or b is None:
        return [f.name for f in spec.fields]
    return [f.name for f in spec.fields if not _alike(a.stored[f.name], b.stored[f.name])]


def _alike(a: Any, b: Any) -> bool:
    return bool(a == b) or (_is_nan(a) and _is_nan(b))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and isnan(value)


def identities(spec: TypeSpec, table: pa.Table) -> list[tuple[str, ...]]:
    columns = [table.column(name).to_pylist() for name in spec.identity]
    return list(zip(*columns, strict=True))


def _decide(
    spec: TypeSpec,
    policy: Policy,
    identity: tuple[str, ...],
    base: _Version | None,
    ours: _Version | None,
    theirs: _Version,
) -> tuple[_Version | None, Conflict | None]:
    """The row that counts, or the conflict that stays."""
    if policy == "ours":
        return ours, None
    if policy == "theirs":
        return theirs, None
    if policy == "fields":
        combined, contested = _combined(spec, base, ours, theirs)
        if not contested:
            return combined, None
        return None, _conflict(spec, identity, base, ours, theirs, contested)
    if callable(policy):
        # What it is given is its own to change.
        given = [deepcopy(side.row) if side is not None else None for side in (base, ours, theirs)]
        made = policy(*given)  # type: ignore[arg-type]
        return _checked(spec, identity, made, theirs.row), None
    return None, _conflict(spec, identity, base, ours, theirs, _differing(spec, ours, theirs))


def _combined(
    spec: TypeSpec, base: _Version | None, ours: _Version | None, theirs: _Version
) -> tuple[_Version, list[str]]:
    """Each field as the side has it that changed it; and those that both changed."""
    if ours is None:
        return theirs, []
    by_us, by_them = (_differing(spec, base, side) for side in (ours, theirs))
    apart = _differing(spec, ours, theirs)
    kept = [name for name in apart if name not in by_them]
    made = (
        {**version, **{name: own[name] for name in kept}}
        for version, own in ((theirs.row, ours.row), (theirs.stored, ours.stored))
    )
    return _Version(*made), [name for name in apart if name in by_us and name in by_them]


def _checked(
    spec: TypeSpec, identity: tuple[str, ...], made: Any, theirs: Mapping[str, Any]
) -> _Version:
    """What a function made of a conflict, as a row of the type."""
    if not isinstance(made, Mapping):
        raise ConfigurationError(
            f"on_conflict: the function returned {made!r} for {shown_identity(spec, identity)}; it "
            "returns a row, as it was given them"
        )
    names = [f.name for f in spec.fields]
    unknown = sorted(set(made) - set(theirs))
    missing = [name for name in names if name not in made]
    if unknown or missing:
        raise ValidationError(
            f"on_conflict: the row for {shown_identity(spec, identity)} has "
            + " and ".join(
                [f"no field {name!r}" for name in missing]
                + [f"a field {name!r} that the type has not" for name in unknown]
            ),
            type=spec.name,
        )
    row = {**theirs, **made}
    for field in spec.fields:
        if row[field.name] is None and field.nullable:
            continue
        try:
            row[field.name] = validator(field.type_spec).validate_python(row[field.name])
        except PydanticError as error:
            shown = identity[0] if spec.kind == "entity" else identity
            raise explain(
                error, type_name=spec.name, identity=shown, arguments=(), within=(field.name,)
            ) from None
    table = rows_to_table(spec, [row])
    if identities(spec, table) != [identity]:
        raise ValidationError(
            f"on_conflict: the row for {shown_identity(spec, identity)} has another identity",
            type=spec.name,
        )
    return _versions(spec, table)[0]


def _conflict(
    spec: TypeSpec,
    identity: tuple[str, ...],
    base: _Version | None,
    ours: _Version | None,
    theirs: _Version,
    fields: Sequence[str],
) -> Conflict:
    inserted = base is None
    what = "was created on both sides" if inserted else "was changed on both sides"
    return Conflict(
        "divergent_insert" if inserted else "divergent_update",
        spec.kind,
        spec.name,
        f"{shown_identity(spec, identity)} {what} ({', '.join(fields)})",
        identity,
        base.row if base is not None else None,
        ours.row if ours is not None else None,
        theirs.row,
        tuple(fields),
    )


def shown_identity(spec: TypeSpec, identity: tuple[str, ...]) -> str:
    shown = identity[0] if len(identity) == 1 else tuple(part for part in identity if part)
    return f"{spec.name} {shown!r}"

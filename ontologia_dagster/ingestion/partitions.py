"""Partitions of a type: Dagster's definition of them, the condition that selects their rows from
a source, and what the storage has of each.

A row belongs to the partition that its own field says, in the source and in the storage alike, so
counts are told from what is stored, whoever wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.declaration import OntologyAsset, PartitionSpec
from ontologia_dagster.ingestion.source_files import PARTITION_KEY
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec
    from storage_engine.query.results import SqlExecutor

_TIMED = {
    "hourly": dg.HourlyPartitionsDefinition,
    "daily": dg.DailyPartitionsDefinition,
    "weekly": dg.WeeklyPartitionsDefinition,
    "monthly": dg.MonthlyPartitionsDefinition,
}
_TELLS_TIME = ("date", "datetime", "str")


def partitions_def(spec: PartitionSpec | None) -> Any:
    """As Dagster has it; None when the type is not cut."""
    if spec is None:
        return None
    if spec.kind == "static":
        return dg.StaticPartitionsDefinition(list(spec.keys))
    assert spec.start is not None
    fmt = "%Y-%m-%d"
    return _TIMED[spec.kind](
        start_date=datetime.strptime(spec.start, fmt),  # noqa: DTZ007 - the zone is given apart
        end_date=datetime.strptime(spec.end, fmt) if spec.end else None,  # noqa: DTZ007
        timezone=spec.timezone,
    )


@dataclass(frozen=True)
class Slice:
    """One partition: its key, and for time partitions where it begins and ends."""

    key: str
    start: datetime | None = None
    end: datetime | None = None


def slices(spec: PartitionSpec, keys: Sequence[str]) -> list[Slice]:
    definition = partitions_def(spec)
    if isinstance(definition, dg.StaticPartitionsDefinition):
        return [Slice(key) for key in keys]
    windows = [definition.time_window_for_partition_key(key) for key in keys]
    return [Slice(key, window.start, window.end) for key, window in zip(keys, windows, strict=True)]


def format_keys(spec: PartitionSpec, keys: Sequence[str]) -> str:
    """All of these keys as a text for a manifest: the first and last of adjacent spans of time,
    so that years of days take no more room than two; others one by one."""
    spans: list[str | list[str]] = []
    before: Slice | None = None
    for part in slices(spec, keys):
        if before is not None and before.end is not None and before.end == part.start:
            first = spans.pop()
            spans.append([first if isinstance(first, str) else first[0], part.key])
        else:
            spans.append(part.key)
        before = part
    return json.dumps(spans)


def parse_keys(spec: PartitionSpec, text: str) -> list[str] | None:
    """The keys that `format_keys` was given; None where the type is not cut so (any more)."""
    definition = partitions_def(spec)
    keys: list[str] = []
    try:
        spans = json.loads(text)
        for span in spans:
            first, last = (span, span) if isinstance(span, str) else span
            if not definition.has_partition_key(first) or not definition.has_partition_key(last):
                return None
            if first == last:
                keys.append(first)
            else:
                begin, end = slices(spec, [first, last])
                assert begin.start is not None
                assert end.end is not None
                window = dg.TimeWindow(begin.start, end.end)
                keys += definition.get_partition_keys_in_time_window(window)
    except (TypeError, ValueError):
        return None
    return keys


def source_condition(declared: OntologyAsset, keys: Sequence[str], field_type: str) -> str | None:
    """SQL over the source that selects the rows of these partitions; bounds, not a list, where
    partitions are spans of time."""
    spec = declared.partitions
    if spec is None:
        return None
    column = spec.expression or declared.columns.get(spec.field) or f"`{spec.field}`"
    parts = slices(spec, keys)
    if parts[0].start is None or field_type == "str":
        listed = ", ".join(_text(key) for key in keys)
        return f"CAST(({column}) AS STRING) IN ({listed})"
    cast = "DATE" if field_type == "date" else "TIMESTAMP"
    spans = [
        f"(CAST(({column}) AS {cast}) >= {cast} {_text(low)} "
        f"AND CAST(({column}) AS {cast}) < {cast} {_text(high)})"
        for low, high in _spans(parts, field_type)
    ]
    return " OR ".join(spans)


def expand_paths(paths: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Paths with `{partition_key}` in them, once for each key."""
    expanded: list[str] = []
    for path in paths:
        if PARTITION_KEY in path:
            expanded += [path.replace(PARTITION_KEY, key) for key in keys]
        else:
            expanded.append(path)
    return expanded


@dataclass(frozen=True)
class PartitionState:
    """What the storage has of a partition: rows now, and the commit that last changed one."""

    rows: int = 0
    commit_id: int = 0


def read_states(
    executor: SqlExecutor, type_spec: TypeSpec, spec: PartitionSpec, keys: Sequence[str]
) -> dict[str, PartitionState]:
    """Rows and last commit of each of these partitions, by one query."""
    states = dict.fromkeys(keys, PartitionState())
    cut = slices(spec, keys)
    kind = field_type(type_spec, spec)
    column = f't."{spec.field}"'
    if cut[0].start is None or kind == "str":
        rows = ", ".join("(?)" for _ in cut)
        parameters: list[Any] = [part.key for part in cut]
        table, match = f"(VALUES {rows}) AS p(key)", f"CAST({column} AS VARCHAR) = p.key"
    else:
        cast = "DATE" if kind == "date" else "TIMESTAMPTZ"
        rows = ", ".join(f"(?, CAST(? AS {cast}), CAST(? AS {cast}))" for _ in cut)
        parameters = [
            value
            for part in cut
            for value in (part.key, *(bound for span in _spans([part], kind) for bound in span))
        ]
        table = f"(VALUES {rows}) AS p(key, low, high)"
        match = f"{column} >= p.low AND {column} < p.high"
    statement = (
        f"SELECT p.key AS key, count(*) AS n, max(t.commit_id) AS commit_id "
        f'FROM "{type_spec.name}" AS t JOIN {table} ON {match} GROUP BY p.key'
    )
    for batch in executor.sql(statement, parameters).batches:
        for row in batch.to_pylist():
            states[row["key"]] = PartitionState(row["n"], row["commit_id"])
    return states


def key_of(spec: PartitionSpec, value: Any) -> str | None:
    """The partition that a stored value belongs to; None when to none."""
    if value is None:
        return None
    definition = partitions_def(spec)
    if isinstance(definition, dg.StaticPartitionsDefinition) or isinstance(value, str):
        return str(value) if definition.has_partition_key(str(value)) else None
    from zoneinfo import ZoneInfo

    zone = ZoneInfo(spec.timezone)
    if isinstance(value, datetime):
        moment = value.astimezone(zone) if value.tzinfo else value.replace(tzinfo=UTC)
    else:
        assert isinstance(value, date)
        moment = datetime(value.year, value.month, value.day, tzinfo=zone)
    key = definition.get_partition_key_for_timestamp(moment.timestamp())
    return key if definition.has_partition_key(key) else None


def field_type(type_spec: TypeSpec, spec: PartitionSpec) -> str:
    """str, date, datetime, ... of the field that the type is cut by; ConfigurationError when there
    is no such field, or none that tells which partition of this kind a row is in."""
    kinds = {field.name: str(field.storage) for field in type_spec.fields}
    if spec.field not in kinds:
        raise ConfigurationError(
            f"{type_spec.name} has no field {spec.field!r} to partition by; it has "
            f"{', '.join(kinds)}"
        )
    kind = kinds[spec.field]
    if spec.kind != "static" and kind not in _TELLS_TIME:
        raise ConfigurationError(
            f"{type_spec.name}.{spec.field} is {kind}: {spec.kind} partitions need a field that is "
            f"{', '.join(_TELLS_TIME)}; choose another field, or static partitions"
        )
    if spec.kind == "hourly" and kind == "date":
        raise ConfigurationError(
            f"{type_spec.name}.{spec.field} is a date, which does not tell the hour: use daily "
            "partitions, or a datetime field"
        )
    return kind


def _spans(parts: Sequence[Slice], kind: str) -> list[tuple[str, str]]:
    """Bounds as texts, adjacent partitions joined."""
    joined: list[tuple[datetime, datetime]] = []
    for part in parts:
        assert part.start is not None
        assert part.end is not None
        if joined and joined[-1][1] == part.start:
            joined[-1] = (joined[-1][0], part.end)
        else:
            joined.append((part.start, part.end))
    return [(_bound(low, kind), _bound(high, kind)) for low, high in joined]


def _bound(moment: datetime, kind: str) -> str:
    """A date is of the partitions' own zone; an instant is told in UTC."""
    if kind == "date":
        return moment.date().isoformat()
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S+00:00")


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

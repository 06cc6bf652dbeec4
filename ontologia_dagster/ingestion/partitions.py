"""Partitions of a type: Dagster's definition of them, the condition that selects their rows from
a source, and what the storage has of each.

A row belongs to the partition that its own field says, in the source and in the storage alike, so
counts are told from what is stored, whoever wrote it. A text says it as a date (2013-01-31) or as
an instant (2013-01-31T23:59:00Z; in UTC where it has no zone).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

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
# Texts that tell a time, in the regular expressions of Python, Spark and DuckDB alike.
_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = "[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?"
_ZONE = "(Z|[+-][0-9]{2}(:[0-9]{2})?)"
# Without seconds: both engines take a zone after seconds alone.
_MINUTES = f"^({_DATE}[T ][0-9]{{2}}:[0-9]{{2}}){_ZONE}?$"
_DAY_FORM = re.compile(_DATE)
_MOMENT_FORM = re.compile(f"{_DATE}{_TIME}{_ZONE}?")

Span = tuple[datetime, datetime | None]


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
    return _in_partitions(spec, _source_column(declared), keys, field_type)


def stored_condition(spec: PartitionSpec, keys: Sequence[str], field_type: str) -> str:
    """The same over stored rows, whose field says where they are."""
    return _in_partitions(spec, f"`{spec.field}`", keys, field_type)


def _in_partitions(spec: PartitionSpec, column: str, keys: Sequence[str], field_type: str) -> str:
    parts = slices(spec, keys)
    if parts[0].start is None:
        return _listed(f"CAST(({column}) AS STRING)", keys)
    return _in_spans(spec, column, field_type, _spans(parts), keys)


def source_outside(declared: OntologyAsset, keys: Sequence[str], field_type: str) -> str | None:
    """SQL over the source of a run on these partitions, for the rows that no run will take: they
    belong to no partition, or lie in a file of a partition that is not theirs."""
    spec = declared.partitions
    if spec is None:
        return None
    if any(PARTITION_KEY in path for path in declared.source.paths):
        taken = source_condition(declared, keys, field_type)
    elif spec.kind == "static":
        taken = source_condition(declared, spec.keys, field_type)
    else:
        definition = partitions_def(spec)
        end = definition.end
        column = _source_column(declared)
        taken = _in_spans(spec, column, field_type, [(definition.start, end)])
    outside = f"NOT coalesce(({taken}), false)"
    return f"({declared.where}) AND {outside}" if declared.where else outside


def _source_column(declared: OntologyAsset) -> str:
    spec = declared.partitions
    assert spec is not None
    return spec.expression or declared.columns.get(spec.field) or f"`{spec.field}`"


def _listed(text: str, keys: Sequence[str]) -> str:
    return f"{text} IN ({', '.join(_text(key) for key in keys)})"


def _in_spans(
    spec: PartitionSpec,
    column: str,
    field_type: str,
    spans: Sequence[Span],
    keys: Sequence[str] = (),
) -> str:
    """Whether a value lies in one of these spans; `keys` are theirs, for texts that are written as
    keys."""
    if field_type != "str":
        cast = "DATE" if field_type == "date" else "TIMESTAMP"
        return _between(f"CAST(({column}) AS {cast})", cast, spans)
    text = f"trim(CAST(({column}) AS STRING))"
    seconds = f"regexp_replace({text}, '{_MINUTES}', '$1:00$2')"
    moment = f"IF({text} RLIKE '{_ZONE}$', {seconds}, concat({seconds}, '+00:00'))"
    instants = _between(f"try_cast({moment} AS TIMESTAMP)", "TIMESTAMP", spans)
    forms = [f"({text} RLIKE '^{_DATE}{_TIME}{_ZONE}?$' AND ({instants}))"]
    if spec.kind == "hourly":
        as_key = _listed(text, keys) if keys else f"{text} RLIKE '^{_DATE}-[0-9]{{2}}:[0-9]{{2}}$'"
        forms.append(f"({as_key})")
    else:
        days = _between(f"try_cast({text} AS DATE)", "DATE", spans)
        forms.append(f"({text} RLIKE '^{_DATE}$' AND ({days}))")
    return " OR ".join(forms)


def _between(value: str, cast: str, spans: Sequence[Span]) -> str:
    kind = "date" if cast == "DATE" else "datetime"
    conditions = []
    for low, high in spans:
        condition = f"{value} >= {cast} {_text(_bound(low, kind))}"
        if high is not None:
            condition += f" AND {value} < {cast} {_text(_bound(high, kind))}"
        conditions.append(f"({condition})")
    return " OR ".join(conditions)


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
    parameters: list[Any] = []
    tables: list[tuple[str, str]] = []
    if cut[0].start is None:
        tables.append(_by_key(f"CAST({column} AS VARCHAR)", cut, parameters))
    elif kind != "str":
        tables.append(_by_bounds(column, kind, cut, parameters))
    else:
        # A text that is a date, one that is an instant, and for hours one that is a key.
        text = f"trim({column})"
        has_zone = f"regexp_matches({text}, '{_ZONE}$')"
        seconds = f"regexp_replace({text}, '{_MINUTES}', '\\1:00\\2')"
        moment = f"CASE WHEN {has_zone} THEN {seconds} ELSE {seconds} || '+00' END"
        table, match = _by_bounds(f"try_cast({moment} AS TIMESTAMPTZ)", "datetime", cut, parameters)
        tables.append((table, f"regexp_full_match({text}, '{_DATE}{_TIME}{_ZONE}?') AND {match}"))
        if spec.kind == "hourly":
            tables.append(_by_key(text, cut, parameters))
        else:
            table, match = _by_bounds(f"try_cast({text} AS DATE)", "date", cut, parameters)
            tables.append((table, f"regexp_full_match({text}, '{_DATE}') AND {match}"))
    statement = " UNION ALL ".join(
        f"SELECT p.key AS key, count(*) AS n, max(t.commit_id) AS commit_id "
        f'FROM "{type_spec.name}" AS t JOIN {table} ON {match} GROUP BY p.key'
        for table, match in tables
    )
    for batch in executor.sql(statement, parameters).batches:
        for row in batch.to_pylist():
            before = states[row["key"]]
            states[row["key"]] = PartitionState(
                before.rows + row["n"], max(before.commit_id, row["commit_id"])
            )
    return states


def written_by_key(
    tally: Mapping[str, Sequence[int]], type_spec: TypeSpec, spec: PartitionSpec
) -> dict[str, list[int]]:
    """By partition, the rows that a write has inserted, changed and left as they were, from what it
    counted by the field's values."""
    kind = field_type(type_spec, spec)
    finder = KeyFinder(spec)
    totals: dict[str, list[int]] = {}
    for text, counts in tally.items():
        value: Any = text
        if kind == "date" and spec.kind != "static":
            value = date.fromisoformat(text) if text else None
        elif kind == "datetime":
            value = datetime.fromtimestamp(int(text), UTC) if text else None
        key = finder.key_of(value)
        if key is not None:
            before = totals.get(key, [0, 0, 0])
            totals[key] = [a + b for a, b in zip(before, counts, strict=True)]
    return totals


def _by_key(value: str, cut: Sequence[Slice], parameters: list[Any]) -> tuple[str, str]:
    """A table of partitions, and when a row is in one."""
    parameters += [part.key for part in cut]
    return f"(VALUES {', '.join('(?)' for _ in cut)}) AS p(key)", f"{value} = p.key"


def _by_bounds(
    value: str, kind: str, cut: Sequence[Slice], parameters: list[Any]
) -> tuple[str, str]:
    cast = "DATE" if kind == "date" else "TIMESTAMPTZ"
    for part in cut:
        assert part.start is not None
        assert part.end is not None
        parameters += [part.key, _bound(part.start, kind), _bound(part.end, kind)]
    rows = ", ".join(f"(?, CAST(? AS {cast}), CAST(? AS {cast}))" for _ in cut)
    return f"(VALUES {rows}) AS p(key, low, high)", f"{value} >= p.low AND {value} < p.high"


class KeyFinder:
    """Tells which partition a value belongs to; remembers the partitions that it has seen."""

    def __init__(self, spec: PartitionSpec) -> None:
        self._spec = spec
        self._definition = partitions_def(spec)
        self._zone = ZoneInfo(spec.timezone)
        self._ends: list[float] = []  # of the windows below, in their order
        self._windows: list[tuple[float, str | None]] = []  # begin and key

    def key_of(self, value: Any) -> str | None:
        """None when it belongs to none."""
        if value is None:
            return None
        if self._spec.kind == "static":
            return str(value) if self._definition.has_partition_key(str(value)) else None
        moment = self._moment(value)
        if moment is None:
            key = str(value).strip()
            return key if self._definition.has_partition_key(key) else None
        return self._at(moment.timestamp())

    def is_early(self, value: Any) -> bool:
        """Whether it will belong to a partition that is not there yet: its time is not over."""
        if value is None or self._spec.kind == "static":
            return False
        moment = self._moment(value)
        if moment is None or moment < self._definition.start:
            return False
        end = self._definition.end
        return (end is None or moment < end) and self._at(moment.timestamp()) is None

    def last_key(self) -> str:
        """The latest partition that is there; empty when there is none."""
        return self._definition.get_last_partition_key() or ""

    def alike(self, low: Any, high: Any) -> bool:
        """Whether all values between two belong to one partition. The order of texts is not that
        of the instants that they name."""
        if isinstance(low, str) or self._spec.kind == "static":
            return bool(low == high)
        first, last = self._moment(low), self._moment(high)
        if first is None or last is None:
            return False
        begin, end = self._window(first.timestamp())
        return begin <= last.timestamp() < end

    def _moment(self, value: Any) -> datetime | None:
        """When it is; a date is of the partitions' own zone, a time without a zone in UTC."""
        if isinstance(value, str):
            parsed = parse_moment(value.strip())
            if parsed is None or (type(parsed) is date and self._spec.kind == "hourly"):
                return None
            value = parsed
        if isinstance(value, datetime):
            return value.astimezone(self._zone) if value.tzinfo else value.replace(tzinfo=UTC)
        assert isinstance(value, date)
        return datetime(value.year, value.month, value.day, tzinfo=self._zone)

    def _at(self, moment: float) -> str | None:
        self._window(moment)
        at = bisect_right(self._ends, moment)
        return self._windows[at][1]

    def _window(self, moment: float) -> tuple[float, float]:
        at = bisect_right(self._ends, moment)
        if at < len(self._ends) and self._windows[at][0] <= moment:
            return self._windows[at][0], self._ends[at]
        key = self._definition.get_partition_key_for_timestamp(moment)
        window = self._definition.time_window_for_partition_key(key)
        begin, end = window.start.timestamp(), window.end.timestamp()
        self._ends.insert(at, end)
        self._windows.insert(at, (begin, key if self._definition.has_partition_key(key) else None))
        return begin, end


def key_of(spec: PartitionSpec, value: Any) -> str | None:
    """The partition that a stored value belongs to; None when to none."""
    return KeyFinder(spec).key_of(value)


def parse_moment(text: str) -> date | datetime | None:
    """A text that is a date or an instant, as the conditions above take it; None for others."""
    try:
        if _DAY_FORM.fullmatch(text):
            return date.fromisoformat(text)
        return datetime.fromisoformat(text) if _MOMENT_FORM.fullmatch(text) else None
    except ValueError:
        return None


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


def _spans(parts: Sequence[Slice]) -> list[Span]:
    """Bounds, adjacent partitions joined."""
    joined: list[Span] = []
    for part in parts:
        assert part.start is not None
        if joined and joined[-1][1] == part.start:
            joined[-1] = (joined[-1][0], part.end)
        else:
            joined.append((part.start, part.end))
    return joined


def _bound(moment: datetime, kind: str) -> str:
    """A date is of the partitions' own zone; an instant is told in UTC."""
    if kind == "date":
        return moment.date().isoformat()
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S+00:00")


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

"""What materialisations, checks and jobs show of themselves: Dagster's standard keys, numbers that
plot, tables, and an estimate of what the requests cost.

Prices are list prices of S3 Standard in us-east-1, in dollars: for comparing runs, not a bill, as
transfer, storage and other regions are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.history import TypeHistory
    from storage_engine.spark.results import WriteResult

FINGERPRINT = "ontologia/source_fingerprint"
SCHEMA_VERSION = "schema_version"
COLUMN_CHANGES = "column_changes"
SHOWN_ROWS = 100
PER_REQUEST = {
    "GET": 0.0004 / 1000,
    "HEAD": 0.0004 / 1000,
    "PUT": 0.005 / 1000,
    "PUT_IF": 0.005 / 1000,
    "LIST": 0.005 / 1000,
    "DELETE": 0.0,
    "DELETE_IF": 0.0,
}


def write_metadata(
    result: WriteResult, uri: str, spec: TypeSpec, rows: int, *, cut: bool = False
) -> dict[str, Any]:
    """Of one write. `rows` is what the type has now; the rest is what this run did. `cut`: on
    partitions."""
    metadata: dict[str, Any] = {
        "dagster/row_count": rows,
        "dagster/table_name": spec.name,
        "dagster/uri": uri,
        "dagster/column_schema": column_schema(spec),
        "commit": result.commit_id if result.commit_id is not None else dg.MetadataValue.null(),
        "type_commit": result.type_commit_id,
        "already_applied": result.already_applied,
        "rows_read": result.rows,
        "rows_inserted": result.inserted,
        "rows_changed": result.updated,
        "rows_unchanged": result.unchanged,
        "rows_quarantined": result.quarantined,
        "rows_duplicate": result.duplicates,
        "rows_stale": result.stale,
        "rows_kept": result.kept,
        **({"rows_in_no_partition": result.outside} if cut else {}),
        "files": result.files,
        "bytes": result.bytes,
        "lock_wait_ms": float(result.lock_wait_ms),
        "cas_attempts": result.attempts,
        **request_metadata(result.requests),
    }
    if result.reasons:
        rows_by_reason = sorted(result.reasons.items(), key=lambda item: -item[1])
        metadata["quarantine_reasons"] = table(["reason", "rows"], rows_by_reason)
    if result.quarantine:
        metadata["quarantine"] = result.quarantine
    if result.drift:
        metadata["drift"] = dg.MetadataValue.md("\n".join(f"- {change}" for change in result.drift))
    if result.notes:
        metadata["notes"] = dg.MetadataValue.md("\n".join(f"- {note}" for note in result.notes))
    return metadata


def column_schema(spec: TypeSpec) -> dg.TableSchema:
    """The declared fields; identity columns of a relation come first."""
    columns = []
    if spec.kind == "relation":
        columns += [
            dg.TableColumn("left_key", "str", f"key of {spec.left}", _constraints(False)),
            dg.TableColumn("right_key", "str", f"key of {spec.right}", _constraints(False)),
        ]
        if spec.instance_key:
            columns.append(dg.TableColumn(spec.instance_key, "str", None, _constraints(False)))
    for field in spec.fields:
        unique = field.name == spec.primary_key
        columns.append(
            dg.TableColumn(
                field.name, field.column_type, None, _constraints(field.nullable, unique=unique)
            )
        )
    return dg.TableSchema(columns=columns)


def _constraints(nullable: bool, *, unique: bool = False) -> dg.TableColumnConstraints:
    return dg.TableColumnConstraints(nullable=nullable, unique=unique)


# -- schemas --------------------------------------------------------------------------------------


def schema_metadata(
    repository: Repository, spec: TypeSpec, instance: dg.DagsterInstance, key: dg.AssetKey
) -> dict[str, Any]:
    """The version that the type's rows have, and what changed since the asset was last
    materialised. Nothing for a type that is not stored yet."""
    history = repository.type_histories([spec.ref]).get(spec.ref)
    if history is None or history.current is None:
        return {}
    version = history.current.version
    changes = column_changes(history, last_version(instance, key), version)
    return {SCHEMA_VERSION: version, **changes}


def last_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> int | None:
    """The schema version of the last materialisation; None when none of them tells."""
    event = instance.get_latest_materialization_event(key)
    made = event.asset_materialization if event is not None else None
    told = made.metadata.get(SCHEMA_VERSION) if made is not None else None
    return told.value if told is not None and isinstance(told.value, int) else None


def column_changes(history: TypeHistory, before: int | None, now: int) -> dict[str, Any]:
    """What became of columns between two versions, as a table; nothing where nothing did."""
    from storage_engine.schema.lineage import diff_versions

    older, newer = history.version(before or now), history.version(now)
    if older is None or newer is None or older is newer:
        return {}
    diff = diff_versions(older, newer)
    return {
        "schema_version_before": older.version,
        COLUMN_CHANGES: table(
            ["column", "change", "before", "after"],
            [(change.path, change.change, change.before, change.after) for change in diff.changes],
        ),
    }


# -- tables ---------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dg.MetadataValue[Any]:
    """A table of at most SHOWN_ROWS rows; an empty one still shows its columns."""
    shown = [
        {name: _cell(value) for name, value in zip(columns, row, strict=True)}
        for _, row in zip(range(SHOWN_ROWS), rows, strict=False)
    ]
    numbers = {name for name in columns if shown and all(_is_number(r[name]) for r in shown)}
    schema = dg.TableSchema(
        columns=[dg.TableColumn(n, "int" if n in numbers else "string") for n in columns]
    )
    records = [dg.TableRecord(row) for row in shown]
    return dg.MetadataValue.table(records=records, schema=schema)


def before_and_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> dg.MetadataValue[Any]:
    """The same figures at two moments, side by side."""
    return table(["figure", "before", "after"], [(n, before[n], after.get(n)) for n in before])


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [" | ".join(["", *columns, ""]).strip(), "|" + " --- |" * len(columns)]
    for row in rows:
        cells = (str(value).replace("|", "\\|").replace("\n", " ") for value in row)
        lines.append(" | ".join(["", *cells, ""]).strip())
    return "\n".join(lines)


def _cell(value: Any) -> str | int | float | bool:
    if value is None:
        return ""
    return value if isinstance(value, str | int | float | bool) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -- requests -------------------------------------------------------------------------------------


def request_metadata(requests: Mapping[str, int]) -> dict[str, Any]:
    """Requests of this process to the store, by kind, with a price estimate, and what was moved."""
    moved = {
        f"store_{name}": requests[name]
        for name in ("bytes_read", "bytes_written")
        if name in requests
    }
    return {
        "requests": request_total(requests),
        "requests_by_kind": dict(requests),
        "price_estimate_usd": price(requests),
        **moved,
    }


def requests_of(repository: Repository) -> dict[str, int]:
    """What was asked of the store since the storage was opened; nothing where there is none."""
    return repository.requests()


def price(requests: Mapping[str, int]) -> float:
    """Of requests by kind; sums and byte counts among them are passed over."""
    return round(sum(PER_REQUEST.get(kind, 0.0) * count for kind, count in requests.items()), 8)


def request_total(requests: Mapping[str, int]) -> int:
    return sum(count for kind, count in requests.items() if kind in PER_REQUEST)

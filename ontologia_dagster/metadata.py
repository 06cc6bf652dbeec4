"""What a materialisation says of itself: Dagster's standard keys, and numbers that plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.prices import price, request_total
from ontologia_dagster.tables import table

if TYPE_CHECKING:
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.spark.results import WriteResult

FINGERPRINT = "ontologia/source_fingerprint"


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
                field.name, field.storage, None, _constraints(field.nullable, unique=unique)
            )
        )
    return dg.TableSchema(columns=columns)


def _constraints(nullable: bool, *, unique: bool = False) -> dg.TableColumnConstraints:
    return dg.TableColumnConstraints(nullable=nullable, unique=unique)


def write_metadata(result: WriteResult, uri: str, spec: TypeSpec, rows: int) -> dict[str, Any]:
    """Of one write. `rows` is what the type has now; the rest is what this run did."""
    found: dict[str, Any] = {
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
        "files": result.files,
        "bytes": result.bytes,
        "lock_wait_ms": float(result.lock_wait_ms),
        "cas_attempts": result.attempts,
        **request_metadata(result.requests),
    }
    if result.reasons:
        rows_by_reason = sorted(result.reasons.items(), key=lambda item: -item[1])
        found["quarantine_reasons"] = table(["reason", "rows"], rows_by_reason)
    if result.quarantine:
        found["quarantine"] = result.quarantine
    if result.drift:
        found["drift"] = dg.MetadataValue.md("\n".join(f"- {said}" for said in result.drift))
    return found


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
    from storage_engine.repository.object.engine import ObjectRepository

    return repository.store.meter.snapshot() if isinstance(repository, ObjectRepository) else {}

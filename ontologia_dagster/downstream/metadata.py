"""What materialisations, checks and jobs show of themselves: Dagster's standard keys, numbers that
plot, tables, and an estimate of what the requests cost.

Prices are list prices of S3 Standard in us-east-1, in dollars: for comparing runs, not a bill, as
transfer, storage and other regions are left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg

from storage_engine.errors import OntologiaError

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.history import TypeHistory
    from storage_engine.spark.results import WriteResult

FINGERPRINT = "ontologia/source_fingerprint"
SCHEMA_VERSION = "schema_version"
COLUMN_CHANGES = "column_changes"
SHOWN_ROWS = 100
SAMPLE = "sample"
SAMPLE_ROWS = 5
SAMPLE_TEXT = 80  # characters of a cell
SAMPLE_CHARACTERS = 16_000  # of a sample: every materialisation keeps its own
HIDDEN = "(hidden)"
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
    result: WriteResult,
    ontology: OntologyResource,
    spec: TypeSpec,
    rows: int,
    *,
    spark_s: float = 0.0,
    partitions: int = 0,
    branch: str | None = None,
) -> dict[str, Any]:
    """Of one write: what its page shows, and the numbers of the run. Those of a run on several
    partitions are no partition's: they are a table, and each partition has numbers of its own."""
    figures = run_figures(result, spark_s=spark_s, cut=partitions > 0)
    if partitions > 1:
        outside = figures.pop("rows_in_no_partition")  # whose else would they be
        shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in figures.items()}
        figures = {
            "rows_in_no_partition": outside,
            "run": table(["figure", f"of all {partitions} partitions"], shown.items()),
        }
    return {
        **type_metadata(result, ontology, spec, rows, branch),
        **figures,
        "details": table(["what", "value"], _details(result).items()),
    }


def partition_figures(counts: Sequence[int]) -> dict[str, int]:
    """Of one partition of several, under the keys that a run on one alone has."""
    inserted, changed, unchanged = counts
    return {
        "rows_inserted": inserted,
        "rows_changed": changed,
        "rows_unchanged": unchanged,
    }


def type_metadata(
    result: WriteResult,
    ontology: OntologyResource,
    spec: TypeSpec,
    rows: int,
    branch: str | None = None,
) -> dict[str, Any]:
    """Of the type after a write: `rows` is what it has now, there where it was written."""
    metadata: dict[str, Any] = {
        "dagster/row_count": rows,
        "dagster/table_name": spec.name,
        "dagster/uri": ontology.storage_uri,
        "dagster/column_schema": column_schema(spec),
        **commit_metadata(ontology, result.commit_id, spec.name, branch),
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


def run_figures(result: WriteResult, *, spark_s: float, cut: bool) -> dict[str, Any]:
    """Numbers, under keys that every run has: Dagster plots each over runs and partitions. `cut`:
    of a run on partitions."""
    return {
        "rows_read": result.rows,
        "rows_inserted": result.inserted,
        "rows_changed": result.updated,
        "rows_unchanged": result.unchanged,
        "rows_marked": result.marked,
        "rows_quarantined": result.quarantined,
        **({"rows_in_no_partition": result.outside} if cut else {}),
        "bytes": result.bytes,
        "stored_bytes": result.stored_bytes,
        "stored_bytes_read": result.stored_bytes_read,
        "files": result.files,
        "spark_s": round(spark_s, 3),
        "lock_wait_ms": float(result.lock_wait_ms),
        "cas_attempts": result.attempts,
        "requests": request_total(result.requests),
        "price_estimate_usd": price(result.requests),
    }


def _details(result: WriteResult) -> dict[str, Any]:
    """What is looked up now and then, and what no plot tells anything of."""
    return {
        "commit that last changed the type": result.type_commit_id,
        "unit of work was done before": "yes" if result.already_applied else "no",
        "rows that another row of the source replaces": result.duplicates,
        "rows older than stored ones": result.stale,
        "rows left to another commit": result.kept,
        **{f"requests: {kind}": count for kind, count in sorted(result.requests.items())},
    }


def commit_metadata(
    ontology: OntologyResource,
    commit_id: int | None,
    type_name: str | None = None,
    branch: str | None = None,
) -> dict[str, Any]:
    """A commit, as text since its number is nothing to plot, and how to look at it: by a command,
    and where the storage has web pages by links to them. `branch`: the run's own, which others do
    not see."""
    base = ontology.explore_url.rstrip("/") if ontology.explore_url else None
    metadata: dict[str, Any] = {"commit": dg.MetadataValue.null()}
    if commit_id is not None:
        uri = shlex.quote(ontology.storage_uri)
        name = branch or ontology.branch
        on = f"--branch {shlex.quote(name)} " if name is not None else ""
        metadata["commit"] = f"{name}@{commit_id}" if name is not None else str(commit_id)
        metadata["examine_commit"] = f"onto {on}commits examine {commit_id} --storage-uri {uri}"
        if base is not None and name is None:
            metadata["commit_url"] = dg.MetadataValue.url(f"{base}/commits/{commit_id}")
    if base is not None and type_name is not None:
        metadata["type_url"] = dg.MetadataValue.url(f"{base}/types/{quote(type_name)}")
    return metadata


def column_schema(spec: TypeSpec) -> dg.TableSchema:
    """The declared fields, with what the class says of them; identity columns of a relation come
    first."""
    columns = []
    if spec.kind == "relation":
        columns += [
            _column(spec, "left_key", "str", f"key of {spec.left}"),
            _column(spec, "right_key", "str", f"key of {spec.right}"),
        ]
        if spec.instance_key:
            columns.append(_column(spec, spec.instance_key, "str", spec.instance_key_description))
    columns += [
        _column(
            spec,
            field.name,
            field.column_type,
            field.description,
            nullable=field.nullable,
            unique=field.name == spec.primary_key,
        )
        for field in spec.fields
    ]
    return dg.TableSchema(columns=columns)


def _column(
    spec: TypeSpec,
    name: str,
    kind: str,
    description: str | None,
    *,
    nullable: bool = False,
    unique: bool = False,
) -> dg.TableColumn:
    return dg.TableColumn(
        name,
        kind,
        description,
        dg.TableColumnConstraints(nullable=nullable, unique=unique),
        tags={"sensitive": ""} if spec.sensitive or name in spec.sensitive_columns else None,
    )


# -- samples --------------------------------------------------------------------------------------


def sample_metadata(repository: Repository, spec: TypeSpec, commit_id: int) -> dict[str, Any]:
    """A few rows that the commit has written which last changed the type; none of what is
    sensitive. `spec` is the class's: a stored schema does not know what that is."""
    from storage_engine.maintenance.samples import sample_rows

    if spec.sensitive:
        return {SAMPLE: "not shown: the type is sensitive"}
    try:
        sample = sample_rows(repository, spec, commit_id, SAMPLE_ROWS)
    except OntologiaError as error:  # the commit stands, whatever can be seen of it
        return {SAMPLE: f"none: {error}"}
    if not sample.rows:
        return {SAMPLE: f"none: {sample.why_none or 'the commit wrote no rows'}"}
    hidden = [name in spec.sensitive_columns for name in sample.columns]
    rows = [
        [HIDDEN if is_hidden else _cut(value) for value, is_hidden in zip(row, hidden, strict=True)]
        for row in sample.rows
    ]
    shown = _columns_within(sample.columns, rows)
    return {SAMPLE: table(sample.columns[:shown], [row[:shown] for row in rows])}


def _cut(value: Any) -> str | int | float | bool:
    """A value of a cell; a long text, whatever it stands for, is cut."""
    if value is None or isinstance(value, bool | int | float):
        return _cell(value)
    text = f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
    return text if len(text) <= SAMPLE_TEXT else f"{text[: SAMPLE_TEXT - 1]}…"


def _columns_within(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    """How many columns there is room for; the first ones are the identity."""
    room = SAMPLE_CHARACTERS
    for number, name in enumerate(columns):
        room -= len(rows) * (len(name) + 8) + sum(len(str(row[number])) for row in rows)
        if room < 0:
            return max(1, number)
    return len(columns)


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
    return version_told(event.asset_materialization if event is not None else None)


def version_told(made: dg.AssetMaterialization | None) -> int | None:
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

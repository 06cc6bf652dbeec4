"""Assets downstream of the ontology: a typed query or SQL, answered by DuckDB, with a preview.

    def late(view: View) -> pa.Table:
        return view.query().entities(Order).where(Order.total > 100).to_arrow()

    late_orders = query_asset("late_orders", late, deps=["order"])

The query sees one commit from beginning to end: the latest, or what `as_of` in the run config
names (a commit id, an instant, a tag). The data version is the answer's own, so that a run that
found the same triggers nothing further down.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa
from pydantic import Field

from ontologia_dagster.declaration import STORAGE_METADATA, on_new_data
from ontologia_dagster.declaration import automation as condition
from ontologia_dagster.downstream.metadata import markdown_table, request_metadata, requests_of
from ontologia_dagster.resources.ontology import SchemaAdvice, report_failures
from ontologia_dagster.storage import unpublished
from storage_engine.wording import counted

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.query.reference import Reference
    from storage_engine.runtime.reads import View

PREVIEW_ROWS = 20
Answer = Any  # an Arrow table, or a list of dicts


class QueryConfig(dg.Config):
    as_of: str | None = Field(
        default=None,
        description="A commit id, an instant (2013-07-01T00:00:00, in UTC unless it has a zone) or "
        "a tag; the latest if left out",
    )


def query_asset(
    name: str,
    query: "str | Callable[[View], Answer]",
    *,
    deps: Sequence[str] = (),
    storage: str = "ontology",
    key_prefix: Sequence[str] = (),
    group: str | None = "ontologia",
    description: str | None = None,
    automation: Any = None,
    plot: Mapping[str, str] | None = None,
) -> dg.AssetsDefinition:
    """An asset that asks and shows.

    query:       SQL over the stored types, or a function of a View
    automation:  a condition, or its name as in YAML; `on_new_data()` if left out
    plot:        metadata name -> column whose first value is plotted over runs
    """

    @dg.asset(
        key=dg.AssetKey([*key_prefix, name]),
        deps=[dg.AssetKey.from_user_string(dep) for dep in deps],
        group_name=group,
        description=description,
        kinds={"duckdb"},
        metadata={STORAGE_METADATA: storage},
        automation_condition=condition(automation) or on_new_data(),
        required_resource_keys={storage},
        code_version=_code_version(query),
    )
    def asked(context: dg.AssetExecutionContext, config: QueryConfig) -> dg.MaterializeResult[None]:
        ontology: OntologyResource = getattr(context.resources, storage)
        advice = SchemaAdvice.of(ontology, storage)
        with report_failures(context.instance, advice), ontology.session() as session:
            view = session.at(reference(config.as_of, session.repository.head_commit_id()))
            answer = view.sql(query).to_arrow() if isinstance(query, str) else query(view)
            branch = unpublished.branch_of(ontology, session.repository)
            requests = requests_of(session.repository)
        table = answer if isinstance(answer, pa.Table) else pa.Table.from_pylist(list(answer))
        version = fingerprint(table)
        metadata = {
            "as_of_commit": view.commit_id,
            "dagster/uri": ontology.storage_uri,
            **answer_metadata(table),
            **request_metadata(requests),
            **{shown: _number(table, column) for shown, column in (plot or {}).items()},
        }
        if branch is None:
            return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=metadata)
        key, code_version = context.asset_key, _code_version(query)
        [result] = unpublished.observe(
            context, branch, key, {None: metadata}, code_version=code_version, version=version
        )
        return result

    return asked


def reference(text: str | None, head: int) -> "Reference":
    """What `as_of` means: nothing is head, a number a commit, a time an instant (UTC when no zone
    is given), else a tag."""
    from storage_engine.query.reference import parse_reference

    return parse_reference(text) if text is not None and text.strip() else head


def answer_metadata(table: pa.Table) -> dict[str, Any]:
    """Rows, columns and a look at the first of them."""
    columns = [dg.TableColumn(field.name, str(field.type)) for field in table.schema]
    first = table.slice(0, PREVIEW_ROWS).to_pylist()
    rows = [[_shown(row[name]) for name in table.column_names] for row in first]
    more = table.num_rows - len(rows)
    note = f"\n\n{counted(more, 'row')} more" if more > 0 else ""
    return {
        "dagster/row_count": table.num_rows,
        "dagster/column_schema": dg.TableSchema(columns=columns),
        "preview": dg.MetadataValue.md(markdown_table(table.column_names, rows) + note),
    }


def fingerprint(table: pa.Table) -> str:
    """Of the answer's content, however it is cut into batches."""
    digest = hashlib.sha256(str(table.schema.remove_metadata()).encode())
    for row in table.to_pylist():
        digest.update(repr(list(row.values())).encode())
    return digest.hexdigest()[:16]


def _code_version(query: Any) -> str:
    text = query if isinstance(query, str) else _source(query)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _source(function: Callable[..., Any]) -> str:
    import inspect

    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(getattr(function, "__qualname__", function))


def _number(table: pa.Table, column: str) -> float | None:
    values = table.column(column).slice(0, 1).to_pylist()
    return float(values[0]) if values and values[0] is not None else None


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return "" if value is None else str(value)

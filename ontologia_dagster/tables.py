"""Tables in metadata: what people look at in the UI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

SHOWN_ROWS = 100


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

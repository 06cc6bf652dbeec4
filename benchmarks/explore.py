"""Pages of `onto explore` on types of 10,000,000 rows, as a browser gets them over HTTP.

Entities (readings) and relations (which sensor made them) are ingested in bulk, and one of each is
changed by a second commit. The program is started, and each page is asked for first once and then
`ROUNDS` times. The figure is the median of these; beside it stands the processor time that a page
took, which tells more on a machine that others use. What a page shows is checked, or the run is
void. SQLite has the entities alone: to fill it takes minutes. `BENCH_EXPLORE_ROWS` makes it
shorter.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.harness import Measured, Report, measure, sized, timed
from storage_engine import Entity, Field, Relation, Session, initialize_storage
from tests.explore.client import serving

ROWS = sized(10_000_000, 50_000, "BENCH_EXPLORE_ROWS")
ROUNDS = sized(7, 1)
SENSORS = 1_000
PROMISED_S = 1.0
_STEP = 500_000


class Sensor(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    sensor: Field[str]
    value: Field[float]
    note: Field[str]


class MadeBy(Relation[Reading, Sensor]):
    quality: Field[float]


def key(number: int) -> str:
    return f"r{number:09d}"


def run() -> Report:
    report = Report("explore")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for backend in ("directory", "SQLite"):
            uri = f"sqlite:///{folder}/ten.db" if backend == "SQLite" else f"file://{folder}/ten"
            related = backend == "directory"
            report.steps.append(measure(f"{backend}, fill", fill, uri, ROWS, related))
            report.steps += list(pages(backend, uri, Path(folder), related=related))
    slowest = max((s for s in report.steps if "fill" not in s.name), key=lambda step: step.seconds)
    report.verdicts["every page in under a second"] = f"{slowest.seconds:.2f} s ({slowest.name})"
    return report


def fill(uri: str, rows: int, related: bool) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    initialize_storage(uri)
    with timed(outcome), Session(uri) as session:
        session.ensure([Sensor(id=f"s{n}", name=f"sensor {n}") for n in range(SENSORS)])
        session.ingest(Reading, _reader(_readings, rows))
        if related:
            session.ingest(MadeBy, _reader(_made_by, rows))
        session.commit()
        session.ensure(Reading(id=key(7), sensor="s1", value=1.0, note="changed"))
        if related:
            session.ensure(MadeBy(left_key=key(7), right_key="s1", quality=0.5))
        session.commit()
    return outcome


def _reader(make: Callable[[pa.Array], pa.RecordBatch], rows: int) -> pa.RecordBatchReader:
    batches = (
        make(pa.array(range(start, min(rows, start + _STEP)))) for start in range(0, rows, _STEP)
    )
    schema = make(pa.array([0])).schema
    return pa.RecordBatchReader.from_batches(schema, batches)


def _text(prefix: str, numbers: pa.Array, width: int = 0) -> pa.Array:
    text = numbers.cast(pa.string())
    padded = pc.utf8_lpad(text, width, "0") if width else text
    return pc.binary_join_element_wise(prefix, padded, "")


def _remainder(numbers: pa.Array, divisor: int) -> pa.Array:
    return pc.subtract(numbers, pc.multiply(pc.divide(numbers, divisor), divisor))


def _readings(numbers: pa.Array) -> pa.RecordBatch:
    notes = _text("note number ", _remainder(pc.multiply(numbers, 7919), 1_000_003))
    return pa.record_batch(
        {
            "id": _text("r", numbers, 9),
            "sensor": _text("s", _remainder(numbers, SENSORS)),
            "value": pc.multiply(numbers.cast(pa.float64()), 0.5),
            "note": notes,
        }
    )


def _made_by(numbers: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "left_key": _text("r", numbers, 9),
            "right_key": _text("s", _remainder(numbers, SENSORS)),
            "quality": pc.divide(numbers.cast(pa.float64()), 7.0),
        }
    )


def pages(backend: str, uri: str, folder: Path, *, related: bool) -> Iterator[Measured]:
    middle, last = ROWS // 2, ROWS - 60
    wanted: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "types": ("types", lambda d: any(t["rows"] == ROWS for t in d["entities"])),
        "first page": ("types/Reading", lambda d: d["objects"][0]["identity"] == [key(0)]),
        "page in the middle": (
            f"types/Reading?after={key(middle)}",
            lambda d: d["objects"][0]["identity"] == [key(middle + 1)],
        ),
        "last page": (
            f"types/Reading?after={key(last)}&limit=100",
            lambda d: len(d["objects"]) == 59 and d["next_url"] is None,
        ),
        "keys that begin so": (
            f"types/Reading?prefix={key(middle)[:7]}",
            lambda d: d["objects"][0]["identity"][0].startswith(key(middle)[:7]),
        ),
        "filter that many meet": (
            "types/Reading?filter=sensor+%3D%3D+%22s5%22",
            lambda d: d["objects"][0]["identity"] == [key(5)],
        ),
        "filter that a few meet": (  # in all of the type
            "types/Reading?filter=note+%3D%3D+%22note+number+7919%22",
            lambda d: d["objects"][0]["identity"] == [key(1)] and not d["next_url"],
        ),
        "as of the first commit": (
            "types/Reading?as_of=1&prefix=r00000000",
            lambda d: d["objects"][7]["fields"]["note"] != "changed",
        ),
        "one object": (
            f"types/Reading/objects/{key(7)}",
            lambda d: d["timeline"]["total"] == 2,
        ),
        "commit of all rows": (
            "commits/1",
            lambda d: len(d["diffs"][0]["rows"]) == 25,
        ),
        "commit of one row": ("commits/2", lambda d: len(d["diffs"][0]["rows"]) == 1),
        "health": ("health", lambda d: d["engine_version"] == "v2"),
    }
    if related:
        wanted["first page of relations"] = (
            "types/MadeBy",
            lambda d: d["objects"][0]["identity"][:2] == [key(0), "s0"],
        )
        wanted["page of relations in the middle"] = (
            f"types/MadeBy?after={key(middle)}/s{middle % SENSORS}",
            lambda d: d["objects"][0]["identity"][0] == key(middle + 1),
        )
        wanted["entity that many point to"] = (
            "types/Sensor/objects/s5",
            lambda d: d["relations"][0]["related"][0]["key"] == key(5),
        )
    with serving("--storage-uri", uri, cwd=folder) as (program, url):
        for name, (path, right) in wanted.items():
            yield page_of(f"{backend}, {name}", url + path, right, program.pid)


def _processor_s(pid: int) -> float:
    """Processor seconds that a process has had; 0 where that is not told so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_of(name: str, url: str, right: Callable[[Any], bool], pid: int) -> Measured:
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    with urllib.request.urlopen(request) as answer:
        if not right(json.load(answer)):
            raise RuntimeError(f"{name}: another page than expected")
    seconds = []
    before = _processor_s(pid)
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        with urllib.request.urlopen(url) as answer:
            answer.read()
        seconds.append(time.perf_counter() - started)
    spent = (_processor_s(pid) - before) / len(seconds)
    first, *rest = seconds
    facts = {"first": round(first, 3), "processor seconds": round(spent, 3)}
    return Measured(name, statistics.median(rest), [round(s, 4) for s in rest], 0, facts)

"""A storage with 1,000 types: `onto info`, and the pages of `onto explore` that list them.

Types are written by commits of 100 each, in a directory and in a SQLite file. `onto info` is a
process of its own; it tells how many requests it took. `BENCH_TYPES` makes it shorter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.explore import page_of
from benchmarks.harness import Measured, Report, measure, timed
from storage_engine import Entity, Field, Session, initialize_storage
from tests.explore.client import serving

TYPES = int(os.environ.get("BENCH_TYPES", "1000"))
ROWS = 3
PROMISED_S = 1.0
_TOGETHER = 100
_ROOT = Path(__file__).resolve().parent.parent


def run() -> Report:
    report = Report("many_types")
    with tempfile.TemporaryDirectory() as folder:
        for backend, name in (("directory", "many"), ("SQLite", "many.db")):
            uri = str(Path(folder, name))
            report.steps.append(measure(f"{backend}, fill", fill, uri, TYPES))
            report.steps.append(_info(f"{backend}, onto info", uri))
            with serving("--storage-uri", uri, cwd=Path(folder)) as (program, url):
                pages = {
                    "types": ("types", lambda d: len(d["entities"]) == TYPES),
                    "one type": (f"types/{_name(7)}", lambda d: len(d["objects"]) == ROWS),
                    "health": ("health", lambda d: d["engine_version"] == "v2"),
                    "commits": ("commits", lambda d: bool(d["commits"])),
                }
                for what, (path, right) in pages.items():
                    page = page_of(f"{backend}, page of {what}", url + path, right, program.pid)
                    report.steps.append(page)
    requests = next(step.facts["requests"] for step in report.steps if "requests" in step.facts)
    report.verdicts[f"onto info of {TYPES:,} types"] = f"{requests} requests on a directory"
    slowest = max((s for s in report.steps if "page" in s.name), key=lambda step: step.seconds)
    report.verdicts["every page in under a second"] = f"{slowest.seconds:.2f} s ({slowest.name})"
    return report


def _name(number: int) -> str:
    return f"Kind{number:04d}"


def _declared(number: int) -> type[Entity]:
    body = {
        "__annotations__": {"id": Field[str], "n": Field[int]},
        "id": Field(primary_key=True),
        "__module__": __name__,
    }
    return type(_name(number), (Entity,), body)


def fill(uri: str, types: int) -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    initialize_storage(uri)
    with timed(outcome), Session(uri) as session:
        for start in range(0, types, _TOGETHER):
            for cls in map(_declared, range(start, min(types, start + _TOGETHER))):
                session.ensure([cls(id=f"k{n}", n=n) for n in range(ROWS)])
            session.commit()
    return outcome


def _info(name: str, uri: str) -> Measured:
    """The whole process, from its start to its end."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "storage_engine.cli.main",
                "info",
                "--json",
                "--storage-uri",
                uri,
            ],
            capture_output=True,
            check=True,
            cwd=_ROOT,
        )
        seconds.append(time.perf_counter() - begun)
    told = json.loads(done.stdout)
    if len(told["types"]) != TYPES or any(each["rows"] != ROWS for each in told["types"]):
        raise RuntimeError(f"{name}: other types than expected")
    facts = {"load": round(os.getloadavg()[0], 1)}
    if "requests" in told:
        facts["requests"] = told["requests"]["total"]
    return Measured(name, min(seconds), [round(s, 4) for s in seconds], 0, facts)

"""A part of the demo's source that is small and has everything in it: one day of every month (one
of them disrupted), and each flight that was delayed severely or has a time of 2400."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from ontologia_dagster.demo.rules import SEVERE_MINUTES
from ontologia_dagster.demo.source import NOT_MIDNIGHT, NULL, TIMES, text_of

DAY = "8"


def write_part(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("airlines", "airports", "planes"):
        (folder / f"{name}.csv").write_text(text_of(name), encoding="utf-8")
    _some(folder, "weather", lambda row: row["day"] == DAY)
    _some(folder, "flights", _wanted)
    return folder


def _wanted(flight: dict[str, str]) -> bool:
    severe = flight["dep_delay"] != NULL and int(flight["dep_delay"]) > SEVERE_MINUTES
    midnight = any(flight[name] == NOT_MIDNIGHT for name in TIMES)
    return flight["day"] == DAY or severe or midnight


def _some(folder: Path, name: str, wanted) -> None:
    rows = csv.DictReader(io.StringIO(text_of(name), newline=""))
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows.fieldnames or []))
        writer.writeheader()
        writer.writerows(row for row in rows if wanted(row))

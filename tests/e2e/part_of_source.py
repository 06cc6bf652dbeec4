"""A part of the demo's source that is small and has everything in it: some flights of one day of
every month, and a few that were delayed severely or have a time of 2400."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path

from ontologia_dagster.demo.ontology import SEVERE_MINUTES
from ontologia_dagster.demo.source import NOT_MIDNIGHT, NULL, TIMES, text_of

DAY = "8"
_A_MONTH = 60
_OF_EACH_TROUBLE = 5


def write_part(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("airlines", "airports", "planes"):
        (folder / f"{name}.csv").write_text(text_of(name), encoding="utf-8")
    _some(folder, "weather", lambda row: row["day"] == DAY)
    _some(folder, "flights", _Wanted())
    return folder


class _Wanted:
    """Whether a flight is one of the few."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def __call__(self, flight: dict[str, str]) -> bool:
        if flight["dep_delay"] != NULL and int(flight["dep_delay"]) > SEVERE_MINUTES:
            return self._take("severe", _OF_EACH_TROUBLE)
        if any(flight[name] == NOT_MIDNIGHT for name in TIMES):
            return self._take("midnight", _OF_EACH_TROUBLE)
        return flight["day"] == DAY and self._take(flight["month"], _A_MONTH)

    def _take(self, kind: str, most: int) -> bool:
        self._taken[kind] += 1
        return self._taken[kind] <= most


def _some(folder: Path, name: str, wanted) -> None:
    rows = csv.DictReader(io.StringIO(text_of(name), newline=""))
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows.fieldnames or []))
        writer.writeheader()
        writer.writerows(row for row in rows if wanted(row))

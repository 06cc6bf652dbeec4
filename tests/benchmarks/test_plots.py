"""Plots are drawn of what has been measured, as well-formed SVG, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks import plots

HISTORY = [
    {"commits": n, "commit ms": 5, "commit CPU ms": 4, "warm read ms": 3, "warm read CPU ms": 2}
    for n in (100, 10_000)
]
MEASURED: dict[str, list[dict[str, Any]]] = {
    "growth": [{"name": "10,000 commits", "facts": {"history": HISTORY}}],
    "writers": [
        {
            "name": f"{n} threads of one process",
            "facts": {"commits a second": 9.5 * n, "p50 ms": 90, "p95 ms": 120},
        }
        for n in (1, 64)
    ],
    "processes": [
        {"name": name, "facts": {"commits/s": 4.6, "p95": 2.1}} for name in ("ontologia", "<peer>")
    ],
    "queries": [{"name": "small, cold: delta-rs", "seconds": 0.7, "facts": {}}],
    "compaction": [
        {"name": "compact 5,000,000 rows, directory", "seconds": 7.0, "facts": {}},
        {"name": "2,000 commits, compacted", "seconds": 90.0, "facts": {"compacting_s": 3.1}},
    ],
}


def drawn(folder: Path, measured: dict[str, Any]) -> dict[str, str]:
    results = folder / "results"
    results.mkdir()
    for name, steps in measured.items():
        text = json.dumps({"machine": {"cores": 2, "load": [1.5, 1, 1]}, "steps": steps})
        (results / f"{name}.json").write_text(text, encoding="utf-8")
    plots.main(results, folder / "docs")
    return {path.name: path.read_text(encoding="utf-8") for path in (folder / "docs").iterdir()}


def test_whatever_was_measured_is_drawn_and_shown_with_its_machine(tmp_path: Path) -> None:
    files = drawn(tmp_path, MEASURED)
    page = files.pop("README.md")
    assert sorted(files) == [
        "compaction.svg",
        "history-cpu.svg",
        "history-time.svg",
        "latest-cold.svg",
        "threads-latency.svg",
        "threads-throughput.svg",
        "writers-latency.svg",
        "writers-throughput.svg",
    ]
    for name, text in files.items():
        root = ET.fromstring(text)
        assert root.tag.endswith("svg")
        assert f"]({name})" in page
    assert "2 cores" in page
    assert "load 1.5" in page
    assert "10,000" in files["history-cpu.svg"]
    assert "&lt;peer&gt;" in files["writers-latency.svg"]
    heights = [e.get("height") for e in ET.fromstring(files["compaction.svg"])]
    assert len([h for h in heights if h is not None]) == 2  # a bar each


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    files = drawn(tmp_path, {"ingest": [{"name": "ingest", "seconds": 1.0, "facts": {}}]})
    assert list(files) == ["README.md"]

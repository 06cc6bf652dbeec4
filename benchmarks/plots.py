"""`python -m benchmarks.plots`: figures of the results that are kept, into `docs/benchmarks/`.

Whatever has been measured is drawn, the rest is left out. Plain SVG, so that it needs no library
and a change of a figure is a change of text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 168, 40, 48
_COLOURS = ("#1f5fbf", "#c2571a", "#2f8f4e", "#8a4fb0", "#9a7b00", "#5f6b76")

Results = Mapping[str, dict[str, Any]]  # by workload


@dataclass(frozen=True)
class Figure:
    """One plot. `lines`: by name, points of (x, y); of `bars` only the y is looked at."""

    name: str
    title: str
    method: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    source: str
    bars: bool = False


def steps(results: Results, workload: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results.get(workload, {}).get("steps", [])
    return found


def against_history(results: Results) -> Iterator[Figure]:
    watched = [s["facts"]["history"] for s in steps(results, "growth") if "history" in s["facts"]]
    if not watched:
        return
    for unit, what in (("ms", "time"), ("CPU ms", "CPU time")):
        yield Figure(
            f"history-{what.split()[0].lower()}",
            f"One commit and one warm read, {what}, against the commits before",
            "One row a commit into one type of 50 identities, in a directory; medians of 30 at "
            "each size. Storages keep themselves compact meanwhile.",
            "commits of history",
            "milliseconds",
            {
                kind: [(at["commits"], at[f"{kind} {unit}"]) for at in watched[-1]]
                for kind in ("commit", "warm read")
            },
            "growth",
        )


def against_threads(results: Results) -> Iterator[Figure]:
    counted = []
    for step in steps(results, "writers"):
        number = re.match(r"(\d+) threads", step["name"])
        if number is not None:
            counted.append((int(number[1]), step["facts"]))
    if not counted:
        return
    method = "Threads of one process, a session each, one row a commit, behind S3's latency."
    yield Figure(
        "threads-throughput",
        "Commits a second against threads",
        method,
        "threads",
        "commits a second",
        {"ontologia": [(n, facts["commits a second"]) for n, facts in counted]},
        "writers",
    )
    yield Figure(
        "threads-latency",
        "How long a commit takes against threads",
        method,
        "threads",
        "milliseconds",
        {q: [(n, facts[f"{q} ms"]) for n, facts in counted] for q in ("p50", "p95")},
        "writers",
    )


def by_processes(results: Results) -> Iterator[Figure]:
    done = [s for s in steps(results, "processes") if "commits/s" in s["facts"]]
    for name, what, fact in (
        ("throughput", "commits a second", "commits/s"),
        ("latency", "p95 of a commit, seconds", "p95"),
    ):
        if done:
            yield Figure(
                f"writers-{name}",
                f"Eight processes that commit at once: {what}",
                "20 rows a commit, each process its own, behind S3's latency.",
                "",
                what,
                {s["name"]: [(0, s["facts"][fact])] for s in done},
                "processes",
                bars=True,
            )


def by_peer(results: Results) -> Iterator[Figure]:
    for state in ("cold", "warm"):
        prefix = f"small, {state}: "
        read = [s for s in steps(results, "queries") if s["name"].startswith(prefix)]
        if read:
            yield Figure(
                f"latest-{state}",
                f"Latest rows by a filter after 200 small commits, {state}",
                "200 commits of 100 rows behind S3's latency; medians of 5 processes in turns.",
                "",
                "seconds",
                {s["name"].removeprefix(prefix): [(0, s["seconds"])] for s in read},
                "queries",
                bars=True,
            )


def of_compaction(results: Results) -> Iterator[Figure]:
    seconds = {}
    for step in steps(results, "compaction"):
        if step["name"].startswith(("compact ", "delta-rs optimize")):
            seconds[step["name"].replace(" (z-order by key) of the same rows", "")] = step[
                "seconds"
            ]
        elif "compacting_s" in step["facts"]:
            seconds[step["name"]] = step["facts"]["compacting_s"]
    if seconds:
        yield Figure(
            "compaction",
            "Compaction beside delta-rs",
            "Five loads of 1,000,000 rows in no order; 2,000 commits of 20 rows, compacted at "
            "every 50th (the sum of the 40 compactions).",
            "",
            "seconds",
            {name: [(0, value)] for name, value in seconds.items()},
            "compaction",
            bars=True,
        )


FIGURES: tuple[Callable[[Results], Iterator[Figure]], ...] = (
    against_history,
    against_threads,
    by_processes,
    by_peer,
    of_compaction,
)


# --- drawing ------------------------------------------------------------------------------------


def svg(figure: Figure) -> str:
    points = [point for line in figure.lines.values() for point in line]
    top = max((y for _, y in points), default=0) * 1.1 or 1
    tall = _HEIGHT - _TOP - _BOTTOM
    body = [_text(_LEFT, 22, figure.title, weight="bold")]
    for part in range(5):
        y = _HEIGHT - _BOTTOM - tall * part / 4
        body.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#8884"/>')
        body.append(_text(_LEFT - 8, y + 4, _shown(top * part / 4), anchor="end"))
    body.append(_text(_LEFT - 8, _TOP - 6, figure.y, anchor="start"))
    body += (_bars if figure.bars else _lines)(figure, top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#5f6b76" role="img">'
        f"<title>{escape(figure.title)}</title>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _lines(figure: Figure, top: float) -> Iterator[str]:
    """The x axis is logarithmic: what grows with it would be a curve that climbs."""
    places = sorted({x for line in figure.lines.values() for x, _ in line})
    low, high = math.log(places[0]), math.log(places[-1])
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + wide * share, _HEIGHT - _BOTTOM - tall * y / top

    for x in places:
        yield _text(at(x, 0)[0], _HEIGHT - _BOTTOM + 18, f"{x:,}", anchor="middle")
    yield _text(_LEFT + wide / 2, _HEIGHT - 8, figure.x, anchor="middle")
    for number, (name, line) in enumerate(figure.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        drawn = [at(x, y) for x, y in sorted(line)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in drawn:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        yield _text(_WIDTH - _RIGHT + 12, _TOP + 16 * number, name, colour=colour)


def _bars(figure: Figure, top: float) -> Iterator[str]:
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    each = wide / max(1, len(figure.lines))
    for number, (name, [(_, value)]) in enumerate(figure.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        height, x = tall * value / top, _LEFT + each * (number + 0.2)
        y = _HEIGHT - _BOTTOM - height
        yield (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{each * 0.6:.1f}" height="{height:.1f}" '
            f'fill="{colour}"/>'
        )
        yield _text(x + each * 0.3, y - 5, _shown(value), anchor="middle")
        yield _text(_WIDTH - _RIGHT + 12, _TOP + 16 * number, name, colour=colour, size=10)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "",
    weight: str = "",
    size: int = 0,
) -> str:
    more = f' fill="{colour}"' if colour else ""
    more += f' font-weight="{weight}"' if weight else ""
    more += f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- the page -----------------------------------------------------------------------------------


def page(figures: Sequence[Figure], results: Results) -> str:
    parts = [
        "# Figures",
        "Drawn from `benchmarks/results/` by `python -m benchmarks.plots`; `make bench` measures "
        "anew. Tables, how each was measured and what they mean are in "
        "[benchmarks/README.md](../../benchmarks/README.md). Measured on a machine that did other "
        "work as well: read ratios rather than seconds.",
    ]
    for figure in figures:
        parts += [
            f"## {figure.title}",
            f"![{figure.title}]({figure.name}.svg)",
            f"{figure.method} {_machine(results[figure.source].get('machine', {}))}",
        ]
    return "\n\n".join(parts) + "\n"


def _machine(machine: Mapping[str, Any]) -> str:
    told = [f"{machine.get('cores', '?')} cores", f"Python {machine.get('python', '?')}"]
    told += [f"{name} {number}" for name, number in machine.get("versions", {}).items()]
    if "load" in machine:
        told.append(f"load {machine['load'][0]:g} at the end")
    if "taken" in machine:
        told.append(machine["taken"])
    return f"({', '.join(told)}.)"


def main(results: Path = RESULTS, folder: Path = DOCS) -> list[Path]:
    """Write all figures that there are results for, and the page that shows them."""
    read: dict[str, dict[str, Any]] = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(results.glob("*.json"))
    }
    figures = [figure for make in FIGURES for figure in make(read)]
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{figure.name}.svg" for figure in figures]
    for path, figure in zip(written, figures, strict=True):
        path.write_text(svg(figure), encoding="utf-8")
    (folder / "README.md").write_text(page(figures, read), encoding="utf-8")
    return written


if __name__ == "__main__":
    for made in main():
        print(made)

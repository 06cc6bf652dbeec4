"""The soak's own books: each kind of loss is seen. A short soak itself is a lane of its own
(ONTOLOGIA_LONG=1), as it takes a minute and every core."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.latency_proxy import Faults
from benchmarks.soak import Accounts, Chaos, soak
from benchmarks.soak_roles import Bulk, Entry, Happened, Mirror, note
from storage_engine import OntologiaConfig, Session, initialize_storage

CONFIG = OntologiaConfig()


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A small sound soak as it leaves things: a storage and the journals."""
    uri = str(tmp_path / "onto")
    initialize_storage(uri)
    lines: dict[str, list[dict[str, Any]]] = {"writer-0": [], "bulk-0": [], "tagger-0": []}
    with Session(uri) as session:
        for unit in (1, 2):
            rows = [f"writer-0-{unit}-0", f"writer-0-{unit}-1"]
            session.ensure(Entry(id=row, value=unit) for row in rows)
            session.ensure(Mirror(id=row, value=unit) for row in rows)
            event = Happened(key=f"writer-0-{unit}")
            commit = session.commit(event, meta={"unit": f"writer-0/{unit}"})
            lines["writer-0"].append(
                {"kind": "commit", "unit": unit, "commit": commit, "rows": rows, "ms": 1.0,
                 "event": event.key}
            )  # fmt: skip
        session.ensure(Bulk(id=f"bulk-0-1-{n}", batch=1) for n in range(600))
        commit = session.commit(meta={"unit": "bulk-0/1"})
        lines["bulk-0"].append({"kind": "bulk", "unit": 1, "commit": commit, "ms": 1.0})
        tag = session.repository.create_tag("tagged", 2)
        lines["tagger-0"].append({"kind": "tag", "name": tag.name, "commit": 2})
        session.drain([note])
    for name, entries in lines.items():
        text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def problems(books: Path) -> str:
    accounts = Accounts(str(books / "onto"), CONFIG, books)
    accounts.settle_events(patience_s=0)
    accounts.check()
    return "\n".join(accounts.problems)


def claim(books: Path, journal: str, **facts: Any) -> None:
    with open(books / f"{journal}.jsonl", "a") as file:
        file.write(f"{json.dumps(facts)}\n")


def test_a_sound_run_has_no_problems(books: Path) -> None:
    assert problems(books) == ""


def _again(books: Path) -> None:
    with Session(str(books / "onto")) as session:
        session.ensure(Entry(id="writer-0-1-0", value=77))
        session.commit(meta={"unit": "writer-0/1"})


def _half(books: Path) -> None:
    with Session(str(books / "onto")) as session:
        session.ensure(Bulk(id="bulk-0-2-0", batch=2))
        session.commit(meta={"unit": "bulk-0/2"})


@pytest.mark.parametrize(
    ("defect", "seen"),
    [
        (
            lambda b: claim(b, "writer-0", kind="commit", unit=9, commit=9, rows=["x"], ms=1.0,
                            event=None),
            "unit writer-0/9: acknowledged 9, is None",
        ),
        (_again, "unit writer-0/1 was published by commits [6, 1]"),
        (_again, "Entry: twice ['writer-0-1-0']"),
        (_half, "bulk bulk-0-2: 1 rows"),
        (
            lambda b: claim(b, "writer-0", kind="emitted", key="gone"),
            "event gone was acknowledged and never handled",
        ),
        (lambda b: claim(b, "tagger-0", kind="tag", name="gone", commit=1), "tag gone: is None"),
        (lambda b: claim(b, "reader-0", kind="violation", what="half a commit"), "half a commit"),
        (lambda b: claim(b, "gc-0", kind="crash", trace="KeyError"), "gc-0: KeyError"),
    ],
)  # fmt: skip
def test_a_planted_defect_is_seen(books: Path, defect: Callable[[Path], None], seen: str) -> None:
    defect(books)
    assert seen in problems(books)


@pytest.mark.s3
@pytest.mark.skipif(not os.environ.get("ONTOLOGIA_LONG"), reason="a lane of its own: `make soak`")
def test_a_short_soak(tmp_path: Path) -> None:
    figures, wrong = soak(
        20,
        seed=7,
        counts={"writer": 2, "bulk": 1, "compactor": 1, "gc": 1, "repairer": 1, "tagger": 1,
                "restorer": 1, "worker": 1, "reader": 1},
        chaos=Chaos(every_s=2.0),
        faults=Faults(refused=0.01, disowned=0.003, lost=0.01, slow=0.01, slow_ms=500, seed=7),
        keep=tmp_path,
        least=10,
    )  # fmt: skip
    assert wrong == []
    assert figures["units acknowledged"] >= 10
    assert figures["killed"] + figures["stopped"] > 0

"""Processes that fork, write, update and merge on one storage, killed at random: what was
acknowledged is there once, what was not is there as a whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_engine import OntologiaConfig, Session, initialize_storage
from storage_engine.errors import OntologiaError
from storage_engine.maintenance.gc import plan_gc, sweep
from storage_engine.maintenance.integrity import verify_storage
from tests.cli.support import Customer

LONG = bool(os.environ.get("ONTOLOGIA_LONG"))
SECONDS = 60.0 if LONG else 6.0
PROCESSES = 3
ROWS = 4
SETTINGS = {"s3_lease_ttl_ms": 3_000, "s3_lock_timeout_ms": 60_000}


def config(endpoint: str | None, number: int) -> OntologiaConfig:
    return OntologiaConfig(runtime_id=f"p{number}", s3_endpoint_url=endpoint, **SETTINGS)  # type: ignore[arg-type]


def work(uri: str, number: int, journal: str) -> None:
    """Lines of the journal: what is about to be merged, and what was."""
    turn = 0
    with Session(uri, config=config(None, number)) as main, Path(journal).open("a") as told:

        def tell(what: str) -> None:
            told.write(f"{what} {number} {turn}\n")
            told.flush()
            os.fsync(told.fileno())

        while True:
            name = f"run/{number}/{turn}"
            try:
                tell("begun")
                main.create_branch(name)
                with Session(uri, config=config(None, number), branch=name) as branch:
                    branch.ensure(
                        Customer(id=f"{number}-{turn}-{n}", name="new") for n in range(ROWS)
                    )
                    branch.ensure(Customer(id=f"own-{number}", name=str(turn)))
                    branch.commit()
                    if turn % 2:
                        branch.update_branch()
                main.merge(name)
                tell("merged")
                main.delete_branch(name)
            except OntologiaError as error:
                if not error.retryable:
                    tell(f"failed:{type(error).__name__}")
            turn += 1


def lines(folder: Path) -> Iterator[tuple[str, str]]:
    for journal in folder.glob("*.log"):
        for line in journal.read_text().splitlines():
            what, number, turn = line.split(" ")
            yield what, f"{number}-{turn}"


@pytest.mark.simulation
def test_processes_that_are_killed(tmp_path: Path) -> None:
    uri = str(tmp_path / "onto")
    initialize_storage(uri, "v2")
    context = multiprocessing.get_context("spawn")
    drawn = random.Random(7)
    children: list[Any] = []
    number = 0
    ends = time.monotonic() + SECONDS
    try:
        while time.monotonic() < ends:
            while len(children) < PROCESSES:
                journal = str(tmp_path / f"{number}.log")
                child = context.Process(target=work, args=(uri, number, journal))
                child.start()
                children.append(child)
                number += 1
            time.sleep(drawn.uniform(1.0, 2.5))
            doomed = children.pop(drawn.randrange(len(children)))
            os.kill(doomed.pid, signal.SIGKILL)
            doomed.join()
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
    told = list(lines(tmp_path))
    assert [what for what, _ in told if what.startswith("failed")] == []
    begun = {name for what, name in told if what == "begun"}
    merged = {name for what, name in told if what == "merged"}
    with Session(uri, config=config(None, 99)) as session:
        for branch in session.list_branches()[1:]:
            session.delete_branch(branch.name)
        objects = session.repository.objects
        assert objects is not None
        sweep(objects, plan_gc(objects))
        rows = [c.id for c in session.query().entities(Customer).collect()]
        counts: dict[str, int] = {}
        for key in rows:
            if not key.startswith("own-"):
                name = key.rsplit("-", 1)[0]
                counts[name] = counts.get(name, 0) + 1
        assert set(counts.values()) <= {ROWS}, "half of a merge"
        assert merged <= set(counts), "lost"
        assert set(counts) <= begun
        history = session.query().entities(Customer).with_history().count()
        assert history == len(counts) * (ROWS + 1), "doubled"
        assert verify_storage(session.repository, deep=True).findings == []
        kinds = [c["kind"] for c in session.list_commits(10_000)]
        assert kinds.count("merge") == len(counts)

"""Ctrl-C at every line of publishing a group: whoever led is gone, and nobody else is wronged.

Each that waits is answered: by what is so, or that nobody can tell. What was not begun with is
published by whoever comes next.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage_engine.errors import CommitStateUnknownError
from storage_engine.repository import Repository, initialize_storage, open_repository
from storage_engine.repository.commit_queue import PendingCommit
from storage_engine.repository.protocol import CommitRequest
from tests.campaigns import examples
from tests.commitlog.support import World, new_world
from tests.engines import CUSTOMER, customer, put, rows_of
from tests.runtime.test_interrupts import Interrupts

OBJECTS = (
    "commitlog/publisher.py",
    "commitlog/swap.py",
    "write/group.py",
    "repository/commit_queue.py",
)
STEP = 5 // min(5, examples(1))  # lines: all of them in a search
STRETCH = 60
STRETCHES = range(1, 2000, STRETCH)
SQLITE = ("sqlite/group.py", "repository/commit_queue.py")


def submit(repository: Repository, mark: str, age: int) -> PendingCommit:
    rows = rows_of(CUSTOMER, customer(mark[0], age=age))
    return repository.submit(CommitRequest([rows], metadata={"mark": mark}))


def answers(repository: Repository, pending: dict[str, PendingCommit]) -> dict[str, Any]:
    """After somebody else has seen to what was left."""
    repository.flush()
    told: dict[str, Any] = {}
    for mark, each in pending.items():
        assert each.done, "somebody waits for ever"
        try:
            result = each.result()
        except CommitStateUnknownError:
            told[mark] = "unknown"
        else:
            assert result is not None
            told[mark] = result.commit_id
    return told


def check(repository: Repository, told: dict[str, Any], before: int) -> None:
    """What was acknowledged is there once, under that id; and nothing that nobody asked for."""
    head = repository.head_commit_id()
    marks = {c.id: c.metadata.get("mark") for c in repository.list_commits(9, before)}
    assert sorted(marks) == list(range(before + 1, head + 1))
    published = list(marks.values())
    assert len(set(published)) == len(published), "published twice"
    for mark, answer in told.items():
        if answer != "unknown":
            assert marks.get(answer) == mark
    assert set(published) <= set(told)


def interrupted(repository: Repository, number: int, modules: tuple[str, ...]) -> bool:
    """Whether publishing three together runs that many lines; if so, it was stopped there."""
    before = put(repository, customer("base", age=number)).commit_id
    pending = {mark: submit(repository, mark, number) for mark in ("a", "b", "c")}
    work: Callable[[], object] = pending["b"].result
    stopped = Interrupts(number, modules=modules).during(work)
    if stopped is None:
        return False
    told = answers(repository, pending)
    check(repository, told, before)
    assert put(repository, customer("after", age=number)).commit_id > before
    return True


def test_ctrl_c_in_who_leads(world: World) -> None:
    for first in STRETCHES:  # on storages of their own: history makes each run slower
        writer = world.open("ours") if first == 1 else new_world().open("ours")
        number = first
        while number < first + STRETCH and interrupted(writer.repo, number, OBJECTS):
            number += STEP
        if number < first + STRETCH:
            break
        writer.close()
    assert number > 150, "the trace saw the publish"


def test_ctrl_c_in_who_leads_on_sqlite(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/onto.db"
    initialize_storage(uri)
    repository = open_repository(uri)
    number = 1
    while interrupted(repository, number, SQLITE):
        number += STEP
    assert number > 80, "the trace saw the publish"
    repository.close()
    with sqlite3.connect(f"{tmp_path}/onto.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)

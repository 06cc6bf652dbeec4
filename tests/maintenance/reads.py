"""What a storage says before and after its files were rearranged."""

from __future__ import annotations

from typing import Any

from storage_engine.commitlog import state
from storage_engine.commitlog.records import Entry
from storage_engine.model import TypeSpec
from storage_engine.repository import ReadWindow, Repository
from storage_engine.repository.object.engine import ObjectRepository
from tests.engines import CUSTOMER


def entries_of(repository: Repository, spec: TypeSpec = CUSTOMER) -> tuple[Entry, ...]:
    """The log's own, not the index's."""
    assert isinstance(repository, ObjectRepository)
    head = repository.chain.read_head().head
    return state.current_checkpoint(repository.chain, head).entries[spec.ref]


def seen(repository: Repository, spec: TypeSpec = CUSTOMER) -> dict[str, list[dict[str, Any]]]:
    """Every kind of read, at commits that matter, and what each commit changed."""
    head = repository.head_commit_id()
    some = sorted({-1, 0, 1, head // 2, head - 1, head, head + 1})
    windows = {
        "latest": ReadWindow(),
        "history": ReadWindow(history=True),
        **{f"as_of {c}": ReadWindow(as_of=c) for c in some},
        **{f"since {c}": ReadWindow(history=True, since=c) for c in some},
    }
    found = {name: repository.read(spec, window).to_pylist() for name, window in windows.items()}
    return found | {f"changes {c}": repository.list_commit_changes(c) for c in range(1, head + 1)}

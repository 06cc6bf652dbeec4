"""Branches that pages look at: opened beside the storage, shared by requests, closed when idle.

A branch is looked up by name for every request, so that one which was deleted and made anew is
never taken for the other. What was opened is kept by incarnation, and only as much of it as a few
people need.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage_engine.commitlog.branches import Branch
from storage_engine.repository.object.branches import Branches

if TYPE_CHECKING:
    from storage_engine.explore.view import Storage
    from storage_engine.repository.protocol import Repository

_IDLE_KEPT = 8


@dataclass
class _OpenBranch:
    storage: Storage
    readers: int = 0


class OpenBranches:
    """Those of one storage. `make` makes what pages share of a branch."""

    def __init__(self, branches: Branches, make: Callable[[Repository, Branch], Storage]) -> None:
        self._branches = branches
        self._make = make
        self._opened: OrderedDict[str, _OpenBranch] = OrderedDict()  # the latest last
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, name: str) -> Iterator[Storage]:
        """The branch of that name as it is now; UnknownBranchError names the nearest."""
        head = self._branches.head(name)
        with self._lock:
            opened = self._opened.get(head.incarnation)
            if opened is None:
                made = self._make(self._branches.beside(head), Branch.of(head))
                opened = self._opened[head.incarnation] = _OpenBranch(made)
            opened.readers += 1
            self._opened.move_to_end(head.incarnation)
        try:
            yield opened.storage
        finally:
            with self._lock:
                opened.readers -= 1
                surplus = self._surplus()
            for each in surplus:
                each.storage.close()

    def _surplus(self) -> list[_OpenBranch]:
        """Idle ones that were used longest ago; they are nobody's from now on."""
        idle = [key for key, opened in self._opened.items() if not opened.readers]
        return [self._opened.pop(key) for key in idle[: max(0, len(idle) - _IDLE_KEPT)]]

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, OrderedDict()
        for each in opened.values():
            each.storage.close()

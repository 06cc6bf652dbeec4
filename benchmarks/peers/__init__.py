"""Table formats under the same load: the same rows in, the same rows out.

A module each, Ontologia's among them. Each keeps a history of upserts the way its documentation
says to, and reads the latest rows the way its users do: `fill` makes one commit of each batch,
`open_latest` gives a function that reads the rows of one tier as they are when it is called.
Nobody compacts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, cast

import pyarrow as pa

from benchmarks.peers.content import Place

PEERS = {
    "ontologia": "ontologia",
    "delta-rs": "delta",
    "pyiceberg": "iceberg",
    "Lance": "lance_",
    "DuckLake": "ducklake",
}


class Peer(Protocol):
    """What a module here has."""

    def fill(self, place: Place, batches: Iterable[pa.Table]) -> None: ...
    def open_latest(self, place: Place) -> AbstractContextManager[Callable[[str], pa.Table]]: ...


def peer(name: str) -> Peer:
    """Imported when asked for, so that a process has the memory of one alone."""
    return cast(Peer, import_module(f"benchmarks.peers.{PEERS[name]}"))

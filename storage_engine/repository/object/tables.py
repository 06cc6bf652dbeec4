"""Rows of small data files, decoded once and kept in memory while there is room.

A type that is written in many small commits has many small files until it is compacted. Opening
each of them again for every query costs more than all the rest; they never change.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa

from storage_engine.config import KIB, MIB

SMALL_FILE = 128 * KIB
MANY_FILES = 16  # fewer are scanned where they are, with what Parquet knows of them
_KEPT_BYTES = 64 * MIB

Key = tuple[str, tuple[str, ...]]  # path, columns


class DecodedFiles:
    """Least recently used first out. Safe to use from several threads."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._limit = kept_bytes
        self._tables: OrderedDict[Key, pa.Table] = OrderedDict()
        self._bytes = 0
        self._mutex = threading.Lock()

    def get(self, path: str, columns: tuple[str, ...]) -> pa.Table | None:
        with self._mutex:
            found = self._tables.get((path, columns))
            if found is not None:
                self._tables.move_to_end((path, columns))
            return found

    def keep(self, path: str, columns: tuple[str, ...], rows: pa.Table) -> None:
        with self._mutex:
            if (path, columns) in self._tables:
                return
            self._tables[path, columns] = rows
            self._bytes += rows.get_total_buffer_size()
            while self._bytes > self._limit:
                _, oldest = self._tables.popitem(last=False)
                self._bytes -= oldest.get_total_buffer_size()

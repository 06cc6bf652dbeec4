"""Storages in one SQLite file: engines v1 and v2, and what opens, creates and erases them."""

from storage_engine.repository.sqlite.admin import ENGINES, create, describe, detect, erase
from storage_engine.repository.sqlite.connection import MEMORY
from storage_engine.repository.sqlite.control_tables import FORMAT
from storage_engine.repository.sqlite.versions import SqliteRepositoryV1, SqliteRepositoryV2

__all__ = [
    "ENGINES",
    "FORMAT",
    "MEMORY",
    "SqliteRepositoryV1",
    "SqliteRepositoryV2",
    "create",
    "describe",
    "detect",
    "erase",
]

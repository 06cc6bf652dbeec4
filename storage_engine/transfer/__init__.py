"""Whole storages on the move: copies with full history, and from engine v1 to v2."""

from storage_engine.transfer.compare import Difference, StorageComparison, compare_storages
from storage_engine.transfer.copy import (
    CopyReport,
    compare_uris,
    copy_repository,
    copy_storage,
)
from storage_engine.transfer.engine_migration import EngineMigration, migrate_engine

__all__ = [
    "CopyReport",
    "Difference",
    "EngineMigration",
    "StorageComparison",
    "compare_storages",
    "compare_uris",
    "copy_repository",
    "copy_storage",
    "migrate_engine",
]

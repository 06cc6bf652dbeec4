"""Whole storages on the move: copies with full history, and from engine v1 to v2."""

from storage_engine.transfer.compare import Difference, StorageComparison, compare_storages
from storage_engine.transfer.copy import CopyReport, copy_repository, copy_storage

__all__ = [
    "CopyReport",
    "Difference",
    "StorageComparison",
    "compare_storages",
    "copy_repository",
    "copy_storage",
]

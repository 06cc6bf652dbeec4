"""Storage engines behind one protocol, and the way to open or create a storage."""

from storage_engine.commitlog.layout import MAIN
from storage_engine.repository.open import InitPlan, initialize_storage, open_repository
from storage_engine.repository.protocol import (
    CommitRecord,
    CommitRequest,
    CommitResult,
    Idempotency,
    ReadWindow,
    Repository,
    TypeChange,
    TypeInput,
)

__all__ = [
    "MAIN",
    "CommitRecord",
    "CommitRequest",
    "CommitResult",
    "Idempotency",
    "InitPlan",
    "ReadWindow",
    "Repository",
    "TypeChange",
    "TypeInput",
    "initialize_storage",
    "open_repository",
]

"""Storage engines behind one protocol, and the way to open or create a storage."""

from storage_engine.repository.initialize import InitPlan, initialize_storage
from storage_engine.repository.open import open_repository
from storage_engine.repository.protocol import (
    CommitRecord,
    CommitRequest,
    CommitResult,
    Idempotency,
    Repository,
    TypeChange,
    TypeInput,
    Window,
)

__all__ = [
    "CommitRecord",
    "CommitRequest",
    "CommitResult",
    "Idempotency",
    "InitPlan",
    "Repository",
    "TypeChange",
    "TypeInput",
    "Window",
    "initialize_storage",
    "open_repository",
]

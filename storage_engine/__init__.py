"""Ontologia: a typed ontology kept as an append-only commit log.

Everything public is importable from here. Names are loaded at first use, so importing the package
costs next to nothing and loads no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_engine.config import OntologiaConfig
    from storage_engine.errors import (
        AlreadyInitializedError,
        BatchSizeExceededError,
        ClosedError,
        CommitMetadataTooLargeError,
        CommitStateUnknownError,
        ConcurrentWriteError,
        ConfigurationError,
        CopyRefusedError,
        EventLoopLimitError,
        ExpectedVersionMismatchError,
        ForkedSessionError,
        HandlerError,
        HeadMismatchError,
        IntegrityError,
        LeaseExpiredError,
        LockBreakError,
        LockContentionError,
        MetadataUnavailableError,
        MigrationTokenError,
        OntologiaError,
        SchemaMetadataError,
        SchemaOutdatedError,
        SqlNotAllowedError,
        StorageBackendError,
        TagExistsError,
        TypeDeclarationError,
        UninitializedStorageError,
        UnknownTagError,
        UnsupportedEngineError,
        ValidationError,
    )
    from storage_engine.events.envelopes import EventDeadLetter
    from storage_engine.events.schedules import Schedule
    from storage_engine.maintenance.compaction import CompactionPolicy
    from storage_engine.model.declarations import Entity, Event, Relation
    from storage_engine.model.field import Field
    from storage_engine.query.builder import Query, left, right
    from storage_engine.query.results import Path, Plan, Result
    from storage_engine.repository.open import initialize_storage, open_repository
    from storage_engine.runtime.handlers import HandlerContext, on_event
    from storage_engine.runtime.history import Changes
    from storage_engine.runtime.ontology import Ontology
    from storage_engine.runtime.reads import SqlQuery, View
    from storage_engine.runtime.session import Session
    from storage_engine.transfer import CopyReport, copy_storage

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitializedError",
    "BatchSizeExceededError",
    "Changes",
    "ClosedError",
    "CommitMetadataTooLargeError",
    "CommitStateUnknownError",
    "CompactionPolicy",
    "ConcurrentWriteError",
    "ConfigurationError",
    "CopyRefusedError",
    "CopyReport",
    "Entity",
    "Event",
    "EventDeadLetter",
    "EventLoopLimitError",
    "ExpectedVersionMismatchError",
    "Field",
    "ForkedSessionError",
    "HandlerContext",
    "HandlerError",
    "HeadMismatchError",
    "IntegrityError",
    "LeaseExpiredError",
    "LockBreakError",
    "LockContentionError",
    "MetadataUnavailableError",
    "MigrationTokenError",
    "OntologiaConfig",
    "OntologiaError",
    "Ontology",
    "Path",
    "Plan",
    "Query",
    "Relation",
    "Result",
    "Schedule",
    "SchemaMetadataError",
    "SchemaOutdatedError",
    "Session",
    "SqlNotAllowedError",
    "SqlQuery",
    "StorageBackendError",
    "TagExistsError",
    "TypeDeclarationError",
    "UninitializedStorageError",
    "UnknownTagError",
    "UnsupportedEngineError",
    "ValidationError",
    "View",
    "__version__",
    "copy_storage",
    "initialize_storage",
    "left",
    "on_event",
    "open_repository",
    "right",
]

_ERRORS = "storage_engine.errors"
_MODULES = {
    "CompactionPolicy": "storage_engine.maintenance.compaction",
    "Changes": "storage_engine.runtime.history",
    "CopyReport": "storage_engine.transfer",
    "Entity": "storage_engine.model.declarations",
    "Event": "storage_engine.model.declarations",
    "EventDeadLetter": "storage_engine.events.envelopes",
    "Field": "storage_engine.model.field",
    "HandlerContext": "storage_engine.runtime.handlers",
    "OntologiaConfig": "storage_engine.config",
    "Ontology": "storage_engine.runtime.ontology",
    "Path": "storage_engine.query.results",
    "Plan": "storage_engine.query.results",
    "Query": "storage_engine.query.builder",
    "Relation": "storage_engine.model.declarations",
    "Schedule": "storage_engine.events.schedules",
    "Result": "storage_engine.query.results",
    "Session": "storage_engine.runtime.session",
    "SqlQuery": "storage_engine.runtime.reads",
    "View": "storage_engine.runtime.reads",
    "copy_storage": "storage_engine.transfer",
    "initialize_storage": "storage_engine.repository.open",
    "on_event": "storage_engine.runtime.handlers",
    "left": "storage_engine.query.builder",
    "open_repository": "storage_engine.repository.open",
    "right": "storage_engine.query.builder",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name) or (_ERRORS if name in __all__ else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Ontologia: a typed ontology kept as an append-only commit log.

Everything public is importable from here. Names are loaded at first use, so importing the package
costs next to nothing and loads no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_engine.commitlog.branches import Branch
    from storage_engine.config import OntologiaConfig
    from storage_engine.errors import (
        AlreadyInitializedError,
        BadRowsError,
        BatchSizeExceededError,
        BranchExistsError,
        ClosedError,
        CommitMetadataTooLargeError,
        CommitStateUnknownError,
        ConcurrentWriteError,
        ConfigurationError,
        CopyRefusedError,
        DropDependencyError,
        EventLoopLimitError,
        ExpectedVersionMismatchError,
        ForkedSessionError,
        HandlerError,
        HeadMismatchError,
        ImportConflictError,
        IntegrityError,
        LeaseExpiredError,
        LockBreakError,
        LockContentionError,
        MergeConflictError,
        MetadataUnavailableError,
        MigrationError,
        MigrationTokenError,
        MissingRowsError,
        MissingUpgraderError,
        OntologiaError,
        OvertakenExtractError,
        ProtectedBranchError,
        SchemaMetadataError,
        SchemaOutdatedError,
        SqlNotAllowedError,
        StorageBackendError,
        TagExistsError,
        TypeDeclarationError,
        TypeDroppedError,
        UninitializedStorageError,
        UnknownBranchError,
        UnknownTagError,
        UnsupportedEngineError,
        UnsupportedTypeError,
        ValidationError,
    )
    from storage_engine.events.envelopes import EventDeadLetter
    from storage_engine.events.schedules import Schedule
    from storage_engine.maintenance.compaction import CompactionPolicy
    from storage_engine.model.decimals import Precision
    from storage_engine.model.declarations import Entity, Event, Relation
    from storage_engine.model.field import Field
    from storage_engine.query.builder import Query, RawQuery, left, right
    from storage_engine.query.results import Path, Plan, Result
    from storage_engine.repository.object.merge import Conflict, MergeReport
    from storage_engine.repository.open import initialize_storage, open_repository
    from storage_engine.runtime.exchange import ExportReport, ImportReport
    from storage_engine.runtime.handlers import HandlerContext, on_event
    from storage_engine.runtime.history import Changes
    from storage_engine.runtime.ontology import Ontology
    from storage_engine.runtime.reads import SqlQuery, View
    from storage_engine.runtime.session import Session
    from storage_engine.schema.diff import FieldChange, SchemaDiff
    from storage_engine.schema.history import SchemaVersion, TypeHistory
    from storage_engine.schema.preview import MigrationPreview, MigrationResult
    from storage_engine.schema.upgraders import load_upgraders, upgrader
    from storage_engine.transfer import CopyReport, copy_storage

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitializedError",
    "BadRowsError",
    "BatchSizeExceededError",
    "Branch",
    "BranchExistsError",
    "Changes",
    "ClosedError",
    "CommitMetadataTooLargeError",
    "CommitStateUnknownError",
    "CompactionPolicy",
    "ConcurrentWriteError",
    "ConfigurationError",
    "Conflict",
    "CopyRefusedError",
    "CopyReport",
    "DropDependencyError",
    "Entity",
    "Event",
    "EventDeadLetter",
    "EventLoopLimitError",
    "ExpectedVersionMismatchError",
    "ExportReport",
    "Field",
    "FieldChange",
    "ForkedSessionError",
    "HandlerContext",
    "HandlerError",
    "HeadMismatchError",
    "ImportConflictError",
    "ImportReport",
    "IntegrityError",
    "LeaseExpiredError",
    "LockBreakError",
    "LockContentionError",
    "MergeConflictError",
    "MergeReport",
    "MetadataUnavailableError",
    "MigrationError",
    "MigrationPreview",
    "MigrationResult",
    "MigrationTokenError",
    "MissingRowsError",
    "MissingUpgraderError",
    "OntologiaConfig",
    "OntologiaError",
    "Ontology",
    "OvertakenExtractError",
    "Path",
    "Plan",
    "Precision",
    "ProtectedBranchError",
    "Query",
    "RawQuery",
    "Relation",
    "Result",
    "Schedule",
    "SchemaDiff",
    "SchemaMetadataError",
    "SchemaOutdatedError",
    "SchemaVersion",
    "Session",
    "SqlNotAllowedError",
    "SqlQuery",
    "StorageBackendError",
    "TagExistsError",
    "TypeDeclarationError",
    "TypeDroppedError",
    "TypeHistory",
    "UninitializedStorageError",
    "UnknownBranchError",
    "UnknownTagError",
    "UnsupportedEngineError",
    "UnsupportedTypeError",
    "ValidationError",
    "View",
    "__version__",
    "copy_storage",
    "initialize_storage",
    "left",
    "load_upgraders",
    "on_event",
    "open_repository",
    "right",
    "upgrader",
]

_ERRORS = "storage_engine.errors"
_MODULES = {
    "Branch": "storage_engine.commitlog.branches",
    "Conflict": "storage_engine.repository.object.merge",
    "MergeReport": "storage_engine.repository.object.merge",
    "CompactionPolicy": "storage_engine.maintenance.compaction",
    "Changes": "storage_engine.runtime.history",
    "CopyReport": "storage_engine.transfer",
    "Entity": "storage_engine.model.declarations",
    "Event": "storage_engine.model.declarations",
    "EventDeadLetter": "storage_engine.events.envelopes",
    "ExportReport": "storage_engine.runtime.exchange",
    "Field": "storage_engine.model.field",
    "FieldChange": "storage_engine.schema.diff",
    "HandlerContext": "storage_engine.runtime.handlers",
    "ImportReport": "storage_engine.runtime.exchange",
    "MigrationPreview": "storage_engine.schema.preview",
    "MigrationResult": "storage_engine.schema.preview",
    "OntologiaConfig": "storage_engine.config",
    "Ontology": "storage_engine.runtime.ontology",
    "Path": "storage_engine.query.results",
    "Plan": "storage_engine.query.results",
    "Precision": "storage_engine.model.decimals",
    "Query": "storage_engine.query.builder",
    "RawQuery": "storage_engine.query.builder",
    "Relation": "storage_engine.model.declarations",
    "Schedule": "storage_engine.events.schedules",
    "Result": "storage_engine.query.results",
    "SchemaDiff": "storage_engine.schema.diff",
    "SchemaVersion": "storage_engine.schema.history",
    "Session": "storage_engine.runtime.session",
    "SqlQuery": "storage_engine.runtime.reads",
    "TypeHistory": "storage_engine.schema.history",
    "View": "storage_engine.runtime.reads",
    "copy_storage": "storage_engine.transfer",
    "initialize_storage": "storage_engine.repository.open",
    "on_event": "storage_engine.runtime.handlers",
    "left": "storage_engine.query.builder",
    "load_upgraders": "storage_engine.schema.upgraders",
    "open_repository": "storage_engine.repository.open",
    "right": "storage_engine.query.builder",
    "upgrader": "storage_engine.schema.upgraders",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name) or (_ERRORS if name in __all__ else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

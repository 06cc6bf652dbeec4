"""Rows of types as files: exports and imports."""

from storage_engine.runtime.exchange.export import ExportReport, export_types
from storage_engine.runtime.exchange.inputs import InputProblem
from storage_engine.runtime.exchange.load import ImportedType, ImportReport, import_types
from storage_engine.runtime.exchange.summary import ExportedType, ExportSummary

__all__ = [
    "ExportReport",
    "ExportSummary",
    "ExportedType",
    "ImportReport",
    "ImportedType",
    "InputProblem",
    "export_types",
    "import_types",
]

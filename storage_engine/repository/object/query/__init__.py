"""Queries on object stores: plan which files to open, compose one DuckDB statement, stream."""

from storage_engine.repository.object.query.executor import ObjectExecutor

__all__ = ["ObjectExecutor"]

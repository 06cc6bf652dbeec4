"""Integrity: does a storage contradict itself anywhere? Read-only, on any storage."""

from __future__ import annotations

from storage_engine.maintenance.integrity.data import RowCheck, check_files
from storage_engine.maintenance.integrity.log import LogCheck
from storage_engine.maintenance.integrity.report import Finding, IntegrityReport, Progress
from storage_engine.maintenance.integrity.sqlite import check_sqlite
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.protocol import Repository
from storage_engine.repository.sqlite.engine import SqliteRepository

__all__ = ["Finding", "IntegrityReport", "verify_storage"]


def verify_storage(
    repository: Repository, *, deep: bool = False, progress: Progress | None = None
) -> IntegrityReport:
    """Follow the log and read every data file that it needs; with `deep`, every row too."""
    report = IntegrityReport(repository.uri, deep=deep)
    tell: Progress = progress if progress is not None else lambda _what, _done, _total: None
    repository.flush()
    if isinstance(repository, SqliteRepository):
        check_sqlite(repository, report, tell)
        return report
    assert isinstance(repository, ObjectRepository)
    log = LogCheck(repository.store, report, tell).run()
    if log is not None:
        check_files(repository.store, log, repository.engine_version, report, tell)
        if deep:
            RowCheck(repository, log, report, tell).run()
    return report

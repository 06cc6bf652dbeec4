"""Integrity: does a storage contradict itself anywhere? Read-only, on any storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage_engine.maintenance.integrity.data import RowCheck, check_files
from storage_engine.maintenance.integrity.log import LogCheck
from storage_engine.maintenance.integrity.report import Finding, IntegrityReport, Progress
from storage_engine.maintenance.integrity.sqlite import check_sqlite
from storage_engine.repository.protocol import Repository

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository

__all__ = ["Finding", "IntegrityReport", "verify_storage"]


def verify_storage(
    repository: Repository, *, deep: bool = False, progress: Progress | None = None
) -> IntegrityReport:
    """Follow the log and read every data file that it needs; with `deep`, every row too."""
    report = IntegrityReport(repository.uri, deep=deep)
    tell: Progress = progress if progress is not None else lambda _what, _done, _total: None
    repository.flush()
    if (database := repository.database) is not None:
        check_sqlite(database, report, tell)
    if (objects := repository.objects) is not None:
        _check_objects(objects, report, tell)
    return report


def _check_objects(repository: ObjectRepository, report: IntegrityReport, tell: Progress) -> None:
    log = LogCheck(repository.store, report, tell).run()
    if log is not None:
        check_files(repository.store, log, repository.engine_version, report, tell)
        if report.deep:
            RowCheck(repository, log, report, tell).run()

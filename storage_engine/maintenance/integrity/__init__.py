"""Integrity: does a storage contradict itself anywhere? Read-only, on any storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from storage_engine.commitlog import layout
from storage_engine.commitlog.branches import chain_of, list_heads
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head
from storage_engine.errors import IntegrityError, OntologiaError, UnknownBranchError
from storage_engine.maintenance.indices import index_verifier
from storage_engine.maintenance.integrity.data import RowCheck, check_files
from storage_engine.maintenance.integrity.log import Log, LogCheck
from storage_engine.maintenance.integrity.report import Finding, IntegrityReport, Progress
from storage_engine.maintenance.integrity.sqlite import check_sqlite
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import Repository
from storage_engine.schema.diff import diff_types

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository

__all__ = ["Finding", "IntegrityReport", "verify_storage"]

# Of indices, what no writer leaves behind. That one lags is no contradiction.
CONTRADICTIONS = frozenset(
    {
        "altered",
        "missing_entry",
        "orphan_file",
        "other_history",
        "overlap",
        "path_mismatch",
        "unreadable",
        "wrong_facts",
    }
)


def verify_storage(
    repository: Repository,
    *,
    deep: bool = False,
    models: Iterable[TypeSpec] = (),
    progress: Progress | None = None,
) -> IntegrityReport:
    """Follow the log and read every data file that it needs; with `deep`, every row too.

    Declared types (`models`) are compared with what is stored of them; one that is not stored yet
    contradicts nothing.
    """
    report = IntegrityReport(repository.uri, deep=deep)
    tell: Progress = progress if progress is not None else lambda _what, _done, _total: None
    repository.flush()
    if (database := repository.database) is not None:
        check_sqlite(database, report, tell)
    if (objects := repository.objects) is not None:
        _check_objects(objects, report, tell)
    _check_models(repository, {spec.ref: spec for spec in models}, report)
    return report


def _check_models(
    repository: Repository, models: Mapping[tuple[str, str], TypeSpec], report: IntegrityReport
) -> None:
    if not models:
        return
    try:
        stored = {spec.ref: spec for spec in repository.known_types()}
    except OntologiaError as error:
        report.note("models", "unreadable_schema", str(error))
        return
    for ref, declared in sorted(models.items()):
        report.checked["models"] += 1
        schema = stored[ref].schema_dict() if ref in stored else None
        if schema is None or declared.aligned(schema).schema_sha256 == stored[ref].schema_sha256:
            continue
        differences = diff_types(TypeSpec.from_schema_dict(schema), declared).sentences()
        message = "; ".join(differences) or "details that do not change its fields"
        report.note("models", "schema_differs", message, type_name=declared.name)


def _check_objects(repository: ObjectRepository, report: IntegrityReport, tell: Progress) -> None:
    seen: set[str] = set()
    log = _check_chain(repository, report, tell, seen)
    if log is None:
        return
    if report.deep:
        RowCheck(repository, log, report, tell).run()
    if repository.fork is None and repository.engine_version == "v2":
        _check_branches(repository, log, report, tell, seen)


def _check_chain(
    repository: ObjectRepository,
    report: IntegrityReport,
    tell: Progress,
    seen: set[str],
    inherited: Log | None = None,
) -> Log | None:
    """A log, its indices and files, but for those that were seen before."""
    check = LogCheck(
        repository.store, report, tell, head_key=repository.chain.head_key, inherited=inherited
    )
    log = check.run()
    if log is not None:
        # Where the log contradicts itself, it proves nothing of an index.
        if not any(finding.area in {"chain", "checkpoint"} for finding in report.findings):
            _check_indices(repository, log, report)
        check_files(repository.store, log, repository.engine_version, report, tell, seen)
    return log


def _check_branches(
    repository: ObjectRepository,
    main: Log,
    report: IntegrityReport,
    tell: Progress,
    seen: set[str],
) -> None:
    """Every branch, as far as it is not main's. Rows are read of a branch that is verified by
    itself."""
    try:
        heads = list_heads(repository.store, log_id=main.head.log_id)
    except IntegrityError as error:
        report.note("chain", "unreadable_head", str(error), key=error.key)
        return
    chains = {"": repository.chain}
    chains |= {v.head.incarnation: chain_of(repository.store, v.head) for v in heads}
    for version in heads:
        own = IntegrityReport(report.uri)
        branch = repository.on_branch(version.head)
        try:
            _check_chain(branch, own, tell, seen, main)
        except UnknownBranchError:
            continue  # it was deleted meanwhile
        finally:
            branch.close()
        _check_base(version.head, chains, own)
        report.checked["branches"] += 1
        report.checked["files"] += own.checked["files"]
        for finding in own.findings:
            report.note(
                finding.area,
                finding.reason,
                f"branch {branch.branch}: {finding.message}",
                key=finding.key,
                commit_id=finding.commit_id,
                type_name=finding.type_name,
            )


def _check_base(head: Head, chains: Mapping[str, Chain], report: IntegrityReport) -> None:
    """Whether its parent still has the commit that a branch goes on from."""
    fork = head.fork
    parent = chains.get(fork.parent_incarnation) if fork is not None else None
    if fork is None or fork.base is None or parent is None:
        return
    try:
        there = parent.has(parent.read_head().head, fork.base.path)
    except (IntegrityError, UnknownBranchError):
        return  # which is told of the parent itself, or it was deleted meanwhile
    if not there:
        report.note(
            "branch",
            "other_history",
            f"it goes on from commit {fork.base_commit}, which {fork.parent!r} does not have",
            key=layout.branch_head(fork.branch),
            commit_id=fork.base_commit,
        )


def _check_indices(repository: ObjectRepository, log: Log, report: IntegrityReport) -> None:
    """Whether an index says what the log does not; `index verify` tells what it lacks, too."""
    anew = chain_of(repository.store, log.head)
    examined = index_verifier(repository, anew).examine(log.head, known_types=())
    for finding in examined.findings:
        if finding.reason in CONTRADICTIONS:
            report.note(
                "index",
                finding.reason,
                f"index of {finding.type_name} {finding.message}",
                key=finding.path or repository.indices.key((finding.kind, finding.type_name)),
                commit_id=finding.commit_id,
                type_name=finding.type_name,
            )
    report.checked["indices"] += len(examined.types)

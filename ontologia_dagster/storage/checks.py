"""Two speeds of checking what is stored.

`index_verify` and `schema_matches` belong to each type and run with every materialisation: they
compare the type's index with the log, and the class with the stored schema, which reads no data.
Deep verification reads everything (chain, hashes, row
counts, both ends of relations); its checks hang on the storage's log, an asset that nobody
materialises, so that they run on their own schedule alone.

A check always has a result: a storage that cannot be read is a failed check that says why.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.declaration import (
    MAINTENANCE_POOL,
    STORAGE_METADATA,
    OntologyAsset,
    snake_case,
    with_ends,
)
from ontologia_dagster.downstream.metadata import (
    SCHEMA_VERSION,
    request_metadata,
    requests_of,
    table,
)
from ontologia_dagster.resources.ontology import SchemaAdvice
from ontologia_dagster.schema.differences import comparison_metadata
from storage_engine.errors import OntologiaError
from storage_engine.schema.comparison import compare_types

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.index.verify import Examination
    from storage_engine.maintenance.integrity import Finding, IntegrityReport

INDEX_VERIFY = "index_verify"
SCHEMA_MATCHES = "schema_matches"
DEEP_VERIFY = "deep_verify"
LOG_AREA = "deep_verify_log"
_FINDING = ["type", "reason", "commit", "what", "path"]


def index_check(declared: OntologyAsset, repair_job: str) -> dg.AssetChecksDefinition:
    """The cheap check of one type; a failure names the job that repairs it."""

    @dg.asset_check(
        asset=declared.asset_key,
        name=INDEX_VERIFY,
        description="The type's index agrees with the log.",
        blocking=declared.blocking_checks,
        required_resource_keys={declared.storage},
    )
    def index_verify(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        ontology: OntologyResource = getattr(context.resources, declared.storage)
        return run_check(lambda: _index_result(ontology, declared.type, repair_job))

    return index_verify


def run_check(check: Callable[[], dg.AssetCheckResult]) -> dg.AssetCheckResult:
    """The check's result, or a failed one with the error that kept it from having one."""
    try:
        return check()
    except OntologiaError as error:
        return _failed(error)


def _failed(error: OntologiaError, **of: Any) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=False,
        description=str(error),
        metadata={"error": type(error).__name__, "retryable": error.retryable},
        **of,
    )


def _index_result(ontology: "OntologyResource", type_name: str, repair_job: str) -> Any:
    examined, requests = examine(ontology, type_name)
    findings = [finding for examination in examined for finding in examination.findings]
    metadata: dict[str, Any] = {
        "index_lag": max((examination.lag for examination in examined), default=0),
        "findings": len(findings),
        "finding_list": table(
            _FINDING, [(f.type_name, f.reason, f.commit_id, f.message, f.path) for f in findings]
        ),
        **request_metadata(requests),
    }
    if not findings:
        return dg.AssetCheckResult(passed=True, metadata=metadata)
    reasons = ", ".join(sorted({finding.reason for finding in findings}))
    return dg.AssetCheckResult(
        passed=False,
        description=f"{type_name}: {reasons}. Readers stay right, but slower; run {repair_job}",
        metadata={
            **metadata,
            "repair_job": dg.MetadataValue.job(repair_job, ontology.location),
        },
    )


def examine(
    ontology: "OntologyResource", type_name: str
) -> "tuple[list[Examination], dict[str, int]]":
    """What the index of a type is and should be (nothing where there are no indices), and the
    requests that it took."""
    from storage_engine.maintenance.indices import index_verifier

    with ontology.repository() as repository:
        if (objects := repository.objects) is None:
            return [], {}  # SQLite keeps rows in tables
        verifier = index_verifier(objects)
        head = verifier.chain.read_head().head
        refs = [spec.ref for spec in repository.known_types() if spec.name == type_name]
        examined = [
            verifier.examine_type(head, ref, verifier.indices.read(ref, log_id=head.log_id))
            for ref in refs
        ]
        return examined, requests_of(repository)


# -- schema ---------------------------------------------------------------------------------------


def schema_check(declared: OntologyAsset) -> dg.AssetChecksDefinition:
    """Whether the class is what the storage has; run by itself it tells before a run is stopped."""

    @dg.asset_check(
        asset=declared.asset_key,
        name=SCHEMA_MATCHES,
        description="The declared class is the schema that the storage has.",
        required_resource_keys={declared.storage},
    )
    def schema_matches(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        ontology: OntologyResource = getattr(context.resources, declared.storage)
        return run_check(lambda: _schema_result(ontology, declared))

    return schema_matches


def _schema_result(ontology: "OntologyResource", declared: OntologyAsset) -> dg.AssetCheckResult:
    from storage_engine.spark.jobs.ingest import type_of

    spec = type_of(declared.ingest_spec(ontology.storage_uri, declared.source.paths))
    with ontology.repository() as repository:
        comparison = compare_types(with_ends(spec, declared.models), repository.type_histories)
        requests = requests_of(repository)
    metadata: dict[str, Any] = {
        SCHEMA_VERSION: comparison.versions.get(spec.ref) or dg.MetadataValue.null(),
        **request_metadata(requests),
    }
    if comparison.agrees:
        return dg.AssetCheckResult(passed=True, metadata=metadata)
    advice = SchemaAdvice.of(ontology, declared.storage, declared.models)
    by_itself = comparison.additive and declared.schema_changes == "additive"
    after = "the next run applies it" if by_itself else advice.sentence()
    return dg.AssetCheckResult(
        passed=False,
        severity=dg.AssetCheckSeverity.WARN if by_itself else dg.AssetCheckSeverity.ERROR,
        description=f"{comparison.summary()}. {after}",
        metadata={**metadata, **comparison_metadata(comparison, advice)},
    )


# -- deep -----------------------------------------------------------------------------------------


def log_asset(storage: str) -> dg.AssetSpec:
    """The storage's log, as something to hang checks on: runs write it, nobody materialises it."""
    return dg.AssetSpec(
        dg.AssetKey([storage, "log"]),
        description="The commit log with its data files, as deep verification sees it.",
        group_name="ontologia",
        kinds={"parquet"},
        metadata={STORAGE_METADATA: storage},
    )


def deep_check_name(type_name: str) -> str:
    return f"{DEEP_VERIFY}_{snake_case(type_name)}"


def deep_checks(storage: str, types: Sequence[str]) -> dg.AssetChecksDefinition:
    """One check for the log itself, one for each type; all from one reading of the storage."""
    key = dg.AssetKey([storage, "log"])
    specs = [
        dg.AssetCheckSpec(
            LOG_AREA, asset=key, description="Chain, checkpoints, tags, undeclared types."
        ),
        *(
            dg.AssetCheckSpec(
                deep_check_name(name),
                asset=key,
                description=f"Files, hashes, row counts and endpoints of {name}.",
            )
            for name in types
        ),
    ]

    @dg.multi_asset_check(
        name=f"{storage}_deep_verification",
        specs=specs,
        required_resource_keys={storage},
        pool=MAINTENANCE_POOL,
        can_subset=True,  # otherwise the UI's Execute buttons are off
    )
    def deep_verify(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        ontology: OntologyResource = getattr(context.resources, storage)
        wanted = {key.name for key in context.selected_asset_check_keys}
        try:
            report, requests = deep_report(ontology)
            results = list(_deep_results(key, report, types, requests))
        except OntologiaError as error:
            results = [_failed(error, asset_key=key, check_name=spec.name) for spec in specs]
        yield from (result for result in results if result.check_name in wanted)

    return deep_verify


def deep_report(ontology: "OntologyResource") -> "tuple[IntegrityReport, dict[str, int]]":
    """What is wrong with the storage, and the requests that it took to know."""
    from storage_engine.maintenance.integrity import verify_storage

    with ontology.repository() as repository:
        return verify_storage(repository, deep=True), requests_of(repository)


def _deep_results(
    key: dg.AssetKey,
    report: "IntegrityReport",
    types: Sequence[str],
    requests: Mapping[str, int],
) -> Iterator[dg.AssetCheckResult]:
    """By what was counted: of many findings the report keeps only the first. What it took is told
    once, with the log's."""
    shown: dict[str | None, list[Finding]] = {name: [] for name in types}
    rest: list[Finding] = []
    for finding in report.findings:
        shown.get(finding.type_name, rest).append(finding)
    others = report.total - sum(report.by_type[name] for name in types)
    yield _deep_result(key, LOG_AREA, rest, others, report, **request_metadata(requests))
    for name in types:
        yield _deep_result(key, deep_check_name(name), shown[name], report.by_type[name], report)


def _deep_result(
    key: dg.AssetKey,
    name: str,
    shown: "Sequence[Finding]",
    count: int,
    report: "IntegrityReport",
    **more: Any,
) -> dg.AssetCheckResult:
    checked = dict(report.checked)
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=name,
        passed=not count,
        description=_summary(shown, count) if count else None,
        metadata={
            "findings": count,
            "finding_list": table(
                ["type", "area", *_FINDING[1:]],
                [(f.type_name, f.area, f.reason, f.commit_id, f.message, f.key) for f in shown],
            ),
            "head_commit": report.head_commit_id,
            **{f"checked_{what}": number for what, number in sorted(checked.items())},
            **more,
        },
    )


def _summary(shown: "Sequence[Finding]", count: int) -> str:
    reasons = Counter(finding.reason for finding in shown)
    parts = [f"{number} x {reason}" for reason, number in sorted(reasons.items())]
    if count > len(shown):
        parts.append(f"{count - len(shown)} more that are counted only")
    return ", ".join(parts)

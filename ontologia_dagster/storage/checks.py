"""The quick checks of a type, which run with every materialisation and read no data.

`index_verify` compares the type's index with the log, `schema_matches` the class with the stored
schema. What reads everything is told in `deep_checks`.

A check always has a result: a storage that cannot be read is a failed check that says why.
"""

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dagster as dg
import yaml

from ontologia_dagster.declaration import OntologyAsset, TypeAsset, with_ends
from ontologia_dagster.downstream.metadata import (
    SCHEMA_VERSION,
    request_metadata,
    requests_of,
    table,
)
from ontologia_dagster.resources.ontology import SchemaAdvice
from ontologia_dagster.schema.differences import comparison_metadata
from ontologia_dagster.storage.finding_words import index_sentence
from storage_engine.errors import OntologiaError
from storage_engine.schema.comparison import compare_types

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.index.verify import Examination

INDEX_VERIFY = "index_verify"
SCHEMA_MATCHES = "schema_matches"
DEEP_VERIFY = "deep_verify"
FINDING = ["type", "reason", "commit", "what", "path"]


def index_check(
    asset: TypeAsset, repair_job: str, *, blocking: bool = False
) -> dg.AssetChecksDefinition:
    """The cheap check of one type; a failure names the job that repairs it."""

    @dg.asset_check(
        asset=asset.key,
        name=INDEX_VERIFY,
        description="The type's index agrees with the log.",
        blocking=blocking,
        required_resource_keys={asset.storage},
    )
    def index_verify(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        ontology: OntologyResource = getattr(context.resources, asset.storage)
        return run_check(lambda: index_result(ontology, asset.type_name, repair_job))

    return index_verify


def run_check(check: Callable[[], dg.AssetCheckResult]) -> dg.AssetCheckResult:
    """The check's result, or a failed one with the error that kept it from having one."""
    try:
        return check()
    except OntologiaError as error:
        return failed_check(error)


def failed_check(error: OntologiaError, **of: Any) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=False,
        description=str(error),
        metadata={"error": type(error).__name__, "retryable": error.retryable},
        **of,
    )


def index_result(ontology: "OntologyResource", type_name: str, repair_job: str) -> Any:
    examined, requests = examine(ontology, type_name)
    findings = [finding for examination in examined for finding in examination.findings]
    metadata: dict[str, Any] = {
        "index_lag": max((examination.lag for examination in examined), default=0),
        "findings": len(findings),
        "finding_list": table(
            FINDING, [(f.type_name, f.reason, f.commit_id, f.message, f.path) for f in findings]
        ),
        **request_metadata(requests),
    }
    if not findings:
        return dg.AssetCheckResult(passed=True, metadata=metadata)
    return dg.AssetCheckResult(
        passed=False,
        description=f"{index_sentence(type_name, findings)} Readers stay right, but slower. Run "
        f"the job {repair_job}",
        metadata={**metadata, **repair_metadata(ontology, repair_job)},
    )


def repair_metadata(ontology: "OntologyResource", repair_job: str) -> dict[str, Any]:
    """The job that repairs indices, with its config, and the command for those at a terminal."""
    op = f"{repair_job.removesuffix('_index_repair')}_repair_indices"
    config = {"ops": {op: {"config": {"dry_run": False}}}}
    return {
        "repair_job": dg.MetadataValue.job(repair_job, ontology.location),
        "repair_config": dg.MetadataValue.md(f"```yaml\n{yaml.safe_dump(config)}```"),
        "command": f"onto index repair --apply --storage-uri {shlex.quote(ontology.storage_uri)}",
    }


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
        return verifier.examine_types(head, refs), requests_of(repository)


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

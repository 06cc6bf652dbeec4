"""Which run wrote a commit, and whether the same work was done before.

App id = location/asset/partition, version = root run + source fingerprint + code version: a step
that is tried again finds its own commit and writes nothing, while re-executing the run after the
source was corrected, or the mapping changed, does write. Sources whose state nobody can name (a
database table or a file system that we cannot see, without a `fingerprint` function) count by the
run itself.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import step_key
from ontologia_dagster.declaration import OntologyAsset, SourceSpec
from ontologia_dagster.ingestion import partitions
from ontologia_dagster.ingestion.partitions import expand_paths
from ontologia_dagster.ingestion.source_files import PARTITION_KEY, SourceFile, SourceFiles
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource

RUN_ID = "dagster/run_id"
STEP = "dagster/step"
ASSET_KEY = "dagster/asset_key"
PARTITIONS = "dagster/partitions"
CODE_VERSION = "dagster/code_version"


def commit_metadata(
    context: dg.AssetExecutionContext, declared: OntologyAsset, keys: Sequence[str]
) -> dict[str, str]:
    """What the manifest says of the run: commit and run point at each other."""
    metadata = {
        RUN_ID: context.run.run_id,
        STEP: step_key(context),
        ASSET_KEY: declared.asset_key.to_user_string(),
        CODE_VERSION: declared.code_version,
    }
    if declared.partitions is not None and keys:
        metadata[PARTITIONS] = partitions.format_keys(declared.partitions, keys)
    return metadata


def holder(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> dict[str, str]:
    """What others read of us while they wait for the write lock."""
    return {"run_id": context.run.run_id, "job": context.run.job_name}


def unit_of_work(
    context: dg.AssetExecutionContext,
    declared: OntologyAsset,
    keys: Sequence[str],
    location: str,
    fingerprint: str | None,
) -> tuple[str, str]:
    """The idempotency key of this write."""
    parts = [location, declared.asset_key.to_user_string()]
    if keys:
        parts.append(name_partitions(keys))
    run = context.run
    root = run.root_run_id or run.run_id
    start = root if fingerprint is not None else run.run_id
    return "/".join(parts), f"{start}:{fingerprint or '-'}:{declared.code_version}"


def name_partitions(keys: Sequence[str]) -> str:
    """One or several partitions as part of an app id."""
    if len(keys) == 1:
        return keys[0]
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:8]
    return f"{keys[0]}..{keys[-1]} ({len(keys)}, {digest})"


def source_fingerprints(
    declared: OntologyAsset, keys: Sequence[str], ontology: OntologyResource
) -> dict[str, str | None]:
    """The state of what each of these partitions comes from (under "" for a type that is not
    cut). None when nobody can tell it."""
    source, files = declared.source, SourceFiles(ontology)
    if not keys or not any(PARTITION_KEY in path for path in source.paths):
        return dict.fromkeys(keys or [""], source_fingerprint(source, source.paths, files))
    if source.fingerprint is not None or source.format == "jdbc":
        return {
            key: source_fingerprint(source, expand_paths(source.paths, [key]), files)
            for key in keys
        }
    by_key = {key: expand_paths(source.paths, [key]) for key in keys}
    places = list(dict.fromkeys(path for paths in by_key.values() for path in paths))
    looks = dict(zip(places, files.at_each(places), strict=True))
    return {key: state_of(looks[path] for path in paths) for key, paths in by_key.items()}


def combine(prints: Iterable[str | None]) -> str | None:
    """Of several partitions as one; None when one of them cannot be told."""
    distinct = list(dict.fromkeys(prints))
    fingerprints = [fingerprint for fingerprint in distinct if fingerprint is not None]
    if len(fingerprints) < len(distinct):
        return None
    return fingerprints[0] if len(fingerprints) == 1 else _digest(fingerprints)


def source_fingerprint(source: SourceSpec, paths: Sequence[str], files: SourceFiles) -> str | None:
    """Names the present state of a source: its files with size and time (on S3: ETag). None when
    nobody can tell: a database, another file system, or a path at which we see no file."""
    if source.fingerprint is not None:
        return _digest([str(_call(source.fingerprint, source))])
    if source.format == "jdbc":
        return None
    return state_of(files.at_each(paths))


def state_of(by_path: Iterable[Sequence[SourceFile] | None]) -> str | None:
    """The fingerprint of files, by path; None when those of one path cannot be told."""
    facts: list[str] = []
    for files in by_path:
        if not files:
            return None
        facts += [f"{file.name} {file.state}" for file in files]
    return _digest(facts)


def _digest(facts: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{fact}\n" for fact in facts).encode()).hexdigest()[:16]


def _call(name: str, source: SourceSpec) -> Any:
    module, _, function = name.partition(":")
    try:
        name_state = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"source.fingerprint {name!r} cannot be loaded: {error}"
        ) from error
    return name_state(source)

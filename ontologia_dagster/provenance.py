"""Which run wrote a commit, and whether the same work was done before.

App id = location/asset/partition, version = root run + source fingerprint + code version: a step
that is tried again finds its own commit and writes nothing, while re-executing the run after the
source was corrected, or the mapping changed, does write. Sources whose state nobody can name (a
database table without a `fingerprint` function) count by the run itself.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import dagster as dg

from ontologia_dagster import partitions
from ontologia_dagster.declaration import OntologyAsset, SourceSpec
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource

RUN_ID = "dagster/run_id"
STEP = "dagster/step"
ASSET_KEY = "dagster/asset_key"
PARTITIONS = "dagster/partitions"
CODE_VERSION = "dagster/code_version"


def commit_metadata(
    context: dg.AssetExecutionContext, declared: OntologyAsset, keys: Sequence[str]
) -> dict[str, str]:
    """What the manifest says of the run: commit and run point at each other."""
    found = {
        RUN_ID: context.run.run_id,
        STEP: context.op_execution_context.get_step_execution_context().step.key,
        ASSET_KEY: declared.asset_key.to_user_string(),
        CODE_VERSION: declared.code_version,
    }
    if declared.partitions is not None and keys:
        found[PARTITIONS] = partitions.written(declared.partitions, keys)
    return found


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
        parts.append(_named(keys))
    run = context.run
    root = run.root_run_id or run.run_id
    start = root if fingerprint is not None else run.run_id
    return "/".join(parts), f"{start}:{fingerprint or '-'}:{declared.code_version}"


def _named(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:8]
    return f"{keys[0]}..{keys[-1]} ({len(keys)}, {digest})"


def source_fingerprint(
    source: SourceSpec, paths: Sequence[str], ontology: OntologyResource
) -> str | None:
    """Names the present state of a source: its files with size and time (on S3: ETag). None when
    nobody can tell."""
    digest = hashlib.sha256()
    if source.fingerprint is not None:
        digest.update(str(_call(source.fingerprint, source)).encode())
        return digest.hexdigest()[:16]
    if source.format == "jdbc":
        return None
    for path in paths:
        for fact in _facts(path, ontology):
            digest.update(fact.encode())
    return digest.hexdigest()[:16]


def _call(name: str, source: SourceSpec) -> Any:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"source.fingerprint {name!r} cannot be loaded: {error}"
        ) from error
    return found(source)


def _facts(path: str, ontology: OntologyResource) -> Iterator[str]:
    parts = urlsplit(path)
    if parts.scheme in {"s3", "s3a"}:
        yield from _s3_facts(parts.netloc, parts.path.lstrip("/"), ontology)
    elif parts.scheme in {"", "file"}:
        yield from _file_facts(unquote(parts.path) if parts.scheme else path)
    else:
        yield f"{path}\n"  # another file system: its name is all we know


def _file_facts(pattern: str) -> Iterator[str]:
    for found in sorted(glob.glob(pattern)):
        root = Path(found)
        files = sorted(one for one in root.rglob("*") if one.is_file()) if root.is_dir() else [root]
        for file in files:
            facts = file.stat()
            yield f"{file} {facts.st_size} {facts.st_mtime_ns}\n"


def _s3_facts(bucket: str, pattern: str, ontology: OntologyResource) -> Iterator[str]:
    fixed = re.split(r"[*?\[{]", pattern, maxsplit=1)[0]
    pages = ontology.s3.get_client().get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=bucket, Prefix=fixed):
        for item in page.get("Contents", []):
            key = item["Key"]
            if fixed == pattern or fnmatch.fnmatch(key, pattern) or key.startswith(f"{pattern}/"):
                yield f"{key} {item['Size']} {item['ETag']}\n"

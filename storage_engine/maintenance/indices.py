"""Index verify and repair for an opened object storage."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import Documents
from storage_engine.commitlog.records import CommitFile
from storage_engine.index.record import IndexObjects
from storage_engine.index.repair import Repair, apply_repair, plan_repair
from storage_engine.index.verify import IndexReport, IndexVerifier
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.schema.catalogs import known_types


def index_verifier(repository: ObjectRepository, chain: Chain | None = None) -> IndexVerifier:
    """With a view of the indices of its own: nothing that the repository remembers is believed.
    `chain`: another than the repository's."""
    store = repository.store
    documents = Documents(store)
    return IndexVerifier(
        chain or repository.chain,
        IndexObjects(
            store, engine_version=repository.engine_version, under=repository.indices.under
        ),
        # A branch writes no catalogs: the log says which types there are.
        known_types=lambda: known_types(documents) if repository.fork is None else [],
        watermark_is_head=repository.engine_version == "v1",
        count_rows=lambda file: count_rows(store, file),
    )


def verify_indices(repository: ObjectRepository) -> IndexReport:
    """Compare every type index with the log. SchemaMetadataError when types.json is unreadable."""
    repository.flush()
    return index_verifier(repository).verify()


def repair_indices(repository: ObjectRepository, *, apply: bool = False) -> Repair:
    """Plan the index writes that the log calls for, or (with `apply`) make them."""
    repository.flush()
    verifier = index_verifier(repository)
    return apply_repair(verifier, repository.lock) if apply else plan_repair(verifier)


def count_rows(store: ObjectStore, file: CommitFile) -> int | None:
    """From the file's own footer."""
    try:
        local = store.local_path(file.path)
        source = local if local is not None else io.BytesIO(store.get(file.path).data)
        return int(pq.read_metadata(source).num_rows)
    except (ObjectNotFound, FileNotFoundError, pa.ArrowInvalid):
        return None

"""The log's JSON objects as immutable records: head, manifest, files, type heads, checkpoint.

Field names are the contract of the specification; what is added to it is optional on reading, so
that storages written by its first implementation (v1, without our additions) still open. What is
there must be of the right type and range: truth that cannot be read is an IntegrityError.

Wherever a record names a manifest it has the hash of its content beside it, as far as that is
known: a manifest cannot contain its own, so those that it writes about itself lack it, and so do
those of writers before format 2.
"""

from __future__ import annotations

from storage_engine.commitlog.records.checkpoint import (
    Checkpoint,
    CommitPoint,
    Entry,
    PageRef,
    entry_of,
    parse_entry,
    parse_points,
)
from storage_engine.commitlog.records.head import BranchPoint, Head
from storage_engine.commitlog.records.manifest import (
    AckedTogether,
    ClippedFile,
    CommitFile,
    Manifest,
    MergePoint,
    Previous,
    UpdatePoint,
    check_registration,
)
from storage_engine.commitlog.records.type_head import (
    TYPES_IN_A_BUCKET,
    BucketRef,
    BucketTable,
    PastVersion,
    TypeHead,
    parse_type_heads,
    type_heads_json,
)
from storage_engine.commitlog.records.values import (
    KINDS,
    CheckpointRef,
    ManifestLink,
    TypeRef,
    UnitVersion,
    from_json,
    optional_checkpoint_ref,
    optional_link,
    parse_marks,
    parse_timestamp,
    parse_version,
    sha256,
    timestamp,
    to_json,
)

__all__ = [
    "KINDS",
    "TYPES_IN_A_BUCKET",
    "AckedTogether",
    "BranchPoint",
    "BucketRef",
    "BucketTable",
    "Checkpoint",
    "CheckpointRef",
    "ClippedFile",
    "CommitFile",
    "CommitPoint",
    "Entry",
    "Head",
    "Manifest",
    "ManifestLink",
    "MergePoint",
    "PageRef",
    "PastVersion",
    "Previous",
    "TypeHead",
    "TypeRef",
    "UnitVersion",
    "UpdatePoint",
    "check_registration",
    "entry_of",
    "from_json",
    "optional_checkpoint_ref",
    "optional_link",
    "parse_entry",
    "parse_marks",
    "parse_points",
    "parse_timestamp",
    "parse_type_heads",
    "parse_version",
    "sha256",
    "timestamp",
    "to_json",
    "type_heads_json",
]

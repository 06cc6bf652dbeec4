"""Tags of an object storage: `meta/tags/{name}.json`, a name for a commit that never moves.

Created if absent, deleted if unchanged. A tag also keeps the checkpoint that head named when it
was made, so that the files which held the commit then are pinned, whatever compaction does later.
Tags of an erased log do not count. A tag whose manifest is not on the chain tells of another
history (of a storage that was copied while it was written, or whose head was put back): it is
listed and can be deleted, but it names no commit here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from storage_engine.commitlog import layout
from storage_engine.commitlog.branches import read_branch
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import Won, write_conditionally
from storage_engine.commitlog.layout import MAIN
from storage_engine.commitlog.parsing import (
    optional_object,
    optional_text,
    optional_time,
    parsing,
    require_int,
    require_path,
)
from storage_engine.commitlog.records import (
    CheckpointRef,
    Head,
    from_json,
    timestamp,
    to_json,
)
from storage_engine.errors import (
    ConfigurationError,
    IntegrityError,
    StorageBackendError,
    TagExistsError,
    UnknownTagError,
)
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StoredObject,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+@-]{0,99}")
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Tag:
    """A named commit. `manifest_path` is None on storages without manifests."""

    name: str
    commit_id: int
    created_at: str
    runtime_id: str
    manifest_path: str | None = None
    log_id: str = ""
    checkpoint: CheckpointRef | None = None
    branch: str = MAIN
    incarnation: str = ""  # of the branch; empty: main

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "commit_id": self.commit_id,
            "created_at": self.created_at,
            "runtime_id": self.runtime_id,
            "manifest_path": self.manifest_path,
            **({"branch": self.branch} if self.incarnation else {}),
        }

    def to_bytes(self, write_id: str) -> bytes:
        ref = self.checkpoint
        return to_json(
            {
                **self.as_dict(),
                "log_id": self.log_id,
                "checkpoint": {"path": ref.path, "sha256": ref.sha256, "commit_id": ref.commit_id}
                if ref is not None
                else None,
                **({"incarnation": self.incarnation} if self.incarnation else {}),
                "write_id": write_id,
            }
        )

    @classmethod
    def parse(cls, data: bytes, *, key: str) -> Self:
        raw = from_json(data, key=key)
        with parsing(key, "tag"):
            checkpoint = optional_object(raw, "checkpoint")
            return cls(
                name=layout.tag_name(key),
                commit_id=require_int(raw, "commit_id", minimum=1),
                created_at=optional_time(raw, "created_at") or "",
                runtime_id=optional_text(raw, "runtime_id", ""),
                manifest_path=require_path(raw, "manifest_path"),
                log_id=optional_text(raw, "log_id", ""),
                checkpoint=CheckpointRef.parse(checkpoint) if checkpoint is not None else None,
                branch=optional_text(raw, "branch", MAIN),
                incarnation=optional_text(raw, "incarnation", ""),
            )


def check_name(name: str) -> str:
    """Refuse names that a storage cannot keep."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no name for a tag: use 1 to 100 letters, digits and ._:+@- that begin "
            "with a letter or digit"
        )
    return name


def unknown(name: str, names: Sequence[str]) -> UnknownTagError:
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return UnknownTagError(name, nearest=nearest, count=len(names))


def list_tags(chain: Chain, head: Head | None = None) -> list[Tag]:
    """By name."""
    head = head if head is not None else chain.read_head().head
    keys = [info.key for info in chain.store.list(layout.TAGS) if info.key.endswith(".json")]
    stored = chain.parallel.map(lambda key: _read(chain, key), keys)
    tags = [tag for tag, _ in (version for version in stored if version is not None)]
    return sorted((t for t in tags if _of_log(t, head)), key=lambda t: t.name)


def resolve_tag(chain: Chain, name: str, head: Head | None = None) -> Tag:
    """One request for a tag that is there, with head at hand; UnknownTagError (a ValueError)
    names the nearest."""
    head = head if head is not None else chain.read_head().head
    if _NAME.fullmatch(name) and (stored := _read(chain, layout.tag(name))) is not None:
        tag, _ = stored
        if _of_log(tag, head):
            return _on_chain(chain, head, tag)
    raise unknown(name, [tag.name for tag in list_tags(chain, head)])


def create_tag(
    chain: Chain,
    name: str,
    commit_id: int | None,
    *,
    runtime_id: str,
    created_at: str | None = None,
) -> Tag:
    """Name a commit (None: head). The same again is no error; another commit: TagExistsError."""
    check_name(name)
    for _ in range(_ATTEMPTS):
        head = chain.read_head().head
        tag = _drafted(chain, head, name, commit_id, runtime_id)
        if created_at is not None:
            tag = replace(tag, created_at=created_at)
        existing = _read(chain, layout.tag(name))
        if existing is not None and _of_log(existing[0], head):
            if existing[0].incarnation != chain.incarnation:
                return _same(existing[0], tag)  # it may name a commit that both chains have
            return _same(_on_chain(chain, head, existing[0]), tag)
        write_id = layout.new_write_id()
        outcome = write_conditionally(
            chain.store,
            layout.tag(name),
            tag.to_bytes(write_id),
            write_id=write_id,
            etag=existing[1].etag if existing is not None else None,  # of an erased log
        )
        if isinstance(outcome, Won):
            return tag
    raise StorageBackendError(
        f"tag {name!r} is being changed by others, try again",
        operation="tag",
        key=layout.tag(name),
        retryable=True,
    )


def adopt_tag(chain: Chain, tag: Tag) -> Tag:
    """Name a commit as the tag of another storage does, with the time and author of that one."""
    return create_tag(
        chain, tag.name, tag.commit_id, runtime_id=tag.runtime_id, created_at=tag.created_at
    )


def delete_tag(chain: Chain, name: str) -> Tag:
    """Take the name away; the commit stays. Of an object that is no tag, commit 0 is returned."""
    head = chain.read_head().head
    failure: Exception | None = None
    for _ in range(_ATTEMPTS):
        existing = _read_any(chain, layout.tag(name)) if _NAME.fullmatch(name) else None
        if existing is None or not _of_log(existing[0], head):
            if existing is None and failure is not None:
                break  # an unanswered request of ours, or somebody else: it is gone
            raise unknown(name, [tag.name for tag in list_tags(chain, head)])
        tag, stored = existing
        try:
            chain.store.delete_if_match(layout.tag(name), stored.etag)
            return tag
        except (PreconditionFailed, ConditionalConflict, OutcomeUnknown) as answer:
            failure = answer
    else:
        raise StorageBackendError(
            f"the store did not say whether tag {name!r} was deleted, try again",
            operation="tag",
            key=layout.tag(name),
            retryable=True,
        ) from failure
    return tag


def _drafted(chain: Chain, head: Head, name: str, commit_id: int | None, runtime_id: str) -> Tag:
    wanted = head.commit_id if commit_id is None else commit_id
    link = chain.locate(head, wanted)
    if link is None:
        there = f"1 to {head.commit_id} are there" if head.commit_id else "there are none yet"
        raise ConfigurationError(f"no commit {wanted} to tag: {there}")
    return Tag(
        name=name,
        commit_id=wanted,
        created_at=timestamp(chain.store.now()),
        runtime_id=runtime_id,
        manifest_path=link.path,
        log_id=head.log_id,
        checkpoint=head.checkpoint,
        branch=chain.branch,
        incarnation=chain.incarnation,
    )


def _stands(chain: Chain, head: Head, tag: Tag) -> bool:
    """Whether the branch of a tag is there."""
    version = read_branch(chain.store, tag.branch, log_id=head.log_id)
    return version is not None and version.head.incarnation == tag.incarnation


def _on_chain(chain: Chain, head: Head, tag: Tag) -> Tag:
    """The tag, if the commit that it names is one of this log."""
    link = chain.locate(head, tag.commit_id)
    if link is not None and link.path == tag.manifest_path:
        return tag
    newer = chain.read_head().head  # the tag may be newer than the head at hand
    if newer.commit_id > head.commit_id:
        link = chain.locate(newer, tag.commit_id)
        if link is not None and link.path == tag.manifest_path:
            return tag
    if tag.incarnation != chain.incarnation:
        named = f"tag {tag.name!r} names commit {tag.commit_id} of branch {tag.branch!r}, which is"
        if tag.incarnation and not _stands(chain, head, tag):
            raise ConfigurationError(
                f"{named} gone: it keeps the files of that commit from being collected, until it "
                f"is deleted (`onto tag delete {tag.name}`)"
            )
        raise ConfigurationError(
            f"{named} not part of {chain.branch!r}: open that branch to read it"
        )
    here = (
        f"commit {tag.commit_id} is {link.path}"
        if link is not None
        else (f"the log ends with commit {newer.commit_id}")
    )
    raise IntegrityError(
        f"tag {tag.name!r} names commit {tag.commit_id} of another history: "
        f"{tag.manifest_path} is not in this log, in which {here}. Delete it with "
        f"`onto tag delete {tag.name}` and create it again",
        key=layout.tag(tag.name),
    )


def _same(existing: Tag, asked: Tag) -> Tag:
    if existing.manifest_path != asked.manifest_path:
        raise TagExistsError(existing.name, commit_id=existing.commit_id, asked=asked.commit_id)
    return existing


def _read(chain: Chain, key: str) -> tuple[Tag, StoredObject] | None:
    try:
        stored = chain.store.get(key)
    except ObjectNotFound:
        return None
    return Tag.parse(stored.data, key=key), stored


def _read_any(chain: Chain, key: str) -> tuple[Tag, StoredObject] | None:
    """A tag, or what is in the place of one and must be deleted to make room."""
    try:
        return _read(chain, key)
    except IntegrityError:
        return Tag(layout.tag_name(key), 0, "", ""), chain.store.get(key)


def _of_log(tag: Tag, head: Head) -> bool:
    return not (tag.log_id and head.log_id and tag.log_id != head.log_id)

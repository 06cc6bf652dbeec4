"""What a commit is called by people: its number, a time, or a tag."""

from __future__ import annotations

from datetime import UTC, datetime

from storage_engine.commitlog.tags import is_instant
from storage_engine.errors import ConfigurationError
from storage_engine.query.spec import Reference
from storage_engine.repository.protocol import Repository


def parse_reference(text: str) -> Reference:
    """`42`, `2026-01-31T12:00+00:00` (UTC when no zone is given), or the name of a tag."""
    if text.isdecimal():
        return int(text)
    if is_instant(text):
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return text


def commit_of(repository: Repository, reference: Reference) -> int:
    """The commit that is meant; unlike a read, which clamps, this wants one that is there."""
    if isinstance(reference, str):
        return repository.resolve_tag(reference).commit_id
    head = repository.head_commit_id()
    if isinstance(reference, datetime):
        found = _at_or_before(repository, reference, head)
        if found == 0:
            raise ConfigurationError(f"there was no commit yet at {reference.isoformat()}")
        return found
    if not 1 <= reference <= head:
        there = f"1 to {head} are there" if head else "there are none yet"
        raise ConfigurationError(f"no commit {reference}: {there}; `onto commits` lists them")
    return reference


def _at_or_before(repository: Repository, moment: datetime, head: int) -> int:
    """Times never go backwards along the chain, so halving finds it."""
    low, high = 0, head
    while low < high:
        middle = (low + high + 1) // 2
        record = repository.get_commit(middle)
        assert record is not None, "ids have no gaps"
        if record.created_at <= moment:
            low = middle
        else:
            high = middle - 1
    return low

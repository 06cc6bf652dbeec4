"""Tags on any storage: names for commits, to read by, to restore to, and to keep files by."""

from __future__ import annotations

from storage_engine.commitlog import tags as object_tags
from storage_engine.commitlog.tags import Tag
from storage_engine.repository.object.engine import ObjectRepository
from storage_engine.repository.protocol import Repository
from storage_engine.repository.sqlite import tags as sqlite_tags
from storage_engine.repository.sqlite.engine import SqliteRepository

__all__ = ["Tag", "create_tag", "delete_tag", "list_tags", "resolve_tag"]


def list_tags(repository: Repository) -> list[Tag]:
    """All tags, by name."""
    if isinstance(repository, ObjectRepository):
        return object_tags.list_tags(repository.chain)
    return sqlite_tags.list_tags(_sqlite(repository))


def resolve_tag(repository: Repository, name: str) -> Tag:
    """The tag of that name; UnknownTagError (a ValueError) names the nearest ones."""
    if isinstance(repository, ObjectRepository):
        return object_tags.resolve_tag(repository.chain, name)
    return sqlite_tags.resolve_tag(_sqlite(repository), name)


def create_tag(repository: Repository, name: str, commit_id: int | None = None) -> Tag:
    """Name a commit, the latest unless told. Saying the same again is no error; a name that is
    taken by another commit is a TagExistsError."""
    if isinstance(repository, ObjectRepository):
        repository.flush()
        return object_tags.create_tag(
            repository.chain, name, commit_id, runtime_id=repository.lock.owner_id
        )
    return sqlite_tags.create_tag(_sqlite(repository), name, commit_id)


def delete_tag(repository: Repository, name: str) -> Tag:
    """Take a name away. The commit stays; what only the tag kept may be collected from now on."""
    if isinstance(repository, ObjectRepository):
        return object_tags.delete_tag(repository.chain, name)
    return sqlite_tags.delete_tag(_sqlite(repository), name)


def _sqlite(repository: Repository) -> SqliteRepository:
    assert isinstance(repository, SqliteRepository)
    return repository

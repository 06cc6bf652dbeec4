"""Commands that look after objects: they open a storage only when it is made of objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storage_engine.cli.boundary import CommandError
from storage_engine.cli.options import Invocation

if TYPE_CHECKING:
    from storage_engine.repository.object.engine import ObjectRepository


class ObjectStorageOnlyError(CommandError):
    """The command does something that a SQLite storage does not need."""

    def __init__(self, uri: str, what: str) -> None:
        self.uri = uri
        super().__init__(
            f"{uri} is a SQLite storage, which has no {what}: the command is for storages on S3 "
            "or in a directory"
        )


@contextmanager
def object_repository(invocation: Invocation, what: str) -> Iterator[ObjectRepository]:
    """The storage; `what` says what of it the command is about."""
    from storage_engine.repository.object.engine import ObjectRepository

    with invocation.repository() as repository:
        if not isinstance(repository, ObjectRepository):
            raise ObjectStorageOnlyError(repository.uri, what)
        yield repository

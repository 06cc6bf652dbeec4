"""Descriptions, owners, tags and what is sensitive are of the class: no storage knows them."""

from typing import Any

import pytest

from storage_engine import Entity, Field, Session
from storage_engine.repository import open_repository


def declared(*, described: bool) -> type[Entity]:
    """The same type, as two versions of a program have it."""
    options: dict[str, Any] = {}
    if described:
        options = {"owners": ["team:sales"], "tags": {"domain": "crm"}, "sensitive": True}

    class Customer(Entity, **options):
        __doc__ = "Who buys from us." if described else None

        id: Field[str] = Field(primary_key=True)
        name: Field[str] = (
            Field(description="as on the bill", sensitive=True) if described else Field()
        )

    return Customer


@pytest.mark.parametrize("first", [True, False])
def test_to_describe_a_type_changes_nothing_that_is_stored(uri: str, first: bool) -> None:
    before, after = declared(described=first), declared(described=not first)
    with Session(uri, entity_types=[before]) as session:
        session.ensure(before(id="1", name="Ann"))
    histories = stored(uri)
    with Session(uri, entity_types=[after]) as session:
        session.validate()
        assert not session.migrate().has_changes
        session.ensure(after(id="1", name="Ann"))  # the same row: nothing to write
        assert session.commit() is None
        session.ensure(after(id="2", name="Bob"))
    assert stored(uri) == histories
    text = str(histories)
    assert not any(word in text for word in ("sales", "crm", "bill", "sensitive", "description"))


def stored(uri: str) -> list[dict[str, Any]]:
    repository = open_repository(uri)
    try:
        return [history.as_dict() for history in repository.type_histories().values()]
    finally:
        repository.close()

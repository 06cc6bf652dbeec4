"""The sign of zero is no change: -0.0 equals 0.0 on every engine."""

from __future__ import annotations

from storage_engine import Entity, Field, Session


class Level(Entity):
    id: Field[str] = Field(primary_key=True)
    height: Field[float]


def test_the_sign_of_zero_is_no_change(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(Level(id="sea", height=0.0))
        assert session.commit() == 1
        session.ensure(Level(id="sea", height=-0.0))
        assert session.commit() is None
        session.ensure(Level(id="sea", height=-1.0))
        assert session.commit() == 2

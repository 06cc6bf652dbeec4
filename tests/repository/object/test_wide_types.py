"""A type with a thousand fields is read and written at the default memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage_engine import Entity, Field, Session, initialize_storage

FIELDS = 1_000


def wide_class() -> Any:
    names = [f"f{n}" for n in range(FIELDS)]
    kinds = {name: Field[str] if n % 2 else Field[float] for n, name in enumerate(names)}
    body = {"__annotations__": {"id": Field[str], **kinds}, "id": Field(primary_key=True)}
    return type("Wide", (Entity,), {**body, "__module__": __name__})


def wide(cls: Any, key: str, text: str = "text") -> Any:
    return cls(id=key, **{f"f{n}": text if n % 2 else float(n) for n in range(FIELDS)})


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_a_type_with_a_thousand_fields(tmp_path: Path, engine: str) -> None:
    cls = wide_class()
    uri = str(tmp_path / "store")
    initialize_storage(uri, engine)
    with Session(uri) as session:
        session.ensure([wide(cls, "a"), wide(cls, "b")])
        assert session.commit() == 1
    with Session(uri) as session:
        session.ensure(wide(cls, "b", "other"))
        assert session.commit() == 2
    with Session(uri) as session:
        objects = session.query().entities(cls).order_by(cls.f1).collect()
        assert [(o.id, o.f999) for o in objects] == [("b", "other"), ("a", "text")]
        (row,) = session.sql("select f1, f998 from Wide where f999 = 'other'").collect()
        assert row == {"f1": "other", "f998": 998.0}
        rows = session.query().entities(cls).to_arrow()
        session.ingest(cls, rows.drop_columns(["commit_id", "entity_key"]))
        assert session.commit() is None

"""Files on S3: small ones through the cache, large ones read in ranges by DuckDB itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine import Session
from storage_engine.errors import OntologiaError
from storage_engine.repository import initialize_storage
from storage_engine.repository.duck import Duck
from storage_engine.repository.object.read import files
from tests.engines import Customer, new_storage


@pytest.mark.s3
@pytest.mark.parametrize("server", ["seaweedfs-v2", "moto-v2"])
def test_large_files_are_read_in_place(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = new_storage(server, request, tmp_path)
    config = storage.config(cache_dir=tmp_path / "cache")
    initialize_storage(storage.uri, storage.engine_version, config)
    with Session(storage.uri, config=config) as session:
        session.ensure([Customer(id=f"c{n}", name="x", age=n) for n in range(50)])
        session.commit()
        session.ensure([Customer(id="c7", name="y", age=70)])
        session.commit()
        customers = session.query().entities(Customer)
        asked = {
            "latest": customers.where(Customer.age > 40),
            "as_of": customers.where(Customer.age > 40).as_of(1),
            "history": customers.where(Customer.id == "c7").with_history(),
        }
        through_the_cache = {name: query.to_arrow() for name, query in asked.items()}
        monkeypatch.setattr(files, "FETCH_WHOLE", 0)
        for name, query in asked.items():
            plan = query.explain()
            assert "s3://" in plan.facts["sql"], "read in place"
            assert query.to_arrow() == through_the_cache[name], name
        assert [c.name for c in asked["history"].collect()] == ["x", "y"]
        assert session.sql("select count(*) as n from Customer where age > 40").collect() == [
            {"n": 10}
        ]


@pytest.mark.s3
def test_a_server_that_refuses_is_reported_as_ours(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = new_storage("seaweedfs-v2", request, tmp_path)
    config = storage.config(cache_dir=tmp_path / "cache")
    initialize_storage(storage.uri, storage.engine_version, config)
    with Session(storage.uri, config=config) as session:
        session.ensure(Customer(id="a", name="x"))
        session.commit()
        session.flush()
        monkeypatch.setattr(files, "FETCH_WHOLE", 0)
        store = storage.objects()
        gone = [info.key for info in store.list("commits/") if info.key.endswith(".parquet")]
        store.delete_many(gone)
        store.close()
        with pytest.raises(OntologiaError, match=r"404|missing"):
            session.query().entities(Customer).collect()


def test_credentials_are_asked_for_again() -> None:
    """Those of a role expire while a session lives."""
    keys = iter(["first", "second", "second"])
    duck = Duck(
        uri="s3://bucket",
        memory_limit="64MB",
        secret=lambda: {"KEY_ID": next(keys), "SECRET": "it's", "REGION": "r", "USE_SSL": "true"},
    )
    seen = []
    for _ in range(3):
        duck.reach_s3()
        ((text,),) = duck.cursor().execute("SELECT secret_string FROM duckdb_secrets()").fetchall()
        seen.append(text)
    duck.close()
    assert "key_id=first" in seen[0]
    assert "key_id=second" in seen[1]
    assert seen[2] == seen[1]
    assert all("it's" not in text for text in seen)  # redacted

"""`Ontology`: what it binds to (RFC 0004 1.1), and how its sessions share the storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage_engine import (
    ClosedError,
    ConfigurationError,
    OntologiaConfig,
    Ontology,
    Session,
    StorageBackendError,
    UninitializedStorageError,
)
from tests.runtime.support import names
from tests.shop import Customer, Product, Subscription

ANN = Customer(id="c1", name="Ann")


# --- binding ------------------------------------------------------------------------------------


def test_the_first_argument_is_a_sqlite_path(tmp_path: Path) -> None:
    path = tmp_path / "onto.db"
    with Ontology(str(path)) as ontology, ontology.session() as session:
        session.ensure(ANN)
        assert session.storage_info()["backend"] == "sqlite"
    assert names(str(path)) == {"c1": "Ann"}
    with Ontology(db_path=str(path)) as ontology:
        assert [c["id"] for c in ontology.list_commits()] == [1]


@pytest.mark.parametrize("name", ["onto", "onto.data", "onto.db"])
def test_rfc0004_07_db_path_is_sqlite_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Ontology(db_path=path) as ontology, ontology.session() as session:
        session.ensure(ANN)
    assert path.is_file()
    assert names(f"sqlite:///{path}") == {"c1": "Ann"}
    with Ontology(str(path), storage_uri=f"sqlite:///{path}") as ontology:
        assert len(ontology.list_commits()) == 1


def test_rfc0004_07_db_path_takes_no_other_storage(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'s3://b/p' is no SQLite file.*storage_uri"):
        Ontology("s3://b/p")
    with pytest.raises(StorageBackendError, match="this is a directory, not a SQLite file"):
        Ontology(tmp_path)


def test_storage_uri_selects_the_backend(uri: str) -> None:
    with Ontology(storage_uri=uri) as ontology:
        with ontology.session() as session:
            session.ensure(ANN)
        assert ontology.get_commit(1) == ontology.list_commits()[0]
        assert ontology.get_commit(2) is None
        assert ontology.list_commits(since_commit_id=1) == []
    assert names(uri) == {"c1": "Ann"}


def test_both_may_be_given_if_they_mean_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "onto.db"
    other = os.path.join(tmp_path, "sub", "..", "onto.db")
    with Ontology(str(path), storage_uri=f"sqlite:///{other}") as ontology:
        assert ontology.list_commits() == []


@pytest.mark.parametrize(
    "storage_uri", ["sqlite:///other.db", "s3://bucket/prefix", "file:///data"]
)
def test_both_that_differ_are_refused(tmp_path: Path, storage_uri: str) -> None:
    with pytest.raises(ConfigurationError, match="name different storages; give one"):
        Ontology(str(tmp_path / "onto.db"), storage_uri=storage_uri)


def test_neither_means_onto_db_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Ontology() as ontology, ontology.session() as session:
        session.ensure(ANN)
    assert names(str(tmp_path / "onto.db")) == {"c1": "Ann"}


def test_neither_means_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("ONTOLOGIA_DB", str(tmp_path / "a.db")),
        ("ONTOLOGIA_STORAGE_URI", f"sqlite:///{tmp_path}/b.db"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with Session() as session:
                session.ensure(ANN)
        assert names(value) == {"c1": "Ann"}
    assert not (tmp_path / "onto.db").exists()


def test_unknown_schemes_name_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown scheme 'ftp'.*s3://bucket/prefix"):
        Ontology(storage_uri="ftp://host/x")


def test_an_object_storage_must_be_initialised(tmp_path: Path) -> None:
    with pytest.raises(UninitializedStorageError):
        Ontology(storage_uri=f"file://{tmp_path}/none")


# --- sessions -----------------------------------------------------------------------------------


def test_types_and_config_go_to_the_sessions(uri: str) -> None:
    config = OntologiaConfig(runtime_id="writer-a")
    ontology = Ontology(
        storage_uri=uri, config=config, entity_types=[Customer], relation_types=[Subscription]
    )
    with ontology.session(namespace="sales") as session:
        session.ensure([ANN, Subscription(left_key="c1", right_key="p1", seats=1)])
        with pytest.raises(ConfigurationError, match="Product is not among"):
            session.ensure(Product(sku="p1", price=1.0))
        assert session.namespace == "sales"
    assert ontology.list_commits()[0]["runtime_id"] == "writer-a"
    ontology.close()


def test_closing_a_session_leaves_the_storage_open(uri: str) -> None:
    with Ontology(storage_uri=uri) as ontology:
        first, second = ontology.session(), ontology.session()
        first.ensure(ANN)
        first.commit()
        first.close()
        second.ensure(ANN.replace(name="Anna"))
        assert second.commit() == 2
    assert names(uri) == {"c1": "Anna"}


def test_sessions_do_not_share_intents_or_types(uri: str) -> None:
    with Ontology(storage_uri=uri) as ontology:
        first, second = ontology.session(), ontology.session()
        first.ensure(ANN)
        assert second.commit() is None
        assert first.commit() == 1
        with pytest.raises(ConfigurationError, match="'Customer' is not a type of this session"):
            second.commit(expect={"Customer": 1})


def test_closing_the_ontology_closes_its_sessions(uri: str) -> None:
    ontology = Ontology(storage_uri=uri)
    session = ontology.session()
    session.ensure(ANN)
    ontology.close()
    ontology.close()

    with pytest.raises(ClosedError, match="this session was closed"):
        session.commit()
    for use in (ontology.session, ontology.list_commits, lambda: ontology.get_commit(1)):
        with pytest.raises(ClosedError, match="this ontology was closed"):
            use()
    assert names(uri) == {}


def test_types_are_checked_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="entity_types takes Entity classes"):
        Ontology(storage_uri=f"file://{tmp_path}/none", entity_types=[Subscription])  # type: ignore[list-item]


def test_queries_of_a_session_that_nobody_holds_end_with_the_ontology(uri: str) -> None:
    ontology = Ontology(storage_uri=uri)
    with ontology.session() as session:
        session.ensure(ANN)
    query = ontology.session().query().entities(Customer)
    view = ontology.session().at(1)
    ontology.close()
    for ask in (query.collect, view.query().entities(Customer).collect):
        with pytest.raises(ClosedError):
            ask()

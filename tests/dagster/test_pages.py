"""What a type's page tells: of the class and declaration, of a run, of its rows, of a commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

from ontologia_dagster.declaration import OntologyAsset, SourceSpec
from ontologia_dagster.downstream import metadata
from ontologia_dagster.downstream.metadata import commit_metadata, sample_metadata
from ontologia_dagster.ingestion.asset import ingestion_asset
from ontologia_dagster.resources.ontology import OntologyResource
from storage_engine import Entity, Field, Relation, Session, initialize_storage
from storage_engine.maintenance import samples
from storage_engine.model import spec_of
from tests.dagster.shop import Customer, Placed
from tests.dagster.world import customers, facts, materialisations, resources, rows, storage


class Note(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]
    tags: Field[list[str]] = Field(default_factory=list)
    raw: Field[bytes | None] = Field(default=None)


class Secret(Entity, sensitive=True):
    id: Field[str] = Field(primary_key=True)


class Keeps(Relation[Customer, Secret]):
    since: Field[str] = Field(instance_key=True, description="a day")
    much: Field[int] = Field(default=1)


def spec_of_asset(declared: OntologyAsset) -> dg.AssetSpec:
    [spec] = ingestion_asset(declared).specs
    return spec


def test_the_page_tells_before_the_first_run(tmp_path: Path) -> None:
    spec = spec_of_asset(customers(tmp_path))
    assert spec.description == "Who buys."
    assert list(spec.owners) == ["team:sales"]
    assert spec.tags["domain"] == "crm"
    assert spec.kinds == {"entity", "spark", "parquet"}
    columns = spec.metadata["dagster/column_schema"].columns
    assert [(c.name, c.description, dict(c.tags)) for c in columns] == [
        ("id", "number in the CRM", {}),
        ("name", None, {"sensitive": ""}),
        ("visits", None, {}),
    ]


def test_a_declaration_goes_before_the_class(tmp_path: Path) -> None:
    spec = spec_of_asset(
        customers(
            tmp_path,
            description="From the shop.",
            owners=["ann@shop.example"],
            tags={"domain": "shop", "tier": "1"},
        )
    )
    assert spec.description == "From the shop."
    assert list(spec.owners) == ["ann@shop.example"]
    assert (spec.tags["domain"], spec.tags["tier"]) == ("shop", "1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"owners": ["sales"]}, "the owner 'sales' is neither an email address nor a team"),
        ({"owners": "team:sales"}, "owners takes a list"),
        ({"tags": {"two words": "x"}}, "the tag 'two words' has no name"),
    ],
)
def test_a_wrong_owner_or_tag_fails_where_it_is_declared(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        customers(tmp_path, **wrong)


def test_a_relation_says_of_what_its_keys_are() -> None:
    columns = metadata.column_schema(spec_of(Keeps)).columns
    assert [(c.name, c.description, dict(c.tags)) for c in columns] == [
        ("left_key", "key of Customer", {}),
        ("right_key", "key of Secret", {"sensitive": ""}),
        ("since", "a day", {}),
        ("much", None, {}),
    ]


def test_models_that_cannot_be_imported_leave_a_page_that_says_less(tmp_path: Path) -> None:
    source = SourceSpec(format="csv", paths=[str(tmp_path / "x.csv")])
    asset = OntologyAsset(type="Gone", models="no.such.module", source=source)
    spec = spec_of_asset(asset)
    assert (spec.description, spec.kinds) == (None, {"spark", "parquet"})


# -- commits --------------------------------------------------------------------------------------


def test_a_commit_says_how_to_look_at_it() -> None:
    plain = OntologyResource(storage_uri="/data/my store")
    assert commit_metadata(plain, 12, "Flight") == {
        "commit": "12",
        "examine_commit": "onto commits examine 12 --storage-uri '/data/my store'",
    }
    linked = OntologyResource(storage_uri="/data/store", explore_url="https://onto.example/x/")
    told = commit_metadata(linked, 12, "Flight")
    assert told["commit_url"].value == "https://onto.example/x/commits/12"
    assert told["type_url"].value == "https://onto.example/x/types/Flight"
    nothing = commit_metadata(linked, None, "Flight")
    assert set(nothing) == {"commit", "type_url"}


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="is no web address"):
        OntologyResource(storage_uri="x", explore_url="onto.example")


# -- samples --------------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "sqlite"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    made = str(tmp_path / "store")
    uri = made if request.param == "directory" else f"sqlite:///{made}.db"
    initialize_storage(uri)
    return uri


def sampled(uri: str, cls: type[Any], commit: int | None = None) -> Any:
    with OntologyResource(storage_uri=uri).repository() as repository:
        spec = spec_of(cls)
        head = repository.type_head(spec) if commit is None else commit
        value = sample_metadata(repository, spec, head)["sample"]
    return value if isinstance(value, str) else rows(value)


def test_a_sample_is_of_the_last_commit_and_hides_what_is_sensitive(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(Customer(id="c1", name="Ada"))
        session.ensure(Customer(id="c2", name="Bo", visits=3))
    with Session(uri) as session:
        session.ensure(Customer(id="c2", name="Bo", visits=4))
        session.ensure(Placed(left_key="c1", right_key="o1"))
        session.ensure(Keeps(left_key="c1", right_key="s1", since="monday"))
        session.ensure(Secret(id="s1"))
    assert sampled(uri, Customer) == [{"id": "c2", "name": "(hidden)", "visits": 4}]
    assert sampled(uri, Placed) == [{"left_key": "c1", "right_key": "o1", "channel": "web"}]
    assert sampled(uri, Keeps) == [
        {"left_key": "c1", "right_key": "(hidden)", "since": "monday", "much": 1}
    ]
    assert sampled(uri, Secret) == "not shown: the type is sensitive"
    assert sampled(uri, Note, 0) == "none: nothing is stored yet"


def test_a_sample_is_bounded(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(uri) as session:
        for number in range(20):
            session.ensure(Note(id=f"{number:02}", text="x" * 1000, tags=["a"], raw=b"\x00" * 9))
    shown = sampled(uri, Note)
    assert len(shown) == metadata.SAMPLE_ROWS
    assert {len(row["text"]) for row in shown} == {metadata.SAMPLE_TEXT}
    assert {row["raw"] for row in shown} == {"9 bytes"}
    assert {row["tags"] for row in shown} == {'["a"]'}
    monkeypatch.setattr(metadata, "SAMPLE_CHARACTERS", 100)
    assert {tuple(row) for row in sampled(uri, Note)} == {("id",)}


def test_a_sample_reads_one_file_and_none_that_is_large_and_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(Note(id="1", text="a"))
    for part in Path(uri).glob("commits/1-*/**/*.parquet"):
        part.unlink()
    assert str(sampled(uri, Note)).startswith("none: ")  # told, and the run goes on
    monkeypatch.setattr(samples, "FAR_BYTES", 0)
    monkeypatch.setattr(
        "storage_engine.objectstore.local.DirectoryStore.local_path", lambda *_: None
    )
    assert "MiB to fetch" in str(sampled(uri, Note))


# -- a run ----------------------------------------------------------------------------------------


@pytest.mark.spark
def test_a_materialisation_has_numbers_to_plot_a_sample_and_its_commit(
    tmp_path: Path, spark: Any
) -> None:
    ontology = storage(tmp_path, explore_url="http://localhost:8000")
    asset = ingestion_asset(customers(tmp_path))
    numbers: list[set[str]] = []
    for text in (None, "id,name\nc1,Ada\nc2,Bob\n", None):
        customers(tmp_path, text)
        [made] = materialisations(dg.materialize([asset], resources=resources(ontology)))
        shown = facts(made.metadata)
        plotted = {
            name for name, value in shown.items() if type(value) in (int, float) and "/" not in name
        }
        numbers.append(plotted)
    assert numbers[0] == numbers[1] == numbers[2]
    assert numbers[0] == {
        *("rows_read", "rows_inserted", "rows_changed", "rows_unchanged", "rows_marked"),
        *(
            "rows_quarantined",
            "bytes",
            "stored_bytes",
            "stored_bytes_read",
            "files",
            "spark_s",
            "lock_wait_ms",
            "cas_attempts",
            "requests",
        ),
        *("price_estimate_usd", "schema_version"),
    }
    assert rows(shown["sample"]) == [{"id": "c2", "name": "(hidden)", "visits": 0}]
    assert shown["commit"] is None
    assert shown["type_url"] == "http://localhost:8000/types/Customer"
    assert {row["what"] for row in rows(shown["details"])} >= {"commit that last changed the type"}

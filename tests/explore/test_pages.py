"""What the pages show, as people and programs get it, on SQLite and on an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from storage_engine import Entity, Field, Session, initialize_storage
from tests.cli.support import Customer, commit, create
from tests.explore import airports
from tests.explore.client import PageClient
from tests.explore.conftest import Browse


def test_types_have_counts_and_schemas(page: PageClient) -> None:
    types = page.document("/types")

    assert {t["label"]: t["rows"] for t in types["entities"]} == {
        "Airline": 5,
        "Airport": 10,
        "Incident": 1,
        "Plane": 5,
    }
    flight = next(t for t in types["relations"] if t["label"] == "Flight")
    assert (flight["left"], flight["right"], flight["rows"]) == ("Airport", "Airport", 20)
    assert "Airport → Airport" in page.shown("/")
    assert "manufacturer index str yes null" in page.shown("/types/Plane/schema")


def test_every_page_names_the_head_that_it_is_of(page: PageClient) -> None:
    for path in ("/", "/types/Airport", "/commits", "/events", "/health"):
        assert "head 5" in page.shown(path)
        seen = {"head_commit_id": 5, "commit_id": 5, "branch": "main"}
        assert page.document(path)["as_of"] == seen


def test_a_table_is_filtered_as_onto_query_filters(page: PageClient) -> None:
    def keys(query: str) -> list[str]:
        answer = page.document(f"/types/Airport?{query}")
        return [row["identity"][0] for row in answer["objects"]]

    assert keys("filter=altitude_ft gt 400") == ["ORD", "SEA"]
    assert keys('filter=timezone == "America/Chicago"') == ["ORD"]
    assert keys("filter=altitude_ft gt 100&filter=altitude_ft lt 200") == ["LAX"]
    assert keys("filter=name is_null") == []
    assert keys("prefix=L") == ["LAX", "LGA"]
    assert keys('filter=tags contains "hub"') == ["JFK"]
    problem = page.document("/types/Airport?filter=altitude_f gt 1", status=400)
    assert "did you mean 'altitude_ft'" in problem["problem"]
    assert "did you mean" in page.shown("/types/Airport?filter=altitude_f gt 1", status=400)
    relations = page.document('/types/Flight?left=JFK&filter=right.name == "Los Angeles Intl"')
    assert [row["identity"][1] for row in relations["objects"]] == ["LAX", "LAX"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"field": "name", "op": "==", "value": "La Guardia"}, 'name == "La Guardia"'),
        ({"field": "name", "op": "==", "value": "7"}, 'name == "7"'),
        ({"field": "name", "op": "is_null", "value": "x"}, "name is_null"),
        ({"field": "altitude_ft", "op": ">", "value": "100"}, "altitude_ft > 100"),
        ({"field": "faa", "op": "in", "value": "JFK, LGA"}, 'faa in ["JFK", "LGA"]'),
        ({"field": "name", "op": "==", "value": '"q"'}, 'name == "q"'),
    ],
)
def test_the_form_becomes_an_address_with_filters(
    page: PageClient, form: dict[str, str], text: str
) -> None:
    moved = page.get(f"/types/Airport?{urlencode({**form, 'as_of': '1'})}")

    assert moved.status == 303
    answer = page.document(moved.headers["location"])
    assert [f["text"] for f in answer["filters"]] == [text]
    assert answer["as_of"]["commit_id"] == 1


def test_the_page_leads_to_its_json_and_back_to_the_latest(page: PageClient) -> None:
    html = page.get("/types/Airport?filter=altitude_ft gt 100&as_of=2").html

    kept = "filter=altitude_ft+gt+100"
    assert f'href="?{kept}&amp;as_of=2&amp;format=json"' in html
    assert f'href="?{kept}"' in html


def test_pages_of_a_table_follow_each_other_by_key(page: PageClient) -> None:
    for path, count in (("/types/Airport?limit=3", 10), ("/types/Flight?limit=7", 20)):
        identities = []
        url: str | None = path
        while url is not None:
            answer = page.document(url)
            assert len(answer["objects"]) <= 7
            identities += [tuple(row["identity"]) for row in answer["objects"]]
            url = answer["next_url"]
        assert len(identities) == count
        assert identities == sorted(set(identities))


def test_matches_are_counted_when_asked(page: PageClient) -> None:
    path = '/types/Flight?filter=carrier == "AA"&limit=2'
    assert page.document(path)["matching"] is None
    assert page.document(f"{path}&count=1")["matching"] == 8
    assert "8 in all" in page.shown(f"{path}&count=1")


def test_an_object_has_fields_relations_and_a_timeline(page: PageClient) -> None:
    jfk = page.document("/types/Airport/objects/JFK")

    assert jfk["name"] == "John F Kennedy Intl"
    assert jfk["fields"]["altitude_ft"] == 14
    assert jfk["fields"]["tags"] == ["hub", "jetblue"]
    ways = {(g["relation"], g["direction"]): g for g in jfk["relations"]}
    assert {key["key"] for key in ways["Flight", "outgoing"]["related"]} == {"LAX", "SFO", "HNL"}
    assert {key["key"] for key in ways["Flight", "incoming"]["related"]} == {"LAX", "BOS", "ORD"}
    assert ways["About", "incoming"]["related"][0]["key"] == "notice/JFK"
    versions = jfk["timeline"]["versions"]
    assert [(v["commit_id"], v["operation"]) for v in versions] == [(4, "update"), (1, "insert")]
    assert versions[0]["changes"] == [
        {"field": "altitude_ft", "before": 13, "after": 14},
        {"field": "tags", "before": [], "after": ["hub", "jetblue"]},
    ]
    text = page.shown("/types/Airport/objects/JFK")
    assert "altitude_ft 13 → 14" in text
    assert "commit 4 changed" in text


def test_a_relation_is_an_object_too(page: PageClient) -> None:
    (path, *_) = [
        row["url"] for row in page.document("/types/Flight?left=JFK&right=LAX")["objects"]
    ]
    flight = page.document(path)

    assert flight["identity"] == ["JFK", "LAX", "2013-01-01/AA/100"]
    assert flight["fields"]["day"] == "2013-01-01"
    assert flight["made_by"]["run_id"] == airports.RUN
    assert flight["left_url"] == "/types/Airport/objects/JFK"
    assert "Dagster run 5a0c3f6e" in page.shown(path)


def test_the_past_is_seen_as_of_a_commit_a_time_or_a_tag(air: str, browse: Browse) -> None:
    client = browse(air)
    with Session(air) as session:
        created = (session.get_commit(2) or {})["created_at"]

    for as_of in ("2", created.replace("+00:00", "Z")):
        answer = client.document(f"/types/Airport/objects/JFK?as_of={as_of}")
        assert answer["fields"]["altitude_ft"] == 13
        assert answer["as_of"]["commit_id"] == 2
        assert len(answer["timeline"]["versions"]) == 1
    assert len(client.document("/types/Flight?as_of=2")["objects"]) == 10
    assert client.document("/types/Incident?as_of=2")["objects"] == []
    text = client.shown("/types/Airport?as_of=2")
    assert "As of 2 , which is commit 2 , 3 commits before the latest" in text
    assert "is not there yet" in client.shown("/types/Airport?as_of=77", status=400)
    assert "tag" in client.shown("/types/Airport?as_of=nosuchtag", status=400)
    assert "no commit yet" in client.shown("/types/Airport?as_of=2001-01-01", status=400)


def test_commits_are_listed_newest_first_with_what_they_wrote(page: PageClient) -> None:
    listed = page.document("/commits")

    assert [c["id"] for c in listed["commits"]] == [5, 4, 3, 2, 1]
    assert listed["commits"][1]["written"] == [
        {"type": "Airport", "kind": "entity", "rows": 2, "inserted": 0, "updated": 2}
    ]
    assert [c["id"] for c in page.document("/commits?before=3")["commits"]] == [2, 1]
    assert "Airport ~2" in page.shown("/commits")


def test_a_commit_shows_what_it_changed_field_by_field(page: PageClient) -> None:
    commit = page.document("/commits/4")

    assert commit["metadata"] == {"reason": "corrected by hand"}
    (diff,) = commit["diffs"]
    assert [(row["identity"], row["operation"]) for row in diff["rows"]] == [
        (["HNL"], "update"),
        (["JFK"], "update"),
    ]
    assert diff["rows"][0]["changes"] == [
        {"field": "name", "before": "Honolulu Intl", "after": "Daniel K. Inouye Intl"}
    ]
    first = page.document("/commits/1")
    assert {row["operation"] for diff in first["diffs"] for row in diff["rows"]} == {"insert"}
    assert "Honolulu Intl → Daniel K. Inouye Intl" in page.shown("/commits/4")


def test_rows_of_a_large_commit_are_paged(air: str, browse: Browse) -> None:
    client = browse(air)
    seen: list[Any] = []
    url = "/commits/2?type=Flight"
    while url:
        (diff,) = client.document(url)["diffs"]
        seen += [tuple(row["identity"]) for row in diff["rows"]]
        url = f"/commits/2?type=Flight&after={diff['after']}" if diff["after"] else ""
    assert len(seen) == 10


def test_a_handled_event_leads_to_the_commit_and_back(page: PageClient, air: str) -> None:
    commit = page.document("/commits/5")
    if not air.startswith("sqlite"):  # which does not keep which commit handled an event
        (handled,) = commit["handled"]
        assert handled["handler_id"].endswith("file_notice")
        assert "token" not in handled
        assert page.document(handled["url"])["payload"]["faa"] == "JFK"
    namespace = page.document("/events/default")
    (letter,) = namespace["dead_letters"]
    assert "no airport XXX" in letter["last_error"]
    event = page.document(letter["url"])
    assert (event["status"], event["payload"]["faa"]) == ("dead_lettered", "XXX")
    assert "no airport XXX" in page.shown(letter["url"])
    acked = page.document("/events/default?status=acked")["events"]
    assert [event["status"] for event in acked] == ["acked"]


def test_health_gives_advice(page: PageClient, air: str) -> None:
    health = page.document("/health")

    assert any("gave up on 1 dead letter" in a["why"] for a in health["advice"])
    assert "onto events dead-letters --namespace default" in page.shown("/health")
    if not air.startswith("sqlite"):
        airport = next(t for t in health["types"] if t["type"] == "Airport")
        assert (airport["identities"], airport["rows"], airport["index_lag"]) == (10, 12, 0)


def test_a_new_commit_is_on_the_next_page(browse: Browse, tmp_path: Any) -> None:
    uri = airports.uri_in(tmp_path, "directory")
    airports.fill(uri)
    client = browse(uri)
    assert client.document("/types/Airline")["rows"] == 5
    with Session(uri) as session:
        session.ensure(airports.Airline(carrier="DL", name="Delta"))

    after = client.document("/types/Airline")
    assert (after["rows"], after["as_of"]["head_commit_id"]) == (6, 6)
    assert client.document("/types/Airline/objects/DL")["name"] == "Delta"
    assert client.document("/types?as_of=5")["as_of"]["commit_id"] == 5


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_a_page_that_was_seen_asks_for_little(page: PageClient) -> None:
    """Head, the types of that head, tags to choose from: files and commits are at hand."""

    def asked() -> int:
        requests = page.document("/health")["requests"]
        return int(sum(requests.values()))

    for path, most in (
        ("/types/Airport", 6),
        ("/types/Airport/objects/JFK", 20),
        ("/commits", 5),
        ("/commits/4", 9),
    ):
        page.shown(path)
        looking = -asked() + asked()  # what this page itself costs
        before = asked()
        page.shown(path)
        assert asked() - before - looking <= most, path


def test_what_is_not_there_says_what_is(page: PageClient) -> None:
    for path, words in (
        ("/types/Airprt", "did you mean 'Airport'"),
        ("/types/Airport/objects/ZZZ", "there is no Airport ZZZ"),
        ("/types/Flight/objects/JFK", "a left key, a right key"),
        ("/types/Flight/objects/JFK/ZZZ", "there is no Flight"),
        ("/commits/99", "1 to 5 are there"),
        ("/commits/first", "numbered from 1 on"),
        ("/commits/99999999999999999999", "there is no commit"),
        ("/events/nowhere", "there is no namespace"),
        ("/events/default/nothing", "there is no event"),
        ("/nothing/here", "there is no such page"),
        ("/static/../app.py", "there is no such"),
        ("/types/%ff", "not UTF-8"),
    ):
        assert words in page.shown(path, status=404), path
        assert page.document(path, status=404)["error"]["status"] == 404
    assert "takes a number" in page.shown("/commits?before=x", status=400)


def test_an_entity_and_a_relation_may_share_a_name(browse: Browse, tmp_path: Any) -> None:
    from tests.cli.support import Customer, CustomerOfProduct, Product, commit, create

    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    commit(
        uri,
        Customer(id="c1", name="Ann"),
        Product(sku="p1"),
        CustomerOfProduct(left_key="c1", right_key="p1"),
    )
    client = browse(uri)

    assert "Say which: entity:Customer or relation:Customer" in client.shown(
        "/types/Customer", status=404
    )
    ann = client.document("/types/entity:Customer/objects/c1")
    (group,) = ann["relations"]
    assert group["relation"] == "relation:Customer"
    relation = client.document(group["related"][0]["relation_url"])
    assert relation["url"] == "/types/relation:Customer/objects/c1/p1"
    assert relation["left_url"] == "/types/entity:Customer/objects/c1"
    assert client.document("/types/entity:Product/objects/p1")["relations"]
    html = client.get("/commits/1").html
    assert 'href="/types/entity%3ACustomer"' in html
    assert client.document("/types/entity%3ACustomer")["kind"] == "entity"


def test_classes_describe_types_and_fields(browse: Browse, tmp_path: Any) -> None:
    class Described(Entity):
        """What it is for."""

        id: Field[str] = Field(primary_key=True, description="Who it <is>")
        mail: Field[str | None] = Field(default=None, sensitive=True)

    uri = f"sqlite:///{tmp_path}/described.db"
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(Described(id="a"))
    text = browse(uri, declared=[Described]).shown("/types/Described/schema")

    assert "What it is for." in text
    assert "Who it <is>" in text
    assert "mail sensitive str" in text


def test_an_empty_storage_is_shown_too(browse: Browse, tmp_path: Any) -> None:
    for uri in (f"file://{tmp_path}/empty", f"sqlite:///{tmp_path}/empty.db"):
        initialize_storage(uri)
        client = browse(uri)
        assert "Nothing is stored yet" in client.shown("/")
        assert "No commits yet" in client.shown("/commits")
        assert "No events yet" in client.shown("/events")
        assert "there is nothing in it yet onto import" in client.shown("/health")
        assert "commit something first" in client.shown("/types/Airport", status=404)


def test_an_older_schema_version_is_shown_as_it_was(browse: Browse, tmp_path: Any) -> None:
    class Old(Entity, name="Thing"):
        id: Field[str] = Field(primary_key=True)
        colour: Field[str]

    class New(Entity, name="Thing"):
        id: Field[str] = Field(primary_key=True)
        color: Field[str] = Field(renamed_from="colour")
        size: Field[int] = Field(default=1)

    for uri in (f"file://{tmp_path}/old", f"sqlite:///{tmp_path}/old.db"):
        initialize_storage(uri)
        with Session(uri) as session:
            session.ensure([Old(id="a", colour="red"), Old(id="b", colour="blue")])
        with Session(uri, entity_types=[New]) as session:
            session.migrate(dry_run=False, force=True)
            session.ensure(New(id="a", color="green", size=2))
        client = browse(uri)

        thing = client.document("/types/Thing/objects/a")
        assert thing["fields"] == {"id": "a", "color": "green", "size": 2}
        changes = [v["changes"] for v in thing["timeline"]["versions"]]
        assert {"field": "color", "before": "red", "after": "green"} in changes[0]
        past = client.document("/types/Thing?as_of=1")
        assert past["columns"] == ["id", "colour"]
        assert [row["fields"]["colour"] for row in past["objects"]] == ["red", "blue"]
        assert client.document("/types/Thing")["rows"] == 2
        schema = client.document("/types/Thing/schema")
        assert [version["number"] for version in schema["versions"]] == [2, 1]
        assert schema["versions"][0]["changes"]
        assert "then called" not in client.shown("/types/Thing/schema")
        (diff,) = client.document("/commits/2")["diffs"]
        assert diff["migrated"] is True
        assert diff["rows"][0]["changes"] == [{"field": "size", "before": None, "after": 1}]


@pytest.mark.parametrize("backend", ["directory", "sqlite"])
def test_commits_of_a_storage_that_was_filled_anew_are_its_own(
    browse: Browse, tmp_path: Path, backend: str
) -> None:
    uri = f"sqlite:///{tmp_path}/s.db" if backend == "sqlite" else f"file://{tmp_path}/s"
    create(uri, "v2")
    commit(uri, Customer(id="c1", name="Ann"), metadata={"source": "the old one"})
    client = browse(uri)
    assert "the old one" in client.shown("/commits/1")
    token = initialize_storage(uri, "v2", force=True, dry_run=True).token
    initialize_storage(uri, "v2", force=True, token=token)
    assert "was erased" in client.shown("/commits/1", status=503)

    commit(uri, Customer(id="c1", name="Ann"), metadata={"source": "the new one"})

    shown = client.shown("/commits/1")
    assert "the new one" in shown
    assert "the old one" not in shown

"""Branches on the page: which there are, looked at one by one, compared, and a merge tried out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Session, initialize_storage
from storage_engine.config import OntologiaConfig
from storage_engine.explore import branches
from storage_engine.model import spec_of
from tests.conformance.test_rfc0009_migration import drop, migrate
from tests.explore import airports
from tests.explore.airports import Airline, Airport, airport
from tests.explore.client import PageClient
from tests.explore.conftest import Browse, browsing

HOSTILE = "<script>document.title='owned'</script>\u202e"


def fork(uri: str, *, owner: str = HOSTILE, code: str = HOSTILE) -> None:
    """A branch that changes, adds and disputes; another on top of it; one that does nothing."""
    config = OntologiaConfig(runtime_id="loader")
    with Session(uri, config=config) as main:
        main.create_branch("fix/prices", owner=owner, expires_in=timedelta(days=7))
        main.create_branch("idle", owner="ops")
    with Session(uri, branch="fix/prices", config=config) as session:
        session.ensure(airport("JFK", altitude_ft=15, tags=["hub", "jetblue"]))
        session.ensure(airport("LAX", name="LAX of the branch"))
        session.ensure(Airport(faa=code, name=code))
        session.commit(meta={"reason": "prices"})
        session.ensure(Airline(carrier="ZZ", name="Zeppelin"))
        session.commit()
        session.create_branch("fix/prices/more")
    with Session(uri, config=config) as main:
        main.ensure(airport("LAX", name="LAX of main"))
        main.ensure(airport("SEA", altitude_ft=434))
        main.commit()


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = airports.uri_in(tmp_path_factory.mktemp("branches"), "directory")
    airports.fill(uri)
    fork(uri)
    return uri


@pytest.fixture(scope="module")
def page(forked: str) -> Iterator[PageClient]:
    for browse in browsing():
        yield browse(forked)


DIFF = "/branches/fix%2Fprices/diff"
MERGE = "/branches/fix%2Fprices/merge"


def test_branches_are_listed_with_where_they_come_from(page: PageClient) -> None:
    listed = {b["name"]: b for b in page.document("/branches")["branches"]}

    assert [*listed] == ["main", "fix/prices", "fix/prices/more", "idle"]
    prices = listed["fix/prices"]
    assert (prices["parent"], prices["base_commit_id"], prices["commit_id"]) == ("main", 5, 7)
    assert (prices["commits"], prices["parent_commits"], prices["protected"]) == (2, 1, False)
    assert prices["expires_at"] is not None
    assert prices["owner"] == HOSTILE
    assert listed["fix/prices/more"]["parent"] == "fix/prices"
    html = page.get("/branches").html
    assert "<script" not in html
    assert "\\u202e" in html


def test_any_page_can_be_looked_at_on_a_branch(page: PageClient) -> None:
    on = "branch=fix/prices"

    assert page.document(f"/types/Airport/objects/LAX?{on}")["name"] == "LAX of the branch"
    assert page.document("/types/Airport/objects/LAX")["name"] == "LAX of main"
    assert page.document("/types/Airport/objects/LAX?branch=main")["name"] == "LAX of main"
    assert page.document(f"/types/Airport/objects/LAX?{on}&as_of=5")["name"] == "Los Angeles Intl"
    shown = page.document(f"/commits?{on}")
    assert shown["as_of"] == {"head_commit_id": 7, "commit_id": 7, "branch": "fix/prices"}
    assert [c["id"] for c in shown["commits"]] == [7, 6, 5, 4, 3, 2, 1]
    assert page.document(f"/commits/6?{on}")["metadata"] == {"reason": "prices"}
    assert "2 commits of its own" in page.shown(f"/types?{on}")
    counts = {t["label"]: t["rows"] for t in page.document(f"/types?{on}")["entities"]}
    assert counts == {"Airline": 6, "Airport": 11, "Incident": 1, "Plane": 5}
    for path in ("/health", "/events", "/events/default", "/types/Airport/schema"):
        page.shown(f"{path}?{on}")


def links(html: str) -> set[str]:
    found = {link.replace("&amp;", "&") for link in re.findall(r'href="([^"]+)"', html)}
    return {link for link in found if not link.startswith(("/static", "#"))}


def test_every_link_stays_on_the_branch(page: PageClient) -> None:
    """But those that lead to another one, and to the bus, which is the storage's."""
    seen: set[str] = set()
    todo = ["/types?branch=fix/prices"]
    while todo and len(seen) < 120:
        url = todo.pop(0)
        answer = page.get(url)
        assert answer.status in (200, 303), (url, answer.status)
        if answer.status == 303 or "format=json" in url:
            continue
        path = url.partition("?")[0]
        for link in links(answer.html):
            if link.startswith("?"):  # of this page: as JSON, on main, the latest
                continue
            if link.startswith("/events"):
                continue
            if not path.startswith("/branches"):
                assert "branch=fix%2Fprices" in link, f"{link} on {url} leaves the branch"
            if link not in seen and "branch=fix%2Fprices" in link:
                seen.add(link)
                todo.append(link)
        form = re.findall(r"<form.*?</form>", answer.html, re.DOTALL)
        assert all('name="branch" value="fix/prices"' in each for each in form), url
    assert len(seen) > 40


def test_choosing_a_branch_leads_back_to_the_same_page(page: PageClient) -> None:
    html = page.get("/types/Airport/objects/LAX").html
    (switch,) = [link for link in links(html) if link.startswith("/branches?place=")]

    assert "/types/Airport/objects/LAX?branch=fix%2Fprices" in links(page.get(switch).html)
    for elsewhere in ("//evil.example/", "https://evil.example", "javascript:alert(1)", "/\\evil"):
        html = page.get(f"/branches?place={elsewhere}").html
        assert "/types?branch=idle" in links(html), elsewhere
        assert not [link for link in links(html) if "evil" in link and link[0] != "?"]


def test_a_branch_has_its_own_commits(page: PageClient) -> None:
    document = page.document("/branches/fix%2Fprices")

    assert [c["id"] for c in document["own_commits"]] == [7, 6]
    assert "main has gone on by 1 commit" in page.shown("/branches/fix%2Fprices")
    assert "No commits of its own yet" in page.shown("/branches/idle")


def rows_of(document: Any) -> dict[tuple[str, str], tuple[str, str]]:
    return {
        (diff["type"], row["identity"][0]): (row["operation"], row["changed_by"])
        for diff in document["diffs"]
        for row in diff["rows"]
    }


def test_a_diff_tells_what_differs_and_who_changed_it(page: PageClient) -> None:
    document = page.document(DIFF)

    assert rows_of(document) == {
        ("Airline", "ZZ"): ("insert", "branch"),
        ("Airport", HOSTILE): ("insert", "branch"),
        ("Airport", "JFK"): ("update", "branch"),
        ("Airport", "LAX"): ("update", "both"),
        ("Airport", "SEA"): ("update", "parent"),
    }
    lax = next(r for r in document["diffs"][1]["rows"] if r["identity"] == ["LAX"])
    assert lax["changes"] == [
        {"field": "name", "before": "LAX of main", "after": "LAX of the branch"}
    ]
    html = page.get(DIFF).html
    assert "<script" not in html
    assert "changed on both sides" in html
    assert page.document("/branches/idle/diff")["diffs"][0]["rows"][0]["changed_by"] == "parent"
    only = page.document(f"{DIFF}?type=Airline")
    assert rows_of(only) == {("Airline", "ZZ"): ("insert", "branch")}
    nested = page.document("/branches/fix%2Fprices%2Fmore/diff")
    assert nested["parent"] == "fix/prices"
    assert nested["diffs"] == []
    assert "Nothing differs" in page.shown("/branches/fix%2Fprices%2Fmore/diff")


def test_a_merge_is_tried_out_with_all_conflicts(page: PageClient) -> None:
    document = page.document(MERGE)

    assert document["conflicts_total"] == 1
    (conflict,) = document["conflicts"]
    assert (conflict["conflict"], conflict["type"]) == ("divergent_update", "Airport")
    assert conflict["fields"] == [
        {
            "field": "name",
            "base": "Los Angeles Intl",
            "ours": "LAX of main",
            "theirs": "LAX of the branch",
        }
    ]
    assert "1 conflict: merging would be refused" in page.shown(MERGE)
    theirs = page.document(f"{MERGE}?on_conflict=theirs")
    assert theirs["conflicts"] == []
    assert {t["type"]: (t["inserted"], t["updated"]) for t in theirs["types"]} == {
        "Airline": (1, 0),
        "Airport": (1, 2),
    }
    shown = page.shown(f"{MERGE}?on_conflict=theirs")
    assert "onto branch merge fix/prices --on-conflict theirs --apply" in shown
    assert "nothing to bring into main" in page.shown("/branches/idle/merge")
    wrong = page.document(f"{MERGE}?on_conflict=maybe", status=400)
    assert "takes one of fail, ours" in wrong["error"]["message"]
    assert page.document("/branches")["branches"][0]["commit_id"] == 6, "nothing was merged"


@pytest.mark.parametrize("path", ["/types?branch=fix/price", "/branches/fix%2Fprice"])
def test_an_unknown_branch_names_the_nearest(page: PageClient, path: str) -> None:
    answer = page.document(path, status=404)

    assert "fix/prices" in answer["error"]["message"]
    for odd in (
        "/branches/main",
        "/branches/main/diff",
        "/types?branch=../../head",
        "/branches/x/y",
    ):
        assert page.get(odd).status == 404, odd


def test_a_branch_made_anew_is_another(browse: Browse, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/anew"
    initialize_storage(uri)
    with Session(uri) as main:
        main.ensure(airport("JFK"))
        main.commit()
        client = browse(uri)
        for code in ("LGA", "EWR"):
            main.create_branch("work")
            with Session(uri, branch="work") as session:
                session.ensure(airport(code))
                session.commit()
            keys = [
                o["identity"][0] for o in client.document("/types/Airport?branch=work")["objects"]
            ]
            assert keys == sorted([code, "JFK"])
            main.delete_branch("work")
            assert client.get("/types?branch=work").status == 404


def test_types_that_one_side_ended(browse: Browse, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ended"
    initialize_storage(uri)
    with Session(uri) as main:
        main.ensure(Airline(carrier="AA", name="American"))
        main.commit()
        main.create_branch("work")
        with Session(uri, branch="work") as session:
            drop(session.repository, "Airline")
            told = [told_of_types(browse(uri))]
            migrate(session.repository, spec_of(Airline))
            told.append(told_of_types(browse(uri)))
            main.create_branch("idle")
        drop(main.repository, "Airline")
        told.append(told_of_types(browse(uri), "idle"))
    assert told == [
        ["ended on the branch"],
        ["ended and made anew on the branch: its earlier rows are gone there"],
        ["ended on the parent"],
    ]


def told_of_types(client: PageClient, branch: str = "work") -> list[str]:
    (diff,) = client.document(f"/branches/{branch}/diff")["diffs"]
    return list(diff["schema"])


def test_pages_of_a_large_branch_are_bounded(
    browse: Browse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a page follow the one before, and rows that are alike again end no page for good."""
    monkeypatch.setattr(branches, "_AT_ONCE", 40)
    monkeypatch.setattr(branches, "_LOOKED_AT", 200)
    monkeypatch.setattr(branches, "MERGED_ROWS", 500)
    uri = f"file://{tmp_path}/large"
    initialize_storage(uri)

    def airport_of(number: int, name: str) -> Airport:
        return Airport(faa=f"{number:04}", name=name)

    with Session(uri) as main:
        main.ensure([airport_of(n, "old") for n in range(900)])
        main.commit()
        main.create_branch("large")
        with Session(uri, branch="large") as session:
            session.ensure([airport_of(n, "new") for n in range(900)])
            session.commit()
            session.ensure([airport_of(n, "old") for n in range(450)])  # as it was
            session.commit()
        main.ensure([airport_of(n, "main") for n in range(870, 930)])
        main.commit()
    client = browse(uri)

    differing: list[tuple[str, str]] = []
    url, pages = "/branches/large/diff", 0
    while url:
        document = client.document(url)
        client.shown(url)
        (diff,) = document["diffs"]
        assert len(diff["rows"]) <= branches.CHANGED
        differing += [(row["identity"][0], row["operation"]) for row in diff["rows"]]
        pages += 1
        after = diff["after"]
        url = f"/branches/large/diff?type=Airport&after={after}" if after else ""
    assert differing == [(f"{n:04}", "update" if n < 900 else "delete") for n in range(450, 930)]
    assert pages > 450 // branches.CHANGED
    preview = client.document("/branches/large/merge")
    assert preview["too_large"] == "1,350 rows written"
    assert preview["types"] == []
    assert "onto branch merge large" in client.shown("/branches/large/merge")


def test_many_branches_come_in_pages(
    browse: Browse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "BRANCHES", 3)
    uri = f"file://{tmp_path}/many"
    initialize_storage(uri)
    names = {"a", "a-b", "a.b", "a/b", "a0", "b/c/d", "zz"}
    with Session(uri) as main:
        for name in names:
            main.create_branch(name)
    client = browse(uri)

    listed: list[str] = []
    url: str | None = "/branches"
    while url:
        document = client.document(url)
        assert len(document["branches"]) <= 4
        listed += [branch["name"] for branch in document["branches"]]
        url = document["next_url"]
    assert listed[0] == "main"
    assert len(listed) == len(set(listed))
    assert set(listed[1:]) == names


def test_what_was_opened_for_a_look_is_closed(
    browse: Browse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_engine.explore.open_branches._IDLE_KEPT", 2)
    uri = f"file://{tmp_path}/open"
    initialize_storage(uri)
    with Session(uri) as main:
        main.ensure(airport("JFK"))
        main.commit()
        for number in range(5):
            main.create_branch(f"b{number}")
    client = browse(uri)
    for _ in range(2):
        for number in range(5):
            assert client.document(f"/types/Airport?branch=b{number}")["rows"] == 1
    opened = client.storage._open_branches
    assert opened is not None
    assert [kept.readers for kept in opened._opened.values()] == [0, 0]


@pytest.mark.parametrize("backend", ["sqlite", "v1"])
def test_storages_without_branches_show_none(browse: Browse, tmp_path: Path, backend: str) -> None:
    uri = airports.uri_in(tmp_path, backend)
    initialize_storage(uri, engine_version="v1" if backend == "v1" else "v2")
    with Session(uri) as session:
        session.ensure(airport("JFK"))
        session.commit()
    client = browse(uri)

    assert client.document("/branches")["branches"] == []
    assert "has no branches" in client.shown("/branches")
    assert "Branches" not in client.shown("/types")
    assert client.document("/types?branch=main")["as_of"]["branch"] == "main"
    assert client.get("/types?branch=work").status == 404

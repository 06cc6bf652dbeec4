"""`onto commits` and `onto commits examine`: the same answers on every backend (RFC 0004, 8)."""

from __future__ import annotations

from tests.cli.conftest import Place
from tests.cli.support import Customer, commit, create, onto


def test_rfc0004_08_commits_lists_newest_first(uri: str) -> None:
    listed = onto("commits", "--storage-uri", uri, "--json")

    assert (listed.code, listed.err) == (0, "")
    newest, oldest = listed.json["commits"]
    assert (newest["id"], newest["parent_id"]) == (2, 1)
    assert (oldest["id"], oldest["parent_id"]) == (1, None)
    assert oldest["metadata"] == {"source": "crm"}
    assert sorted(newest["types"]) == ["Customer", "Employment"]
    assert {c["runtime_id"] for c in listed.json["commits"]} == {"writer"}
    assert listed.json["more"] == 0


def test_commits_for_people(uri: str) -> None:
    listed = onto("commits", "--storage-uri", uri)

    header, newest, oldest = listed.out.splitlines()
    assert header.split() == ["id", "created", "kind", "runtime", "types", "metadata"]
    assert newest.split()[0] == "2"
    assert "source=crm" in oldest


def test_commits_limit_and_since(uri: str) -> None:
    limited = onto("commits", "--limit", "1", "--storage-uri", uri, "--json").json
    since = onto("commits", "--since", "1", "--storage-uri", uri, "--json").json

    assert [c["id"] for c in limited["commits"]] == [2]
    assert limited["more"] == 1
    assert [c["id"] for c in since["commits"]] == [2]
    assert since["more"] == 0
    assert "1 older not shown" in onto("commits", "--limit", "1", "--storage-uri", uri).out
    assert onto("commits", "--since", "2", "--storage-uri", uri).out == "No commits after 2.\n"


def test_commits_of_an_empty_storage(place: Place) -> None:
    create(place.uri, place.engine)

    assert onto("commits", "--storage-uri", place.uri).out == "No commits yet.\n"
    assert onto("commits", "--storage-uri", place.uri, "--json").json["commits"] == []


def test_rfc0004_08_examine_shows_what_a_commit_changed(uri: str) -> None:
    examined = onto("commits", "examine", "2", "--storage-uri", uri, "--json")

    assert (examined.code, examined.err) == (0, "")
    assert examined.json["id"] == 2
    assert examined.json["changes"] == [
        {"kind": "entity", "type_name": "Customer", "inserted": 1, "updated": 1},
        {"kind": "relation", "type_name": "Employment", "inserted": 1, "updated": 0},
    ]
    assert examined.json["identities_total"] == 3
    assert examined.json["identities"] == [
        {"kind": "entity", "type_name": "Customer", "key": "c1", "operation": "update"},
        {"kind": "entity", "type_name": "Customer", "key": "c2", "operation": "insert"},
        {
            "kind": "relation",
            "type_name": "Employment",
            "left_key": "c1",
            "right_key": "p1",
            "instance_key": "2024",
            "operation": "insert",
        },
    ]


def test_examine_for_people(uri: str) -> None:
    examined = onto("commits", "examine", "1", "--storage-uri", uri)

    lines = [line.split() for line in examined.out.splitlines()]
    assert ["meta", "source", "crm"] in lines
    assert ["Customer", "entity", "1", "0"] in lines
    assert ["insert", "Product", "p1"] in lines
    relation = onto("commits", "examine", "2", "--storage-uri", uri).out
    assert "c1 -> p1 [2024]" in relation


def test_examine_limits_identities_not_counts(uri: str) -> None:
    limited = onto("commits", "examine", "2", "--limit", "1", "--storage-uri", uri)
    none = onto("commits", "examine", "2", "--limit", "0", "--storage-uri", uri, "--json").json

    assert "2 more not shown" in limited.out
    assert none["identities"] == []
    assert none["identities_total"] == 3
    assert len(none["changes"]) == 2


def test_stored_text_cannot_steer_the_terminal(place: Place) -> None:
    create(place.uri, place.engine)
    commit(place.uri, Customer(id="a\x1b[31m[bold]b", name="x"), metadata={"k": "1\n2"})

    listed = onto("commits", "--storage-uri", place.uri).out
    examined = onto("commits", "examine", "1", "--storage-uri", place.uri).out

    assert "k=1\\n2" in listed
    assert "a\\x1b[31m[bold]b" in examined


def test_examine_of_an_unknown_commit_names_the_range(uri: str) -> None:
    for wanted in ("3", "0", "99999999999999999999"):
        failed = onto("commits", "examine", wanted, "--storage-uri", uri)

        assert failed.code == 4
        assert f"no commit {wanted} in {uri}: 1 to 2 are there" in failed.error()

    error = onto("commits", "examine", "3", "--storage-uri", uri, "--json").json["error"]
    assert error["type"] == "CommitNotFoundError"
    assert error["facts"] == {"uri": uri, "commit_id": 3, "head_commit_id": 2}


def test_examine_in_an_empty_storage(place: Place) -> None:
    create(place.uri, place.engine)

    failed = onto("commits", "examine", "1", "--storage-uri", place.uri)

    assert failed.code == 4
    assert "there are none yet" in failed.error()


def test_wrong_numbers_are_usage_errors(uri: str) -> None:
    assert onto("commits", "examine", "two", "--storage-uri", uri).code == 2
    assert onto("commits", "examine", "--storage-uri", uri).code == 2
    assert onto("commits", "--limit", "0", "--storage-uri", uri).code == 2
    assert onto("commits", "--since", "-1", "--storage-uri", uri).code == 2


def test_list_options_before_examine_are_refused_not_ignored(uri: str) -> None:
    refused = onto("commits", "--limit", "1", "examine", "1", "--storage-uri", uri)

    assert refused.code == 2
    assert "'examine'" in refused.error()

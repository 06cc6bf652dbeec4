"""`onto info`: the same facts on every backend, and what is wrong on stderr."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.many_types import fill
from storage_engine.commitlog import layout
from storage_engine.objectstore.local import DirectoryStore
from tests.cli.conftest import Place
from tests.cli.support import Customer, CustomerOfProduct, commit, create, onto, opened


def test_info_shows_head_types_and_engine(place: Place, uri: str) -> None:
    shown = onto("info", "--storage-uri", uri, "--json")

    assert (shown.code, shown.err) == (0, "")
    info = shown.json
    assert info["uri"] == uri
    assert info["engine_version"] == place.engine
    assert info["format"] == 3
    assert info["head_commit_id"] == info["head"]["id"] == 2
    assert info["head"]["runtime_id"] == "writer"
    assert [tuple(known.values())[:6] for known in info["types"]] == [
        ("entity", "Customer", 1, 2, 2, 3),
        ("entity", "Product", 1, 1, 1, 1),
        ("relation", "Employment", 1, 2, 1, 1),
    ]
    files = None if place.backend == "sqlite" else 2
    assert info["types"][0]["files"] == files
    assert (info["types"][0]["bytes"] is None) == (place.backend == "sqlite")
    assert info["events"] == []
    assert [advice["run"] for advice in info["advice"]] == (
        ["onto migrate-engine"] if place.engine == "v1" else []
    )
    assert info["index_warnings"] == []
    assert info["lock"] is None
    assert ("db_path" in info) == (place.backend == "sqlite")


def test_info_for_people_names_the_same(place: Place, uri: str) -> None:
    shown = onto("info", "--storage-uri", uri)

    assert (shown.code, shown.err) == (0, "")
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["storage", uri] in lines
    assert ["engine", f"{place.engine},", "format", "3"] in lines
    rows = {line[0]: line for line in lines if line}
    assert rows["Customer"][1:4] == ["entity", "2", "3"]
    assert rows["Customer"][-2:] == rows["Employment"][-2:] == ["1", "2"]
    assert rows["backend"][1:] == [place.backend]
    assert any(line[:3] == ["head", "commit", "2"] for line in lines)


def test_info_tells_types_apart_that_share_a_name(place: Place) -> None:
    create(place.uri, place.engine)
    commit(place.uri, Customer(id="c1", name="Ann"))
    commit(place.uri, CustomerOfProduct(left_key="c1", right_key="p1"))

    types = onto("info", "--storage-uri", place.uri, "--json").json["types"]

    assert [(t["kind"], t["type_name"], t["last_commit_id"]) for t in types] == [
        ("entity", "Customer", 1),
        ("relation", "Customer", 2),
    ]


def test_info_counts_the_requests_it_took(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")

    requests = onto("info", "--storage-uri", uri, "--json").json["requests"]

    assert requests["GET"] + requests["LIST"] == requests["total"] > 0
    assert requests["bytes_written"] == 0


def test_info_of_a_sqlite_file_that_is_not_there_creates_none(tmp_path: Path) -> None:
    shown = onto("info", "--json")

    assert shown.code == 0
    assert shown.json["head_commit_id"] == 0
    assert shown.json["head"] is None
    assert "warning: onto.db does not exist yet" in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["v1", "v2"])
def test_info_warns_of_a_lost_index(engine: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, engine)
    commit(uri, Customer(id="c1", name="Ann"))
    (tmp_path / "shop" / layout.index("entity", "Customer")).unlink()

    shown = onto("info", "--storage-uri", uri, "--json")

    assert shown.code == 0
    assert len(shown.json["index_warnings"]) == 1
    assert "Customer" in shown.json["index_warnings"][0]
    assert shown.err == ""  # the answer is right
    [advice, *_] = shown.json["advice"]
    assert advice["run"] == "onto index repair --apply"
    assert advice["run"] in onto("info", "--storage-uri", uri).out


def test_info_shows_who_holds_the_lock(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    with opened(uri) as repository:
        lease = repository.lock.acquire()
        held = onto("info", "--storage-uri", uri, "--json").json["lock"]
        people = onto("info", "--storage-uri", uri).out
        lease.release()

    assert held["owner_id"] == "writer"
    assert held["expired"] is False
    assert set(held["holder"]) >= {"host", "pid"}
    assert "held: writer (host " in people
    assert "write lock    free" in onto("info", "--storage-uri", uri).out


def test_info_says_that_a_lease_has_run_out(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    body = {
        "owner_id": "dead\x1b[2Jwriter",
        "acquired_at": "2024-01-01T00:00:00+00:00",
        "expires_at": "2024-01-01T00:00:30+00:00",
        "lease_ttl_ms": 30_000,
        "token": "t",
        "holder": {"host": "h", "pid": 1},
    }
    store = DirectoryStore(tmp_path / "shop")
    store.put(layout.LOCK, json.dumps(body).encode())
    store.close()

    shown = onto("info", "--storage-uri", uri)

    assert onto("info", "--storage-uri", uri, "--json").json["lock"]["expired"] is True
    assert "expired, the next writer takes it over: dead\\x1b[2Jwriter" in shown.out
    assert "\x1b[2J" not in shown.out


def test_a_device_is_no_storage(tmp_path: Path) -> None:
    """It looks like an empty file, and a pipe would be waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/null", str(pipe)):
        refused = onto("--db", path, "info")
        assert refused.code == 5, refused
        assert "is no file, but a device, pipe or socket" in refused.error()
        assert onto("--db", path, "init").code == 5


def test_models_are_looked_at_by_commands_that_need_none(uri: str, tmp_path: Path) -> None:
    for command in ("info", "commits", "init"):
        refused = onto(command, "--storage-uri", uri, "--models", "nope.nope")
        assert refused.code == 2, refused
        assert "nope" in refused.error()


def test_info_advises_to_compact_what_has_many_small_files(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    for number in range(9):
        commit(uri, Customer(id=f"c{number}", name="Ann"))

    advice = onto("info", "--storage-uri", uri, "--json").json["advice"]

    assert [each["run"] for each in advice] == ["onto compact --apply"]
    assert "Customer" in advice[0]["why"]
    assert onto("compact", "--apply", "--storage-uri", uri).code == 0
    assert onto("info", "--storage-uri", uri, "--json").json["advice"] == []


def test_info_reads_each_index_once(tmp_path: Path) -> None:
    def requests(types: int) -> int:
        uri = f"file://{tmp_path}/types-{types}"
        fill(uri, types)
        return int(onto("info", "--storage-uri", uri, "--json").json["requests"]["total"])

    assert requests(12) - requests(4) == 8

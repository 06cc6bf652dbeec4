"""`onto log`, `onto diff` and `onto du`, through the program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage_engine import initialize_storage
from storage_engine.commitlog import layout
from tests.cli.conftest import Place
from tests.cli.support import Customer, commit, create, onto

_ONTO = [sys.executable, "-m", "storage_engine.cli.main"]


def test_log_shows_commits_in_the_order_of_landing(uri: str) -> None:
    lines = onto("log", "--storage-uri", uri).out.splitlines()

    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert "writer" in lines[0]
    assert lines[0].endswith("Customer 1, Product 1")
    assert lines[1].endswith("Customer 2, Employment 1")
    records = [
        json.loads(line)
        for line in onto("log", "--storage-uri", uri, "--json").out.split("\n")
        if line
    ]
    assert [record["id"] for record in records] == [1, 2]
    assert records[0]["rows"] == {"Customer": 1, "Product": 1}
    assert len(onto("log", "--storage-uri", uri, "--limit", "1").out.splitlines()) == 1


def test_log_names_the_run_of_a_commit(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    commit(uri, Customer(id="c1", name="Ann"), metadata={"dagster/run_id": "0123456789"})

    assert "run 01234567" in onto("log", "--storage-uri", uri).out


def test_log_follows_until_it_is_interrupted(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    commit(uri, Customer(id="c1", name="Ann"))
    follower = subprocess.Popen(
        [*_ONTO, "log", "-f", "--json", "--storage-uri", uri],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["id"] == 1
        commit(uri, Customer(id="c2", name="Bob"), Customer(id="c3", name="Cid"))
        landed = json.loads(follower.stdout.readline())
        assert (landed["id"], landed["rows"]) == (2, {"Customer": 2})
        follower.send_signal(signal.SIGINT)
        assert follower.wait(timeout=240) == 130
    finally:
        follower.kill()
        follower.wait()


@pytest.mark.parametrize("place", ["directory-v2", "sqlite-v2"], indirect=True)
def test_log_follows_into_a_log_that_was_begun_anew(
    place: Place, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks the storage is erased, made with another engine and written to."""
    other = "v1" if place.engine == "v2" else "v2"
    steps = iter(
        [
            lambda: commit(uri, Customer(id="c3", name="Cid")),
            lambda: _begin_anew(uri, other),
            lambda: commit(uri, Customer(id="c9", name="Zoe")),
            lambda: commit(uri, Customer(id="c8", name="Yan")),
        ]
    )

    between_looks(monkeypatch, steps)
    followed = onto("log", "-f", "--json", "--storage-uri", uri)

    assert followed.code == 130
    records = [json.loads(line) for line in followed.out.splitlines()]
    assert [record["id"] for record in records] == [1, 2, 3, 1, 2]
    assert followed.err == "note: the storage was initialised anew: its commits begin again\n"


def between_looks(monkeypatch: pytest.MonkeyPatch, steps: Iterator[Callable[[], object]]) -> None:
    """One of `steps` each time the follower would sleep, then Ctrl-C. Only it: threads of other
    tests may sleep in this process."""
    clock = SimpleNamespace(sleep=lambda _: next(steps, _interrupt)())
    monkeypatch.setattr("storage_engine.cli.history.time", clock)


def _begin_anew(uri: str, engine: str) -> None:
    token = initialize_storage(uri, engine, force=True, dry_run=True).token
    initialize_storage(uri, engine, force=True, token=token)


def test_log_follows_a_head_that_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, head = f"file://{tmp_path}/shop", tmp_path / "shop" / layout.HEAD
    create(uri, "v2")
    commit(uri, Customer(id="c1", name="Ann"))
    older = head.read_bytes()
    commit(uri, Customer(id="c2", name="Bob"))
    steps = iter(
        [lambda: head.write_bytes(older), lambda: commit(uri, Customer(id="c3", name="Cid"))]
    )
    between_looks(monkeypatch, steps)
    followed = onto("log", "-f", "--storage-uri", uri)

    assert [line.split()[0] for line in followed.out.splitlines()] == ["1", "2", "2"]
    assert followed.err == "note: head was put back from commit 2 to 1\n"


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_diff_shows_fields_before_and_after(uri: str) -> None:
    document = onto("diff", "1", "2", "--storage-uri", uri, "--json").json

    assert (document["before"], document["after"], document["more"]) == (1, 2, 0)
    by_key = {change.get("key"): change for change in document["changes"]}
    assert by_key["c1"]["before"] == {"name": "Ann"}
    assert by_key["c1"]["after"] == {"name": "Anna"}
    assert by_key["c2"]["operation"] == "insert"
    assert {tuple(count.values()) for count in document["counts"]} == {
        ("Customer", "update", 1),
        ("Customer", "insert", 1),
        ("Employment", "insert", 1),
    }
    people = onto("diff", "1", "--storage-uri", uri).out
    assert "Anna" in people
    assert "c1 -> p1 [2024]" in people


def test_diff_counts_what_it_does_not_show_and_can_be_of_one_type(uri: str) -> None:
    document = onto(
        "diff", "0", "2", "--type", "Customer", "--limit", "1", "--storage-uri", uri, "--json"
    ).json
    assert (len(document["changes"]), document["more"]) == (1, 1)
    assert {count["type_name"] for count in document["counts"]} == {"Customer"}
    assert (
        "1 change not shown"
        in onto("diff", "0", "--type", "Customer", "--limit", "1", "--storage-uri", uri).out
    )
    assert "Nothing differs" in onto("diff", "2", "2", "--storage-uri", uri).out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("2", "1"), "the older commit comes first: onto diff 1 2"),
        (("1", "9"), "9"),
        (("1", "no-such-tag"), "no-such-tag"),
        (("1", "2", "--type", "Custommer"), "did you mean Customer?"),
    ],
)
def test_diff_refuses_what_is_not_there(uri: str, args: tuple[str, ...], message: str) -> None:
    refused = onto("diff", *args, "--storage-uri", uri)

    assert refused.code in (2, 4)
    assert message in refused.error()
    assert refused.out == ""


def test_du_tells_what_takes_room(place: Place, uri: str) -> None:
    document = onto("du", "--storage-uri", uri, "--json").json

    assert document["total"]["bytes"] == sum(each["bytes"] for each in document["usage"]) > 0
    if place.backend == "sqlite":
        assert document["usage"][0]["what"] == "database"
        return
    folder = Path(uri.removeprefix("file://"))
    stored = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size]
    assert document["total"]["bytes"] == sum(file.stat().st_size for file in stored)
    assert document["total"]["objects"] == len(stored)
    by_type = {each["type_name"]: each for each in document["usage"] if each["what"] == "commits"}
    assert by_type["Customer"]["objects"] == 2
    assert not [each for each in document["usage"] if each["what"] == "not ours"]
    assert "manifests" in onto("du", "--storage-uri", uri).out


def test_du_counts_snapshots_by_type(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shop"
    create(uri, "v2")
    for number in range(9):
        commit(uri, Customer(id=f"c{number}", name="Ann"))
    assert onto("compact", "--apply", "--storage-uri", uri).code == 0

    usage = onto("du", "--storage-uri", uri, "--json").json["usage"]

    [snapshots] = [each for each in usage if each["what"] == "snapshots"]
    assert (snapshots["type_kind"], snapshots["type_name"]) == ("entity", "Customer")

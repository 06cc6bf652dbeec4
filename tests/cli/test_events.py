"""`onto events`: the bus at the shell, on a directory and on SQLite."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage_engine import Event, Field, HandlerContext, OntologiaConfig, Session, on_event
from storage_engine.events.protocol import open_event_store
from storage_engine.repository import open_repository
from tests.cli.support import ROOT, onto
from tests.cli.support import create as create_storage

HANDLERS = """
from storage_engine import Event, Field, Schedule, on_event


class Ordered(Event):
    n: Field[int]


@on_event(Ordered, id="shop.bill")
def bill(ctx):
    if ctx.event.n < 0:
        raise ValueError("a negative order")


nightly = Schedule(event=Ordered(n=0), cron="0 0 1 1 *")
"""


class Ordered(Event):
    n: Field[int]


@on_event(Ordered, id="shop.bill")
def bill(ctx: HandlerContext[Ordered]) -> None:
    if ctx.event.n < 0:
        raise ValueError("a negative\norder")


@pytest.fixture(params=["directory-v2", "sqlite-v2"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage with a handled event, a failed one and one that nobody has looked at."""
    backend = request.param.split("-")[0]
    uri = f"sqlite:///{tmp_path}/shop.db" if backend == "sqlite" else f"file://{tmp_path}/shop"
    create_storage(uri, "v2")
    with Session(uri, config=OntologiaConfig(event_max_attempts=1)) as session:
        session.emit([Ordered(id="good", n=1), Ordered(id="bad", n=-1)])
        session.drain([bill])
        session.emit(Ordered(id="new", n=2))
    return uri


@pytest.fixture
def module(tmp_path: Path) -> str:
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(HANDLERS)
    return name


def test_list_namespaces(uri: str) -> None:
    done = onto("--json", "events", "list-namespaces", "--storage-uri", uri)

    [listed] = done.json["namespaces"]
    assert datetime.fromisoformat(listed.pop("oldest")) <= datetime.now(UTC)
    assert listed == {
        "namespace": "default",
        "events": 4,  # one tells of the dead letter
        "sessions": 0,
        "dead_sessions": 0,
        "dead_letters": 1,
    }
    assert "default" in onto("events", "list-namespaces", "--storage-uri", uri).out


def test_an_empty_bus(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/empty"
    create_storage(uri, "v2")
    for command, said in [
        ("list-namespaces", "No events yet."),
        ("sessions", "No workers in namespace default."),
        ("show", "No such events"),
        ("dead-letters", "No dead letters"),
        ("redrive", "No such dead letters"),
    ]:
        done = onto("events", command, "--storage-uri", uri)
        assert done.code == 0
        assert said in done.out


def test_peek(uri: str) -> None:
    given = ("--handlers", __name__, "--storage-uri", uri)
    seen = onto("--json", "events", "peek", *given).json

    assert (seen["pending"], seen["due"], seen["waiting"], seen["more"]) == (1, 1, 0, False)
    assert seen["next_due"] is None
    assert seen["oldest"] is not None
    assert "1 event pending, the oldest" in onto("events", "peek", *given).out
    with Session(uri) as session:
        session.drain([bill])
    assert onto("events", "peek", *given).out == "Nothing is left to handle.\n"
    assert onto("events", "peek", "--handlers", "no.such", "--storage-uri", uri).code == 4


def test_show(uri: str) -> None:
    events = onto("--json", "events", "show", "--storage-uri", uri).json["events"]

    assert {e["id"]: e["status"] for e in events if e["type"] == "Ordered"} == {
        "good": "acked",
        "bad": "dead_lettered",
        "new": "pending",
    }
    out = onto("events", "show", "--status", "acked", "--type", "Ordered", "--storage-uri", uri).out
    assert "good" in out
    assert "new" not in out
    wrong = onto("events", "show", "--status", "lost", "--storage-uri", uri)
    assert wrong.code == 2
    assert "pending, claimed, acked, dead_lettered" in wrong.error()


def _path(uri: str) -> str:
    """`--db` for SQLite; elsewhere the environment is not asked, so a URI will do."""
    return uri.removeprefix("sqlite:///") if uri.startswith("sqlite") else uri


def test_dead_letters_and_inspect(uri: str) -> None:
    (letter,) = onto("--json", "events", "dead-letters", "--storage-uri", uri).json["dead_letters"]
    assert (letter["event_id"], letter["handler_id"]) == ("bad", "shop.bill")
    table = onto("events", "dead-letters", "--handler", "shop.bill", "--storage-uri", uri).out
    assert "ValueError: a negative order" in table

    shown = onto("events", "inspect", "bad", "--storage-uri", uri).out
    assert "dead_lettered" in shown
    assert '{"n": -1}' in shown
    (event,) = onto("--json", "events", "inspect", "good", "--storage-uri", uri).json["events"]
    assert event["claims"][0]["state"] == "acked"
    gone = onto("events", "inspect", "nobody", "--storage-uri", uri)
    assert gone.code == 4
    assert "no event nobody in any namespace" in gone.error()


def test_replay_previews_and_applies(uri: str) -> None:
    look = onto("events", "replay", "good", "--storage-uri", uri)
    assert "Would send Ordered good again. To do it, add --apply." in look.out
    assert onto("--json", "events", "replay", "good", "--storage-uri", uri).json["applied"] is False

    done = onto("--json", "events", "replay", "good", "--apply", "--storage-uri", uri).json
    (event,) = onto("--json", "events", "inspect", done["new_event_id"], "--storage-uri", uri).json[
        "events"
    ]
    assert event["payload"] == {"n": 1}
    assert onto("events", "replay", "nobody", "--storage-uri", uri).code == 4


def test_redrive_previews_and_applies(uri: str) -> None:
    assert "Would send these 1 again" in onto("events", "redrive", "--storage-uri", uri).out
    other = onto("--json", "events", "redrive", "--event", "x", "--apply", "--storage-uri", uri)
    assert other.json["sent"] == []
    done = onto("--json", "events", "redrive", "--apply", "--storage-uri", uri).json

    assert [(s["event_id"], s["handler_id"]) for s in done["sent"]] == [("bad", "shop.bill")]
    assert "No dead letters" in onto("events", "dead-letters", "--storage-uri", uri).out


def test_cleanup_previews_and_applies(uri: str) -> None:
    assert "Would delete 0 events" in onto("events", "cleanup", "--storage-uri", uri).out
    done = onto("events", "cleanup", "--older-than", "0s", "--apply", "--storage-uri", uri)
    assert "Deleted 4 events" in done.out
    assert onto("--json", "events", "show", "--storage-uri", uri).json["events"] == []
    wrong = onto("events", "cleanup", "--older-than", "long", "--storage-uri", uri)
    assert wrong.code == 2
    assert "write 90s, 30m, 12h, 7d" in wrong.error()
    wrong = onto("events", "cleanup", "--older-than", "900000d", "--storage-uri", uri)
    assert wrong.code == 2
    assert "before the calendar begins" in wrong.error()


def test_run_drains(uri: str, module: str) -> None:
    run = ("events", "run", "--handlers", module, "--drain", "--storage-uri", uri)
    done = onto("--json", *run, "--concurrency", "4")

    assert (done.json["handled"], done.json["claimed"]) == (1, 1)
    assert onto(*run, "--concurrency", "0").code == 2
    again = onto(
        "events", "run", "--handlers", module, "--max-iterations", "1", "--storage-uri", uri
    )
    assert again.out == "0 handled, 0 failed\n"


LINKING = """
from storage_engine import Entity, Event, Field, Relation, on_event


class Party(Entity):
    id: Field[str] = Field(primary_key=True)


class Ally(Relation[Party, Party]):
    since: Field[int]


class Ordered(Event):
    n: Field[int]


@on_event(Ordered, id="shop.ally")
def ally(ctx):
    ctx.ensure(Ally(left_key="a", right_key="b", since=ctx.event.n))
"""


def test_run_shows_the_notes_of_handlers_commits(uri: str, tmp_path: Path) -> None:
    name = f"linking_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(LINKING)
    run = ("events", "run", "--handlers", name, "--drain", "--storage-uri", uri)
    note = "shop.ally: Ally: its relations point to Party, of which nothing is stored yet"
    done = onto(*run)
    assert (done.code, done.err) == (0, f"note: {note}\n")  # once, of three commits
    with Session(uri) as session:
        session.emit(Ordered(id="later", n=9))
    again = onto("--json", *run)
    assert (again.json["notes"], again.json["more_notes"], again.err) == ([note], 0, "")


@pytest.mark.parametrize("name", ["plain", "100%41#?.data"])
def test_run_takes_a_db_of_any_name(module: str, tmp_path: Path, name: str) -> None:
    done = onto("events", "run", "--handlers", module, "--drain", "--db", tmp_path / name)
    assert done.out == "0 handled, 0 failed\n"
    assert onto("init", "--db", tmp_path / name).code in (0, 4)
    assert (tmp_path / name).is_file()


def test_run_says_what_is_wrong(uri: str, module: str, tmp_path: Path) -> None:
    Path("empty_module.py").write_text("")
    for args, code, said in [
        (["--handlers", "no.such.module"], 4, "cannot be imported"),
        (["--handlers", "empty_module"], 4, "no handlers in empty_module"),
        ([], 2, "--handlers"),
        (["--handlers", module, "--drain", "--max-iterations", "1"], 2, "exclude each other"),
        (["--handlers", module, "--namespace", "a/b"], 2, "namespace 'a/b'"),
    ]:
        done = onto("events", "run", *args, "--storage-uri", uri)
        assert done.code == code
        assert said in done.err


def test_a_worker_ends_in_order_at_sigterm(uri: str, module: str, tmp_path: Path) -> None:
    command = ["events", "run", "--handlers", module, "--storage-uri", uri]
    worker = subprocess.Popen(
        [sys.executable, "-m", "storage_engine.cli.main", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        status = ""
        while status != "acked" and time.monotonic() < deadline:
            found = onto("--json", "events", "inspect", "new", "--storage-uri", uri).json
            status = found["events"][0]["status"]
            time.sleep(0.1)
        assert status == "acked"
        sessions = onto("--json", "events", "sessions", "--storage-uri", uri).json["sessions"]
        assert sessions[0]["metadata"]["pid"] == worker.pid
        assert "alive" in onto("events", "sessions", "--storage-uri", uri).out
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert (worker.returncode, err) == (0, "")
    assert re.fullmatch(r"1 handled, 0 failed\n", out)
    assert onto("--json", "events", "sessions", "--storage-uri", uri).json["sessions"] == []


def register_worker(uri: str) -> None:
    """One that is alive, and not running here."""
    config = OntologiaConfig()
    repository = open_repository(uri, config)
    open_event_store(repository, config).register_session("default", "worker", {})
    repository.close()


def test_what_is_malformed_is_listed_and_keeps_nothing_from_the_others(
    uri: str, module: str
) -> None:
    """An event, a claim and a worker's record are broken."""
    register_worker(uri)
    if uri.startswith("sqlite"):
        connection = sqlite3.connect(_path(uri))
        connection.execute("UPDATE events SET envelope = '{}' WHERE id = 'good'")
        connection.execute("UPDATE event_claims SET attempts = -1 WHERE event_id = 'bad'")
        connection.execute("UPDATE event_sessions SET started_at = 'now'")
        connection.commit()
        connection.close()
    else:
        root = Path(uri.removeprefix("file://"))
        (event,) = root.glob("events/default/*_good.json")
        event.write_bytes(b"{}")
        (root / "claims/default/bad/shop.bill.json").write_bytes(b"\xff")
        (root / "sessions/default/worker.json").write_bytes(b'{"session_id": 5}')

    listed = onto("--json", "events", "show", "--malformed", "--storage-uri", uri).json["malformed"]
    assert [m["kind"] for m in listed] == ["event", "claim", "session"]
    assert all(m["key"] and m["key"] in m["error"] for m in listed)
    shown = onto("events", "show", "--malformed", "--storage-uri", uri).out
    assert all(m["key"] in shown for m in listed)
    both = onto("events", "show", "--malformed", "--type", "Ordered", "--storage-uri", uri)
    assert both.code == 2
    assert "no status and no type" in both.error()

    events = onto("--json", "events", "show", "--storage-uri", uri).json["events"]
    assert {e["id"] for e in events if e["type"] == "Ordered"} == {"bad", "new"}
    (bad,) = [e for e in events if e["id"] == "bad"]
    assert [m["key"] for m in bad["malformed_claims"]] == [listed[1]["key"]]
    assert "malformed" in onto("events", "show", "--storage-uri", uri).out
    assert listed[1]["key"] in onto("events", "inspect", "bad", "--storage-uri", uri).out
    broken = onto("events", "inspect", "good", "--storage-uri", uri)
    assert broken.code == 3
    assert "is not a valid event: id should be a text and is absent" in broken.error()
    (worker,) = onto("--json", "events", "sessions", "--storage-uri", uri).json["sessions"]
    assert worker["malformed"]
    assert "not a valid worker session" in onto("events", "sessions", "--storage-uri", uri).out
    done = onto("--json", "events", "run", "--handlers", module, "--drain", "--storage-uri", uri)
    assert done.json["handled"] == 1


def test_nothing_is_malformed(uri: str) -> None:
    assert onto("--json", "events", "show", "--malformed", "--storage-uri", uri).json == {
        "malformed": []
    }
    done = onto("events", "show", "--malformed", "--storage-uri", uri)
    assert "Nothing is malformed in namespace default." in done.out


def test_times_are_iso_in_json_and_in_tables(uri: str) -> None:
    register_worker(uri)
    (worker,) = onto("--json", "events", "sessions", "--storage-uri", uri).json["sessions"]
    iso = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")
    assert iso.fullmatch(worker["started_at"])
    assert iso.fullmatch(worker["last_heartbeat"])
    cleaned = onto("--json", "events", "cleanup", "--storage-uri", uri).json
    assert iso.fullmatch(cleaned["before"])
    for command in ("sessions", "show", "dead-letters", "cleanup"):
        assert iso.search(onto("events", command, "--storage-uri", uri).out), command

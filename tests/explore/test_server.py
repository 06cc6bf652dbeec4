"""`onto explore` as a process: its address, its mistakes, its end, and a storage that goes away."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage_engine import Session, initialize_storage
from storage_engine.cli import explore as command
from tests.cli.support import onto
from tests.explore import airports
from tests.explore.client import serving
from tests.explore.conftest import Browse

PATHS = [
    "types",
    "types/Airport",
    "types/Flight?limit=3",
    "commits/4",
    "events/default",
    "types/Airport/objects/JFK",
    "health",
    "types/Airport/objects/none",
]


def fetch(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_serves_until_it_is_interrupted(air: str, tmp_path: Path) -> None:
    with serving("--storage-uri", air, cwd=tmp_path) as (program, url):
        status, body = fetch(f"{url}types/Airport/objects/JFK")
        assert status == 200
        assert "John F Kennedy Intl" in body
        assert fetch(url, Host="evil.example")[0] == 421
        assert fetch(f"{url}types/Airport/objects/{'k' * 100_000}")[0] == 404
        with ThreadPoolExecutor(12) as pool:  # at the same time
            answers = list(pool.map(lambda path: fetch(url + path)[0], PATHS * 4))
        assert answers == [200, 200, 200, 200, 200, 200, 200, 404] * 4
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=240)

    assert (program.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_sigterm_ends_it_as_well_and_a_token_is_asked_for(air: str, tmp_path: Path) -> None:
    arguments = ("--storage-uri", air, "--host", "0.0.0.0", "--token", "x" * 20)
    with serving(*arguments, cwd=tmp_path) as (program, url):
        here = url.replace("0.0.0.0", "127.0.0.1")
        assert fetch(here)[0] == 401
        assert fetch(here, Authorization="Bearer " + "x" * 20)[0] == 200
        program.terminate()
        _, err = program.communicate(timeout=240)

    assert (program.returncode, err) == (0, "")


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_a_port_that_is_in_use_is_told(air: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = onto("explore", "--storage-uri", air, "--port", str(port))

    assert done.code == 2
    assert f"port {port} of 127.0.0.1 is in use" in done.error()


@pytest.mark.parametrize("air", ["directory"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "say --token"),
        (("--host", "0.0.0.0", "--token", "short"), "too short"),
        (("--host", "no.such.host.invalid"), "--token"),
        (("--port", "70000"), "65535"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(
    air: str, arguments: tuple[str, ...], words: str
) -> None:
    done = onto("explore", "--storage-uri", air, *arguments)

    assert done.code == 2
    assert words in done.error()


def test_an_uninitialised_storage_says_what_to_do(tmp_path: Path) -> None:
    for uri in (f"file://{tmp_path}/none", f"sqlite:///{tmp_path}/none.db"):
        done = onto("explore", "--storage-uri", uri)

        assert done.code == 5
        assert "onto init" in done.error()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, air: str) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    done = onto("explore", "--storage-uri", air)

    assert done.code == 2
    assert "needs uvicorn: pip install 'ontologia[explore]'" in done.error()


@pytest.mark.parametrize("backend", ["directory", "sqlite"])
def test_a_storage_that_goes_away_and_comes_back(
    backend: str, browse: Browse, tmp_path: Path
) -> None:
    uri = airports.uri_in(tmp_path, backend)
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(airports.Airline(carrier="AA", name="American"))
    client = browse(uri)
    assert "American" in client.shown("/types/Airline")
    place = tmp_path / ("air.db" if backend == "sqlite" else "air")
    place.rename(tmp_path / "elsewhere")

    for path in ("/", "/types/Airline", "/commits/1", "/health"):
        answer = client.get(path)
        assert answer.status == 503, answer.text
        assert "The storage does not answer" in answer.text
        told = client.document(path, status=503)["error"]["message"]
        assert "\n" not in told
        assert str(tmp_path) in told
    (tmp_path / "elsewhere").rename(place)
    assert "American" in client.shown("/types/Airline")
    if backend == "directory":  # nothing was written while it was away
        shutil.rmtree(place)
        assert client.get("/").status == 503
        assert not place.exists()


def test_a_branch_on_the_command_line_is_where_it_begins(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/store"
    initialize_storage(uri)
    with Session(uri) as session:
        session.create_branch("run/42")
    with serving("--storage-uri", uri, "--branch", "run/42", cwd=tmp_path) as (_, url):
        assert url.endswith("/?branch=run%2F42")
        with urllib.request.urlopen(f"{url}&format=json") as answer:
            assert json.load(answer)["as_of"]["branch"] == "run/42"

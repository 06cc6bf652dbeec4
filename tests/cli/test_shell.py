"""`onto shell` and `onto doctor`, through the program."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.support import ROOT, onto

_ENV = {"PYTHONPATH": str(ROOT)}


def run_onto(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "storage_engine.cli.main", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **_ENV, **env},
    )


def test_a_shell_knows_the_session_and_the_types(uri: str, tmp_path: Path) -> None:
    lines = "len(query().entities(Customer).collect())\nsession.list_commits()[0]['id']\n"
    done = run_onto(
        *("shell", "--storage-uri", uri, "--models", "tests.cli.support"),
        stdin=lines,
        XDG_STATE_HOME=str(tmp_path / "state"),
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [">>>", "2", ">>>", "2", ">>>"]
    assert "Customer" in done.stderr  # the banner


def test_a_command_runs_without_a_prompt(uri: str) -> None:
    count = "print(sql('SELECT count(*) AS n FROM Customer').collect()[0]['n'])"
    done = onto("shell", "-c", count, "--storage-uri", uri)
    assert (done.code, done.out) == (0, "2\n")


def test_an_error_in_a_command_is_the_users_own(uri: str) -> None:
    failed = onto("shell", "-c", "1 / 0", "--storage-uri", uri)
    assert failed.code == 1
    assert "ZeroDivisionError" in failed.err
    assert "storage_engine" not in failed.err
    assert onto("shell", "-c", "(", "--storage-uri", uri).code == 1


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [("exit()", 0, ""), ("exit(7)", 7, ""), ("raise SystemExit('no orders')", 1, "no orders\n")],
)
@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_a_shell_ends_as_python_does(uri: str, given: str, code: int, told: str) -> None:
    done = onto("shell", "-c", given, "--storage-uri", uri)
    assert (done.code, done.out, done.err) == (code, "", told)


@pytest.mark.parametrize("place", ["directory-v2"], indirect=True)
def test_a_prompt_needs_no_home_but_a_stdin(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("exit()\n"))
    assert onto("shell", "--storage-uri", uri).code == 0
    monkeypatch.setattr(sys, "stdin", None)
    failed = onto("shell", "--storage-uri", uri)
    assert failed.code == 2
    assert "stdin, which is closed" in failed.error()


def findings(done: object) -> dict[str, dict[str, str]]:
    return {each["about"]: each for each in done.json["findings"]}  # type: ignore[attr-defined]


def test_the_doctor_finds_a_good_storage_in_order(uri: str) -> None:
    done = onto("doctor", "--storage-uri", uri, "--json")

    assert done.code == 0
    assert done.json["ok"] is True
    named = findings(done)
    assert named["storage"]["state"] == named["write"]["state"] == "ok"
    assert "head at 2" in named["storage"]["what"]
    assert "ok      storage: " in onto("doctor", "--storage-uri", uri).out


def test_the_doctor_writes_nothing_that_stays(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    done = onto("doctor", "--storage-uri", str(missing), "--json")
    assert (done.code, findings(done)["storage"]["state"]) == (0, "note")
    assert findings(done)["storage"]["do"] == f"onto init --storage-uri {missing}"
    assert not missing.exists()

    folder = tmp_path / "empty"
    folder.mkdir()
    done = onto("doctor", "--storage-uri", str(folder), "--json")
    assert findings(done)["conditional writes"]["state"] == "ok"
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_the_doctor_names_the_permission_that_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    done = onto("doctor", "--storage-uri", str(folder), "--json")
    assert done.code == 3
    assert "s3:PutObject" in findings(done)["write"]["do"]


def test_the_doctor_says_what_is_wrong_with_the_machine(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    done = onto("doctor", "--storage-uri", uri, "--json")

    assert done.code == 3
    named = findings(done)
    assert named["dagster"]["state"] == named["spark"]["state"] == "problem"
    assert named["dagster"]["do"].startswith("mkdir -p")
    assert "JAVA_HOME" in named["spark"]["do"]


def test_the_doctor_tells_of_a_storage_that_cannot_be_meant() -> None:
    done = onto("doctor", "--storage-uri", "gs://bucket", "--json")

    assert done.code == 3
    assert "unknown scheme 'gs'" in findings(done)["storage"]["what"]
    assert "python" in findings(done)


def test_the_doctor_knows_an_endpoint_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    config = Path("quick.toml")
    config.write_text("s3_request_timeout_s = 2\n")
    done = onto("doctor", "--storage-uri", "s3://bucket/prefix", "--json")

    assert done.code == 3
    assert findings(done)["list"]["state"] == "problem"
    assert "127.0.0.1:9" in findings(done)["list"]["what"]

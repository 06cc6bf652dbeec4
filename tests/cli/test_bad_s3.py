"""Every command against S3 that does not let it, or has a storage that is not as it should be: one
line with what, where and what next, the exit code of the table, nothing written, few tries."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage_engine.commitlog import layout
from tests.cli.lines import LINES, READ_ROWS, check_answer, line_of
from tests.cli.support import Done, fill, onto
from tests.objectstore.fake_s3 import run_fake_s3
from tests.servers import S3Server, free_ports, run_moto

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("nothing_outside")]

TRIES = 3  # of one request
TOGETHER = 2  # requests that a command begins with
# One of each way to a storage: most commands open it by the same lines.
DOORS = {
    *("init", "info", "doctor", "copy", "migrate-engine", "explore", "import", "export"),
    *("query sql", "events run", "events show", "lock show", "shell"),
}
READERS = READ_ROWS | {"info", "commits examine", "restore", "compact", "gc"}
if os.environ.get("ONTOLOGIA_LONG"):
    DOORS = READERS = {*LINES}
_turn = itertools.count()


class Commands:
    """All of `onto` on one place, in text or JSON by turns."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri = uri
        self._folder = folder

    def run(self, commands: Collection[str] = LINES) -> Iterator[tuple[str, Done, str]]:
        """Each command, what it left behind, and what it told."""
        for number, command in enumerate(sorted(commands)):
            as_json = next(_turn) % 2 == 0
            config = self._folder / "cache.toml"
            config.write_text(f'cache_dir = "{self._folder}/cache-{number}"\n')
            line = line_of(command, self.uri, "--config", str(config), as_json=as_json)
            done = onto(*line)
            check_answer(command, done, as_json=as_json)
            error = done.json.get("error") if as_json and done.code else None
            yield command, done, error["message"] if error else done.err + done.out


def use(server: S3Server | str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ENDPOINT_URL", server if isinstance(server, str) else server.endpoint)


def contents(server: S3Server, bucket: str) -> dict[str, str]:
    listed = server.client().list_objects_v2(Bucket=bucket).get("Contents", [])
    return {found["Key"]: found["ETag"] for found in listed}


@pytest.fixture
def shop(seaweedfs_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> tuple[S3Server, str, str]:
    """A server, a bucket of it and a storage there, with two commits."""
    use(seaweedfs_s3, monkeypatch)
    bucket = seaweedfs_s3.make_bucket()
    fill(f"s3://{bucket}/shop")
    return seaweedfs_s3, bucket, f"s3://{bucket}/shop"


# --- what there is, is not a storage of ours -----------------------------------------------------


def damage(server: S3Server, bucket: str, ending: str, change: Any) -> None:
    client = server.client()
    for key in contents(server, bucket):
        if key.endswith(ending):
            body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            client.put_object(Bucket=bucket, Key=key, Body=change(body))


DAMAGES: dict[str, tuple[str, Any, set[str], str]] = {
    "newer": (
        layout.ENGINE,
        lambda body: json.dumps(json.loads(body) | {"format": 99}).encode(),
        DOORS,
        "upgrade ontologia first",
    ),
    "corrupted": ("manifest.json", lambda _body: b"{}", READ_ROWS, ""),
    "truncated": (".parquet", lambda body: body[:40], READ_ROWS, ""),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_storage(kind: str, shop: tuple[S3Server, str, str], tmp_path: Path) -> None:
    server, bucket, uri = shop
    ending, change, must_fail, advice = DAMAGES[kind]
    damage(server, bucket, ending, change)
    before = contents(server, bucket)
    for command, done, told in Commands(uri, tmp_path).run(READERS | must_fail):
        if command in must_fail:
            assert done.code, (command, done)
            assert advice in told or command == "init", (command, done)  # that has a wrong token
        if done.code:
            assert contents(server, bucket) == before, command
        before = contents(server, bucket)


def test_an_uninitialised_prefix(shop: tuple[S3Server, str, str], tmp_path: Path) -> None:
    server, bucket, _ = shop
    before = contents(server, bucket)
    uri = f"s3://{bucket}/nothing"
    for command, done, told in Commands(uri, tmp_path).run({*LINES} - {"init"}):
        if command == "doctor":  # says that there is none yet
            continue
        assert done.code == 5, (command, done)
        assert f"no ontology at {uri}" in told, (command, done)
        elsewhere = command in ("copy", "migrate-engine")  # to make an empty one is no help
        assert (f"onto init --storage-uri {uri}" in told) != elsewhere, (command, done)
    assert contents(server, bucket) == before


# --- there is no way in --------------------------------------------------------------------------


def test_a_missing_bucket_or_wrong_credentials(
    shop: tuple[S3Server, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, bucket, uri = shop
    before = contents(server, bucket)
    _refused(
        "s3://no-such-bucket/shop", "no-such-bucket", "the bucket does not exist: create", tmp_path
    )
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        _refused(uri, bucket, "the secret key is wrong: set AWS_ACCESS_KEY_ID", tmp_path)
    assert contents(server, bucket) == before


def _refused(uri: str, where: str, advice: str, folder: Path) -> None:
    for command, done, told in Commands(uri, folder).run(DOORS):
        assert done.code == (3 if command == "doctor" else 5), (command, done)
        assert advice in told, (command, done)
        assert where in told, (command, done)


def test_no_permission_at_all(
    aws_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_fake_s3() as fake:
        use(fake.endpoint, monkeypatch)
        fake.answer = lambda _seen: (403, "AccessDenied")
        _refused("s3://bucket/shop", "s3://bucket/shop", "allow this user s3:GetObject", tmp_path)
        tries = len(fake.requests) / len(DOORS)
        assert tries <= TOGETHER + 1  # a refusal is not asked for again
        assert fake.objects == {}


def skip_waits(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Those of botocore alone: threads of other tests may sleep in this process."""
    clock = SimpleNamespace(**{**vars(time), "sleep": sleep})
    monkeypatch.setattr("botocore.endpoint.time", clock)


def test_permission_to_read_alone(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads has an answer; who would write is told which permission is missing."""
    bucket = moto_s3.make_bucket()
    use(moto_s3, monkeypatch)
    fill(f"s3://{bucket}/shop")
    before = contents(moto_s3, bucket)
    refused = set()
    with run_moto(refused={"PUT", "POST", "DELETE"}) as server:
        use(server, monkeypatch)
        for command, done, told in Commands(f"s3://{bucket}/shop", tmp_path).run():
            if done.code == 5:
                refused.add(command)
                assert "s3:PutObject" in told, (command, done)
            elif command == "doctor":
                assert (done.code, "s3:PutObject" in told + done.out) == (3, True), done
    assert refused == {
        *("import", "restore", "tag create", "compact", "index repair", "schema repair"),
        *("events run", "events cleanup", "branch create"),
    }
    assert contents(moto_s3, bucket) == before


def test_an_endpoint_that_is_down(
    aws_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits between tries are counted, not waited for."""
    waits: list[float] = []
    skip_waits(monkeypatch, waits.append)
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    use(endpoint, monkeypatch)
    for command, done, told in Commands("s3://bucket/shop", tmp_path).run(DOORS):
        assert done.code == (3 if command == "doctor" else 5), (command, done)
        assert f"cannot reach {endpoint}: check the network" in told, (command, done)
        assert len(waits) <= (TRIES - 1) * TOGETHER, command
        assert sum(waits) < 10, command
        waits.clear()


def test_an_endpoint_that_never_answers(
    aws_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waits(monkeypatch, lambda _seconds: None)
    config = tmp_path / "quick.toml"
    config.write_text("s3_request_timeout_s = 0.3\n")
    with run_fake_s3() as fake:
        use(fake.endpoint, monkeypatch)
        fake.answer = lambda _seen: "hang"
        done = onto("info", "--storage-uri", "s3://bucket/shop", "--config", config)

        assert done.code == 5
        assert "s3://bucket/shop" in done.error()
        assert len(fake.requests) <= TRIES * TOGETHER

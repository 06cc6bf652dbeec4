"""The benchmarks' proxy: what it adds, what it counts, and that it changes nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError

from benchmarks.latency_proxy import LATENCY_MS, Faults, LatencyProxy, latency_proxy
from tests.servers import S3Server

pytestmark = pytest.mark.s3
BUCKET = "latency-proxy"
NO_LATENCY = dict.fromkeys(LATENCY_MS, 0.0)


@pytest.fixture(scope="module")
def upstream(seaweedfs_s3: S3Server) -> S3Server:
    seaweedfs_s3.client().create_bucket(Bucket=BUCKET)
    return seaweedfs_s3


@pytest.fixture(scope="module")
def running(upstream: S3Server) -> Iterator[LatencyProxy]:
    with latency_proxy(upstream.endpoint, NO_LATENCY) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: LatencyProxy) -> LatencyProxy:
    running.reset()
    return running


@pytest.fixture
def client(proxy: LatencyProxy) -> Any:
    return S3Server("proxy", proxy.endpoint).client()


def code_of(error: pytest.ExceptionInfo[ClientError]) -> int:
    return error.value.response["ResponseMetadata"]["HTTPStatusCode"]


def test_requests_and_bytes_are_counted_by_kind(proxy: LatencyProxy, client: Any) -> None:
    client.put_object(Bucket=BUCKET, Key="counted/a", Body=b"12345")
    client.put_object(Bucket=BUCKET, Key="counted/b", Body=b"67", IfNoneMatch="*")
    client.get_object(Bucket=BUCKET, Key="counted/a")["Body"].read()
    client.get_object(Bucket=BUCKET, Key="counted/a", Range="bytes=1-2")["Body"].read()
    client.head_object(Bucket=BUCKET, Key="counted/a")
    client.list_objects_v2(Bucket=BUCKET, Prefix="counted/")
    client.list_objects(Bucket=BUCKET, Prefix="counted/")
    client.delete_object(Bucket=BUCKET, Key="counted/a")
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "counted/b"}]})

    counts = proxy.reset()

    assert counts.requests == {"PUT": 1, "PUT_IF": 1, "GET": 2, "HEAD": 1, "LIST": 2, "DELETE": 2}
    assert counts.total == 9
    assert (counts.sent["PUT"], counts.sent["PUT_IF"]) == (5, 2)
    assert counts.received["GET"] == 5 + 2
    assert counts.received["HEAD"] == 0
    assert proxy.counts().total == 0


def test_latency_is_added_to_its_kind_alone(upstream: S3Server) -> None:
    with latency_proxy(upstream.endpoint, NO_LATENCY | {"PUT_IF": 400}) as proxy:
        client = S3Server("proxy", proxy.endpoint).client()
        started = time.monotonic()
        client.put_object(Bucket=BUCKET, Key="slow", Body=b"x", IfNoneMatch="*")
        assert time.monotonic() - started >= 0.4  # a bound below, never one above

        # Waits do not queue up: all of these are held back at the same time.
        with ThreadPoolExecutor(20) as pool:
            started = time.monotonic()
            results = list(
                pool.map(
                    lambda n: client.put_object(
                        Bucket=BUCKET, Key=f"slow/{n}", Body=b"x", IfNoneMatch="*"
                    ),
                    range(20),
                )
            )
        assert len(results) == 20
        assert proxy.counts().requests["PUT_IF"] == 21


@pytest.mark.parametrize(
    ("faults", "landed"),
    [(Faults(refused=1.0), False), (Faults(disowned=1.0), True), (Faults(lost=1.0), True)],
    ids=["refused", "disowned", "lost"],
)
def test_a_fault_answers_or_not_and_the_request_lands_or_not(
    upstream: S3Server, faults: Faults, landed: bool, request: pytest.FixtureRequest
) -> None:
    fault = request.node.callspec.id
    with latency_proxy(upstream.endpoint, NO_LATENCY, faults=faults) as proxy:
        client = boto3.client(
            "s3",
            endpoint_url=proxy.endpoint,
            config=Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}),
        )
        with pytest.raises((ClientError, HTTPClientError)) as failed:
            client.put_object(Bucket=BUCKET, Key=f"fault/{fault}", Body=b"x")
        assert isinstance(failed.value, ClientError) == (fault != "lost")
        if isinstance(failed.value, ClientError):
            assert failed.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert proxy.counts().faults == {fault: proxy.counts().total}
    listed = upstream.client().list_objects_v2(Bucket=BUCKET, Prefix=f"fault/{fault}")
    assert listed["KeyCount"] == landed


def test_conditions_are_decided_by_the_server(client: Any) -> None:
    etag = client.put_object(Bucket=BUCKET, Key="head", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as taken:
        client.put_object(Bucket=BUCKET, Key="head", Body=b"2", IfNoneMatch="*")
    assert code_of(taken) == 412
    client.put_object(Bucket=BUCKET, Key="head", Body=b"3", IfMatch=etag)
    with pytest.raises(ClientError) as lost:
        client.put_object(Bucket=BUCKET, Key="head", Body=b"4", IfMatch=etag)
    assert code_of(lost) == 412
    stored = client.get_object(Bucket=BUCKET, Key="head")
    assert stored["Body"].read() == b"3"
    with pytest.raises(ClientError) as unchanged:
        client.get_object(Bucket=BUCKET, Key="head", IfNoneMatch=stored["ETag"])
    assert code_of(unchanged) == 304
    assert client.get_object(Bucket=BUCKET, Key="head")["Body"].read() == b"3"


def test_large_bodies_arrive_whole(
    proxy: LatencyProxy, client: Any, upstream: S3Server, tmp_path: Path
) -> None:
    data = os.urandom(24 * 1024 * 1024 + 17)
    client.put_object(Bucket=BUCKET, Key="large", Body=data)
    (tmp_path / "large").write_bytes(data)
    client.upload_file(str(tmp_path / "large"), BUCKET, "parts")  # multipart, from threads

    for key in ("large", "parts"):
        assert upstream.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() == data
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == data
        middle = client.get_object(Bucket=BUCKET, Key=key, Range="bytes=1000000-19999999")
        assert middle["Body"].read() == data[1_000_000:20_000_000]
    assert proxy.counts().received["GET"] == 2 * (len(data) + 19_000_000)


def test_aws_chunked_body_with_trailing_checksum(client: Any, upstream: S3Server) -> None:
    """As DuckDB's, Spark's and boto3's own uploads are, unless told otherwise."""
    data = os.urandom(300_000)
    client.put_object(Bucket=BUCKET, Key="trailer", Body=data, ChecksumAlgorithm="CRC32")
    assert upstream.client().get_object(Bucket=BUCKET, Key="trailer")["Body"].read() == data


def test_connections_are_kept_and_odd_keys_pass(proxy: LatencyProxy) -> None:
    raw = RawConnection(proxy.endpoint)
    for _ in range(3):
        status, body = raw.get("/-/counts")
        assert status == 200
        assert json.loads(body)["total"] == 0
    client = S3Server("proxy", proxy.endpoint).client()
    for key in ("a b/c+d", "list-type=2", "ü/é", "x?list-type=2"):
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == key.encode()
    assert proxy.counts().requests == {"PUT": 4, "GET": 4}


def test_many_connections_at_once(proxy: LatencyProxy) -> None:
    clients = [S3Server("proxy", proxy.endpoint).client() for _ in range(4)]
    bodies = {f"many/{n}": hashlib.sha256(str(n).encode()).digest() * 500 for n in range(64)}

    def round_trip(item: tuple[int, str]) -> bytes:
        number, key = item
        mine = clients[number % len(clients)]
        mine.put_object(Bucket=BUCKET, Key=key, Body=bodies[key])
        return mine.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(round_trip, enumerate(bodies))) == list(bodies.values())
    assert proxy.counts().requests == {"PUT": 64, "GET": 64}


@pytest.mark.parametrize("answer", ["continue", "refusal"])
def test_a_client_that_waits_for_100_continue(answer: str) -> None:
    """Against a server that does exactly this, as SeaweedFS sends 100 when it pleases."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(_serve_expectation, server, answer)
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        with latency_proxy(endpoint, NO_LATENCY) as proxy:
            client = socket.create_connection(("127.0.0.1", urlsplit(proxy.endpoint).port))
            client.settimeout(20)
            client.sendall(
                b"PUT /bucket/key HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            stream = client.makefile("rb")
            if answer == "continue":
                assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
                assert stream.readline() == b"\r\n"
                client.sendall(b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n")
                assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
                assert served.result().endswith(
                    b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
                )
                assert proxy.counts().sent == {"PUT": 11}
            else:
                assert stream.readline() == b"HTTP/1.1 412 Precondition Failed\r\n"
                rest = stream.read()  # ends: the connection is closed
                assert b"Connection: close\r\n" in rest
                assert rest.endswith(b"no")
            client.close()


def _serve_expectation(server: socket.socket, answer: str) -> bytes:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(20)
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += connection.recv(65536)
        if answer == "refusal":
            connection.sendall(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 2\r\n\r\nno")
            return received
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not received.endswith(b"Trailer: x\r\n\r\n"):
            received += connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return received


def test_a_dead_upstream_is_a_broken_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with latency_proxy(f"http://127.0.0.1:{port}", NO_LATENCY) as proxy:
        raw = RawConnection(proxy.endpoint)
        with pytest.raises(ConnectionError):
            raw.get("/bucket/key")
        assert proxy.counts().total == 0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(RuntimeError, match="did not start"), latency_proxy("ftp://x"):
        pass
    with (
        pytest.raises(RuntimeError, match="did not start"),
        latency_proxy("http://127.0.0.1:1", {"GIT": 1.0}),
    ):
        pass


def test_it_ends_with_its_context(upstream: S3Server) -> None:
    with latency_proxy(upstream.endpoint) as proxy:
        assert proxy.counts().total == 0
        RawConnection(proxy.endpoint).get("/-/counts")
    alive = subprocess.run(["ps", "-p", str(proxy.pid)], capture_output=True, check=False)
    assert alive.returncode == 1


class RawConnection:
    """One connection, so that a proxy which closes it is found out."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=20)
        self._stream = self._socket.makefile("rb")

    def get(self, path: str) -> tuple[int, bytes]:
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: proxy\r\n\r\n".encode())
        first = self._stream.readline()
        if not first:
            raise ConnectionError("closed without an answer")
        length = 0
        while (line := self._stream.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return int(first.split()[1]), self._stream.read(length)

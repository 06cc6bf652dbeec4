"""S3 servers for tests, on loopback only: moto (in this process) and SeaweedFS (a real one).

Fixtures `moto_s3` and `seaweedfs_s3` live for the whole test session. Import them in a conftest:
`from tests.servers import aws_environment, moto_s3, seaweedfs_s3`.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from ontologia_dagster.demo.local_s3 import LocalS3, free_ports, local_s3
from storage_engine.config import OntologiaConfig

__all__ = ["S3Server", "aws_environment", "free_ports", "moto_s3", "run_seaweedfs", "seaweedfs_s3"]

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "us-east-1"
_START_TIMEOUT_S = 240.0

# One server of each kind a process, however many conftests import the fixtures.
_until_exit = ExitStack()
atexit.register(_until_exit.close)


@dataclass(frozen=True)
class S3Server:
    """A running server, reached with the credentials that `aws_environment` sets."""

    name: str
    endpoint: str
    pid: int | None = None

    def client(self) -> Any:
        """A plain boto3 client, for setting things up behind the adapter's back."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                proxies={},
            ),
        )

    def make_bucket(self) -> str:
        """A new bucket of its own for one test."""
        bucket = f"onto-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=bucket)
        return bucket

    def config(self, **settings: Any) -> OntologiaConfig:
        return OntologiaConfig(s3_endpoint_url=self.endpoint, s3_region=REGION, **settings)


@contextmanager
def run_moto(refused: Collection[str] = ()) -> Iterator[S3Server]:
    """moto's server in a thread, one request at a time: its checks and writes are not atomic. All
    of one process have the same objects; `refused` methods are answered with 403."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    application = DomainDispatcherApplication(create_backend_app)
    turn = threading.Lock()

    def serialised(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in refused:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"]
        with turn:
            return list(application(environ, start_response))

    server = make_server("127.0.0.1", 0, serialised, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3Server("moto", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def run_seaweedfs(directory: Path, ports: Sequence[int] = ()) -> Iterator[S3Server]:
    """A SeaweedFS with its data in `directory`, killed at the end.

    Give the same directory and the same eight `ports` again to restart one.
    """
    with local_s3(directory, ACCESS_KEY, SECRET_KEY, ports) as started:
        server = S3Server("seaweedfs", started.endpoint, started.process.pid)
        _await_put(server, started)
        yield server


def _await_put(server: S3Server, started: LocalS3) -> None:
    client = server.client()
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with suppress(client.exceptions.BucketAlreadyOwnedByYou):  # of a restarted server
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"ready")
            return
        except Exception as error:
            if started.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS: {error}\n{started.said()}") from error
            time.sleep(0.2)


@pytest.fixture(scope="session")
def aws_environment() -> Iterator[None]:
    """Credentials for the test servers, and nothing of the developer's own AWS settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "AWS_PROFILE",
            "AWS_SESSION_TOKEN",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_ALLOW_HTTP",
            "AWS_S3_FORCE_PATH_STYLE",
            "AWS_DEFAULT_REGION",
        ):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_REGION", REGION)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        yield


@functools.cache
def _moto() -> S3Server:
    return _until_exit.enter_context(run_moto())


@functools.cache
def _seaweedfs() -> S3Server:
    # Not pytest's tmp_path: socket paths have a short limit.
    directory = _until_exit.enter_context(
        tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True)
    )
    return _until_exit.enter_context(run_seaweedfs(Path(directory)))


@pytest.fixture(scope="session")
def moto_s3(aws_environment: None) -> S3Server:
    return _moto()


@pytest.fixture(scope="session")
def seaweedfs_s3(aws_environment: None) -> S3Server:
    return _seaweedfs()

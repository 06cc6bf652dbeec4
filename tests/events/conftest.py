"""A test that takes `bus` runs on every event store; `on_servers` adds S3 servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events.clock import skipped_sleep
from tests.events.support import Bus, made_bus
from tests.servers import REGION, S3Server, aws_environment, moto_s3, seaweedfs_s3

__all__ = ["aws_environment", "moto_s3", "seaweedfs_s3"]

LOCAL = ("sqlite", "directory", "memory")
_buckets: dict[str, str] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bus" in metafunc.fixturenames:
        servers = ("seaweedfs", "moto") if hasattr(metafunc.function, "on_servers") else ()
        marked = [pytest.param(name, marks=pytest.mark.s3) for name in servers]
        metafunc.parametrize("bus", [*LOCAL, *marked], indirect=True)


@pytest.fixture
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bus]:
    kind, settings = request.param, {}
    if kind == "sqlite":
        uri = f"sqlite:///{tmp_path}/bus.db"
    elif kind == "directory":
        uri = f"file://{tmp_path}/bus"
    elif kind == "memory":
        uri = f"memory://bus-{uuid.uuid4().hex}"
    else:
        server: S3Server = request.getfixturevalue(f"{kind}_s3")
        bucket = _buckets.setdefault(server.endpoint, "") or server.make_bucket()
        _buckets[server.endpoint] = bucket
        uri = f"s3://{bucket}/{uuid.uuid4().hex[:12]}"
        settings = {"s3_endpoint_url": server.endpoint, "s3_region": REGION}
    with skipped_sleep(), made_bus(uri, kind, **settings) as made:
        yield made

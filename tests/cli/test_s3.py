"""`onto` on S3: the RFC's example line, what `info` adds there, and servers that do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import onto
from tests.servers import S3Server, free_ports

pytestmark = pytest.mark.s3


@pytest.fixture
def config(moto_s3: S3Server, tmp_path: Path) -> Path:
    path = tmp_path / "s3.toml"
    path.write_text(f's3_endpoint_url = "{moto_s3.endpoint}"\n')
    return path


def test_init_and_info_on_s3(moto_s3: S3Server, config: Path) -> None:
    bucket = moto_s3.make_bucket()
    uri = f"s3://{bucket}/onto-prod"

    planned = onto("init", "--storage-uri", uri, "--config", config, "--dry-run")
    assert planned.code == 0
    assert moto_s3.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 0

    assert onto("init", "--storage-uri", uri, "--config", config).code == 0
    shown = onto("info", "--storage-uri", uri, "--config", config, "--json").json
    assert (shown["bucket"], shown["prefix"], shown["store"]) == (bucket, "onto-prod", "s3")
    people = [
        line.split()
        for line in onto("info", "--storage-uri", uri, "--config", config).out.splitlines()
    ]
    assert ["bucket", bucket] in people
    assert ["prefix", "onto-prod"] in people


@pytest.mark.parametrize("args", [("info",), ("commits",), ("commits", "examine", "1")])
def test_rfc0004_11_uninitialised_s3_prefix_fails_fast(
    args: tuple[str, ...], moto_s3: S3Server, config: Path
) -> None:
    uri = f"s3://{moto_s3.make_bucket()}/nothing"

    failed = onto(*args, "--storage-uri", uri, "--config", config)

    assert failed.code == 5
    assert f"onto init --storage-uri {uri}" in failed.error()


def test_a_missing_bucket_exits_5(moto_s3: S3Server, config: Path) -> None:
    failed = onto("info", "--storage-uri", "s3://no-such-bucket/x", "--config", config)

    assert failed.code == 5
    assert "no-such-bucket" in failed.error()


def test_a_server_that_is_not_there_exits_5(aws_environment: None, tmp_path: Path) -> None:
    config = tmp_path / "s3.toml"
    config.write_text(
        f's3_endpoint_url = "http://127.0.0.1:{free_ports(1)[0]}"\ns3_request_timeout_s = 2.0\n'
    )

    failed = onto("info", "--storage-uri", "s3://bucket/x", "--config", config, "--json")

    assert failed.code == 5
    error = failed.json["error"]
    assert error["type"] == "StorageBackendError"
    assert error["retryable"] is True
    assert error["facts"]["bucket"] == "bucket"

"""Storage URIs: what each one opens, and what a wrong one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError
from storage_engine.objectstore.open import StoreUri, memory_backend, open_store, parse_uri
from storage_engine.objectstore.s3 import S3Settings


@pytest.mark.parametrize(
    ("uri", "parsed"),
    [
        ("s3://my-bucket", StoreUri("s3", bucket="my-bucket")),
        ("s3://my-bucket/", StoreUri("s3", bucket="my-bucket")),
        ("S3://my-bucket/a/b c/", StoreUri("s3", bucket="my-bucket", prefix="a/b c")),
        ("file:///data/onto", StoreUri("file", path=Path("/data/onto"))),
        ("file://localhost/data", StoreUri("file", path=Path("/data"))),
        ("file:///data/with%20space", StoreUri("file", path=Path("/data/with space"))),
        ("/data/onto", StoreUri("file", path=Path("/data/onto"))),
        ("relative/dir", StoreUri("file", path=Path("relative/dir"))),
        ("./odd:name", StoreUri("file", path=Path("odd:name"))),
        ("memory://test-1", StoreUri("memory", name="test-1")),
    ],
)
def test_good_uris(uri: str, parsed: StoreUri) -> None:
    assert parse_uri(uri) == parsed


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("gs://bucket/x", "unknown scheme 'gs'"),
        ("s3a://bucket/x", r"did you mean s3://\?"),
        ("http://host/x", "unknown scheme 'http'"),
        ("s3:bucket", "lacks '//'"),
        ("s3://", "no valid bucket name"),
        ("s3:///prefix", "no valid bucket name"),
        ("s3://b!/x", "no valid bucket name"),
        ("s3://bucket/a//b", "bad prefix"),
        ("s3://bucket/../x", "bad prefix"),
        ("file://relative", "three slashes"),
        ("file://host/path", "three slashes"),
        ("memory://", "memory://name"),
        ("memory://a/b", "memory://name"),
        ("sqlite:///x.db", "not an object store"),
    ],
)
def test_bad_uris(uri: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_store(uri)


def test_unknown_schemes_list_the_known_ones() -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store("gopher://x")
    for known in ("s3://", "file:///", "plain directory", "sqlite:///", "memory://"):
        assert known in str(caught.value)


def test_memory_stores_of_one_name_share_their_objects() -> None:
    one, two = open_store("memory://shared-a"), open_store("memory://shared-a")
    other = open_store("memory://shared-b")
    one.put("k", b"1")
    assert two.get("k").data == b"1"
    assert list(other.list("")) == []
    assert memory_backend("shared-a").objects() == {"k": b"1"}
    assert one.uri == "memory://shared-a"


def test_directories(tmp_path: Path) -> None:
    plain, uri = open_store(str(tmp_path / "x y")), open_store((tmp_path / "x y").as_uri())
    plain.put("k", b"1")
    assert uri.get("k").data == b"1"
    assert plain.uri == uri.uri == (tmp_path / "x y").as_uri()
    assert plain.kind == "directory"


def test_s3(aws_environment: None) -> None:
    config = OntologiaConfig(s3_endpoint_url="http://127.0.0.1:1")
    store = open_store("s3://bucket/a/b", config)
    assert (store.uri, store.kind) == ("s3://bucket/a/b", "s3")
    assert store.local_path("k") is None
    store.close()


def test_boto3_is_imported_for_s3_only() -> None:
    program = (
        "import sys, storage_engine.objectstore.open as o;"
        "o.open_store('memory://x'); o.open_store('/tmp/never-written');"
        "assert not {'boto3', 'botocore'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=240
    )


def resolve(environ: dict[str, str], **config: object) -> S3Settings:
    return S3Settings.resolve(OntologiaConfig(**config), environ)


def test_s3_settings_come_from_config_then_environment() -> None:
    aws = resolve({})
    assert (aws.endpoint, aws.region, aws.path_style) == (None, None, False)
    environ = {
        "AWS_ENDPOINT_URL": "https://general",
        "AWS_ENDPOINT_URL_S3": "https://s3.example:9000",
        "AWS_DEFAULT_REGION": "default",
        "AWS_REGION": "chosen",
    }
    custom = resolve(environ)
    assert (custom.endpoint, custom.region) == ("https://s3.example:9000", "chosen")
    assert custom.path_style
    given = resolve(environ, s3_endpoint_url="https://given", s3_region="eu-west-1")
    assert (given.endpoint, given.region) == ("https://given", "eu-west-1")
    assert resolve({"AWS_ENDPOINT_URL": "https://general"}).region == "us-east-1"
    assert resolve({"AWS_S3_FORCE_PATH_STYLE": "TRUE"}).path_style
    assert not resolve({"AWS_S3_FORCE_PATH_STYLE": "false"}).path_style


def test_plain_http_must_be_wanted() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://minio.internal:9000"}
    with pytest.raises(ConfigurationError, match="AWS_ALLOW_HTTP"):
        resolve(environ)
    assert resolve(environ | {"AWS_ALLOW_HTTP": "true"}).endpoint == "http://minio.internal:9000"
    assert resolve({}, s3_endpoint_url="http://minio.internal:9000").endpoint
    for local in ("http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"):
        assert resolve({"AWS_ENDPOINT_URL": local}).is_loopback


@pytest.mark.parametrize("endpoint", ["minio:9000", "ftp://x", "http://", "/path"])
def test_bad_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a URL"):
        resolve({"AWS_ENDPOINT_URL_S3": endpoint})

"""Fixtures for all suites: S3 servers, started when first asked for, and a cache of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import aws_environment, moto_s3, seaweedfs_s3
from tests.spark_support import spark

__all__ = ["aws_environment", "moto_s3", "seaweedfs_s3", "spark"]


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not the cache of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

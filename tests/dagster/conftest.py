"""The cluster that Pipes tests submit to, started when first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark_cluster import spark_cluster


@pytest.fixture(scope="module")
def spark_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster:
        yield cluster.master

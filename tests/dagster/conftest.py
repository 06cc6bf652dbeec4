"""What tests of Dagster share: the cluster that Pipes tests submit to, started when first asked
for, a storage and an instance for audited runs, and Dagster's own migrations, read once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from storage_engine import initialize_storage
from tests.spark_cluster import spark_cluster


@pytest.fixture(scope="module")
def spark_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with spark_cluster(tmp_path_factory.mktemp("cluster"), workers=1) as cluster:
        yield cluster.master


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a storage, `store`."""
    initialize_storage(str(tmp_path / "store"))
    return tmp_path


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def migrations_are_read_once() -> Iterator[None]:
    """Every new instance, in memory too, is stamped as migrated: Dagster has its sixty migrations
    compiled for that, which is most of what it costs."""
    read: dict[str | None, ScriptDirectory] = {}
    from_config = ScriptDirectory.from_config

    def once(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in read:
            read[place] = from_config(config)
        return read[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", once)
        yield

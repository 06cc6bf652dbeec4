"""A driver that kills itself with SIGKILL at its write of head: `killed_driver.py URI WHEN`."""

from __future__ import annotations

import sys
from typing import cast

from storage_engine import OntologiaConfig
from storage_engine.commitlog import layout
from storage_engine.objectstore.open import open_store
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository.open import open_object_repository
from storage_engine.runtime.core import SessionSettings
from storage_engine.runtime.session import session_on
from storage_engine.spark import spark_session, write_entities
from tests.engines import Customer
from tests.integration.killed import KillingStore, KillPoint, When
from tests.spark_support import SETTINGS

LEASE_TTL_MS = 2_000
APP = ("crm", 1)


def main(uri: str, when: str) -> None:
    spark = spark_session("doomed", master="local[1]", config=SETTINGS)
    config = OntologiaConfig(s3_lease_ttl_ms=LEASE_TTL_MS)
    store = KillingStore(open_store(uri, config))
    repository = open_object_repository(cast(ObjectStore, store), config)
    session = session_on(repository, SessionSettings.of(config))
    df = spark.createDataFrame(
        [("a", "new", 1), ("b", "new", 2)], "id string, name string, age int"
    )
    store.arm(KillPoint(cast(When, when), operation="put_if_match", key=layout.HEAD))
    write_entities(df, Customer, session, idempotency=APP)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The page of a storage on S3: the same walk."""

from __future__ import annotations

import pytest

from storage_engine.config import OntologiaConfig
from tests.explore import airports
from tests.explore.conftest import Browse
from tests.servers import REGION, S3Server

pytestmark = pytest.mark.s3


def test_the_walk_on_s3(seaweedfs_s3: S3Server, browse: Browse) -> None:
    uri = f"s3://{seaweedfs_s3.make_bucket()}/air"
    config = OntologiaConfig(
        event_max_attempts=1, s3_endpoint_url=seaweedfs_s3.endpoint, s3_region=REGION
    )
    airports.fill(uri, config)
    client = browse(uri, s3_endpoint_url=config.s3_endpoint_url, s3_region=REGION)

    row = client.document("/types/Airport?prefix=HN")["objects"][0]
    hnl = client.document(row["url"])
    assert [v["commit_id"] for v in hnl["timeline"]["versions"]] == [4, 1]
    (related,) = {o["url"] for g in hnl["relations"] for o in g["related"]}
    assert client.document(related)["name"] == "John F Kennedy Intl"
    (diff,) = client.document(hnl["timeline"]["versions"][0]["commit_url"])["diffs"]
    assert diff["rows"][0]["changes"][0]["after"] == "Daniel K. Inouye Intl"
    assert client.document("/events/default")["dead_letters"]

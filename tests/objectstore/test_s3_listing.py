"""What is cut out of a listing is what botocore would have read, and what is odd is left to it."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest
from botocore.parsers import create_parser

from storage_engine.objectstore.s3_listing import take_contents

ITEM = (
    "<Contents><Key>{key}</Key><LastModified>2026-11-16T19:04:05.000Z</LastModified>"
    "<ETag>&quot;d41d8&quot;</ETag><Size>12</Size><StorageClass>STANDARD</StorageClass></Contents>"
)
PAGE = (
    '<?xml version="1.0" encoding="UTF-8"?>\n'
    '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
    "<IsTruncated>true</IsTruncated>{items}<KeyCount>2</KeyCount></ListBucketResult>\n"
)


def answer(body: str, status: int = 200) -> dict[str, Any]:
    return {"status_code": status, "headers": {}, "body": body.encode()}


def parsed(response: dict[str, Any]) -> dict[str, Any]:
    model = botocore.session.get_session().get_service_model("s3")
    shape = model.operation_model("ListObjectsV2").output_shape
    assert shape is not None
    found: dict[str, Any] = create_parser("rest-xml").parse(response, shape)
    return found


@pytest.mark.parametrize("keys", [[], ["a"], ["events/x_a%2520b.json", "a&amp;b/&#233;&lt;"]])
def test_the_same_as_botocore(keys: list[str]) -> None:
    body = PAGE.format(items="".join(ITEM.format(key=key) for key in keys))
    taken: dict[str, Any] = {}
    response = answer(body)

    take_contents(response, taken)
    ours, theirs = {**parsed(response), **taken}, parsed(answer(body))

    assert (b"<Contents>" in response["body"]) is False
    wanted = ("Key", "Size", "LastModified")
    assert [[item[name] for name in wanted] for item in ours.get("Contents", [])] == [
        [item[name] for name in wanted] for item in theirs.get("Contents", [])
    ]
    assert {**ours, "Contents": []} == {**theirs, "Contents": []}


@pytest.mark.parametrize(
    "response",
    [
        answer(PAGE.format(items=ITEM.format(key="a")), status=500),
        answer(PAGE.format(items=ITEM.format(key="a"))[:-30]),
        answer(PAGE.format(items=ITEM.format(key="a").replace("<Size>12</Size>", ""))),
        answer(PAGE.format(items=ITEM.format(key="a").replace("2026-", "in "))),
        answer("<Error><Code>SlowDown</Code></Error>"),
    ],
    ids=["an error", "cut off", "no size", "no time", "another document"],
)
def test_what_is_odd_is_left_as_it_is(response: dict[str, Any]) -> None:
    before = response["body"]
    taken: dict[str, Any] = {}

    take_contents(response, taken)

    assert (response["body"], taken) == (before, {})

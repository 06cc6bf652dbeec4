"""Reads a page of an S3 listing in a third of the processor time that botocore's parser takes.

That one goes through every element by the model of S3, 0.05 ms a key; a worker that starts after
a burst of events, or `gc`, reads a hundred thousand keys. Here the keys are cut out of the answer
first, and botocore parses what is left: whether there is more, or what is wrong. An answer that
does not look as expected is left to botocore altogether.
"""

from __future__ import annotations

from datetime import datetime
from html import unescape
from typing import Any


def take_contents(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any
) -> None:
    """botocore's `before-parse` of ListObjectsV2: what is put in the second goes in the result."""
    body: bytes = response_dict["body"]
    if response_dict["status_code"] != 200 or not body.rstrip().endswith(b"</ListBucketResult>"):
        return
    try:
        text = body.decode()
        before, *items = text.split("<Contents>")
        found, after = [], []
        for item in items:
            content, end, rest = item.partition("</Contents>")
            if not end:
                return
            found.append(_parsed(content))
            after.append(rest)
    except (UnicodeDecodeError, ValueError):
        return
    if found:
        customized_response_dict["Contents"] = found
        response_dict["body"] = "".join([before, *after]).encode()


def _parsed(content: str) -> dict[str, Any]:
    key = _between(content, "<Key>", "</Key>")
    return {
        "Key": unescape(key) if "&" in key else key,
        "Size": int(_between(content, "<Size>", "</Size>")),
        "LastModified": datetime.fromisoformat(
            _between(content, "<LastModified>", "</LastModified>")
        ),
    }


def _between(text: str, begin: str, end: str) -> str:
    """ValueError where one of the two is missing."""
    start = text.index(begin) + len(begin)
    return text[start : text.index(end, start)]

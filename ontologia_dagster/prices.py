"""What requests cost, about: list prices of S3 Standard in us-east-1, in dollars.

An estimate for comparing runs, not a bill: transfer, storage and other regions are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

PER_REQUEST = {
    "GET": 0.0004 / 1000,
    "HEAD": 0.0004 / 1000,
    "PUT": 0.005 / 1000,
    "PUT_IF": 0.005 / 1000,
    "LIST": 0.005 / 1000,
    "DELETE": 0.0,
    "DELETE_IF": 0.0,
}


def price(requests: Mapping[str, int]) -> float:
    """Of requests by kind; sums and byte counts among them are passed over."""
    return round(sum(PER_REQUEST.get(kind, 0.0) * count for kind, count in requests.items()), 8)


def request_total(requests: Mapping[str, int]) -> int:
    return sum(count for kind, count in requests.items() if kind in PER_REQUEST)

"""Upgraders for `tests.cli.shop_3`. Marked by hand: they are of no concern to other tests."""

from __future__ import annotations

from typing import Any

from storage_engine.schema import upgraders


def initials(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "initial": row["name"][0]}


setattr(initials, upgraders._MARK, (upgraders.Upgrader("Customer", 1, initials),))

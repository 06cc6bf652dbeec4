"""References to commits by name."""

from __future__ import annotations

from storage_engine.query.spec import When


def after_pin(when: When, pinned: int) -> ValueError:
    """What a reader of a pinned view is told who asks for what came later."""
    return ValueError(
        f"{when} is after commit {pinned}, at which this view is pinned; ask the session itself"
    )

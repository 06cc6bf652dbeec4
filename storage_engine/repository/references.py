"""References to commits by name."""

from __future__ import annotations

from collections.abc import Iterable

from storage_engine.model.validation import unknown_name
from storage_engine.query.spec import When


def unknown_tag(name: str, known: Iterable[str]) -> ValueError:
    """What a reader of a tag that is not there is told."""
    return ValueError(f"as_of: {unknown_name(name, known, what='tag')}")


def after_pin(when: When, pinned: int) -> ValueError:
    """What a reader of a pinned view is told who asks for what came later."""
    return ValueError(
        f"{when} is after commit {pinned}, at which this view is pinned; ask the session itself"
    )

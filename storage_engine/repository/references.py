"""References to commits by name."""

from __future__ import annotations

from collections.abc import Iterable

from storage_engine.model.validation import unknown_name


def unknown_tag(name: str, known: Iterable[str]) -> ValueError:
    """What a reader of a tag that is not there is told."""
    return ValueError(f"as_of: {unknown_name(name, known, what='tag')}")

"""Types as keys of what `storage_info()` reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def labels(types: Sequence[tuple[str, str]]) -> list[str]:
    """A key for each (kind, name): the name, with the kind only where two types share the name."""
    shared = Counter(name for _, name in types)
    return [f"{kind}:{name}" if shared[name] > 1 else name for kind, name in types]

"""How many random examples a test tries: few each time, many in a search.

ONTOLOGIA_LONG=1 makes it a search: twenty times as many (add --timeout=0). Comparisons of all
storages have a number of their own, see `tests.comparison.scenarios`.
"""

from __future__ import annotations

import os

_TIMES = 20 if os.environ.get("ONTOLOGIA_LONG") else 1


def examples(count: int) -> int:
    """For hypothesis' `max_examples`."""
    return count * _TIMES

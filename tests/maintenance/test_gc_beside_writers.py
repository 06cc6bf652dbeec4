"""A collector that never stops beside four processes that write: nothing is lost, no litter stays.

The same for a minute, with figures, is `python -m benchmarks gc`.
"""

from __future__ import annotations

from pathlib import Path

from tests.maintenance.beside import run


def test_nothing_reachable_goes_and_all_litter_does(tmp_path: Path) -> None:
    outcome = run(tmp_path, writers=4, seconds=90.0, commits=6, grace_s=1.0)
    assert outcome.commits == 24
    assert outcome.planted > 0
    assert outcome.sweeps >= 2
    assert outcome.reads >= 1
    assert outcome.findings == []
    assert outcome.lost == []
    assert outcome.left == []

"""Types that others compare: what they stage is one attempt, however many are compared at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from storage_engine.commitlog import layout
from storage_engine.repository.object.merge.bulk import BulkMerge, LargeType, LargeVerdict
from storage_engine.repository.object.write.staged_write import PartFolder
from tests.commitlog.support import World
from tests.engines import CUSTOMER, PRODUCT


class Merger:
    """Says where it was to stage."""

    def __init__(self) -> None:
        self.attempts: list[str] = []

    def takes(self, changed_rows: int) -> bool:
        return True

    def compare(self, asked: LargeType, folder: PartFolder | None) -> LargeVerdict:
        assert folder is not None
        self.attempts.append(folder.attempt)
        return LargeVerdict(0, 0)

    def cancel(self) -> None:
        raise AssertionError("nothing was lost")


def test_types_that_are_compared_at_once_are_staged_as_one_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two attempts one would be announced for ever, and its parts be nobody's."""
    new_id = layout.new_id

    def slow_id() -> str:
        time.sleep(0.05)  # whoever asks meanwhile asks, too
        return new_id()

    monkeypatch.setattr(layout, "new_id", slow_id)
    writer, merger = world.open("writer"), Merger()
    bulk = BulkMerge(merger, writer.repo, {}, rehearsal=False)
    together = Barrier(2)

    def compare(spec: object) -> None:
        asked = LargeType(spec, "fail", None, None, ())  # type: ignore[arg-type]
        together.wait(10)
        bulk.compare(1, asked, 1, lambda _: pytest.fail("there are no conflicts"))

    with ThreadPoolExecutor(2) as pool:
        for compared in [pool.submit(compare, spec) for spec in (CUSTOMER, PRODUCT)]:
            compared.result(10)
    [announced] = [key for key in world.backend.objects() if key.startswith("meta/attempts/")]
    assert {layout.attempt_heartbeat(attempt) for attempt in merger.attempts} == {announced}
    bulk.close((), outcome_known=True)
    assert not [key for key in world.backend.objects() if key.startswith("meta/attempts/")]

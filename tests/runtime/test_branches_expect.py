"""A merge that was decided on one state of its target, and what merged a branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine import Session, initialize_storage
from storage_engine.errors import HeadMismatchError
from storage_engine.runtime.branches import branches_of
from tests.shop import Customer


def test_a_merge_refuses_where_the_target_has_moved_since(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    with Session(uri, entity_types=[Customer]) as main:
        main.create_branch("run/1")
        with Session(uri, branch="run/1", entity_types=[Customer]) as work:
            work.ensure(Customer(id="c1", name="Ada"))
            work.commit()
            seen = work.update_branch().source_commit_id
        main.ensure(Customer(id="c2", name="Bo"))
        assert main.commit() == 1
        assert branches_of(main.repository).merged_by("run/1") is None

        with pytest.raises(HeadMismatchError):
            main.merge("run/1", expect=seen)

        assert main.repository.head_commit_id() == 1
        with Session(uri, branch="run/1") as work:
            seen = work.update_branch().source_commit_id
        assert seen == 1
        assert main.merge("run/1", expect=seen).commit_id == 2
        assert branches_of(main.repository).merged_by("run/1") == 2
        assert main.merge("run/1").commit_id is None
        assert branches_of(main.repository).merged_by("run/1") == 2
        main.delete_branch("run/1")
        assert branches_of(main.repository).find("run/1") is None

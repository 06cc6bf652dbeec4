"""A storage that is erased and begun anew while somebody has it open."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine import Entity, Field, Session, UnsupportedEngineError, initialize_storage


class Thing(Entity):
    id: Field[str] = Field(primary_key=True)


def begin_anew(uri: str, engine_version: str) -> None:
    plan = initialize_storage(uri, engine_version, force=True, dry_run=True)
    initialize_storage(uri, engine_version, force=True, token=plan.token)


def test_an_open_session_does_not_write_with_the_engine_of_before(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri, "v1")
    with Session(uri) as session:
        session.ensure(Thing(id="a"))
        session.commit()
        session.flush()
        begin_anew(uri, "v2")
        session.ensure(Thing(id="b"))
        with pytest.raises(UnsupportedEngineError, match="open it again"):
            session.commit()
        session.discard()
    with Session(uri) as session:
        assert session.list_commits() == []


def test_the_same_engine_goes_on_in_the_new_log(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(Thing(id="a"))
        assert session.commit() == 1
        session.flush()
        begin_anew(uri, "v2")
        session.ensure(Thing(id="a"))
        assert session.commit() == 1  # what the erased log had is not there

"""Where files lie must not change what is read from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_engine import Entity, Field, Session, initialize_storage
from storage_engine.model import spec_of
from storage_engine.repository import ReadWindow


class Guest(Entity):
    id: Field[str] = Field(primary_key=True)
    tier: Field[str]


@pytest.mark.parametrize("folder", ["tier=Gold", "a[bc]d", "what*ever", "it's here", "100% ünique"])
def test_folder_names_are_neither_columns_nor_patterns(tmp_path: Path, folder: str) -> None:
    uri = str(tmp_path / folder)
    initialize_storage(uri)
    with Session(uri) as session:
        session.ensure(Guest(id="g", tier="Silver"))
        session.commit()
        session.ensure(Guest(id="g", tier="Bronze"))
        session.commit()
        spec = spec_of(Guest)
        assert session.repository.read(spec).column("tier").to_pylist() == ["Bronze"]
        history = session.repository.read(spec, ReadWindow(history=True))
        assert history.column("tier").to_pylist() == ["Silver", "Bronze"]


@pytest.mark.parametrize("folder", ["tier=Gold", "a[bc]d"])
def test_bulk_rows_in_such_folders(tmp_path: Path, folder: str) -> None:
    import pyarrow as pa

    uri = str(tmp_path / folder)
    initialize_storage(uri)
    with Session(uri) as session:
        session.ingest(Guest, pa.table({"id": ["g", "h"], "tier": ["Silver", "Silver"]}))
        session.commit()
        session.ingest(Guest, pa.table({"id": ["g", "h"], "tier": ["Silver", "Bronze"]}))
        session.commit()
        assert session.last_commit is not None
        assert session.last_commit.changes[0].updated == 1
        rows = session.repository.read(spec_of(Guest))
        assert rows.column("tier").to_pylist() == ["Silver", "Bronze"]
        assert rows.column("commit_id").to_pylist() == [1, 2]


def test_reading_at_once_after_a_commit_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = str(tmp_path / "store")
    initialize_storage(uri)
    with Session(uri) as session:
        for number in range(20):
            session.ensure(Guest(id="g", tier=str(number)))
            session.commit()
            rows = session.repository.read(spec_of(Guest))
            assert rows.column("tier").to_pylist() == [str(number)]
        session.flush()
        assert session.storage_info()["last_index_warning"] is None
    assert caplog.records == []

"""A changed byte in a small file is an error that names the file, never an answer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from storage_engine.errors import IntegrityError, OntologiaError
from storage_engine.repository import Repository, initialize_storage
from storage_engine.repository.open import open_repository
from tests.commitlog.support import World, made_world
from tests.engines import CUSTOMER, commit, customer, rows_of

MANY = 20  # more small files than are scanned where they are


def changed_value(data: bytes) -> bytes:
    """The same file, but that Ann is Bnn: valid Parquet, another answer."""
    assert b"Ann" in data
    return data.replace(b"Ann", b"Bnn")


@pytest.mark.parametrize("files", [1, MANY])
@pytest.mark.parametrize("engine_version", ["v1", "v2"])
def test_in_the_simulated_store(engine_version: str, files: int) -> None:
    with made_world(engine_version) as world:
        writer = world.open("writer")
        for number in range(files):
            writer.put(customer(f"c{number}"))
        path = first_file(world)
        world.backend.write(path, changed_value(world.backend.objects()[path]))
        with pytest.raises(IntegrityError, match=path) as caught:
            world.open("reader").rows()
        assert caught.value.key == path
        with pytest.raises(IntegrityError, match=path):
            world.open("another").commit(rows_of(CUSTOMER, customer("c0", name="Zoe")))


def first_file(world: World) -> str:
    return world.chain()[0].files[0].path


@pytest.mark.parametrize("files", [1, MANY])
def test_in_a_directory(tmp_path: Path, files: int) -> None:
    """Once in the life of a process: what was right stays right while the file is the same."""
    with filled(tmp_path, files) as repository:
        assert len(repository.read(CUSTOMER).to_pylist()) == files
    (path,) = tmp_path.glob("commits/1-*/entities/Customer/*.parquet")
    path.write_bytes(changed_value(path.read_bytes()))
    with opened(tmp_path) as repository, pytest.raises(IntegrityError, match=path.name):
        repository.read(CUSTOMER)


def test_a_file_that_changes_under_an_open_session(tmp_path: Path) -> None:
    with filled(tmp_path, 1) as repository:
        assert repository.read(CUSTOMER).to_pylist()[0]["name"] == "Ann"
        (path,) = tmp_path.glob("commits/1-*/entities/Customer/*.parquet")
        path.write_bytes(changed_value(path.read_bytes()))
        with pytest.raises(OntologiaError, match=path.name):
            repository.read(CUSTOMER)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    with filled(tmp_path, 1):
        pass
    (path,) = tmp_path.glob("commits/1-*/entities/Customer/*.parquet")
    path.write_bytes(path.read_bytes()[:-10])
    with opened(tmp_path) as repository, pytest.raises(IntegrityError, match="bytes where the log"):
        repository.read(CUSTOMER)


def opened(folder: Path) -> closing[Repository]:
    return closing(open_repository(str(folder)))


def filled(folder: Path, files: int) -> closing[Repository]:
    initialize_storage(str(folder), "v2")
    repository = open_repository(str(folder))
    for number in range(files):
        commit(repository, rows_of(CUSTOMER, customer(f"c{number}")))
    repository.flush()
    return closing(repository)

"""Paths that cannot be: each answered by an error of ours that names the path and what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from storage_engine import Entity, Field, OntologiaConfig, Session, initialize_storage
from storage_engine.errors import OntologiaError, StorageBackendError
from storage_engine.objectstore.open import open_store
from storage_engine.repository import open_repository
from tests.cli.support import onto

LONG = "x" * 300
DEEP = "/".join(["d" * 200] * 30)


class Note(Entity):
    id: Field[str] = Field(primary_key=True)


def _in_a_file(folder: Path) -> str:
    (folder / "file").write_text("x" * 10)
    return f"{folder}/file/store"


def _loop(folder: Path) -> str:
    (folder / "loop").symlink_to("loop")
    return f"{folder}/loop/store"


def _nowhere(folder: Path) -> str:
    (folder / "file").write_text("x")
    for name in ("dangling", "dangling.db"):
        (folder / name).symlink_to(folder / "file" / "nowhere")
    return f"{folder}/dangling"


PLACES: dict[str, Callable[[Path], str]] = {
    "overlong name": lambda folder: f"{folder}/{LONG}",
    "overlong path": lambda folder: f"{folder}/{DEEP}",
    "NUL": lambda folder: f"{folder}/a\0b",
    "below a file": _in_a_file,
    "symlink loop": _loop,
    "dangling symlink": _nowhere,
    "no such user": lambda folder: "~no-such-user-here/store",
}
FORMS: dict[str, Callable[[str], str]] = {
    "directory": lambda path: path,
    "file URI": lambda path: f"file://{path}".replace("\0", "%00"),
    "SQLite": lambda path: f"{path}.db",
    "SQLite URI": lambda path: f"sqlite:///{path}.db".replace("\0", "%00"),
}


def _store_a_note(uri: str) -> None:
    with Session(uri) as session:
        session.ensure(Note(id="n"))


def _read(uri: str) -> None:
    with closing(open_repository(uri)) as repository:
        repository.head_commit_id()


USES: dict[str, Callable[[str], Any]] = {
    "open": _read,
    "init": initialize_storage,
    "write": _store_a_note,
    "store": lambda uri: open_store(uri).put("a/b", b"x"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_path_is_answered_in_words(tmp_path: Path, place: str, form: str) -> None:
    if place == "no such user" and "URI" in form:
        return  # a URI has no home directories
    uri = FORMS[form](PLACES[place](tmp_path))
    uses = USES if "SQLite" not in form else {**USES, "store": _read}
    for use in uses.values():
        with pytest.raises(OntologiaError) as refused:
            use(uri)
        assert 20 < len(str(refused.value)) < 1500, refused.value
    done = onto("info", "--storage-uri", uri)
    assert done.code in (2, 4, 5), done
    assert "unexpected" not in done.err


CODES = [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize("kind", ["directory", "sqlite"])
def test_what_the_system_refuses_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    """As the user that tests run as may do everything, the refusal is planted in `os`."""
    place = tmp_path / "store"
    uri = str(place) if kind == "directory" else f"{place}.db"
    initialize_storage(uri)
    _store_a_note(uri)
    for call in ("stat", "open", "mkdir", "scandir", "lstat", "link", "replace"):
        real = getattr(os, call)

        def refuse(path: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            if str(path).startswith(str(place)):
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **options)

        with monkeypatch.context() as planted:
            planted.setattr(os, call, refuse)
            for use in (_read, initialize_storage, _store_a_note):
                with suppress(OntologiaError):  # nothing else comes out, if anything does
                    use(uri)


def test_a_refused_directory_names_it_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(f"{tmp_path}/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    for uri in (f"{tmp_path}/closed/store", f"{tmp_path}/closed/store.db"):
        with pytest.raises(StorageBackendError, match="permission denied") as refused:
            open_repository(uri)
        assert f"{tmp_path}/closed/store" in str(refused.value)
        assert refused.value.retryable is False


def test_a_temporary_folder_that_cannot_be_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Session(":memory:") as session:
        session.ensure(Note(id="n"))
        session.commit()
        monkeypatch.setattr("tempfile.mkdtemp", refuse)
        with pytest.raises(StorageBackendError, match=re.escape("TMPDIR")) as refused:
            session.sql("select * from Note").collect()
        assert refused.value.retryable


def test_a_cache_that_cannot_be_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file" / "cache", tmp_path / LONG):
        config = OntologiaConfig(cache_dir=folder)
        uri = f"memory://{tmp_path.name}-{len(folder.name)}"
        initialize_storage(uri, config=config)
        with Session(uri, config=config) as session:
            session.ensure(Note(id="n"))
            session.commit()
            assert session.query().entities(Note).count() == 1


# --- file systems that are read-only or full ------------------------------------------------------

_MOUNTED = """
import os, subprocess, sys, tempfile
import pyarrow as pa
from storage_engine import Session, initialize_storage
from storage_engine.errors import StorageBackendError
from tests.repository.test_paths import Note

small = sys.argv[1]
mount = lambda *options: subprocess.run(["mount", *options, small], check=True)
mount("-t", "tmpfs", "-o", "size=2m", "tmpfs")

# Scratch files of a bulk load do not fit.
rows = pa.table({"id": [os.urandom(40).hex() for _ in range(50_000)]})
tempfile.tempdir = small
for engine in ("v1", "v2"):
    uri = f"file://{sys.argv[2]}/{engine}"
    initialize_storage(uri, engine)
    with Session(uri) as session:
        session.ingest(Note, rows)
        try:
            session.commit()
            raise SystemExit("it did fit")
        except StorageBackendError as error:
            assert error.retryable, error
            assert "disk is full" in str(error) and "TMPDIR" in str(error), error
        tempfile.tempdir = None
        assert session.commit() == 1
    tempfile.tempdir = small

# A storage that cannot be written is read.
uris = [f"sqlite:///{small}/v1.db", f"sqlite:///{small}/v2.db", f"file://{small}/store"]
for uri, engine in zip(uris, ("v1", "v2", "v2")):
    initialize_storage(uri, engine)
    with Session(uri) as session:
        session.ensure(Note(id="a"))
tempfile.tempdir = None
mount("-o", "remount,ro")
kept = [Session(uri) for uri in uris]
for uri in uris:
    with Session(uri) as session:
        assert session.query().entities(Note).count() == 1
        assert len(session.sql("select * from Note").collect()) == 1
        assert session.list_commits()
        session.ensure(Note(id="b"))
        try:
            session.commit()
            raise SystemExit("it was written")
        except StorageBackendError as error:
            assert "read-only" in str(error) or "write protected" in str(error), error
        session.discard()
for session in kept:
    assert session.query().entities(Note).count() == 1
mount("-o", "remount,rw")
for session in kept:
    session.ensure(Note(id="c"))
    assert session.commit() == 2
    assert session.query().entities(Note).count() == 2
    session.close()
"""


def test_file_systems_that_are_full_or_read_only(tmp_path: Path) -> None:
    """In a namespace of its own, where that may be made."""
    small = tmp_path / "small"
    small.mkdir()
    run = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*run, "true"], check=False).returncode:
        pytest.skip("no namespaces for mounting")
    done = subprocess.run(
        [*run, sys.executable, "-c", _MOUNTED, str(small), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

"""Types, storages and a way to run `onto` for the command line's tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage_engine.cli.main import run
from storage_engine.config import OntologiaConfig
from storage_engine.model import Entity, Field, Relation, objects_to_table, spec_of
from storage_engine.repository import (
    CommitRequest,
    CommitResult,
    TypeInput,
    initialize_storage,
    open_repository,
)

ROOT = Path(__file__).resolve().parents[2]


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]


class Product(Entity):
    sku: Field[str] = Field(primary_key=True)


class Employment(Relation[Customer, Product]):
    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class CustomerOfProduct(Relation[Customer, Product], name="Customer"):
    """Shares its stored name with an entity type."""


@dataclass(frozen=True)
class Done:
    """What a run of `onto` left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout as one JSON document: anything besides it makes this fail."""
        return json.loads(self.out)

    def error(self) -> str:
        """The only line of stderr, which must be the error."""
        assert self.out == ""
        assert self.err.count("\n") == 1
        assert self.err.startswith("error: ")
        return self.err.removeprefix("error: ").rstrip("\n")


def onto(*args: str | Path) -> Done:
    """The program's whole run, error boundary included, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(arg) for arg in args])
    return Done(code, out.getvalue(), err.getvalue())


def onto_process(*args: str | Path, cwd: Path, **environ: str) -> Done:
    """The same in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ONTOLOGIA_")}
    done = subprocess.run(
        [sys.executable, "-m", "storage_engine.cli.main", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def create(uri: str, engine: str) -> None:
    initialize_storage(uri, engine)


def commit(uri: str, *objects: Any, **request: Any) -> CommitResult | None:
    """Commit objects as a writer of its own."""
    by_type: dict[type, list[Any]] = {}
    for item in objects:
        by_type.setdefault(type(item), []).append(item)
    inputs = [
        TypeInput(spec_of(cls), table=objects_to_table(spec_of(cls), items))
        for cls, items in by_type.items()
    ]
    with opened(uri) as repository:
        return repository.commit(CommitRequest(inputs, **request))


def fill(uri: str, engine: str = "v2") -> None:
    """Make a storage with two commits."""
    create(uri, engine)
    commit(uri, Customer(id="c1", name="Ann"), Product(sku="p1"), metadata={"source": "crm"})
    commit(
        uri,
        Customer(id="c1", name="Anna"),
        Customer(id="c2", name="Bob"),
        Employment(left_key="c1", right_key="p1", stint="2024", role="clerk"),
    )


@contextlib.contextmanager
def opened(uri: str) -> Iterator[Any]:
    repository = open_repository(uri, OntologiaConfig(runtime_id="writer"))
    try:
        yield repository
    finally:
        repository.close()


def files(folder: Path) -> list[str]:
    """What a directory store holds."""
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if not name.startswith("."))

"""Which files a reader passes who follows a request through the code: four walks, measured.

A file is passed when at least one of its functions runs between start and end of the walk, in any
thread of this process. Everything has been loaded before, so that importing counts for nothing.

A walk ends at ports: what lies behind `ObjectStore` is not shown, and the ingestion ends at
`Repository`, behind which lies the walk of a commit. Nor are the values that travel, which decide
nothing: `model/`, the log's records, ranges and keys, a query as data, the ports themselves,
settings and errors.
Both figures are printed, to the ports and in all.

`python -m tests.structure.walks` prints the walks, `--write` brings the lists of
`docs/development.md` up to date.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage_engine import (
    Entity,
    Event,
    Field,
    HandlerContext,
    Session,
    initialize_storage,
    on_event,
)

PACKAGES = ("storage_engine", "ontologia_dagster", "jobs")
# What we have. Aims: 24, 20, 16 and 30. A commit passes the line of those that wait, their group,
# and the series of commits that one swap of head publishes.
LIMITS = {"commit": 28, "query": 20, "event": 25, "ingestion": 35}
PAGE = Path(__file__).parents[2] / "docs" / "development.md"
VALUES = (
    "storage_engine/__init__.py",
    "storage_engine/commitlog/layout.py",
    "storage_engine/commitlog/parsing.py",
    "storage_engine/commitlog/ranges.py",
    "storage_engine/commitlog/records/",
    "storage_engine/commitlog/type_heads.py",
    "storage_engine/config.py",
    "storage_engine/errors.py",
    "storage_engine/events/outcomes.py",
    "storage_engine/events/protocol.py",
    "storage_engine/model/",
    "storage_engine/process.py",
    "storage_engine/query/spec.py",
    "storage_engine/repository/protocol.py",
)
BEHIND_OBJECT_STORE = ("storage_engine/objectstore/",)
BEHIND_REPOSITORY = (
    "storage_engine/commitlog/",
    "storage_engine/index/",
    "storage_engine/query/",
    "storage_engine/repository/",
    "storage_engine/schema/",
)


class Customer(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    tier: Field[str] = Field(default="")


class Greeted(Event):
    customer: Field[str]


@on_event(Greeted, id="walks.greet")
def greet(ctx: HandlerContext[Greeted]) -> None:
    """Only looks, so that the walk is the bus's own and not that of a commit too."""


class Recorder:
    """Notes product files in the order in which they are first entered, with their functions."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        self._recording = False
        self._names: dict[str, str | None] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """From here on, also in threads that start later (pools start lazily, so install first)."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _profile(self, frame: Any, event: str, _arg: Any) -> None:
        if event != "call" or not self._recording:
            return
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # bodies of modules and classes are not
        if not is_function or (name := self._product_file(code.co_filename)) is None:
            return
        functions = self.files.setdefault(name, [])
        if code.co_qualname not in functions:
            functions.append(code.co_qualname)

    def _product_file(self, path: str) -> str | None:
        if path not in self._names:
            parts = Path(path).parts
            start = next((i for i, part in enumerate(parts) if part in PACKAGES), None)
            product = start is not None and "site-packages" not in parts
            self._names[path] = "/".join(parts[start:]) if product else None
        return self._names[path]


def commit(folder: Path, recorder: Recorder) -> None:
    """A small commit of a session that has committed before, with what follows its CAS."""
    initialize_storage(str(folder / "store"))
    with recorder.installed(), Session(str(folder / "store")) as session:
        session.ensure(Customer(id="c1", name="Ada"))
        session.commit()
        session.flush()
        with recorder.recording():
            session.ensure(Customer(id="c2", name="Bo"))
            session.commit()
            session.flush()


def query(folder: Path, recorder: Recorder) -> None:
    """A typed query with a filter, answered as objects."""
    initialize_storage(str(folder / "store"))
    with recorder.installed(), Session(str(folder / "store")) as session:
        session.ensure([Customer(id=f"c{i}", name="Ada", tier="Gold") for i in range(3)])
        session.commit()
        session.flush()
        with recorder.recording():
            assert len(session.query().entities(Customer).where(Customer.tier == "Gold").collect())


def event(folder: Path, recorder: Recorder) -> None:
    """An event is sent and handled by a worker that runs until nothing is due."""
    initialize_storage(str(folder / "store"))
    with recorder.installed(), Session(str(folder / "store")) as session, recorder.recording():
        session.emit(Greeted(customer="c1"))
        assert session.drain([greet]).handled == 1


def ingestion(folder: Path, recorder: Recorder) -> None:
    """An asset that ingests a CSV file is materialised, with Spark in this process."""
    import dagster as dg

    from ontologia_dagster.declaration import OntologyAsset, SourceSpec
    from ontologia_dagster.ingestion.asset import ingestion_asset
    from ontologia_dagster.resources.ontology import OntologyResource
    from ontologia_dagster.resources.spark import SparkResource

    initialize_storage(str(folder / "store"))
    (folder / "customers.csv").write_text("id,name\nc1,Ada\nc2,Bo\n")
    asset = ingestion_asset(
        OntologyAsset(
            type="Customer",
            models="tests.structure.walks",
            source=SourceSpec(format="csv", paths=[str(folder / "customers.csv")]),
        )
    )
    ontology = OntologyResource(storage_uri=str(folder / "store"))
    resources = {"ontology": ontology, "spark": SparkResource()}
    with recorder.installed(), recorder.recording():
        assert dg.materialize([asset], resources=resources).success


WALKS: dict[str, Callable[[Path, Recorder], None]] = {
    "commit": commit,
    "query": query,
    "event": event,
    "ingestion": ingestion,
}


def walk(name: str) -> dict[str, list[str]]:
    """Functions by file, in the order of the first visit. Walked twice: the first time loads."""
    for recorder in (Recorder(), Recorder()):
        with tempfile.TemporaryDirectory() as folder:
            WALKS[name](Path(folder), recorder)
    return recorder.files


def to_the_ports(name: str, files: Iterable[str]) -> list[str]:
    behind = VALUES + BEHIND_OBJECT_STORE + (BEHIND_REPOSITORY if name == "ingestion" else ())
    return [file for file in files if not file.startswith(behind)]


def documented(page: str, name: str) -> list[str]:
    """The files of a walk as `docs/development.md` lists them."""
    block = _block(name).search(page)
    assert block is not None, f"docs/development.md has no list between `walk: {name}` and its end"
    return re.findall(r"`([\w/.]+\.py)`", block[2])


def with_list(page: str, name: str, files: Sequence[str]) -> str:
    text = "\n".join(f"{number}. `{file}`" for number, file in enumerate(files, 1))
    return _block(name).sub(lambda block: f"{block[1]}{text}{block[3]}", page)


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- walk: {name} -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", nargs="*", default=list(WALKS), help="commit, query, ...")
    parser.add_argument("--functions", action="store_true", help="show the functions that ran too")
    parser.add_argument("--all", action="store_true", help="go on behind the ports")
    parser.add_argument("--write", action="store_true", help="bring docs/development.md up to date")
    given = parser.parse_args()
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    for name in given.walks:
        files = walk(name)
        shown = to_the_ports(name, files)
        print(
            f"{name}: {len(shown)} files to the ports (at most {LIMITS[name]}), {len(files)} in all"
        )
        for file in files if given.all else shown:
            print(f"  {file}" + (f": {', '.join(files[file])}" if given.functions else ""))
        if given.write:
            PAGE.write_text(with_list(PAGE.read_text(), name, shown))


if __name__ == "__main__":
    main()

"""`Session.export` and `import_files`: what goes out comes in again, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from storage_engine import Entity, Field, Relation, Session, initialize_storage
from storage_engine.errors import (
    ConcurrentWriteError,
    ConfigurationError,
    ImportConflictError,
    SchemaOutdatedError,
    TypeDroppedError,
    ValidationError,
)
from storage_engine.model.validation import MAX_DEPTH
from storage_engine.repository.protocol import Repository
from storage_engine.runtime import migration
from storage_engine.runtime.exchange import load, readers, spool, summary
from tests.campaigns import examples
from tests.engines import Customer, Employment, Knows, Product, Subscription
from tests.query.worlds import Link, Thing, objects
from tests.runtime.support import make_storage

FORMATS = ("jsonl", "csv", "parquet")
ANN = Customer(id="ann", name="Ann")
BOB = Customer(id="bob", name="Bob")


def filled(uri: str, *objects: Any) -> Session:
    session = Session(uri)
    session.ensure(objects)
    session.commit()
    return session


def lines(*records: Any) -> io.BytesIO:
    """JSON lines in a pipe."""
    return io.BytesIO(b"".join(json.dumps(r).encode() + b"\n" for r in records))


def record(key: str, name: str, **members: Any) -> dict[str, Any]:
    return {"type": "Customer", "key": key, "fields": {"name": name}, **members}


def problems(session: Session, source: Any, **options: Any) -> list[str]:
    """What is wrong with an input, and that nothing was written."""
    before = session.repository.head_commit_id()
    report = session.import_files(source, **options)
    with pytest.raises(ValidationError):
        report.require()
    assert session.repository.head_commit_id() == before
    return [str(problem) for problem in report.problems]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "export.json"}


# --- what goes out comes in again -------------------------------------------------------------


@given(objects(max_size=5))
@settings(max_examples=examples(12), deadline=None)
@pytest.mark.parametrize("file_format", FORMATS)
def test_every_value_comes_back(
    tmp_path_factory: pytest.TempPathFactory, file_format: Any, made: list[Thing]
) -> None:
    folder = tmp_path_factory.mktemp("export")
    links = [Link(left_key=a.id, right_key=b.id, weight=3) for a, b in pairwise(made)]
    with Session(":memory:") as source, Session(":memory:") as target:
        source.ensure([*made, *links])
        source.commit()
        source.export(folder / "out", format=file_format)
        # With the classes, and by what the export tells of its types.
        for receiver in (Session(":memory:", entity_types=[Thing], relation_types=[Link]), target):
            report = receiver.import_files(folder / "out", apply=True)
            assert (report.applied, report.conflicts, report.notes) == (True, 0, ())
            if made:
                rows = receiver.query().entities(Thing).collect()
                assert sorted(rows, key=lambda r: r.id) == sorted(made, key=lambda r: r.id)
            if receiver is not target:
                receiver.close()
        if links:
            ends = [(r.left_key, r.right_key) for r in target.query().relations(Link).collect()]
            assert sorted(ends) == sorted((r.left_key, r.right_key) for r in links)
        target.export(folder / "again", format=file_format)
        assert files(folder / "out") == files(folder / "again")


SHOP = [
    ANN,
    BOB,
    Product(sku="p1", price=1.5),
    Subscription(left_key="ann", right_key="p1", seats=2),
    Employment(left_key="ann", right_key="p1", stint="2023", role="clerk"),
    Employment(left_key="ann", right_key="p1", stint="2024", role="boss"),
    Knows(left_key="ann", right_key="bob"),
]


@pytest.mark.parametrize("file_format", FORMATS)
def test_any_engine_gives_the_same_bytes(uri: str, tmp_path: Path, file_format: Any) -> None:
    with filled("sqlite:///" + str(tmp_path / "first.db"), *SHOP) as source:
        source.export(tmp_path / "out", format=file_format)
    with Session(uri) as target:
        preview = target.import_files(tmp_path / "out")
        assert [(t.type_name, t.insert) for t in preview.types] == [
            ("Customer", 2), ("Product", 1), ("Employment", 2), ("Knows", 1), ("Subscription", 1),
        ]  # fmt: skip
        assert target.repository.head_commit_id() == 0
        report = target.import_files(tmp_path / "out", apply=True, meta={"by": "test"})
        assert (report.applied, report.commit_id) == (True, 1)
        commit = target.get_commit(1)
        assert commit is not None
        assert commit["metadata"] == {"by": "test"}
        target.export(tmp_path / "again", format=file_format)
        assert files(tmp_path / "again") == files(tmp_path / "out")


def test_a_pipe_has_all_types(uri: str) -> None:
    pipe = io.BytesIO()
    with filled(":memory:", *SHOP) as source:
        report = source.export(pipe)
        assert (report.rows, report.output) == (7, "-")
    pipe.seek(0)
    with Session(uri) as target:
        target.import_files(pipe, format="jsonl", apply=True)
        assert target.query().entities(Customer).count() == 2
        assert target.query().relations(Employment).count() == 2


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_a_pipe_of_one_type(file_format: Any) -> None:
    with filled(":memory:", *SHOP) as source, Session(":memory:") as target:
        with pytest.raises(ConfigurationError, match="has one type, and there are Customer, "):
            source.export(io.BytesIO(), format=file_format)
        pipe = io.BytesIO()
        source.export(pipe, format=file_format, types=[Employment])
        pipe.seek(0)
        target.import_files(pipe, format=file_format, type=Employment, apply=True)
        assert target.query().relations(Employment).count() == 2


def test_as_of_and_history(uri: str, tmp_path: Path) -> None:
    with filled(uri, ANN) as session:
        session.ensure([Customer(id="ann", name="Anna"), BOB])
        session.commit()
        session.export(tmp_path / "then", as_of=1)
        session.export(tmp_path / "all", history_since=0, with_metadata=True)
        session.export(tmp_path / "since", history_since=1, format="csv", with_metadata=True)
    names = [json.loads(line) for line in (tmp_path / "then/Customer.jsonl").open()]
    assert [(r["key"], r["fields"]["name"]) for r in names] == [("ann", "Ann")]
    versions = [json.loads(line) for line in (tmp_path / "all/Customer.jsonl").open()]
    assert [(r["commit_id"], r["key"], r["fields"]["name"]) for r in versions] == [
        (1, "ann", "Ann"), (2, "ann", "Anna"), (2, "bob", "Bob"),
    ]  # fmt: skip
    table = (tmp_path / "since/Customer.csv").read_text().splitlines()
    assert table[0].startswith("commit_id,id,name")
    assert [line[:5] for line in table[1:]] == ["2,ann", "2,bob"]
    with Session(":memory:") as target:  # the last version counts, in one commit
        report = target.import_files(tmp_path / "all", apply=True)
        assert report.commit_id == 1
        assert "1 row repeats an identity" in report.notes[0]
        assert [c.name for c in target.query().entities(Customer).collect()] == ["Anna", "Bob"]
    with Session(":memory:") as target:
        target.import_files(tmp_path / "since", apply=True)
        assert target.query().entities(Customer).count() == 2


class Old(Entity, name="Evolving"):
    id: Field[str] = Field(primary_key=True)


class New(Entity, name="Evolving"):
    id: Field[str] = Field(primary_key=True)
    note: Field[str] = Field(default="none")


def test_an_export_as_of_has_the_schema_of_then(uri: str, tmp_path: Path) -> None:
    with filled(uri, Old(id="a"), Customer(id="c", name="C")):
        pass
    with Session(uri, entity_types=[New]) as session:
        session.migrate(dry_run=False, force=True)
        session.ensure(New(id="b"))
        session.commit()
        session.export(tmp_path / "then", as_of=1, types=["Evolving"])
        session.export(tmp_path / "now", types=[New])
        told = session.export(tmp_path / "all", types=["Evolving"], history_since=0)
    then = (tmp_path / "then/Evolving.jsonl").read_text()
    assert then == '{"type":"Evolving","key":"a","fields":{"id":"a"}}\n'
    assert (tmp_path / "now/Evolving.jsonl").read_text().count('"note":"none"') == 2
    assert any("written before (version 1)" in note for note in told.notes)
    with Session(":memory:", entity_types=[New]) as target:  # what has a default may be missing
        target.import_files(tmp_path / "then", apply=True)
        assert [row.note for row in target.query().entities(New).collect()] == ["none"]
    with Session(uri, entity_types=[Old]) as stale, pytest.raises(SchemaOutdatedError):
        stale.import_files(tmp_path / "now")


def test_a_type_that_was_dropped(uri: str, tmp_path: Path) -> None:
    with filled(uri, *SHOP[:3]) as session:
        session.export(tmp_path / "before", types=["Product"])
        plan = migration.preview_drop(session.repository, "Product")
        migration.apply_drop(session.repository, "Product", token=plan.token)
        report = session.export(tmp_path / "after")
        assert [t.spec.name for t in report.summary.types] == ["Customer"]
        with pytest.raises(ConfigurationError, match="export it as of commit 1"):
            session.export(tmp_path / "no", types=["Product"])
        assert not (tmp_path / "no").exists()
        assert session.export(tmp_path / "then", types=["Product"], as_of=1).rows == 1
        with pytest.raises(TypeDroppedError, match="create it anew"):
            session.import_files(tmp_path / "before")


@pytest.mark.parametrize("file_format", FORMATS)
def test_values_come_back_that_are_nested_as_deeply_as_they_may(
    tmp_path: Path, file_format: Any
) -> None:
    """In JSON lines they have a record around them."""

    class Nested(Entity):
        id: Field[str] = Field(primary_key=True)
        value: Field[Any] = Field(default=None)

    value: Any = 1.5
    for _ in range(MAX_DEPTH):
        value = {"a": value}
    with Session(":memory:", entity_types=[Nested]) as session:
        session.ensure(Nested(id="deep", value=value))
        session.commit()
        session.export(tmp_path / "out", format=file_format)
    with Session(":memory:", entity_types=[Nested]) as session:
        session.import_files(tmp_path / "out", apply=True).require()
        assert session.query().entities(Nested).collect()[0].value == value
        for levels, wrong in [
            (MAX_DEPTH + 1, "'value' does not fit its type"),
            (100_000, "too deep"),
        ]:
            text = '{"a":' * levels + "1" + "}" * levels
            line = b'{"type":"Nested","key":"x","fields":{"value":%s}}\n' % text.encode()
            assert wrong in problems(session, io.BytesIO(line), format="jsonl")[0]
        nan = line.replace(b":1}", b":NaN}").replace(b'{"a":' * 99_000, b"", 1)
        nan = nan.replace(b"}" * 99_000, b"", 1)
        assert "is not JSON" in problems(session, io.BytesIO(nan), format="jsonl")[0]


# --- an export is whole, or says that it is not -------------------------------------------------


def test_a_folder_is_not_written_over_unless_told(tmp_path: Path) -> None:
    with filled(":memory:", *SHOP) as session:
        session.export(tmp_path / "out")
        before = files(tmp_path / "out")
        with pytest.raises(ConfigurationError, match="has an export of commit 1"):
            session.export(tmp_path / "out")
        (tmp_path / "other").mkdir()
        (tmp_path / "other/mine.txt").write_text("mine")
        with pytest.raises(ConfigurationError, match="has other files"):
            session.export(tmp_path / "other")
        with pytest.raises(ConfigurationError, match="is a file"):
            session.export(tmp_path / "other/mine.txt")
        session.export(tmp_path / "out", types=[Customer], overwrite=True)
        assert files(tmp_path / "out") == {"Customer.jsonl": before["Customer.jsonl"]}
        session.export(tmp_path / "other", overwrite=True)
        assert (tmp_path / "other/mine.txt").read_text() == "mine"
        told = session.import_files(tmp_path / "other").notes
        assert told == ("not part of the export, and left alone: mine.txt",)


class Stop(BaseException):
    """The process ends here."""


def _stopped_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the process end at the n-th change of the disk by an export, without cleaning up."""
    count = 0

    def counted(do: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                raise Stop
            return do(*args, **options)

        return step

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(summary.ExportFolder, "abandon", lambda _self: None)
    return lambda: count


@pytest.mark.parametrize("earlier", [False, True])
def test_an_export_that_dies_at_any_write_is_never_taken_for_a_whole_one(
    tmp_path: Path, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(":memory:", *SHOP) as session, Session(":memory:") as target:
        with monkeypatch.context() as patch:
            steps = _stopped_at(0, patch)
            session.export(tmp_path / "count")
            total = steps()
        assert total > 8
        complete, refused = 0, set[str]()
        for number in range(1, total + 1 + earlier):
            folder = tmp_path / f"out{number}"
            if earlier:
                session.export(folder, types=[Customer])
            with monkeypatch.context() as patch:
                _stopped_at(number, patch)
                with contextlib.suppress(Stop):
                    session.export(folder, overwrite=True)
            try:
                told = target.import_files(folder)
            except ConfigurationError as error:
                refused.add(str(error).replace(str(folder), ""))
                continue
            assert not told.problems
            complete += 1
            assert len(told.types) in ((1, 5) if earlier else (5,))
            session.export(folder, overwrite=True)
            assert files(folder) == files(tmp_path / "count")
        assert complete >= 1
        assert all("never finished" in told or "no files" in told for told in refused)


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(":memory:", *SHOP) as session:
        session.export(tmp_path / "there", types=[Customer])
        kept = {p.name: p.read_bytes() for p in (tmp_path / "there").iterdir()}

        def interrupted(_name: str, rows: int) -> None:
            if rows > 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.export(tmp_path / "new", progress=interrupted)
        assert not (tmp_path / "new").exists()
        with pytest.raises(KeyboardInterrupt):
            session.export(tmp_path / "there", overwrite=True, progress=interrupted)
        assert {p.name: p.read_bytes() for p in (tmp_path / "there").iterdir()} == kept
        pipe = io.BytesIO()
        with pytest.raises(KeyboardInterrupt):
            session.export(pipe, progress=interrupted)
    with Session(":memory:") as target:
        pipe.seek(0)
        assert "its last line is missing" in problems(target, pipe, format="jsonl")[-1]
        cut = pipe.getvalue() + b'{"export_end":{"rows":9}}\n'
        assert "had 9 records" in problems(target, io.BytesIO(cut), format="jsonl")[-1]


def test_a_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    with filled(":memory:", *SHOP) as session:
        session.export(tmp_path / "out")
    path = tmp_path / "out/Customer.jsonl"
    with Session(":memory:", entity_types=[Customer, Product],
                 relation_types=[Employment, Knows, Subscription]) as target:  # fmt: skip
        path.write_bytes(path.read_bytes()[:-20])
        (tmp_path / "out/Product.jsonl").unlink()
        told = problems(target, tmp_path / "out")
        assert "Customer.jsonl: is not the file that export.json tells of" in told[0]
        assert told[1] == "Product.jsonl: is missing: export.json tells of it"
        path.write_text(json.dumps(record("c", "C")) + "\n")
        (tmp_path / "out/export.json").unlink()  # on purpose
        assert target.import_files(tmp_path / "out").types[0].insert == 1
    (tmp_path / "out/export.json").write_text('{"format_version": 99}')
    with Session(":memory:") as target:
        with pytest.raises(ConfigurationError, match="newer program"):
            target.import_files(tmp_path / "out")
        (tmp_path / "out/export.json").write_text("{")
        with pytest.raises(ConfigurationError, match="is not JSON"):
            target.import_files(tmp_path / "out")
        for text in ('{"format_version": 1, "types": [1]}', '{"format_version": 1}'):
            (tmp_path / "out/export.json").write_text(text)
            with pytest.raises(ConfigurationError, match="cannot be read"):
                target.import_files(tmp_path / "out")
        for text in ("[]", "5", '{"other": 1}'):
            (tmp_path / "out/export.json").write_text(text)
            with pytest.raises(ConfigurationError, match="is no summary of an export"):
                target.import_files(tmp_path / "out")
            with pytest.raises(ConfigurationError, match="is no summary of an export"):
                target.import_files(lines({"export": json.loads(text)}), format="jsonl")


# --- problems -------------------------------------------------------------------------------------


def test_all_problems_are_told_with_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 200)
    good = json.dumps(record("c0", "fine")).encode()
    wrong = [
        (b'{"type": "Customer"', "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"key": "a", "fields": {}}', "has no type"),
        (b'{"type": "Customer", "fields": {}}', "has neither key"),
        (b'{"type": "Customer", "key": 5}', "key must be a non-empty text"),
        (b'{"type": "Customer", "key": ""}', "key must be a non-empty text"),
        (b'{"type": "Customer", "key": "a", "left_key": "b"}', "has key and left_key"),
        (b'{"type": "Customer", "key": "a", "fields": []}', "fields is not a JSON object"),
        (b'{"type": "Customer", "key": "a", "feilds": {}}', "did you mean 'fields'?"),
        (b'{"type": "Customer", "key": "a", "fields": {"nmae": ""}}', "did you mean 'name'?"),
        (b'{"type": "Customer", "key": "a"}', "column 'name' is missing"),
        (b'{"type": "Customer", "key": "a", "fields": {"name": 1}}', "'name' is not text (got 1)"),
        (b'{"type": "Customer", "key": "a", "fields": {"name": null}}', "'name' is null"),
        (b'{"type": "Customer", "key": "a", "fields": {"name": NaN}}', "is not JSON"),
        (
            b'{"type": "Customer", "key": "a", "fields": {"name": "\xff"}}',
            "is not UTF-8: byte 0xff",
        ),
        (
            b'{"type": "Customer", "key": "a", "fields": {"id": "b", "name": ""}}',
            "but id in fields",
        ),
        (b'{"type": "Custmer", "key": "a", "fields": {}}', "did you mean 'Customer'?"),
        (b'{"type": "Employment", "left_key": "a", "right_key": "b"}', "instance_key is missing"),
        (b'{"type": "Employment", "left_key": "a"}', "right_key is missing"),
        (b'{"type": "Customer", "key": "' + b"a" * 300 + b'"}', "is longer than"),
    ]
    text = b"\xef\xbb\xbf" + good + b"\n\n" + b"\n".join(line for line, _ in wrong) + b"\n" + good
    with Session(":memory:", entity_types=[Customer], relation_types=[Employment]) as session:
        told = problems(session, io.BytesIO(text), format="jsonl")
    assert len(told) == len(wrong)
    by_line = sorted(told, key=lambda t: int(t.split(" line ")[1].partition(":")[0]))
    for number, (line, (_, expected)) in enumerate(zip(by_line, wrong, strict=True), start=3):
        assert line.startswith(f"<stdin> line {number}: ")
        assert expected in line


def test_problems_are_told_up_to_a_bound() -> None:
    with Session(":memory:", entity_types=[Customer]) as session:
        report = session.import_files(lines(*([1] * 500)), format="jsonl")
        assert (len(report.problems), report.problems_complete) == (100, False)
        with pytest.raises(ValidationError, match="at least 100 problems"):
            report.require()
        many = [record(f"c{n}", 5 if n in (7, 20_000) else "x") for n in range(20_001)]  # type: ignore[arg-type]
        told = problems(session, lines(*many), format="jsonl")
        assert [t.partition(":")[0] for t in told] == ["<stdin> line 8", "<stdin> line 20001"]


CSV = """id,name,age
a,"two
lines",1
b,x,five

c,x
d,x,2,3
e,x,6
,x,7
f,x,8
"""


def test_problems_of_csv(tmp_path: Path) -> None:
    class Aged(Entity, name="Customer"):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        age: Field[int | None] = Field(default=None)
        tags: Field[list[str]] = Field(default_factory=list)

    path = tmp_path / "Customer.csv"
    with Session(":memory:", entity_types=[Aged]) as session:
        path.write_text(CSV)
        told = problems(session, path)
        assert [t.partition(":")[0] for t in told] == [
            f"Customer.csv line {n}" for n in (4, 6, 7, 9)
        ]
        assert "'age' is not an integer" in told[0]
        assert "has 2 values, and there are 3 columns" in told[1]
        assert "'id' is empty" in told[3]
        for text, expected in [
            (b"", "the first line must name the columns"),
            (b"id,name,nmae\n", "did you mean 'name'?"),
            (b"id\na\n", "column 'name' is missing"),
            (b"id,id,name\n", "Customer.csv: there is the column 'id' twice"),
            (b"id,name\na,\xff\n", "line 2: is not UTF-8"),
            (b"id,n\xe4me\n", "convert it to UTF-8"),
            (b'id,name\na,"x\n', "line 2: quote is never closed"),
            (b'id,name,tags\na,x,[1]\n', "line 2: column 'tags' does not fit its type"),
            (b'id,name,tags\na,x,oops\n', "line 2: column 'tags' does not fit its type"),
        ]:  # fmt: skip
            path.write_bytes(text)
            (said,) = problems(session, path)[:1]
            assert expected in said
            assert said.count(path.name) == 1
        path.write_bytes(b"\xef\xbb\xbfid,name\r\na,x\r\n")
        assert session.import_files(path, apply=True).types[0].insert == 1
        path.rename(tmp_path / "Costumer.csv")
        assert "did you mean 'Customer'?" in problems(session, tmp_path / "Costumer.csv")[0]
        told = problems(session, tmp_path / "Costumer.csv", type="relation:Nothing")
        assert "unknown relation type 'Nothing'" in told[0]


def test_problems_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "Product.parquet"
    with Session(":memory:", entity_types=[Product]) as session:
        nan = float("nan")
        pq.write_table(pa.table({"sku": ["a", None, "c"], "price": [1.0, 2.0, nan]}), path)
        told = problems(session, path)
        assert [t.partition(":")[0] for t in told] == [
            "Product.parquet row 2",
            "Product.parquet row 3",
        ]
        pq.write_table(pa.table({"sku": ["a"], "prize": [1.0]}), path)
        assert "did you mean 'price'?" in problems(session, path)[0]
        path.write_bytes(b"PAR1 not really")
        assert "cannot be read as Parquet" in problems(session, path)[0]


def test_times_without_a_zone_are_noted(tmp_path: Path) -> None:
    class Visit(Entity):
        id: Field[str] = Field(primary_key=True)
        at: Field[datetime]

    moments = pa.array([0], pa.timestamp("us"))
    pq.write_table(pa.table({"id": ["a"], "at": moments}), tmp_path / "Visit.parquet")
    with Session(":memory:", entity_types=[Visit]) as session:
        report = session.import_files(tmp_path / "Visit.parquet", apply=True)
        assert report.notes == ("Visit.at: times without a zone were read as UTC",)
        visit = session.query().entities(Visit).first()
        assert visit is not None
        assert visit.at == datetime(1970, 1, 1, tzinfo=UTC)


def test_what_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/Customer.jsonl.abc.partial").write_text("")
    with Session(":memory:") as session:
        inputs: list[tuple[Any, dict[str, Any], str]] = [
            (tmp_path / "nothing", {}, "is not there"),
            (tmp_path / "empty", {}, "has no files to import"),
            (tmp_path / "half", {}, "never finished"),
            (tmp_path / "text.txt", {}, "does not tell what is in it"),
            (tmp_path / "empty", {"format": "csv"}, "leave out type and format"),
            (io.BytesIO(), {}, "a pipe does not tell"),
            (io.BytesIO(), {"format": "csv"}, "name it"),
            (io.BytesIO(), {"format": "jsonl", "type": "A"}, "leave out the type"),
            (io.BytesIO(), {"format": "xml"}, "is unknown"),
            (io.BytesIO(), {"format": "csv", "type": "thing:A"}, "write NAME, entity:NAME"),
            (io.BytesIO(), {"on_conflict": "merge"}, "is unknown"),
        ]
        for source, options, expected in inputs:
            with pytest.raises(ConfigurationError, match=expected):
                session.import_files(source, **options)
        exports: list[tuple[dict[str, Any], str]] = [
            ({"format": "xml"}, "is unknown"),
            ({"as_of": 1, "history_since": 0}, "contradict each other"),
            ({"history_since": -1}, "from 0 on"),
            ({"types": ["Nothing"]}, "nothing is stored yet"),
        ]
        for options, expected in exports:
            with pytest.raises(ConfigurationError, match=expected):
                session.export(tmp_path / "out", **options)
        with pytest.raises(ConfigurationError, match="no commit 3"):
            session.export(tmp_path / "out", as_of=3)
        assert not (tmp_path / "out").exists()
        assert session.export(tmp_path / "out").rows == 0
        assert session.import_files(tmp_path / "out", apply=True).commit_id is None


# --- conflicts ------------------------------------------------------------------------------------


def test_conflicts(uri: str) -> None:
    new, changed, same = record("cid", "Cid"), record("ann", "Anna"), record("bob", "Bob")
    with filled(uri, ANN, BOB) as session:
        preview = session.import_files(lines(new, changed, same), format="jsonl")
        counts = preview.types[0]
        assert (counts.insert, counts.update, counts.unchanged, counts.conflict) == (1, 0, 1, 1)
        assert (preview.conflicts, preview.types[0].examples) == (1, (("ann",),))
        with pytest.raises(ImportConflictError, match="1 of Customer") as refused:
            session.import_files(lines(new, changed, same), format="jsonl", apply=True)
        assert refused.value.conflicts == {"Customer": 1}
        assert session.repository.head_commit_id() == 1
        skipped = session.import_files(
            lines(new, changed, same), format="jsonl", apply=True, on_conflict="skip"
        )
        assert (skipped.commit_id, skipped.writes) == (2, 1)
        names = {c.id: c.name for c in session.query().entities(Customer).collect()}
        assert names == {"ann": "Ann", "bob": "Bob", "cid": "Cid"}
        again = session.import_files(
            lines(new, changed, same), format="jsonl", apply=True, on_conflict="skip"
        )
        assert (again.already_applied, again.applied, again.commit_id) == (True, True, 2)
        written = session.import_files(
            lines(new, changed, same), format="jsonl", apply=True, on_conflict="upsert"
        )
        assert (written.commit_id, written.writes) == (3, 1)
        assert session.query().entities(Customer).first().name == "Anna"  # type: ignore[union-attr]


def test_a_unit_of_work_is_done_once(uri: str) -> None:
    given = [record("ann", "Anna")]
    with filled(uri, ANN) as session:
        options: dict[str, Any] = {"format": "jsonl", "apply": True, "on_conflict": "upsert"}
        assert session.import_files(lines(*given), **options).commit_id == 2
        assert session.import_files(lines(*given), **options).already_applied
        session.ensure(Customer(id="ann", name="Somebody else's"))
        session.commit()
        with pytest.raises(ImportConflictError, match="was imported by commit 2") as refused:
            session.import_files(lines(*given), **options)
        assert refused.value.applied_by == 2
        preview = session.import_files(lines(*given), **{**options, "apply": False})
        assert (preview.already_applied, preview.conflicts) == (True, 1)
        named = {**options, "idempotency": ("mine", 1)}
        assert session.import_files(lines(*given), **named).commit_id == 4
        session.ensure(Customer(id="ann", name="Again"))
        session.commit()
        told = session.import_files(lines(*given), **named)
        assert (told.already_applied, told.commit_id, told.types) == (True, 4, ())
        assert session.query().entities(Customer).first().name == "Again"  # type: ignore[union-attr]


def test_an_identity_twice_counts_by_its_last_row(uri: str) -> None:
    given = [record("b", "first"), record("a", "x"), record("b", "last"), record("a", "x")]
    with Session(uri, entity_types=[Customer]) as session:
        report = session.import_files(lines(*given), format="jsonl", apply=True)
        assert "2 rows repeat an identity" in report.notes[0]
        assert report.types[0].rows == 2
        names = {c.id: c.name for c in session.query().entities(Customer).collect()}
        assert names == {"a": "x", "b": "last"}


@pytest.mark.parametrize("on_conflict", ["abort", "skip", "upsert"])
@pytest.mark.parametrize("bulk", [False, True])
def test_somebody_else_writes_between_comparing_and_committing(
    uri: str, on_conflict: Any, bulk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bulk:
        monkeypatch.setattr(load, "AT_HAND", 0)
        monkeypatch.setattr(spool, "AT_HAND", 0)
    with Session(uri, entity_types=[Customer]) as session:
        session.ensure(BOB)
        session.commit()
        commit, rivals = session.repository.commit, ["ann"]

        def rivalled(self: Repository, request: Any) -> Any:
            if rivals:
                rivals.pop()
                with filled(uri, Customer(id="ann", name="theirs")):
                    pass
            return commit(request)

        monkeypatch.setattr(type(session.repository), "commit", rivalled)
        given = lines(record("ann", "ours"), record("cid", "Cid"))
        options: dict[str, Any] = {"format": "jsonl", "apply": True, "on_conflict": on_conflict}
        if on_conflict == "abort":
            with pytest.raises(ImportConflictError):
                session.import_files(given, **options)
        else:
            assert session.import_files(given, **options).applied
    with Session(uri) as session:
        names = {c.id: c.name for c in session.query().entities(Customer).collect()}
    expected = {"abort": {"ann": "theirs"}, "skip": {"ann": "theirs", "cid": "Cid"}}
    others = expected.get(on_conflict, {"ann": "ours", "cid": "Cid"})
    assert names == {"bob": "Bob", **others}


@pytest.mark.parametrize("moment", ["before the base", "before the commit"])
def test_somebody_else_stores_the_type_first(
    uri: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not stored when the import began is looked for again."""
    with Session(uri, entity_types=[Customer]) as session:
        engine, rivals = type(session.repository), ["ann"]
        name = "head_commit_id" if moment == "before the base" else "commit"
        method = getattr(engine, name)

        def rivalled(self: Repository, *args: Any) -> Any:
            if rivals:
                rivals.pop()
                with filled(uri, Customer(id="ann", name="theirs")):
                    pass
            return method(self, *args)

        monkeypatch.setattr(engine, name, rivalled)
        with pytest.raises(ImportConflictError):
            session.import_files(lines(record("ann", "ours")), format="jsonl", apply=True)
        assert session.repository.head_commit_id() == 1


def test_the_session_knows_its_import(local: Session) -> None:
    local.ensure(ANN)
    report = local.import_files(lines(record("bob", "Bob")), format="jsonl", apply=True,
                                idempotency=("a", 1))  # fmt: skip
    assert local.last_commit is not None
    assert local.last_commit.commit_id == report.commit_id == 1
    assert local.commit(isolation="snapshot") == 2  # the intents are still there, on their base
    assert local.query().entities(Customer).count() == 2


def test_progress_is_told(local: Session) -> None:
    local.ensure(ANN)
    local.commit()
    told: list[tuple[str, int]] = []
    given = [record(f"c{n:05d}", "x") for n in range(20_000)]
    local.import_files(
        lines(*given),
        format="jsonl",
        apply=True,
        progress=lambda what, rows: told.append((what, rows)),
    )
    assert list(dict.fromkeys(what for what, _ in told)) == ["reading", "comparing", "writing"]
    reading = [rows for what, rows in told if what == "reading"]
    assert reading == sorted(reading)
    assert (len(reading) > 2, reading[-1]) == (True, 20_000)
    assert [rows for what, rows in told if what == "comparing"][-1] == 20_000


def test_a_rival_that_never_stops(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(uri, BOB) as session:

        def refused(_self: Repository, _request: Any) -> Any:
            raise ConcurrentWriteError(type="Customer", identities=["ann"], snapshot=1)

        monkeypatch.setattr(type(session.repository), "commit", refused)
        with pytest.raises(ConcurrentWriteError):
            session.import_files(lines(record("ann", "A")), format="jsonl", apply=True)


def test_ends_that_are_not_there_are_noted(uri: str) -> None:
    def job(left: str, right: str) -> dict[str, Any]:
        keys = {"left_key": left, "right_key": right, "instance_key": "1"}
        return {"type": "Employment", **keys, "fields": {"role": "r"}}

    with filled(uri, ANN, SHOP[4]) as session:
        given = lines(record("cid", "C"), job("ann", "p1"), job("cid", "p2"), job("dan", "p2"))
        report = session.import_files(given, format="jsonl")
        assert report.notes == (
            "Employment: 1 left_key without a Customer ('dan'), neither stored nor in the input",
            "Employment: 2 right_keys without a Product ('p1', 'p2'), neither stored nor in the "
            "input",
        )


class Namesake(Relation[Customer, Customer], name="Customer"):
    """Shares its stored name with an entity type."""


@pytest.mark.parametrize("file_format", FORMATS)
def test_two_types_of_one_name(tmp_path: Path, file_format: Any) -> None:
    uri = make_storage(tmp_path, "object-v2")
    with filled(uri, ANN, Namesake(left_key="ann", right_key="ann")) as session:
        for among in ("store", "store/meta/new"):
            with pytest.raises(ConfigurationError, match="is among the objects"):
                session.export(tmp_path / among, overwrite=True)
        session.export(tmp_path / "out", format=file_format)
        assert sorted(files(tmp_path / "out")) == [
            f"Customer.entity.{file_format}", f"Customer.relation.{file_format}",
        ]  # fmt: skip
        only = session.export(tmp_path / "one", types=["relation:Customer"], format=file_format)
        assert [t.spec.kind for t in only.summary.types] == ["relation"]
    (tmp_path / "out/export.json").unlink()
    with Session(":memory:", entity_types=[Customer], relation_types=[Namesake]) as target:
        report = target.import_files(tmp_path / "out", apply=True)
        assert [(t.kind, t.insert) for t in report.types] == [("entity", 1), ("relation", 1)]


def test_an_export_is_of_one_commit(uri: str, tmp_path: Path) -> None:
    """What is committed while it runs is not in it, of no type."""
    with filled(uri, *SHOP) as session:

        def meanwhile(name: str, _rows: int) -> None:
            if name == "Customer":
                with filled(uri, Product(sku="p2", price=2.0), Customer(id="new", name="New")):
                    pass

        report = session.export(tmp_path / "out", progress=meanwhile)
        assert {t.spec.name: t.rows for t in report.summary.types}["Product"] == 1
        assert report.summary.commit_id == 1
    assert summary.FIRST_LINE == "export"  # a contract: pipes of older programs are read


@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_rows_pass_through_in_bounded_memory(tmp_path: Path, file_format: Any) -> None:
    """What Arrow holds at once is a small part of the rows; `benchmarks/exchange.py` has the
    figures of whole processes."""
    text, count = "x" * 4_000, 12_000
    uri = make_storage(tmp_path, "object-v2")
    with Session(uri) as session:
        source = pa.table({"id": [f"c{n:05d}" for n in range(count)], "name": [text] * count})
        session.ingest(Customer, source)
        session.commit()
        session.repository.flush()
        del source
        before = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(before)
        pa.set_memory_pool(pool)
        try:
            session.export(tmp_path / "out", format=file_format)
            with Session(":memory:") as target:
                preview = target.import_files(tmp_path / "out")
        finally:
            pa.set_memory_pool(before)
    assert preview.types[0].insert == count
    assert pool.max_memory() < len(text) * count / 2


def test_an_uninitialised_target(tmp_path: Path) -> None:
    from storage_engine.errors import UninitializedStorageError

    with pytest.raises(UninitializedStorageError), Session(f"file://{tmp_path}/none") as session:
        session.import_files(lines(record("a", "A")), format="jsonl")
    initialize_storage(f"file://{tmp_path}/none")

"""A first ontology: declare types, commit, change, ingest in bulk, ask, look back in time.

Run it with `make example`, or `python docs/examples/first_ontology.py --storage my-ontology` to
keep the storage in a directory of your choice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from storage_engine import (
    Entity,
    Event,
    Field,
    OntologiaError,
    Relation,
    Session,
    initialize_storage,
    right,
)

console = Console()


# 1. Types are Python classes.


class Person(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    city: Field[str | None] = Field(default=None)
    skills: Field[list[str]] = Field(default_factory=list)


class Company(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]


class Knows(Relation[Person, Person]):  # at most one per pair
    since: Field[int]


class Employment(Relation[Person, Company]):  # several per pair, told apart by `stint`
    stint: Field[str] = Field(instance_key=True)
    role: Field[str]


class Hired(Event):
    person: Field[str]


def main(storage: Path) -> None:
    # 2. A storage is a directory here; `s3://bucket/prefix` works the same way.
    initialize_storage(storage)

    # 3. A session collects what should be true, and publishes it as one commit.
    with Session(storage, entity_types=[Person, Company], relation_types=[Knows, Employment]) as s:
        heading("Commit objects and relations together")
        ada = Person(id="ada", name="Ada", city="London", skills=["mathematics"])
        grace = Person(id="grace", name="Grace", city="New York")
        s.ensure([ada, grace, Company(id="acme", name="Acme")])
        s.ensure(Knows(left_key="ada", right_key="grace", since=1950))
        s.ensure(Employment(left_key="ada", right_key="acme", stint="1", role="analyst"))
        s.ensure(Employment(left_key="ada", right_key="acme", stint="2", role="director"))
        say(s, s.commit(event=Hired(person="ada"), meta={"why": "first data"}))

        heading("Change one of them: only the difference is written")
        s.ensure([ada.replace(city="Paris"), grace])
        say(s, s.commit())

        heading("State the same again: nothing to do, so no commit")
        s.ensure([ada.replace(city="Paris"), grace])
        say(s, s.commit())

        heading("Ingest an Arrow table (or a data frame, or a Parquet, CSV or JSON lines file)")
        numbers = range(1000)
        people = pa.table(
            {"id": [f"p{n:04}" for n in numbers], "name": [f"Person {n}" for n in numbers]}
        )
        s.ingest(Person, people)
        say(s, s.commit(idempotency=("first-load", 1)))

        heading("Repeat it under the same idempotency key: the earlier commit answers")
        s.ingest(Person, people)
        say(s, s.commit(idempotency=("first-load", 1)))

        s.flush()  # let the work that follows commits (indices, lock release) finish
        heading("Every commit is kept")
        show_commits(s)

        heading("Ask: filters, relations and their ends, paths")
        mathematicians = s.query().entities(Person).where(Person.skills.contains("mathematics"))
        console.print(f"  knows mathematics: {', '.join(p.name for p in mathematicians.collect())}")
        directors = s.query().relations(Employment).where(Employment.role == "director")
        for stint in directors.collect():
            console.print(f"  {stint.left_key} -> {stint.right_key}: {stint.role}")
        at_acme = s.query().relations(Employment).where(right(Employment).name == "Acme")
        console.print(f"  stints at Acme: {at_acme.count()}")
        for path in s.query().entities(Person).via(Knows).collect():
            (knows,) = path.relations
            console.print(f"  {path.source.name} knows {knows.right.name} since {knows.since}")

        heading("Or in SQL")
        for row in s.sql(
            "select city, count(*) as n from Person group by city order by n"
        ).collect():
            console.print(f"  {row['city'] or 'unknown'}: {row['n']}")

        heading("Time travel")
        show_cities(s)
        for change in s.diff(1, 2):
            console.print(f"  {change['key']}: {change['before']} -> {change['after']}")

        heading("What it cost: requests to the store")
        show_requests(s.storage_info())

    heading("Look further")
    for command in ("info", "commits", "commits examine 2"):
        line = f"  {shell_command()} {command} --storage-uri {storage}"
        console.print(line, soft_wrap=True, highlight=False)


def say(session: Session, commit_id: int | None) -> None:
    result = session.last_commit
    if commit_id is None or result is None:
        console.print("  no commit")
    elif result.already_applied:
        console.print(f"  commit {commit_id} had done it already")
    else:
        for change in result.changes:
            counts = f"{change.inserted} inserted, {change.updated} updated"
            console.print(f"  commit {commit_id}: {change.type_name}, {counts}", highlight=False)


def show_commits(session: Session) -> None:
    table = Table("commit", "made at (UTC)", "types", "metadata")
    for commit in session.list_commits():
        made_at = commit["created_at"][:19].replace("T", " ")
        meta = ", ".join(f"{k}: {v}" for k, v in commit["metadata"].items())
        table.add_row(str(commit["id"]), made_at, ", ".join(commit["types"]), meta)
    console.print(table)


def show_cities(session: Session) -> None:
    table = Table("read", "Ada's city", "written by commit", "people in all")
    people = session.query().entities(Person)
    for label, query in (
        ("as of commit 1", people.as_of(1)),
        ("as of commit 2", people.as_of(2)),
        ("latest", people),
    ):
        (ada,) = query.where(Person.id == "ada").collect()
        table.add_row(label, ada.city, str(ada.meta().commit_id), str(query.count()))
    console.print(table)


def show_requests(info: dict[str, Any]) -> None:
    table = Table("request", "count")
    for name, count in sorted(info["requests"].items()):
        if isinstance(count, int):
            table.add_row(name, str(count))
    console.print(table)


def shell_command() -> str:
    """`onto`, as it can be typed here: in a checkout it is not on the PATH."""
    beside = Path(sys.executable).with_name("onto")
    return "onto" if shutil.which("onto") or not beside.exists() else os.path.relpath(beside)


def heading(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", type=Path, help="a directory that holds no ontology yet")
    given = parser.parse_args().storage
    try:
        main(given or Path(tempfile.mkdtemp(prefix="ontologia-")) / "store")
    except OntologiaError as error:
        sys.exit(f"first_ontology: {error}")

"""A type that changes twice: once by itself, once through an upgrader, and its past stays readable.

python docs/examples/schema_change.py --storage onto.db
"""

from __future__ import annotations

import argparse
from typing import Any

from storage_engine import Entity, Field, SchemaOutdatedError, Session, upgrader


class CustomerAtFirst(Entity, name="Customer"):
    id: Field[str] = Field(primary_key=True)
    first: Field[str]
    last: Field[str]


class CustomerWithTier(Entity, name="Customer"):
    """One more field, with a default: an additive change."""

    id: Field[str] = Field(primary_key=True)
    first: Field[str]
    last: Field[str]
    tier: Field[str] = Field(default="Standard")


class Customer(Entity):
    """One name instead of two, and a field with another name."""

    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    level: Field[str] = Field(default="Standard", renamed_from="tier")


@upgrader("Customer", from_version=2)
def one_name(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": f"{row['first']} {row['last']}",
        "level": row["tier"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default="onto.db")
    storage = parser.parse_args().storage

    with Session(storage) as session:
        session.ensure(CustomerAtFirst(id="c1", first="Ada", last="Byron"))

    with Session(storage, entity_types=[CustomerWithTier]) as session:
        try:
            session.validate()
        except SchemaOutdatedError as error:
            print("validate:", "; ".join(error.differences))
        preview = session.migrate()
        print("rows to rewrite:", dict(preview.estimated_rows))
        result = session.migrate(dry_run=False, token=preview.token)
        print("versions:", dict(result.new_schema_versions), "by commit", result.commit_id)
        session.ensure(CustomerWithTier(id="c1", first="Ada", last="Lovelace", tier="Gold"))

    with Session(storage, entity_types=[Customer]) as session:
        result = session.migrate(dry_run=False, token=session.migrate().token)
        print("versions:", dict(result.new_schema_versions), "by commit", result.commit_id)
        customers = session.query().entities(Customer)
        print("now:", [(c.name, c.level) for c in customers.collect()])
        print("as of commit 1:", [c.name for c in customers.upgraded().as_of(1).collect()])
        print("as it was:", session.query().raw("Customer", schema_version=1).collect())
        for change in session.changes(0):
            print("change:", change["commit_id"], change["operation"], change["fields"]["name"])


if __name__ == "__main__":
    main()

"""Mistakes in a declaration that show once its models are imported, and its source is looked at.

A declaration by itself is checked when it is made. Here the names in it are looked up: the type in
its module, fields in the type, and columns in the source's file where there is one on this machine.
Every mistake is told, each as (member, sentence), with the nearest name. Nothing here needs Spark
or opens a storage.
"""

from __future__ import annotations

import difflib
import pkgutil
import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ontologia_dagster.ingestion.partitions import field_type
from ontologia_dagster.ingestion.source_columns import columns_of_file, columns_of_schema
from storage_engine.errors import ConfigurationError
from storage_engine.model.columns import columns_of
from storage_engine.model.expectations import RefersTo, parse_expectation
from storage_engine.runtime.arguments import declared_types as types_of_module
from storage_engine.spark.missing_policy import field_marks

if TYPE_CHECKING:
    from ontologia_dagster.declaration import OntologyAsset
    from storage_engine.model.spec import TypeSpec

Problem = tuple[tuple[str, ...], str]
_PLAIN_COLUMN = re.compile(r"`(?P<quoted>[^`]+)`|(?P<plain>[A-Za-z_]\w*)")
# Expressions of one word that name no column.
_WORDS = {"null", "true", "false", "current_date", "current_timestamp", "current_user", "now"}


def find_mistakes(declared: OntologyAsset, *, with_files: bool) -> list[Problem]:
    """`with_files` looks at the source's file, too. A location must not do that to load: files
    come and go, and what they hold is nothing that a deployment depends on."""
    problems = list(_functions(declared))
    try:
        types = types_of_module(declared.models, option="models")
    except ConfigurationError as error:
        return [*problems, (("models",), f"{error}{_near_module(declared.models)}")]
    named = [spec for (_, name), spec in types.items() if name == declared.type]
    if len(named) != 1:
        names = sorted({name for _, name in types})
        why = f"{declared.models} has an entity and a relation {declared.type!r}"
        if not named:
            why = (
                f"{declared.models} has no type {declared.type!r}; {nearest(declared.type, names)}"
            )
        return [*problems, (("type",), f"type: {why}")]
    [spec] = named
    problems += _fields(declared, spec, {name for _, name in types})
    if with_files and declared.transform is None:
        problems += _columns(declared, spec)
    return problems


def nearest(name: str, names: Collection[str]) -> str:
    """`did you mean tier?`, or what there is."""
    folded = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), list(folded), n=1)
    return f"did you mean {folded[near[0]]}?" if near else f"there are {', '.join(names)}"


def _functions(declared: OntologyAsset) -> Iterator[Problem]:
    """Modules of functions are looked for and not imported: they may need Spark."""
    for member, named in (
        (("transform",), declared.transform),
        (("source", "fingerprint"), declared.source.fingerprint),
    ):
        module, _, function = (named or "").partition(":")
        if named is not None and not (module and function):
            text = f"{'.'.join(member)} is module:function, such as shop.cleaning:tidy"
            yield member, f"{text}, not {named!r}"
        elif module and not _is_module(module):
            yield member, f"{'.'.join(member)}: there is no module {module}{_near_module(module)}"


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _near_module(name: str) -> str:
    """The nearest beside it in its package, where that is one."""
    package, _, last = name.rpartition(".")
    if _is_module(name) or not package or not _is_module(package):
        return ""
    spec = find_spec(package)
    paths = spec.submodule_search_locations if spec is not None else None
    beside = [module.name for module in pkgutil.iter_modules(paths)] if paths else []
    near = difflib.get_close_matches(last, beside, n=1)
    return f"; did you mean {package}.{near[0]}?" if near else ""


def _fields(declared: OntologyAsset, spec: TypeSpec, types: Collection[str]) -> Iterator[Problem]:
    """Names of the type's fields, wherever the declaration has them."""
    fields = columns_of(spec)

    def unknown(member: tuple[str, ...], name: str) -> Problem:
        text = f"{'.'.join(member)}: {spec.name} has no field {name!r}; {nearest(name, fields)}"
        return member, text

    for name in declared.columns:
        if name not in fields:
            yield unknown(("columns", name), name)
    if declared.order_by is not None and declared.order_by not in fields:
        yield unknown(("order_by",), declared.order_by)
    for number, raw in enumerate(declared.expectations):
        expectation = parse_expectation(raw)
        member = ("expectations", str(number))
        for name in expectation.columns:
            if name not in fields:
                yield unknown(member, name)
        if isinstance(expectation, RefersTo) and expectation.type_name not in types:
            near = difflib.get_close_matches(expectation.type_name, sorted(types), n=1)
            if near:  # otherwise it may be a type of another module
                text = f"{declared.models} has no type {expectation.type_name!r}"
                yield member, f"{'.'.join(member)}: {text}; did you mean {near[0]}?"
    try:
        field_marks(declared.missing, spec)
    except ConfigurationError as error:
        yield ("missing", "set"), str(error)
    if declared.partitions is not None:
        if declared.partitions.field not in fields:
            yield unknown(("partitions", "field"), declared.partitions.field)
        else:
            try:
                field_type(spec, declared.partitions)
            except ConfigurationError as error:
                yield ("partitions", "field"), f"partitions.field: {error}"


def _columns(declared: OntologyAsset, spec: TypeSpec) -> Iterator[Problem]:
    """Names of the source's columns: those that it is declared to have, or else those of a file."""
    if declared.source.row_schema is not None:
        where, columns = "source.row_schema", columns_of_schema(declared.source.row_schema)
    elif (looked_at := columns_of_file(declared.source)) is not None:
        where, columns = looked_at
    else:
        return
    present = {name.lower() for name in columns}
    expressions = {("columns", name): sql for name, sql in declared.columns.items()}
    if declared.partitions is not None and declared.partitions.expression:
        expressions["partitions", "expression"] = declared.partitions.expression
    for member, sql in expressions.items():
        name = _plain_column(sql)
        if name is not None and name.lower() not in present:
            text = f"{where} has no column {name!r}; {nearest(name, columns)}"
            yield member, f"{'.'.join(member)}: {text}"
    yield from _not_mapped(declared, spec, where, columns)


def _plain_column(sql: str) -> str | None:
    match = _PLAIN_COLUMN.fullmatch(sql.strip())
    if match is None or sql.strip().lower() in _WORDS:
        return None
    return match["quoted"] or match["plain"]


def _not_mapped(
    declared: OntologyAsset, spec: TypeSpec, where: str, columns: list[str]
) -> Iterator[Problem]:
    """Fields that nothing gives; and without a mapping, columns that the type has not."""
    optional = {field.name for field in spec.fields if not field.required}
    for name in columns_of(spec):
        if name not in declared.columns and name not in columns and name not in optional:
            text = f"nothing gives {spec.name}.{name}: {where} has no such column; "
            yield ("columns",), f"columns: {text}{nearest(name, columns)}"
    if not declared.columns:
        for name in columns:
            if name not in columns_of(spec):
                text = f"{where} has a column {name!r}, and {spec.name} has no such field"
                near = nearest(name, columns_of(spec))
                yield ("columns",), f"columns: {text}; {near} With `columns` others are left out"

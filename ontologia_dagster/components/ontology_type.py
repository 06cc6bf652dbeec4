"""A type of the ontology as a YAML file: `defs.yaml` becomes asset, check, job, schedule, sensor.

    type: ontologia_dagster.components.OntologyTypeComponent
    attributes:
      type: Customer
      models: shop.models
      source: {format: csv, paths: ["data/customers/*.csv"]}

`dg scaffold defs ontologia_dagster.components.OntologyTypeComponent customers --type Customer
--models shop.models --source-path 'data/*.csv'` writes a first one, and `dg check defs` finds
every mistake in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import cleandoc
from typing import Any, Self

import dagster as dg
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from ontologia_dagster.components.yaml_files import refuse_mistakes
from ontologia_dagster.dagster_compat import with_lasting_checks
from ontologia_dagster.declaration import OntologyAsset, SourceSpec, TypeAsset
from ontologia_dagster.ingestion.asset import build_type
from ontologia_dagster.ingestion.mistakes import find_mistakes
from storage_engine.model.columns import columns_of
from storage_engine.runtime.arguments import declared_types
from storage_engine.spark.ingest_spec import Format


class ScaffoldParams(BaseModel):
    """What `dg scaffold` is told. It writes nothing that could not be loaded, so the models and the
    type in them have to be there."""

    type: str = Field(description="The type's stored name, such as Customer")
    models: str = Field(description="The module that declares it, such as shop.models")
    source_path: str = Field(description="Its files, such as 'data/customers/*.csv'")
    source_format: Format = Field(
        default="csv", description="csv, json (lines), parquet or jdbc; csv if left out"
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        missing = [
            f"{_option(name)} ({info.description})"
            for name, info in cls.model_fields.items()
            if info.is_required() and not (given or {}).get(name)
        ]
        if missing:
            raise ValueError(f"nothing was written. Say {', '.join(missing)}")
        return given

    @model_validator(mode="after")
    def _loads(self) -> Self:
        if mistakes := find_mistakes(self.declaration(), with_files=False):
            texts = "; ".join(text for _, text in mistakes)
            raise ValueError(f"nothing was written, as it could not be loaded: {texts}")
        return self

    def declaration(self) -> OntologyAsset:
        source = SourceSpec(format=self.source_format, paths=[self.source_path])
        return OntologyAsset(type=self.type, models=self.models, source=source)

    def columns(self) -> dict[str, str]:
        """Every field from a column of its own name, until somebody says otherwise."""
        [spec] = [
            spec
            for spec in declared_types(self.models, option="models").values()
            if spec.name == self.type
        ]
        return {name: name for name in columns_of(spec)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class OntologyTypeScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes a declaration that loads as it is, and shows what else can be said."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        params = request.params
        if request.scaffold_format == "python":
            text = _PYTHON.format(columns=params.columns(), **params.model_dump())
            (request.target_path / "component.py").write_text(text, encoding="utf-8")
            return
        dg.scaffold_component(
            request,
            {
                "type": params.type,
                "models": params.models,
                "source": {"format": params.source_format, "paths": [params.source_path]},
                "columns": params.columns(),
                "on_bad_rows": "fail",
                "expectations": [],
            },
        )


_PYTHON = """import dagster as dg

from ontologia_dagster import OntologyTypeComponent, SourceSpec


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> OntologyTypeComponent:
    return OntologyTypeComponent(
        type={type!r},
        models={models!r},
        source=SourceSpec(format={source_format!r}, paths=[{source_path!r}]),
        columns={columns!r},
    )
"""
_OPTIONS = "\n".join(
    f"- {_option(name)}: {info.description}" for name, info in ScaffoldParams.model_fields.items()
)


class _Refused(BaseModel):
    """In place of attributes that are not valid: `load` says what is wrong with them."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    error: ValidationError


@cache
def _lenient(model: type[BaseModel]) -> type[BaseModel]:
    """A model that refuses nothing, and describes its members to editors and `dg docs`. Otherwise
    Dagster would stop at the first file with a mistake, and tell of no other."""

    class OntologyType(model):  # type: ignore[misc, valid-type]
        @model_validator(mode="wrap")
        @classmethod
        def _any(cls, given: Any, validate: ModelWrapValidatorHandler[Any]) -> Any:
            try:
                return validate(given)
            except ValidationError as error:
                return _Refused(error=error)

        @classmethod
        def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
            schema = handler.resolve_ref_schema(handler(core))
            members = {
                name: {"description": member.get("description", ""), "anyOf": [member, {}]}
                for name, member in schema.get("properties", {}).items()
            }
            kept = {name: value for name, value in schema.items() if name != "required"}
            return {**kept, "properties": members, "additionalProperties": True}

    return OntologyType


@dg.scaffold_with(OntologyTypeScaffolder)
class OntologyTypeComponent(OntologyAsset, dg.Component):
    """An entity or relation type that Spark ingests from files or a database.

    Yields the asset, its index check, a job, and as declared a schedule and a source sensor.
    """

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        """All that is wrong in the location is told at once, before any of it is built."""
        with_scope = context.with_rendering_scope({"context": context})
        render = with_scope.resolution_context.resolve_value
        refuse_mistakes(cls, context.path, context.defs_module_path, render)
        if isinstance(attributes, _Refused):
            raise attributes.error
        return super().load(attributes, context)

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return _lenient(cls.model())

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return with_lasting_checks(build_type(self, _types_in(context.component_tree)))

    @classmethod
    def get_spec(cls) -> Any:
        return dg.ComponentTypeSpec(tags=["ontologia", "spark"])


# Of the folder that is being loaded: of hundreds of types each would ask for all of them otherwise.
_siblings: dict[str, Any] = {"tree": None, "types": ()}


def _types_in(tree: Any) -> Sequence[TypeAsset]:
    """The assets of all types in a `defs` folder, wherever in it they are declared."""
    if _siblings["tree"] is not tree:
        try:
            components = tree.get_all_components(OntologyTypeComponent)
        except Exception:  # noqa: BLE001 - of another file, which says so when it is loaded itself
            return ()
        _siblings.update(tree=tree, types=[component.type_asset for component in components])
    types: Sequence[TypeAsset] = _siblings["types"]
    return types


# `dg scaffold defs ... --help` shows this, and nothing of what options are for.
OntologyTypeComponent.__doc__ = f"""{cleandoc(OntologyTypeComponent.__doc__ or "")}

To scaffold it, say:

{_OPTIONS}
"""

"""Components for `dg`: types of an ontology declared in YAML."""

from ontologia_dagster.components.ontology_type import OntologyTypeComponent

__all__ = ["OntologyTypeComponent"]

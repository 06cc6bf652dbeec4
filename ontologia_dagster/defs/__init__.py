"""The location's types, in YAML (`dg scaffold defs
ontologia_dagster.components.OntologyTypeComponent customers`) or in Python (`build_type`).
`definitions.py` loads all that is here.
"""

"""The Dagster code location over an ontology: its definitions load without any storage."""

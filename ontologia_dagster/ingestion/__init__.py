"""Ingestion of a type: its asset, partitions, provenance, sources and runs."""

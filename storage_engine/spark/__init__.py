"""Ontologia in Spark."""

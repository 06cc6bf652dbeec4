"""The demo: a year of flights from New York, ingested, corrected, watched and asked about.

`make run` runs all of it once; `make ui` opens it in Dagster.
"""

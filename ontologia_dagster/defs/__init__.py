"""What Dagster shows, one module a subject; `definitions.py` loads all of them."""

"""What a storage brings to Dagster: checks, maintenance, log tail, events, alerts."""

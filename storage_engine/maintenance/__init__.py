"""Upkeep of a storage: compaction, index repair, garbage collection, tags, integrity, metrics."""

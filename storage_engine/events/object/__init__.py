"""The event bus on an object store."""

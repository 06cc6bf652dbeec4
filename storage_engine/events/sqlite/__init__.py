"""The event bus in a SQLite file."""

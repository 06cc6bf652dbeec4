"""The log: one head pointer, a chain of manifests, and the writer that adds to it."""

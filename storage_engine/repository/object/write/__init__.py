"""Writing to an object store: reconcile, stage, publish."""

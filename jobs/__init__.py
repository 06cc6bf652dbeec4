"""Programs for spark-submit. Each is thin and can be called from Python too."""

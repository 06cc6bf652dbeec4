"""Side-by-side measurements. Not tests: nothing here passes or fails by the clock."""

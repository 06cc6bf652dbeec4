"""Type indices: advisory shortcuts from a type to its files. The chain stays the truth."""

"""Type registration and the schema catalogs. The manifest decides; the catalogs follow."""

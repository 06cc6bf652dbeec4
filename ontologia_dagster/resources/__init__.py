"""What assets reach storages and Spark through, and what an environment says of them."""

"""An example to replace: a small shop."""

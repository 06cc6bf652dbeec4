"""`onto`, the command line: one module per command group, one error boundary around them."""

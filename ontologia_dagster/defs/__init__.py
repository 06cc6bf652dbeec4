"""The location's own types, handlers and assets: `definitions.py` loads all that is here.

`shop/` is an example. README.md says how to put something of your own in its place.
"""

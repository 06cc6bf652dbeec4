"""Types that differ in their names alone, for writers that register the same ones at once."""

from __future__ import annotations

from storage_engine.model import Entity, Field


class _Numbered(Entity, abstract=True):
    id: Field[str] = Field(primary_key=True)
    value: Field[int]


class Type0(_Numbered):
    pass


class Type1(_Numbered):
    pass


class Type2(_Numbered):
    pass


class Type3(_Numbered):
    pass


TYPES = (Type0, Type1, Type2, Type3)

"""Numbers in sentences: `1 row`, `2,000 rows`, `1.5 MiB`; the same words wherever they are told."""

from __future__ import annotations

_S_AFTER = ("s", "x", "z", "ch", "sh")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 flight`, `7,602 flights`."""
    return f"{number:,} {noun if number == 1 else plural or plural_of(noun)}"


def plural_of(noun: str) -> str:
    """By the rules alone: words that follow none are given to `counted`."""
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(_S_AFTER) else f"{noun}s"


def size(count: int) -> str:
    """Bytes as people read them."""
    amount = float(count)
    for unit in _UNITS[:-1]:
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {_UNITS[-1]}"

"""Numbers and nouns in sentences: `1 row`, `2,000 rows`, `1.5 MiB`, told alike everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN = 5  # examples in a sentence
_S_AFTER = ("s", "x", "z", "ch", "sh")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 flight`, `7,602 flights`."""
    return f"{number:,} {noun if number == 1 else plural or plural_of(noun)}"


def plural_of(noun: str) -> str:
    """By the rules alone: words that follow none are given to `counted`."""
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(_S_AFTER) else f"{noun}s"


def noun_of(type_name: str) -> str:
    """`WeatherObservation` -> `weather observation`."""
    return " ".join(word for word in _WORDS.split(type_name) if word).lower()


def size(count: int) -> str:
    """Bytes as people read them."""
    amount = float(count)
    for unit in _UNITS[:-1]:
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {_UNITS[-1]}"


def listed(examples: Sequence[str], total: int) -> str:
    """Some of so many: `BQN, PSE and 2 more`."""
    shown = ", ".join(examples[:SHOWN])
    more = total - min(len(examples), SHOWN)
    return f"{shown} and {more:,} more" if more > 0 and shown else shown


def first_line(error: BaseException) -> str:
    """What an error of others says, without what follows for their developers."""
    return str(error).partition("\n")[0]

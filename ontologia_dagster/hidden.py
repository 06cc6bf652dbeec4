"""What no command line may show, and the variables of the environment that it goes by instead."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.environment import is_reference, reference
from storage_engine.errors import ConfigurationError

if TYPE_CHECKING:
    from jobs.orders import IngestOrder

# As Spark decides what its own pages blot out (spark.redaction.regex), and some more.
_SECRET = re.compile(r"secret|password|passphrase|passwd|token|credential|(access|account)[._]?key")
_PARAMETER = re.compile(r"[?;&]([^=;&?]+)=")  # of a URL
_OPTION = "ONTOLOGIA_JOB_OPTION_"


def is_secret(name: str) -> bool:
    """By the name of a setting or an option."""
    return _SECRET.search(name.lower()) is not None


def hidden_options(order: IngestOrder) -> tuple[IngestOrder, dict[str, str]]:
    """The order with references in place of secrets among the options of its source (a password
    that was written out), and the variables that they refer to."""
    for path in order.source.paths:
        told = [name for name in _PARAMETER.findall(path) if is_secret(name)]
        if order.source.format == "jdbc" and told:
            raise ConfigurationError(
                f"the URL of {order.type}'s source holds {told[0]}, which a command line would "
                f"show: take it out, and give source.options.{told[0]} as env:NAME"
            )
    variables = {
        f"{_OPTION}{number}": name
        for number, (name, text) in enumerate(order.source.options.items())
        if is_secret(name) and not is_reference(text)
    }
    references = {name: reference(variable) for variable, name in variables.items()}
    options = {**order.source.options, **references}
    hidden = replace(order, source=replace(order.source, options=options))
    return hidden, {variable: order.source.options[name] for variable, name in variables.items()}

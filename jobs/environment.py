"""What a job reads from its environment: what whoever starts it does not say on a command line,
which everybody on the machine can read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError

STORAGE_CONFIG = "ONTOLOGIA_JOB_CONFIG"  # options of OntologiaConfig, as a JSON object
SPARK_CONFIG = "ONTOLOGIA_JOB_SPARK_CONFIG"  # further settings of the Spark session, likewise
_REFERENCE = "env:"


def storage_config(environ: Mapping[str, str] = os.environ) -> OntologiaConfig:
    """How the job opens its storage; as the AWS environment says where nothing is given."""
    return OntologiaConfig(**_given(STORAGE_CONFIG, environ))


def spark_config(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: str(value) for name, value in _given(SPARK_CONFIG, environ).items()}


def revealed(name: str, text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A value as it is or, for `env:NAME`, that of the variable. `name` is for the error."""
    if not is_reference(text):
        return text
    variable = text.removeprefix(_REFERENCE)
    found = environ.get(variable)
    if found is None:
        raise ConfigurationError(
            f"{name} is to come from the environment variable {variable}, which is not set"
        )
    return found


def is_reference(text: str) -> bool:
    return text.startswith(_REFERENCE)


def reference(variable: str) -> str:
    return f"{_REFERENCE}{variable}"


def _given(variable: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Says nothing of the value when it is wrong: there may be secrets in it."""
    try:
        found = json.loads(environ.get(variable) or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{variable} is not a JSON object")
    return found

"""What no command line may show, and the variables of the environment that it goes by instead.

Everybody on a machine can read the command lines of its processes. A program that we start gets
secrets among its options by reference, and the storage's configuration in its environment: it opens
the storage as we do. Where that names who to be on S3, other programs in it (Hadoop's `s3a`) are
the same: nothing that is inherited from us stands in the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from storage_engine.config import OntologiaConfig, S3Credentials
from storage_engine.errors import ConfigurationError
from storage_engine.spark.jobs.program import STORAGE_CONFIG, is_reference, reference

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.spark.ingest_spec import IngestSpec

# As Spark decides what its own pages blot out (spark.redaction.regex), and some more.
_SECRET = re.compile(r"secret|password|passphrase|passwd|token|credential|(access|account)[._]?key")
_PARAMETER = re.compile(r"[?;&]([^=;&?]+)=")  # of a URL
_OPTION = "ONTOLOGIA_JOB_OPTION_"
# All that says who a process is on AWS. A part of another identity beside ours would be mixed
# with it (a session token), or win over it (keys over a profile).
_IDENTITY = (
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_CREDENTIAL_EXPIRATION",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


def is_secret(name: str) -> bool:
    """By the name of a setting or an option."""
    return _SECRET.search(name.lower()) is not None


def hide_options(order: IngestSpec) -> tuple[IngestSpec, dict[str, str]]:
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
    hidden = order.replace(source=order.source.replace(options=options))
    return hidden, {variable: order.source.options[name] for variable, name in variables.items()}


def child_environment(ontology: OntologyResource, inherited: Mapping[str, str]) -> dict[str, str]:
    """What is inherited, with the storage's configuration and in its identity, if it has one."""
    config = ontology.config()
    given = _reveal(config.s3_credentials or S3Credentials())
    kept = {n: value for n, value in inherited.items() if not given or n not in _IDENTITY}
    own = {
        "AWS_PROFILE": given.get("profile"),
        "AWS_ACCESS_KEY_ID": given.get("access_key_id"),
        "AWS_SECRET_ACCESS_KEY": given.get("secret_access_key"),
        "AWS_SESSION_TOKEN": given.get("session_token"),
        "AWS_REGION": config.s3_region,
        "AWS_DEFAULT_REGION": config.s3_region,
        "AWS_ENDPOINT_URL_S3": config.s3_endpoint_url,
        STORAGE_CONFIG: _options(config, given),
    }
    if (config.s3_endpoint_url or "").startswith("http:"):
        own["AWS_ALLOW_HTTP"] = "true"
    return {**kept, **{name: value for name, value in own.items() if value}}


def _options(config: OntologiaConfig, credentials: Mapping[str, str]) -> str:
    options: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({**options, "s3_credentials": credentials} if credentials else options)


def _reveal(credentials: S3Credentials) -> dict[str, str]:
    secret, token = credentials.secret_access_key, credentials.session_token
    given = {
        "profile": credentials.profile,
        "access_key_id": credentials.access_key_id,
        "secret_access_key": secret.get_secret_value() if secret is not None else None,
        "session_token": token.get_secret_value() if token is not None else None,
    }
    return {name: value for name, value in given.items() if value is not None}

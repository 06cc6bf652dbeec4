"""How a process that we start for a storage gets at it: by its environment, since a command line
can be read by everybody on the machine.

It opens the storage with our own configuration. Where that names who to be on S3, other programs
in it (Hadoop's `s3a`) are the same: nothing that is inherited from us stands in the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.environment import STORAGE_CONFIG
from storage_engine.config import OntologiaConfig, S3Credentials

if TYPE_CHECKING:
    from ontologia_dagster.resources import OntologyResource

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


def child_environment(ontology: OntologyResource, inherited: Mapping[str, str]) -> dict[str, str]:
    """What is inherited, with the storage's configuration and in its identity, if it has one."""
    config = ontology.config()
    given = _revealed(config.s3_credentials or S3Credentials())
    found = {n: value for n, value in inherited.items() if not given or n not in _IDENTITY}
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
    return {**found, **{name: value for name, value in own.items() if value}}


def _options(config: OntologiaConfig, credentials: Mapping[str, str]) -> str:
    said: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({**said, "s3_credentials": credentials} if credentials else said)


def _revealed(credentials: S3Credentials) -> dict[str, str]:
    secret, token = credentials.secret_access_key, credentials.session_token
    given = {
        "profile": credentials.profile,
        "access_key_id": credentials.access_key_id,
        "secret_access_key": secret.get_secret_value() if secret is not None else None,
        "session_token": token.get_secret_value() if token is not None else None,
    }
    return {name: value for name, value in given.items() if value is not None}

"""Which S3 server to talk to and how, from the config and the usual AWS environment variables."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from storage_engine.config import OntologiaConfig
from storage_engine.errors import ConfigurationError

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to reach the server. `endpoint` None means AWS itself (or what ~/.aws/config says)."""

    endpoint: str | None
    region: str | None
    path_style: bool
    is_loopback: bool
    timeout_s: float

    @classmethod
    def resolve(
        cls, config: OntologiaConfig, environ: Mapping[str, str] = os.environ
    ) -> S3Settings:
        """The config wins over the environment; a plain http endpoint must be wanted."""
        source, endpoint = "s3_endpoint_url", config.s3_endpoint_url
        for variable in _ENDPOINT_VARIABLES:
            if not endpoint:
                source, endpoint = variable, environ.get(variable)
        loopback = False
        if endpoint:
            parts = urlsplit(endpoint)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ConfigurationError(
                    f"{source} is {endpoint!r}: expected a URL such as https://s3.example.com:9000"
                )
            loopback = _is_loopback(parts.hostname)
            explicit = source == "s3_endpoint_url" or _flag(environ, "AWS_ALLOW_HTTP")
            if parts.scheme == "http" and not (explicit or loopback):
                raise ConfigurationError(
                    f"{source} is {endpoint!r}, which sends data unencrypted: use https, or set "
                    "AWS_ALLOW_HTTP=true if that is wanted"
                )
        region = config.s3_region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        return cls(
            endpoint=endpoint or None,
            # A server that is not AWS needs some region for the signature, and ignores which.
            region=region or ("us-east-1" if endpoint else None),
            path_style=bool(endpoint) or _flag(environ, "AWS_S3_FORCE_PATH_STYLE"),
            is_loopback=loopback,
            timeout_s=config.s3_request_timeout_s,
        )


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in _TRUE


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Who may look: on loopback whoever is on this machine, elsewhere whoever has the token.

On loopback, requests that name another host are refused: a page of the internet whose name was
made to lead to this machine could read the ontology otherwise. With a token every request needs
it; an address with `?token=` leaves a cookie and is then shown without. Nothing but GET and HEAD is
answered, and no other page may frame this one, run scripts in it, or learn the address that a link
was followed from.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from storage_engine.errors import ConfigurationError

SHORTEST_TOKEN = 16
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; script-src 'none'; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
METHODS = ("GET", "HEAD")
_PORT = re.compile(r":[0-9]{1,5}$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    message: str
    advice: str


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that carries the right token in its address: the cookie to set, and where to go."""

    location: str
    cookie: str


class Access:
    """The rules for one server."""

    def __init__(self, host: str, port: int, token: str | None) -> None:
        if token is None and not is_loopback(host):
            raise ConfigurationError(
                f"--host {host}: others could read the ontology there; say --token as well (at "
                f"least {SHORTEST_TOKEN} characters), or leave --host out to serve this machine "
                "alone"
            )
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise ConfigurationError(
                f"--token is too short to keep anybody out: take at least {SHORTEST_TOKEN} "
                "characters, such as those of `openssl rand -hex 16`"
            )
        self._hosts = {"localhost", "127.0.0.1", "::1", host.lower().strip("[]")}
        self._token = token
        self._cookie = f"onto_explore_{port}"  # cookies of one host are shared by all its ports

    def check(
        self, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> Refusal | Admission | None:
        """None: go on."""
        if method not in METHODS:
            return Refusal(
                405, f"{method} is not answered", "This page only shows: GET and HEAD are all."
            )
        if self._token is None:
            return self._check_host(headers.get("host", ""))
        return self._check_token(path, query, headers)

    def _check_host(self, host: str) -> Refusal | None:
        name = _PORT.sub("", host.strip().lower()).strip("[]")
        if name in self._hosts or is_loopback(name):
            return None
        return Refusal(
            421,
            f"this server does not answer for {host or 'a request without a host'}",
            "Use the address that `onto explore` printed. To be reached by other names, start it "
            "with --token.",
        )

    def _check_token(
        self, path: str, query: str, headers: Mapping[str, str]
    ) -> Refusal | Admission | None:
        pairs = parse_qsl(query, keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        if given:
            if not self._is_right(given):
                return _WRONG
            rest = urlencode([(name, value) for name, value in pairs if name != "token"])
            here = "/" + path.lstrip("/\\")  # two slashes would lead to another host
            return Admission(f"{here}?{rest}" if rest else here, self._set_cookie())
        if self._is_right(_bearer(headers.get("authorization", ""))):
            return None
        if hmac.compare_digest(self._sent_cookie(headers.get("cookie", "")), self._secret()):
            return None
        return _WRONG

    def _is_right(self, given: Iterable[str]) -> bool:
        assert self._token is not None
        right = self._token.encode()
        return any(hmac.compare_digest(text.encode(), right) for text in given)

    def _secret(self) -> bytes:
        """What the cookie holds: not the token itself."""
        assert self._token is not None
        return hmac.new(self._token.encode(), b"onto explore", hashlib.sha256).hexdigest().encode()

    def _set_cookie(self) -> str:
        # Lax: a link from Dagster's pages opens, other requests of strangers go without it.
        return f"{self._cookie}={self._secret().decode()}; Path=/; HttpOnly; SameSite=Lax"

    def _sent_cookie(self, header: str) -> bytes:
        try:
            morsel = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return b""
        return morsel.value.encode() if morsel is not None else b""


_WRONG = Refusal(
    401, "the token is missing or wrong", "Open the address with ?token= and the token at its end."
)


def _bearer(header: str) -> list[str]:
    scheme, _, token = header.partition(" ")
    return [token.strip()] if scheme.lower() == "bearer" else []


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    name = host.lower().strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

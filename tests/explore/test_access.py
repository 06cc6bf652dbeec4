"""Who may look, and what browsers are told."""

from __future__ import annotations

import pytest

from storage_engine.errors import ConfigurationError
from storage_engine.explore.access import Access
from tests.explore.conftest import Browse

TOKEN = "correct horse battery"


def test_other_interfaces_need_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org", ""):
        with pytest.raises(ConfigurationError, match="--token"):
            Access(host, 1, None)
        Access(host, 1, TOKEN)
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9", "[::1]"):
        Access(host, 1, None)
    with pytest.raises(ConfigurationError, match="too short"):
        Access("0.0.0.0", 1, "short")


@pytest.mark.parametrize("air", ["directory"], indirect=True)
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8686", 200),
        ("localhost", 200),
        ("LOCALHOST:99", 200),
        ("[::1]:8686", 200),
        ("evil.example:8686", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8686", 421),
        ("", 421),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    browse: Browse, air: str, host: str, status: int
) -> None:
    client = browse(air)
    answer = client.get("/commits", host=host)
    assert answer.status == status
    assert client.get("/static/style.css", host=host).status == status
    if status == 421:
        assert "does not answer for" in answer.text


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_nothing_but_looking(browse: Browse, air: str) -> None:
    client = browse(air)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        answer = client.get("/types", method=method)
        assert answer.status == 405
        assert answer.headers["allow"] == "GET, HEAD"
    assert client.get("/types", method="HEAD").status == 200


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_browsers_are_told_to_be_strict(browse: Browse, air: str) -> None:
    client = browse(air)
    for path in ("/types", "/nothing", "/static/style.css", "/types?format=json"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "script-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert client.get("/types").headers["cache-control"] == "no-store"
    style = client.get("/static/style.css")
    assert "immutable" in style.headers["cache-control"]
    assert client.get("/static/style.css", **{"if-none-match": style.headers["etag"]}).status == 304


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_with_a_token_every_request_needs_it(browse: Browse, air: str) -> None:
    client = browse(air, host="0.0.0.0", token=TOKEN)
    strange = {"host": "box.lan:8686"}

    for path in ("/types", "/static/style.css", "/types?format=json", "/types?token=wrong"):
        refused = client.get(path, **strange)
        assert refused.status == 401
        assert b"Airport" not in refused.body
    entered = client.get("/commits?before=3&token=correct%20horse%20battery", **strange)
    assert entered.status == 303
    assert entered.headers["location"] == "/commits?before=3"
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert TOKEN not in cookie
    value = cookie.partition(";")[0]
    assert client.get("/commits", cookie=value, **strange).status == 200
    assert client.get("/commits", cookie=value[:-1] + "0", **strange).status == 401
    assert client.get("/commits", cookie="=;;,", **strange).status == 401
    assert client.get("/commits", authorization=f"Bearer {TOKEN}", **strange).status == 200
    assert client.get("/commits", authorization=f"Basic {TOKEN}", **strange).status == 401


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_the_token_leads_to_no_other_host(browse: Browse, air: str) -> None:
    client = browse(air, token=TOKEN)
    for path in ("//evil.example/", "/\\evil.example/"):
        entered = client.get(f"{path}?token=correct%20horse%20battery")
        assert not entered.headers["location"].startswith(("//", "/\\", "/%5C%5C"))
        assert entered.headers["location"].startswith("/evil.example") or (
            entered.headers["location"].startswith("/%5C")
        )


@pytest.mark.parametrize("air", ["directory"], indirect=True)
def test_who_is_refused_does_not_learn_which_storage_this_is(browse: Browse, air: str) -> None:
    for refused in (
        browse(air, host="0.0.0.0", token=TOKEN).get("/types", host="box.lan:8686"),
        browse(air).get("/types", host="evil.example"),
    ):
        assert refused.status in (401, 421)
        assert air.encode() not in refused.body

"""Credentials that a program gives: used for its store alone, shown nowhere, refused in files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pydantic import SecretStr

from storage_engine.config import OntologiaConfig, S3Credentials
from storage_engine.errors import ConfigurationError
from storage_engine.objectstore.s3 import S3Store


def config(name: str) -> OntologiaConfig:
    given = S3Credentials(access_key_id=f"key-{name}", secret_access_key=SecretStr(f"hush-{name}"))
    return OntologiaConfig(s3_credentials=given, s3_endpoint_url="http://127.0.0.1:9")


def test_two_stores_are_two_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-environment")
    one, two = S3Store("bucket", "a", config("one")), S3Store("bucket", "b", config("two"))
    chain = S3Store("bucket", "c", OntologiaConfig(s3_endpoint_url="http://127.0.0.1:9"))
    try:
        keys = [found.access_key for s in (one, two, chain) if (found := s.credentials())]
    finally:
        for store in (one, two, chain):
            store.close()

    assert keys == ["key-one", "key-two", "of-the-environment"]


def test_they_travel_and_are_never_shown(tmp_path: Path) -> None:
    given = config("one")

    assert pickle.loads(pickle.dumps(given)) == given  # to Spark's executors
    assert "hush-one" not in repr(given) + str(given.model_dump()) + repr(given.s3_credentials)
    with pytest.raises(ConfigurationError) as caught:
        OntologiaConfig(s3_credentials={"secret": "hush-one"})
    assert "hush-one" not in str(caught.value)
    path = tmp_path / "onto.toml"
    path.write_text('[s3_credentials]\naccess_key_id = "x"\nsecret_access_key = "hush-one"\n')
    with pytest.raises(ConfigurationError, match="holds credentials") as refused:
        OntologiaConfig.from_file(path)
    assert "hush-one" not in str(refused.value)

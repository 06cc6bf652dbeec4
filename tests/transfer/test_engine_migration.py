"""From engine v1 to v2: beside, with a token, resumable; the source stays as it was."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from storage_engine.errors import ConfigurationError, CopyRefusedError, MigrationTokenError
from storage_engine.repository.open import target_of
from storage_engine.transfer import migrate_engine
from storage_engine.transfer.engine_migration import beside
from tests.engines import Storage, customer, put
from tests.transfer.test_copy import fill, state_of

V1 = pytest.mark.parametrize("source", ["sqlite-v1", "directory-v1"], indirect=True)


def migrated(source: Storage) -> Storage:
    return Storage(beside(target_of(source.uri)).uri, source.backend, "v2")


@V1
def test_a_v2_storage_is_built_beside(source: Storage) -> None:
    fill(source)
    before = state_of(source)
    plan = migrate_engine(source.uri)
    assert not plan.applied
    assert not Path(plan.copy.target.partition("//")[2]).exists()
    done = migrate_engine(source.uri, apply=True, token=plan.token)
    assert done.copy.comparison is not None
    assert done.copy.comparison.ok
    assert (done.copy.source_engine, done.copy.target_engine) == ("v1", "v2")
    assert state_of(migrated(source)) == before == state_of(source)


@V1
def test_the_token_holds_while_writers_go_on(source: Storage) -> None:
    """What came after the preview is left to the next one."""
    fill(source)
    plan = migrate_engine(source.uri)
    with closing(source.open()) as repo:
        put(repo, customer("late"))
    done = migrate_engine(source.uri, apply=True, token=plan.token)
    assert (done.copy.upto, done.copy.behind) == (6, 1)
    again = migrate_engine(source.uri)
    assert again.token != plan.token
    assert (again.copy.since, again.copy.commits) == (6, 1)
    migrate_engine(source.uri, apply=True, token=again.token)
    assert state_of(migrated(source)) == state_of(source)
    # Nothing is left, and to say so again does no harm.
    assert migrate_engine(source.uri, apply=True, token=again.token).copy.commits == 0


@V1
def test_tokens_that_do_not_fit(source: Storage, tmp_path: Path) -> None:
    fill(source)
    token = migrate_engine(source.uri).token
    for wrong in (None, "", "x", "6-0000000000000000", "5" + token[1:]):
        with pytest.raises(MigrationTokenError):
            migrate_engine(source.uri, apply=True, token=wrong)
    with pytest.raises(MigrationTokenError):  # it was for another place
        migrate_engine(source.uri, tmp_path / "elsewhere", apply=True, token=token)
    with pytest.raises(ConfigurationError, match="goes with --apply"):
        migrate_engine(source.uri, token=token)


@V1
def test_a_target_that_holds_something_else_is_refused(source: Storage, tmp_path: Path) -> None:
    fill(source)
    other = Storage(f"sqlite:///{tmp_path / 'other.db'}", "sqlite", "v2")
    fill(other)
    with pytest.raises(CopyRefusedError):
        migrate_engine(source.uri, other.uri)


@pytest.mark.parametrize("source", ["sqlite-v2", "directory-v2"], indirect=True)
def test_v2_needs_no_migration(source: Storage) -> None:
    with pytest.raises(ConfigurationError, match="nothing to migrate"):
        migrate_engine(source.uri)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("onto.db", "sqlite:///onto-v2.db"),
        ("sqlite:////data/my%20onto.sqlite", "sqlite:////data/my%20onto-v2.sqlite"),
        ("file:///data/onto/", "file:///data/onto-v2"),
        ("s3://bucket/some/prefix", "s3://bucket/some/prefix-v2"),
    ],
)
def test_the_place_beside(uri: str, expected: str) -> None:
    assert beside(target_of(uri)).uri == expected


def test_nothing_is_beside_a_bucket() -> None:
    with pytest.raises(ConfigurationError, match="--to"):
        beside(target_of("s3://bucket"))

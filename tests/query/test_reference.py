"""One text means one commit, through whichever door it comes; a time without a zone is UTC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage_engine import Entity, Field, Session, initialize_storage
from storage_engine.errors import ConfigurationError
from storage_engine.model.validation import INT64_MAX
from storage_engine.query.reference import check_tag, checked_reference, parse_reference
from tests.cli.support import onto


class Reading(Entity):
    id: Field[str] = Field(primary_key=True)
    value: Field[int]


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose own zone is hours from UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(params=["directory", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Three commits, some milliseconds apart."""
    uri = str(tmp_path / ("onto.db" if request.param == "sqlite" else "onto"))
    if request.param == "directory":
        initialize_storage(uri)
    with Session(uri) as session:
        for value in (1, 2, 3):
            session.ensure(Reading(id="a", value=value))
            session.commit()
            time.sleep(0.01)
    return uri


def _through_session(uri: str, text: str) -> int:
    with Session(uri) as session:
        return session.at(text).commit_id


def _through_query(uri: str, text: str) -> int:
    with Session(uri) as session:
        found = session.query().entities(Reading).as_of(text).first()
        assert found is not None
        return found.value


def _through_command(uri: str, text: str) -> int:
    shown = onto("query", "entities", "Reading", "--as-of", text, "--storage-uri", uri, "--json")
    return int(shown.json["rows"][0]["commit_id"])


def _through_tag(uri: str, text: str) -> int:
    return int(
        onto("tag", "create", "named", text, "--storage-uri", uri, "--json").json["commit_id"]
    )


def _through_restore(uri: str, text: str) -> int:
    return int(onto("restore", text, "--storage-uri", uri, "--json").json["commit_id"])


def _through_spark_option(uri: str, text: str) -> int:
    pytest.importorskip("pyspark")
    from storage_engine.spark.datasource import ReadOptions
    from storage_engine.spark.driver import commit_of, opened

    options = ReadOptions.parse({"storage_uri": uri, "type": "Reading", "as_of": text})
    with opened(uri) as repository:
        return commit_of(repository, options.as_of)


def _through_spark_reader(uri: str, text: str) -> int:
    pytest.importorskip("pyspark")
    from storage_engine.spark.driver import commit_of, opened

    with opened(uri) as repository:
        return commit_of(repository, text)


def _through_dagster(uri: str, text: str) -> int:
    pytest.importorskip("dagster")
    from ontologia_dagster.downstream.queries import reference

    with Session(uri) as session:
        return session.at(reference(text, session.repository.head_commit_id())).commit_id


DOORS = [
    _through_session,
    _through_query,
    _through_command,
    _through_tag,
    _through_restore,
    _through_spark_option,
    _through_spark_reader,
    _through_dagster,
]


@pytest.mark.usefixtures("new_york")
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__.strip("_"))
def test_a_text_means_one_commit_through_every_door(
    storage: str, door: Callable[[str, str], int]
) -> None:
    with Session(storage) as session:
        second = session.repository.get_commit(2)
        session.repository.create_tag("two", 2)
    assert second is not None
    moment = second.created_at.astimezone(UTC)
    naive = moment.replace(tzinfo=None).isoformat()  # as local time, hours after the last commit
    for text in (naive, f" {naive} ", moment.isoformat(), f"{naive}Z", "2", "two"):
        assert door(storage, text) == 2, text


@pytest.mark.usefixtures("new_york")
def test_texts_are_ids_times_and_tags() -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    for text in (
        "2026-01-31T12:00",
        "2026-01-31 12:00:00Z",
        "20260131T1200",
        "2026-01-31T07:00-05",
    ):
        assert parse_reference(text) == noon == checked_reference(text), text
        with pytest.raises(ConfigurationError, match="reads as a commit id or a time"):
            check_tag(text)
    assert checked_reference(noon.replace(tzinfo=None)) == noon
    assert parse_reference("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert (parse_reference("42"), parse_reference(" +42 "), parse_reference("-3")) == (42, 42, -3)
    assert parse_reference("9" * 5000) == INT64_MAX
    for tag in ("v1", "release-2026-01-31", "2026-01-31-rc1"):
        assert parse_reference(tag) == tag
        check_tag(tag)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the name of a tag is not empty"),
        ("  ", "the name of a tag is not empty"),
        ("2024-13-01", "not a time in ISO 8601"),
        ("2024-01-01T25:00", "not a time in ISO 8601"),
        ("0001-01-01T00:00+14:00", "outside years 1 to 9999"),
    ],
)
def test_what_means_no_commit_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_reference(text)
    with pytest.raises(ValueError, match=said):
        checked_reference(text)

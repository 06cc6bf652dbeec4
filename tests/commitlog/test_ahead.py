"""Building on a commit that head does not name yet: published only if it comes exactly so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from storage_engine.commitlog import ahead, layout
from storage_engine.commitlog.ahead import Ahead
from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.lock import Lease, Tenure
from storage_engine.commitlog.records import Head
from storage_engine.errors import OntologiaError
from storage_engine.repository.commit_queue import PendingCommit
from storage_engine.repository.protocol import CommitRequest, CommitResult
from storage_engine.testing.faults import FaultKind
from tests.commitlog.support import World, at, new_world
from tests.engines import CUSTOMER, PRODUCT, customer, product, rows_of


@pytest.fixture
def world() -> Iterator[World]:
    with closing(new_world()) as made:
        yield made


class Foresight:
    """Two writers: the second drafts on the manifest of the first, at a moment of our choice."""

    def __init__(
        self, world: World, monkeypatch: pytest.MonkeyPatch, checkpoints: Sequence[int] = (100, 100)
    ) -> None:
        self.world = world
        self.first, self.second = (
            world.open(name, checkpoint_interval=interval)
            for name, interval in zip(("first", "second"), checkpoints, strict=True)
        )
        self.first.put(customer("zero"))
        self.second.put(customer("one"))
        self.first.rows()
        self.upcoming = 3  # the commit of the first that is foreseen
        self.foreseen: list[HeadVersion] = []
        self._begin = self.second.repo.publisher._begin
        monkeypatch.setattr(self.second.repo.publisher, "_begin", self._begin_on_foreseen)

    def _begin_on_foreseen(
        self,
        tenure: Tenure,
        held: Lease | None = None,
        *,
        foresee: bool = False,
        quiet: bool = False,
    ) -> tuple[Lease, HeadVersion, float]:
        """As when it has been next, and the lock has come to it meanwhile."""
        if not foresee or self.foreseen:
            return self._begin(tenure, held, foresee=foresee, quiet=quiet)
        look = Ahead(self.second.repo.chain, foresee=True)
        assert look(self.upcoming - 1, self.token, holds=True)
        assert look.version is not None
        assert look.version.foreseen
        self.foreseen.append(look.version)
        return self.second.repo.lock.acquire(tenure), look.version, 0.0

    @property
    def token(self) -> str:
        (path,) = manifests_of(self.world, self.upcoming)
        return token_of(path)

    def at_swap(self, action: Callable[[], object], *, when: str = "before") -> None:
        """When the first swings head: its manifest is there."""

        def act() -> None:
            self.world.backend.remove([layout.LOCK])  # it counts as handed over
            action()

        at(self.first.store, "PUT_IF", layout.HEAD, act, when=when)

    def not_yet_there(self, pattern: str) -> None:
        """Objects come only when the second looks at head."""
        backend = self.world.backend
        late = {k: data for k, data in backend.objects().items() if fnmatchcase(k, pattern)}
        assert late
        backend.remove([*late])
        at(
            self.second.store,
            "GET",
            layout.HEAD,
            lambda: [backend.write(key, data) for key, data in late.items()],
        )

    def fence(self) -> None:
        """As collecting garbage does, so that what was uploaded before cannot be published."""
        head = replace(self.world.head(), write_id=layout.new_write_id())
        self.world.backend.write(layout.HEAD, head.to_bytes())


@pytest.fixture
def foresight(world: World, monkeypatch: pytest.MonkeyPatch) -> Foresight:
    return Foresight(world, monkeypatch)


def token_of(path: str) -> str:
    """One that the name of this attempt follows from."""
    return path.split("/")[1].partition("-")[2].ljust(32, "0")


def manifests_of(world: World, commit_id: int) -> list[str]:
    return [k for k in world.stored_keys(f"commits/{commit_id}-") if k.endswith("manifest.json")]


def test_what_was_drafted_on_a_foreseen_head_is_published_when_it_stands(
    foresight: Foresight,
) -> None:
    results = []
    foresight.at_swap(lambda: results.append(foresight.second.put(customer("b"))), when="after")
    foresight.first.put(customer("a"))
    assert (results[0].commit_id, results[0].attempts) == (4, 1)
    assert len(manifests_of(foresight.world, 4)) == 1, "it was drafted once"
    assert (
        foresight.foreseen[0].head.manifest_path == foresight.world.chain()[3].parent_manifest_path
    )
    assert {*foresight.first.ages()} == {"zero", "one", "a", "b"}
    assert foresight.world.orphans() == []


def foreseen_never_comes(foresight: Foresight) -> None:
    """The one before us is slow: head is still where it was when the lock is ours."""
    results = []
    foresight.at_swap(lambda: results.append(foresight.second.put(customer("b"))))
    foresight.first.put(customer("a"))
    assert [result.commit_id for result in results] == [3]
    assert {*foresight.second.ages()} == {"zero", "one", "a", "b"}
    assert len(foresight.world.chain()) == 4
    assert foresight.world.orphans() == []


def test_a_foreseen_commit_that_does_not_come_is_not_built_on(foresight: Foresight) -> None:
    foreseen_never_comes(foresight)


def test_planted_a_foreseen_head_that_is_taken_for_granted_is_found(
    foresight: Foresight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "matches", lambda foreseen, head: True)
    with pytest.raises(AssertionError):
        foreseen_never_comes(foresight)


def fenced_meanwhile(foresight: Foresight) -> None:
    """Head names the foreseen commit, but was rewritten since we uploaded."""
    path = []

    def commit() -> None:
        foresight.fence()
        result = foresight.second.put(customer("b"))
        assert result.commit_id == 4
        path.extend(manifests_of(foresight.world, 4))

    first_names: list[str] = []
    at(
        foresight.second.store,
        "PUT_IF",
        "commits/4-*/manifest.json",
        lambda: first_names.extend(manifests_of(foresight.world, 4)),
        when="after",
    )
    foresight.at_swap(commit, when="after")
    foresight.first.put(customer("a"))
    assert len(path) == 1
    assert path != first_names[:1], "what was uploaded before the fence is not published"
    assert {*foresight.first.ages()} == {"zero", "one", "a", "b"}


def test_what_was_uploaded_before_a_fence_is_not_published(foresight: Foresight) -> None:
    fenced_meanwhile(foresight)


def test_planted_a_fence_that_is_not_seen_is_found(
    foresight: Foresight, monkeypatch: pytest.MonkeyPatch
) -> None:
    matches = ahead.matches
    monkeypatch.setattr(
        ahead,
        "matches",
        lambda foreseen, head: matches(foreseen, replace(head, write_id=foreseen.write_id)),
    )
    with pytest.raises(AssertionError):
        fenced_meanwhile(foresight)


def test_what_is_learned_from_a_foreseen_head_is_not_told(foresight: Foresight) -> None:
    """That the same rows are there already is true only if the one before us publishes them."""
    results = []
    foresight.at_swap(lambda: results.append(foresight.second.put(customer("a"))))
    foresight.first.put(customer("a"), customer("c"))
    assert [result.commit_id for result in results] == [3]
    assert {*foresight.first.ages()} == {"zero", "one", "a", "c"}


def test_an_expectation_that_a_foreseen_head_breaks_is_looked_at_again(
    foresight: Foresight,
) -> None:
    results = []
    expect = {("entity", "Customer"): 2}
    foresight.at_swap(lambda: results.append(foresight.second.put(customer("b"), expect=expect)))
    foresight.first.put(customer("a"))
    assert [result.commit_id for result in results] == [3]


def test_who_foresees_in_vain_does_so_once(
    foresight: Foresight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may always be another one who is about to commit; and the turn that has come to us
    meanwhile is ours."""
    begun: list[tuple[bool, bool]] = []
    begin = foresight.second.repo.publisher._begin

    def count(
        tenure: Tenure,
        held: Lease | None = None,
        *,
        foresee: bool = False,
        quiet: bool = False,
    ) -> tuple[Lease, HeadVersion, float]:
        begun.append((foresee, held is not None))
        assert len(begun) < 9
        foresight.foreseen.clear()
        return begin(tenure, held, foresee=foresee, quiet=quiet)

    monkeypatch.setattr(foresight.second.repo.publisher, "_begin", count)
    refused: list[Exception] = []

    def commit() -> None:
        try:
            foresight.second.put(customer("b"), expect={("entity", "Customer"): 2})
        except OntologiaError as error:
            refused.append(error)

    foresight.at_swap(commit, when="after")
    foresight.first.put(customer("a"))
    assert [type(error).__name__ for error in refused] == ["ExpectedVersionMismatchError"]
    assert begun == [(True, False), (False, True)]
    assert foresight.world.orphans() == []


@pytest.mark.parametrize(
    "change",
    [
        {"protected": True},
        {"marks": {"app": 1}},
        {"write_id": "another"},
        {"checkpoint": None, "commit_sha256": "other"},
        {"commit_id": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_head_that_differs_in_anything_is_another(change: dict[str, object]) -> None:
    head = Head(3, "commits/3-0/manifest.json", "2026-01-01T00:00:00.000Z", "a", write_id="w")
    assert ahead.matches(head, replace(head, updated_at="later", runtime_id="b"))
    assert not ahead.matches(head, replace(head, **change))  # type: ignore[arg-type]


def test_a_manifest_of_another_log_is_not_foreseen(foresight: Foresight) -> None:
    look = Ahead(foresight.second.repo.chain, foresee=True)
    chain = foresight.world.chain()
    path = foresight.world.head().manifest_path
    assert path is not None
    document = foresight.world.backend.objects()[path].replace(
        chain[-1].log_id.encode(), b"another"
    )
    foresight.world.backend.write(path, document)
    assert not look(1, token_of(path), holds=True)
    foresight.world.backend.write(path, b"no manifest")
    assert not look(1, token_of(path), holds=True)
    assert look(1, token_of(path), holds=True), "then head is looked at"
    assert look.version is not None
    assert not look.version.foreseen


def test_rows_in_memory_do_not_count_as_read_up_to_a_commit_that_never_came(
    foresight: Foresight,
) -> None:
    """The foreseen commit is of another type. What others make of that number and the next is not
    known of the rows that were read for it."""
    first, second, world = foresight.first, foresight.second, foresight.world
    first.put(customer("two"))  # what the second has in memory is behind
    foresight.upcoming = 4
    third = world.open("third")

    def commit() -> None:
        at(second.store, "PUT_IF", "commits/5-*/manifest.json", overtake)
        second.put(customer("one"), customer("b"))

    def overtake() -> None:
        world.backend.remove([layout.LOCK])
        third.put(customer("one", age=9))
        third.put(customer("else"))

    foresight.at_swap(commit)
    first.commit(rows_of(PRODUCT, product("p")))
    assert world.chain()[3].files[0].type_name == "Customer", "the foreseen one did not come"
    assert {*second.ages()} == {"zero", "one", "two", "b", "else"}
    assert second.ages()["one"] == 1, "stated last, on the row of age 9"


def test_what_is_not_uploaded_yet_of_a_foreseen_commit_is_nobodys_error(
    foresight: Foresight,
) -> None:
    """A manifest may be there before the rows that it names. One of a group needs these, another
    does not: the first is not told that they are missing."""
    second = foresight.second
    pending: list[PendingCommit] = []

    def commit() -> None:
        foresight.not_yet_there("commits/3-*.parquet")
        inputs = [rows_of(CUSTOMER, customer("a", age=2)), rows_of(PRODUCT, product("p"))]
        pending.extend(second.repo.submit(CommitRequest([each])) for each in inputs)
        with suppress(OntologiaError):
            pending[0].result()

    foresight.at_swap(commit, when="after")
    foresight.first.put(customer("a"))
    results = [each.result() for each in pending]
    assert [result.commit_id for result in results if result is not None] == [4, 5]
    assert second.ages()["a"] == 2
    assert foresight.world.orphans() == []


def test_a_checkpoint_that_is_not_uploaded_yet_is_nobodys_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the foreseen commit, and the next one is to write another."""
    foresight = Foresight(world, monkeypatch, checkpoints=(3, 4))
    results: list[CommitResult | Exception | None] = []

    def commit() -> None:
        foresight.not_yet_there("meta/checkpoints/3-*")
        try:
            results.append(foresight.second.commit(rows_of(PRODUCT, product("p"))))
        except OntologiaError as error:
            results.append(error)

    foresight.at_swap(commit, when="after")
    foresight.first.put(customer("a"))
    assert [getattr(result, "commit_id", result) for result in results] == [4]
    assert world.orphans() == []


def test_a_look_ahead_that_fails_is_nobodys_error(foresight: Foresight) -> None:
    """It is only to be faster; who waits looks at the lock and at head again."""
    second = foresight.second
    look = Ahead(second.repo.chain, foresee=True)
    second.fail(FaultKind.UNAVAILABLE, "GET", "commits/*")
    assert not look(2, "0" * 32, holds=True)
    assert look.version is None
    second.heal()

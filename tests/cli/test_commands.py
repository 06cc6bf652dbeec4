"""Every command on every kind of storage, each as a process of its own: the good case and its JSON,
mistakes of every kind and their exit codes. A command that is in no case here fails a test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typer.main import get_command

from storage_engine.cli.main import app
from tests.cli.forks import Forks
from tests.cli.lines import PRINT_THEIR_OWN, leaves
from tests.cli.support import ROOT, onto
from tests.servers import S3Server

DOCS = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
MODELS = ("--models", "tests.cli.support")
HANDLERS = ("--handlers", "tests.cli.test_events")
EMIT = """from tests.cli.test_events import Ordered
session.emit([Ordered(id='e1', n=1), Ordered(id='e2', n=-1)])"""

ROWS = [
    {"type": "Customer", "key": "c1", "fields": {"name": "Ann"}},
    {"type": "Customer", "key": "c2", "fields": {"name": "Bob"}},
    {"type": "Product", "key": "p1", "fields": {}},
    {
        "type": "Employment",
        "left_key": "c1",
        "right_key": "p1",
        "instance_key": "2024",
        "fields": {"role": "clerk"},
    },
]


@dataclass(frozen=True)
class Case:
    """One line of `onto`: its exit code, and what its JSON has."""

    line: str  # of words; {uri} is the storage
    code: int = 0
    has: dict[str, Any] | None = None  # of the JSON document; None: it prints something else
    more: tuple[str, ...] = ()  # words with blanks
    sqlite: int | None = None  # the exit code there, where it is another one
    lives: bool = False  # until it is interrupted


GOOD = {
    "init": Case("init", has={"applied": True, "erases": None}),
    "import": Case(f"import --input in.jsonl {' '.join(MODELS)} --apply", has={"commit_id": 1}),
    "import again": Case(
        "import --input later.csv --type Customer --apply --on-conflict upsert",
        has={"commit_id": 2},
    ),
    "info": Case("info", has={"head_commit_id": 2, "lock": None}),
    "query entities": Case("query entities Customer --limit 1", has={"row_count": 1}),
    "query relations": Case("query relations Employment", has={"row_count": 1}),
    "query traverse": Case("query traverse Customer --via Employment", has={"row_count": 1}),
    "query sql": Case(
        "query sql", more=("select count(*) as n from Customer",), has={"rows": [{"n": 2}]}
    ),
    "shell": Case("shell -c", more=(EMIT,)),
    "explore": Case("explore --port 0", lives=True, has={"storage": "{uri}"}),
    "commits": Case("commits --limit 1", has={"more": 1}),
    "commits examine": Case("commits examine 1", has={"id": 1, "identities_total": 4}),
    "log": Case("log --limit 1"),
    "diff": Case("diff 1 2", has={"before": 1, "after": 2, "more": 0}),
    "export": Case("export --output out", has={"rows": 4, "complete": True}),
    "schema list": Case("schema list"),
    "schema show": Case("schema show Product", has={"schema_version_id": 1}),
    "schema diff": Case(f"schema diff {' '.join(MODELS)}", has={}),
    "schema export": Case("schema export", has={"commit_id": 2}),
    "schema history": Case("schema history Product", has={"purged": False}),
    "schema drop": Case("schema drop Employment", has={"applied": False, "dependents": []}),
    "schema repair": Case("schema repair", has={"applied": False, "catalogs": []}),
    "migrate": Case(f"migrate {' '.join(MODELS)}", has={"applied": False}),
    "tag create": Case("tag create before 1", has={"name": "before", "commit_id": 1}),
    "tag list": Case("tag list"),
    "tag delete": Case("tag delete before", has={"name": "before"}),
    "restore": Case("restore 1 --apply", has={"new_commit_id": 3, "restored": 1}),
    "copy": Case("copy {uri} copied --apply", has={"commits": 3, "applied": True}),
    "migrate-engine": Case("migrate-engine --to there", code=2),  # it is v2; see test_transfer
    "events list-namespaces": Case("events list-namespaces"),
    "events peek": Case(f"events peek {' '.join(HANDLERS)}", has={"pending": 2, "due": 2}),
    "events run": Case(
        f"events run {' '.join(HANDLERS)} --drain --config once.toml", has={"handled": 1}
    ),
    "events sessions": Case("events sessions", has={"sessions": []}),
    "events show": Case("events show --status acked --type Ordered"),
    "events dead-letters": Case("events dead-letters"),
    "events inspect": Case("events inspect e2"),
    "events replay": Case("events replay e1 --apply", has={"applied": True}),
    "events redrive": Case("events redrive --apply", has={"applied": True}),
    "events cleanup": Case("events cleanup --older-than 0s --apply", has={"applied": True}),
    "verify": Case("verify --deep", has={"ok": True, "findings": []}),
    "index verify": Case("index verify", has={"ok": True}, sqlite=4),
    "index repair": Case("index repair --apply", has={"applied": True, "types": []}, sqlite=4),
    "compact": Case("compact", has={"applied": False}),
    "gc": Case("gc --apply", has={"objects": 0}, sqlite=4),
    "du": Case("du"),
    "doctor": Case("doctor", has={"ok": True}),
    "lock show": Case("lock show", has={"lock": None, "problem": None}, sqlite=4),
    "lock break": Case("lock break --token t --yes", code=4),  # nobody holds it; see test_lock
    "branch create": Case(
        "branch create run/1 --owner ann", has={"name": "run/1", "owner": "ann"}, sqlite=5
    ),
    "branch list": Case("branch list", has={}, sqlite=5),
    "branch diff": Case("branch diff run/1", has={"after": "run/1", "more": 0}, sqlite=5),
    "branch update": Case("branch update run/1 --apply", has={"commit_id": None}, sqlite=5),
    "branch merge": Case("branch merge run/1", has={"dry_run": True, "conflicts": []}, sqlite=5),
    "branch protect": Case("branch protect run/1 --off", has={"protected": False}, sqlite=5),
    "branch delete": Case("branch delete run/1 --apply", has={"applied": True}, sqlite=5),
}

# What is wrong, and what is said of it; the storage is there, with all that GOOD has put into it.
BAD = [
    ("init", 4, "already holds an ontology"),
    ("init --force --token nonsense", 4, "--force --dry-run"),
    ("init --token t", 2, "goes with --force"),
    ("init --engine-version v9", 2, "'v1', 'v2'"),
    ("query entities Custmer", 2, "did you mean 'Customer'?"),
    ("query entities Employment", 2, "is a relation type, not an entity type"),
    ("query entities Customer --filter nme eq 1", 2, "did you mean 'name'?"),
    ("query entities Customer --filter name like 1", 2, "like"),
    ("query entities Customer --as-of never", 4, "no tag 'never'"),
    ("query relations Customer", 2, "is an entity type, not a relation type"),
    ("query traverse Customer --via Nothing", 2, "Nothing"),
    ("query sql nonsense", 2, "nonsense"),
    ("query sql select", 2, "select"),
    ("shell -c raise(SystemExit(9))", 9, ""),
    ("explore --host 0.0.0.0", 2, "--token"),
    ("commits --limit none", 2, "'--limit'"),
    ("commits examine 99", 4, "99"),
    ("log --limit -1", 2, "'--limit'"),
    ("diff 2 1", 2, "the older commit comes first"),
    ("diff 0 1 --type Custmer", 2, "did you mean Customer?"),
    ("export --output in.jsonl", 2, "in.jsonl"),
    ("export --output new --type Nothing", 2, "Nothing"),
    ("import --input nowhere", 2, "nowhere"),
    ("import --input in.jsonl --meta nothing", 2, "write KEY=VALUE"),
    ("import --input broken.jsonl", 4, "broken.jsonl"),
    ("import --input changed.jsonl", 6, "on-conflict"),
    ("schema show Nothing", 2, "Nothing"),
    ("schema history Nothing", 2, "Nothing"),
    ("schema diff", 2, "--models"),
    ("schema diff Product 1 9", 2, "9"),
    ("schema drop Customer", 7, "Employment"),
    ("schema drop Employment --apply", 2, "token"),
    ("schema export --output nowhere/at/all.json", 2, "nowhere"),
    ("migrate", 2, "--models"),
    ("migrate --models no.such", 2, "no.such"),
    ("restore 99", 2, "no commit 99"),
    ("restore never", 4, "no tag 'never'"),
    ("tag create 12 1", 2, "12"),
    ("tag create good 99", 2, "no commit 99"),
    ("tag delete nothing", 4, "no tag 'nothing'"),
    ("copy {uri} {uri}", 2, "into itself"),
    ("copy nowhere other", 5, "is the name right?"),
    ("copy {uri} copied --apply --verify", 2, "leave out --verify"),
    ("events inspect nothing", 4, "no event nothing"),
    ("events replay nothing", 4, "no event nothing"),
    ("events show --status lost", 2, "pending, claimed, acked"),
    ("events sessions --namespace a/b", 2, "a/b"),
    ("events dead-letters --limit none", 2, "'--limit'"),
    ("events redrive --namespace a/b", 2, "a/b"),
    ("events list-namespaces extra", 2, "extra"),
    ("events cleanup --older-than long", 2, "write 90s, 30m, 12h, 7d"),
    ("events peek --handlers no.such", 4, "no.such"),
    ("events run --handlers no.such", 4, "no.such"),
    ("compact --tpe Customer", 2, "--type"),
    ("gc --older-than long", 2, "long"),
    ("verify --models no.such", 2, "no.such"),
    ("info --config nowhere.toml", 2, "nowhere.toml"),
    ("doctor --config nowhere.toml", 2, "nowhere.toml"),
    ("du extra", 2, "extra"),
    ("index verify extra", 2, "extra"),
    ("index repair --aply", 2, "--apply"),
    ("schema list extra", 2, "extra"),
    ("schema repair --aply", 2, "--apply"),
    ("tag list extra", 2, "extra"),
    ("lock show extra", 2, "extra"),
    ("lock break extra", 2, "extra"),
    ("migrate-engine --token t", 2, "--apply"),
    ("branch list extra", 2, "extra"),
    ("branch create", 2, "NAME"),
    ("branch diff", 2, "NAME"),
    ("branch delete", 2, "NAME"),
    ("branch protect", 2, "NAME"),
    ("branch merge run/1 --on-conflict mine", 2, "fail, ours, theirs, fields"),
    ("branch update run/1 --on-conflict mine", 2, "fail, ours, theirs, fields"),
]


AS_FOR = {
    "query relations": "query entities",
    "commits examine": "commits",
    "tag create": "tag list",
    "tag delete": "tag list",
    "events inspect": "events show",
    "branch create": "branch list",
    "branch delete": "branch list",
    "branch protect": "branch list",
    "branch diff": "diff",
    "branch update": "branch merge",
}  # commands whose JSON is told of elsewhere


def test_every_command_is_in_both_tables() -> None:
    commands = {*leaves(get_command(app))}
    assert {name.removesuffix(" again") for name in GOOD} == commands
    wrong = {name for name in commands for line, _, _ in BAD if f"{line} ".startswith(f"{name} ")}
    assert wrong == commands


@pytest.fixture(
    params=["sqlite", "directory", pytest.param("seaweedfs", marks=pytest.mark.s3)], scope="module"
)
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Forks]]:
    """A place for a storage, and a folder with files for it."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (folder / "changed.jsonl").write_text(json.dumps(ROWS[0]).replace("Ann", "Zoe"))
    (folder / "broken.jsonl").write_text('{"type": "Customer", "key": 5}\n{')
    (folder / "later.csv").write_text("id,name\nc1,Anna\n")
    (folder / "once.toml").write_text("event_max_attempts = 1\n")
    if request.param == "seaweedfs":
        server: S3Server = request.getfixturevalue("seaweedfs_s3")
        with Forks(folder, AWS_ENDPOINT_URL=server.endpoint) as forks:
            yield f"s3://{server.make_bucket()}/shop", forks
        return
    name = "shop.db" if request.param == "sqlite" else "shop"
    with Forks(folder) as forks:
        yield name, forks


def test_good_and_bad_lines(shop: tuple[str, Forks]) -> None:
    """In the order of the tables: what one leaves behind is what the next one works on."""
    uri, forks = shop
    wrong = [each for name, case in GOOD.items() for each in _good(forks, uri, name, case)]
    # What is wrong with a line itself is the same everywhere.
    lines = [line for line in BAD if line[1] != 2 or uri == "shop.db"]
    wrong += [each for line in lines for each in _bad(forks, uri, *line)]
    assert not wrong, "\n".join(map(str, wrong))


def _good(forks: Forks, uri: str, name: str, case: Case) -> Iterator[tuple[Any, ...]]:
    """What is not as it should be."""
    words = [*case.line.format(uri=uri).split(), *case.more]
    where = () if name == "copy" else ("--storage-uri", uri)
    done = forks.onto("--json", *words, *where, until_line=case.lives)
    code = case.sqlite if uri.endswith(".db") and case.sqlite is not None else case.code
    if done.code != code:
        yield (name, code, done)
    elif done.code:
        if done.json["error"]["exit_code"] != done.code:
            yield (name, done)
    elif name not in PRINT_THEIR_OWN or case.has:
        expected = json.loads(json.dumps(case.has or {}).replace("{uri}", _location(uri)))
        found = {key: done.json.get(key) for key in expected}
        if found != expected:
            yield (name, expected, found)
        if undocumented := [key for key in done.json if f"`{key}`" not in _section(name)]:
            yield (name, "docs/cli.md says nothing of", undocumented)


def _bad(forks: Forks, uri: str, line: str, code: int, words: str) -> Iterator[tuple[Any, ...]]:
    names = line.format(uri=uri).split()
    where = () if names[0] == "copy" else ("--storage-uri", uri)
    done = forks.onto(*names, *where)
    errors = [told for told in done.err.splitlines() if told.startswith("error: ")]
    if done.code != code or len(errors) != bool(words) or words not in done.err:
        yield (line, code, words, done)
    if "defect" in done.err or "Traceback" in done.err:
        yield (line, done)


def _location(uri: str) -> str:
    return f"sqlite:///{uri}" if uri.endswith(".db") else uri


def _section(name: str) -> str:
    """Of a command in docs/cli.md, with the one that it points to."""
    names = [name.removesuffix(" again"), *filter(None, [AS_FOR.get(name)])]
    headings = [rf"^#+ `onto {re.escape(each)}\b[^`\n]*`\n(.*?)(?=^#|\Z)" for each in names]
    found = [re.search(heading, DOCS, re.M | re.S) for heading in headings]
    return "".join(each.group(1) for each in found if each is not None)


def test_an_option_that_is_not_there() -> None:
    for name in leaves(get_command(app)):
        done = onto(*name.split(), "--no-such-option")
        assert done.code == 2, (name, done)
        assert "--no-such-option" in done.error(), (name, done)
        assert f"`onto {name} --help`" in done.err, (name, done)

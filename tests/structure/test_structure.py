"""What `docs/development.md` says of the structure, held to. Each failure says what to do."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.structure import folders, walks

ROOT = Path(__file__).parents[2]
SHORTEST = 40  # lines
MEANINGLESS = {"found", "one", "known", "said"}

# Files that may be short, and why.
SHORT = {
    "ontologia_dagster/definitions.py": "what Dagster loads: a table of contents",
}
# Class names, without a leading underscore, that stand for two things, and why.
SHARED_NAMES: dict[str, str] = {}


@cache
def product() -> dict[str, ast.Module]:
    """Every module of the product, by its path."""
    files = [file for name in folders.PACKAGES for file in (ROOT / name).rglob("*.py")]
    return {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text()) for f in sorted(files)}


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for file, module in product().items():
        for node in ast.walk(module):
            if isinstance(node, kinds):
                yield file, node


def imports() -> Iterator[tuple[str, int, str]]:
    """File, line and the module that is imported, for `import a.b` and `from a import b` alike."""
    for file, node in nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield file, node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield file, node.lineno, f"{node.module}.{alias.name}"


def last_name(node: ast.AST) -> str:
    """`store` of both `store` and `self._repository.store`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def none_of(problems: list[str], advice: str) -> None:
    assert not problems, "\n".join([advice, *problems])


# --- the contributor's page ---------------------------------------------------------------------


def test_the_folder_list_is_the_tree() -> None:
    listed = folders.listed(folders.PAGE.read_text())
    tree = folders.tree()

    none_of(
        [f"not in the list: {path}" for path in tree if path not in listed]
        + [f"not in the tree: {path}" for path in listed if path not in tree]
        + [f"has no words: {path}" for path, words in listed.items() if not words],
        "docs/development.md shows another tree: run `python -m tests.structure.folders --write`,"
        " then read the words of what is new",
    )
    assert list(listed) == tree, "right files, wrong order: `python -m tests.structure.folders -h`"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.spark] if name == "ingestion" else [])
        for name in walks.WALKS
    ],
)
def test_a_walk_passes_the_files_that_are_listed(name: str, request: pytest.FixtureRequest) -> None:
    if name == "ingestion":
        request.getfixturevalue("spark")  # the resource finds the session of the tests
    documented = set(walks.documented(walks.PAGE.read_text(), name))
    for _ in range(3):  # a slow machine may renew a lease on the way
        passed = walks.to_the_ports(name, walks.walk(name))
        if set(passed) == documented:
            break

    assert documented == set(passed), (
        f"the walk of docs/development.md has changed: run `python -m tests.structure.walks {name}"
        " --write`, and look whether the diagram above the list still tells the truth"
    )
    assert len(passed) <= walks.LIMITS[name], (
        f"{len(passed)} files, at most {walks.LIMITS[name]}: a reader who follows it has to open"
        " too many rooms; see which two of them are one noun"
    )


def test_names_of_files_and_tests_on_the_pages_exist() -> None:
    """Of the design pages and the contributor's: every path, and every test that is named."""
    functions = re.findall(
        r"^\s*(?:async )?def (test_\w+)",
        "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py")),
        re.MULTILINE,
    )
    problems = []
    for page in [folders.PAGE, *sorted((ROOT / "docs" / "design").glob("*.md"))]:
        text = page.read_text()
        for path in re.findall(
            r"`((?:storage_engine|ontologia_dagster|jobs|tests)/[\w/.]*)`", text
        ):
            if not (ROOT / path).exists():
                problems.append(f"{page.name}: no such file: {path}")
        for test in re.findall(r"`(test_\w+)`", text):
            if not any(name.startswith(test) for name in functions):
                problems.append(f"{page.name}: no such test: {test}")
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in link and not (page.parent / link).exists():
                problems.append(f"{page.name}: leads nowhere: {link}")
    none_of(problems, "the pages name what is not there: put in the new names")


def test_what_the_code_cites_is_explained() -> None:
    """`RFC 0004 3.5` and the like, in code and tests, have a row in docs/design/README.md."""
    explained = (ROOT / "docs" / "design" / "README.md").read_text()
    rows = set(re.findall(r"^\| (RFC 00\d\d(?: [\d.]+| test \d+)?) ", explained, re.MULTILINE))
    problems = []
    for folder in ("storage_engine", "ontologia_dagster", "jobs", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for rfc, lead, number in re.findall(
                r"RFC (00\d\d),? (section |tests? |matrix |test matrix )?(\d+(?:\.\d+)?)",
                file.read_text(),
            ):
                kind = "test " if lead.startswith(("test", "matrix")) else ""
                citation = f"RFC {rfc} {kind}{number}"
                if citation not in rows:
                    problems.append(f"{file.relative_to(ROOT)}: {citation}")
    none_of(problems, "docs/design/README.md has no row for these citations")


# --- rooms --------------------------------------------------------------------------------------


def test_no_file_is_too_short_to_be_a_room() -> None:
    problems = []
    for file in product():
        lines = len((ROOT / file).read_text().splitlines())
        thin = Path(file).stem in {"__init__", "__main__"} or file.startswith("jobs/")
        thin |= file.startswith("ontologia_dagster/defs/")  # an example that people replace
        if lines < SHORTEST and not thin and file not in SHORT:
            problems.append(f"{file}: {lines} lines")
    none_of(problems, f"a file under {SHORTEST} lines belongs into the room of its noun")
    none_of([file for file in SHORT if file not in product()], "SHORT names what is gone")


def test_a_class_name_stands_for_one_thing() -> None:
    classes: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for file, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        classes.setdefault(node.name.lstrip("_"), []).append((file, node))
    problems = []
    for name, places in sorted(classes.items()):
        bases = {(file, last_name(base)) for file, node in places for base in node.bases}
        things = [f"{file}:{n.lineno}" for file, n in places if (file, n.name) not in bases]
        if len(things) > 1 and name not in SHARED_NAMES:
            problems.append(f"{name}: {', '.join(things)}")
    none_of(problems, "two classes of one name for two things: rename one to what it is")
    none_of(
        [n for n in SHARED_NAMES if len(classes.get(n, ())) < 2], "SHARED_NAMES no longer needs"
    )


def test_locals_say_what_they_hold() -> None:
    none_of(
        [
            f"{file}:{line} {name}"
            for file, module in product().items()
            for line, name in sorted(_locals(module))
            if name in MEANINGLESS
        ],
        "these names say nothing: call it what it is (claim, manifests, head, ...)",
    )


def _locals(node: ast.AST, inside: bool = False) -> Iterator[tuple[int, str]]:
    """What functions, lambdas and comprehensions bind; fields of classes are no locals."""
    match node:
        case ast.Name(id=name, ctx=ast.Store(), lineno=line) if inside:
            yield line, name
        case ast.arg(arg=name, lineno=line):
            yield line, name
        case ast.ExceptHandler() | ast.MatchAs() if inside and node.name:
            yield node.lineno, node.name
    if isinstance(node, ast.ClassDef):
        inside = False
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *_COMPREHENSIONS)):
        inside = True
    for child in ast.iter_child_nodes(node):
        yield from _locals(child, inside)


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# --- layers and ports ---------------------------------------------------------------------------


def test_the_layers_include_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [c["layers"] for c in settings["contracts"] if c["type"] == "layers"]
    placed = {name.strip() for layer in layers for name in re.split(r"[|:]", layer)}
    engine = ROOT / "storage_engine"
    parts = [path for path in engine.iterdir() if (path / "__init__.py").exists()]
    parts += [path for path in engine.glob("*.py") if path.stem not in {"__init__", "__main__"}]

    none_of(
        sorted(
            f"storage_engine.{p.stem}" for p in parts if f"storage_engine.{p.stem}" not in placed
        )
        + sorted(n for n in placed if not _is_module(n)),
        "the layers contract in pyproject.toml names other packages than there are: give each new"
        " one its place, and drop what is gone",
    )


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_nobody_asks_an_engine_or_a_store_what_it_is() -> None:
    """What differs between engines is a method or a capability of the port."""
    engines = {
        node.name
        for file, node in nodes(ast.ClassDef)
        if isinstance(node, ast.ClassDef) and re.search(r"(Repository|Store)(V\d)?$", node.name)
    }
    problems = []
    for file, node in nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if last_name(node.func) != "isinstance" or len(node.args) != 2:
            continue
        kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
        problems += [f"{file}:{node.lineno} {k}" for k in map(last_name, kinds) if k in engines]
    none_of(
        problems, "no isinstance on engines and stores: widen Repository or ObjectStore instead"
    )


def test_nobody_reaches_around_a_port() -> None:
    problems = []
    for file, node in nodes(ast.Call):
        assert isinstance(node, ast.Call)
        if last_name(node.func) in {"getattr", "hasattr"} and node.args:
            target = last_name(node.args[0]).lstrip("_")
            if re.search(r"(^|_)(store|repository|repo|engine)$", target):
                problems.append(f"{file}:{node.lineno} {last_name(node.func)}({target}, ...)")
    none_of(problems, "no getattr and hasattr on stores and repositories: declare it on the port")


def test_no_product_code_knows_that_it_is_simulated() -> None:
    problems = []
    for file, node in nodes(ast.Name, ast.Attribute, ast.FunctionDef):
        name = node.name if isinstance(node, ast.FunctionDef) else last_name(node)
        if name == "simulated":
            problems.append(f"{file}:{getattr(node, 'lineno', 0)}")
    for file, node in nodes(ast.Compare):
        assert isinstance(node, ast.Compare)
        if file.startswith("storage_engine/objectstore/"):
            continue  # where `memory://` is a scheme like others
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) and side.value == "memory" for side in sides):
            problems.append(f'{file}:{node.lineno} compares with "memory"')
    none_of(problems, "what differs in a simulation is a policy or a capability of the store")


def test_private_names_of_dagster_are_in_one_file() -> None:
    private = re.compile(r"dagster(_\w+)?(\.\w+)*\._")
    none_of(
        [
            f"{file}:{line} {module}"
            for file, line, module in imports()
            if private.match(module) and file != "ontologia_dagster/dagster_compat.py"
        ],
        "import private names of Dagster in ontologia_dagster/dagster_compat.py alone",
    )


def test_spark_and_dagster_use_the_log_through_the_repository() -> None:
    none_of(
        [
            f"{file}:{line} {module}"
            for file, line, module in imports()
            if file.startswith(("storage_engine/spark/", "ontologia_dagster/", "jobs/"))
            and f"{module}.".startswith("storage_engine.commitlog.")
        ],
        "spark and ontologia_dagster import no commitlog: ask the Repository for it",
    )


def test_programs_are_not_imported() -> None:
    none_of(
        [
            f"{file}:{line} {module}"
            for file, line, module in imports()
            if module.split(".", 1)[0] == "jobs"
        ],
        "jobs/ holds programs for spark-submit: import from storage_engine.spark.jobs",
    )

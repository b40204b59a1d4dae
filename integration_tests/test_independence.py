"""Six packages stand alone: none imports or requires another of ours, or uses what it does not declare."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
OURS = {name.replace("-", "_") for name in PACKAGES}
ASSEMBLY = "gemini-booster"


def imported_modules(source: Path) -> Iterator[tuple[str, bool]]:
    """Yield each module that a file imports, and whether importing the file needs it."""
    tree = ast.parse(source.read_text(), str(source))
    at_import = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        at_import.add(node)
        if isinstance(node, ast.ClassDef):
            pending.extend(node.body)
    for node in ast.walk(tree):
        needed = node in at_import
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, needed
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module, needed
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((name, False) for name in names if isinstance(name, str))


def declared(package: Path, *, extras: bool) -> set[str]:
    """Return the names of the distributions a package requires, optionally with its extras."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    texts = list(project["dependencies"])
    if extras:
        texts += [text for texts in project.get("optional-dependencies", {}).values() for text in texts]
    return {re.split(r"[\s<>=!~;\[]", text, maxsplit=1)[0].lower() for text in texts}


def faults(package: Path) -> list[str]:
    """Return what keeps a package from standing alone, one sentence each."""
    own = package.name.replace("-", "_")
    siblings = set() if package.name == ASSEMBLY else OURS - {own}
    found = [
        f"{package.name} requires {name}."
        for name in declared(package, extras=True)
        if name.replace("-", "_") in siblings
    ]
    required, optional = declared(package, extras=False), declared(package, extras=True)
    for folder in ("src", "tests"):
        for source in sorted((package / folder).rglob("*.py")):
            for module, needed in imported_modules(source):
                top = module.partition(".")[0]
                place = f"{source.relative_to(package)} imports {module}"
                if top in siblings:
                    found.append(f"{place}, a sibling.")
                elif folder == "src" and top not in sys.stdlib_module_names and top != own:
                    distribution = top.replace("_", "-")
                    if distribution not in (required if needed else optional):
                        found.append(f"{place}, which {package.name} does not require.")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_package_uses_no_sibling_and_only_what_it_requires(package: str) -> None:
    assert faults(ROOT / "packages" / package) == []


def make_package(folder: Path, name: str, source: str, *, dependencies: list[str]) -> Path:
    package = folder / name
    (package / "src" / name.replace("-", "_")).mkdir(parents=True)
    (package / "src" / name.replace("-", "_") / "__init__.py").write_text(source)
    (package / "pyproject.toml").write_text(f"[project]\ndependencies = {dependencies}\n")
    return package


@pytest.mark.parametrize(
    "source",
    [
        "import gemini_chunk",
        "from gemini_chunk import Chunk",
        "from gemini_chunk._states import TensorState",
        "def late():\n    import gemini_chunk",
        "import typing\nif typing.TYPE_CHECKING:\n    from gemini_chunk import Chunk",
        "try:\n    import gemini_chunk\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('gemini_chunk')",
    ],
)
def test_checker_sees_every_way_to_import_a_sibling(tmp_path: Path, source: str) -> None:
    package = make_package(tmp_path, "gemini-ddp", source, dependencies=[])
    assert [text for text in faults(package) if text.endswith("a sibling.")] != []


def test_checker_sees_a_required_sibling(tmp_path: Path) -> None:
    package = make_package(tmp_path, "gemini-ddp", "", dependencies=["gemini-chunk>=0.1,<0.2"])
    assert faults(package) == ["gemini-ddp requires gemini-chunk."]


def test_checker_sees_an_undeclared_requirement(tmp_path: Path) -> None:
    package = make_package(tmp_path, "gemini-search", "import torch", dependencies=[])
    assert faults(package) == ["src/gemini_search/__init__.py imports torch, which gemini-search does not require."]


def test_checker_lets_the_assembly_use_its_siblings(tmp_path: Path) -> None:
    package = make_package(tmp_path, ASSEMBLY, "import gemini_chunk", dependencies=["gemini-chunk>=0.1,<0.2"])
    assert faults(package) == []

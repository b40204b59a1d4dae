"""The repository has its agreed shape, and the seven packages agree with each other."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["booster", "chunk", "ddp", "lazy", "optim", "placement", "search"]


def project(package: str) -> dict[str, Any]:
    """Return the ``project`` table of a package."""
    table: dict[str, Any] = tomllib.loads((folder(package) / "pyproject.toml").read_text())["project"]
    return table


def folder(package: str) -> Path:
    return ROOT / "packages" / f"gemini-{package}"


def listed_files() -> list[Path]:
    """Return the files that are tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_top_level_has_seven_entries() -> None:
    visible = {path.relative_to(ROOT).parts[0] for path in listed_files()}
    visible = {name for name in visible if not name.startswith(".")}
    assert visible == {
        "LICENSE",
        "README.md",
        "examples",
        "integration_tests",
        "noxfile.py",
        "packages",
        "pyproject.toml",
    }


def test_there_are_seven_packages() -> None:
    assert sorted(path.name for path in (ROOT / "packages").iterdir()) == [f"gemini-{name}" for name in PACKAGES]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_what_a_package_needs(package: str) -> None:
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        assert (folder(package) / name).is_file(), name
    for name in ("__init__.py", "py.typed"):
        assert (folder(package) / "src" / f"gemini_{package}" / name).is_file(), name
    assert list((folder(package) / "tests").glob(f"test_{package}_*.py")), "no tests"
    assert (folder(package) / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_changelog_tells_of_the_present_version(package: str) -> None:
    changelog = (folder(package) / "CHANGELOG.md").read_text()
    section = re.search(
        rf"^## \[?{re.escape(project(package)['version'])}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    assert section is not None
    assert re.search(r"^- \w", section[1], re.M)


def test_root_is_no_package() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "project" not in root
    assert "build-system" not in root


def test_booster_requires_exactly_its_siblings_in_ranges_that_admit_them() -> None:
    ranges = {}
    for text in project("booster")["dependencies"]:
        if match := re.fullmatch(r"gemini-(\w+)>=(\d+)\.(\d+)\.(\d+),<(\d+)\.(\d+)", text):
            ranges[match[1]] = [int(number) for number in match.groups()[1:]]
    assert sorted(ranges) == [name for name in PACKAGES if name != "booster"]
    for package, (major, minor, patch, *ceiling) in ranges.items():
        version = [int(number) for number in project(package)["version"].split(".")]
        assert [major, minor, patch] <= version < [*ceiling, 0], package
        # Before 1.0 the minor is the breaking digit: the range ends where the next one begins.
        assert ceiling == [0, minor + 1], package


def test_packages_agree_on_python_and_torch() -> None:
    assert {project(package)["requires-python"] for package in PACKAGES} == {">=3.11"}
    ranges = {text for package in PACKAGES for text in project(package)["dependencies"] if text.startswith("torch")}
    assert ranges == {"torch>=2.9"}


def test_test_files_have_unique_names() -> None:
    names = Counter(path.name for path in ROOT.glob("packages/*/tests/**/test_*.py"))
    names.update(path.name for path in ROOT.glob("integration_tests/**/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_none_is_private(package: str) -> None:
    module = importlib.import_module(f"gemini_{package}")
    assert all(hasattr(module, name) for name in module.__all__)
    assert [name for name in module.__all__ if name.startswith("_")] == ["__version__"]
    assert module.__version__ == project(package)["version"]

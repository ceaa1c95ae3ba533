"""The wheels: `switchyard` with the command, and what it consists of: `-app`, `-engine` and `-kernels`.

The import names are `app` and `engine`, which other programs may use too: install them into an environment of their
own, as `uv tool install` and `pipx install` do. Name the file, not `switchyard`: on PyPI that is another project.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packages.project import CHECKOUT, PackagingError, Project, read_project, run

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "built", "screenshots", ".*")
"""Not in wheels: what is built on a machine, and pictures of the README."""


@dataclass(frozen=True)
class Distribution:
    """One wheel.

    Attributes:
        packages: folders of the checkout that it holds.
        requires: its dependencies.
        scripts: commands and their functions.
        windows: the same for commands without a console.
    """

    name: str
    summary: str
    packages: tuple[str, ...]
    requires: tuple[str, ...]
    scripts: tuple[tuple[str, str], ...] = ()
    windows: tuple[tuple[str, str], ...] = ()


def distributions(project: Project) -> tuple[Distribution, ...]:
    """All but the kernels, which are made for each platform (`packages.kernels`)."""
    same = f"=={project.version}"
    return (
        Distribution(
            "switchyard",
            project.description,
            (),
            (f"switchyard-app{same}", f"switchyard-engine{same}", f"switchyard-kernels{same}"),
            scripts=(("switchyard", "engine.cli:main"),),
            windows=(("switchyard-window", "app.__main__:main"),),
        ),
        Distribution(
            "switchyard-app",
            "The window of Switchyard.",
            ("app",),
            (f"switchyard-engine{same}", *project.window),
        ),
        Distribution("switchyard-engine", "The engine of Switchyard.", ("engine", "resources"), project.engine),
    )


def build_wheels(target: Path, checkout: Path = CHECKOUT) -> list[Path]:
    """Builds them into `target`, which replaces wheels of the same names.

    Raises:
        PackagingError: a build failed; `target` has none of a failed one.
    """
    project = read_project(checkout)
    return [_build(each, project, target, checkout) for each in distributions(project)]


def _build(distribution: Distribution, project: Project, target: Path, checkout: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="switchyard-wheel-") as name:
        tree, built = Path(name) / "tree", Path(name) / "built"
        tree.mkdir()
        for package in distribution.packages:
            shutil.copytree(checkout / package, tree / package, ignore=_LEFT_OUT)
        _compile_translations(tree / "resources" / "translations")
        shutil.copy2(checkout / "LICENSE", tree / "LICENSE")
        shutil.copy2(checkout / "README.md", tree / "README.md")
        (tree / "pyproject.toml").write_text("\n".join(pyproject(distribution, project)), encoding="utf-8")
        return wheel_of(tree, built, target)


def _compile_translations(folder: Path) -> None:
    """Has the compiled ones in place of the sources: a package has no compiler."""
    qt = importlib.util.find_spec("PySide6")
    home = Path(qt.origin).parent if qt is not None and qt.origin else Path()
    name = "lrelease.exe" if sys.platform == "win32" else "lrelease"
    compiler = next((place for place in (home / name, home / "Qt" / "libexec" / name) if place.is_file()), None)
    for source in folder.glob("*.ts"):
        if compiler is None:
            raise PackagingError("PySide6's lrelease, which compiles translations, is not there: set up the checkout.")
        run([compiler, "-silent", source, "-qm", source.with_suffix(".qm")], f"{source.name} could not be compiled")
        source.unlink()


def wheel_of(tree: Path, built: Path, target: Path) -> Path:
    """Builds the project in `tree`, and moves its wheel to `target`."""
    options: list[str | Path] = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--wheel-dir",
        built,
    ]
    run([sys.executable, "-m", "pip", "wheel", *options, tree], f"The wheel of {tree} could not be built")
    (wheel,) = built.glob("*.whl")
    target.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, target / wheel.name))


def pyproject(distribution: Distribution, project: Project) -> Iterator[str]:
    """Lines of a distribution's pyproject.toml."""
    # JSON's strings and lists are TOML's.
    yield "[build-system]"
    yield 'requires = ["setuptools>=77"]'
    yield 'build-backend = "setuptools.build_meta"'
    yield "[project]"
    yield f"name = {json.dumps(distribution.name)}"
    yield f"version = {json.dumps(project.version)}"
    yield f"description = {json.dumps(distribution.summary)}"
    yield 'readme = "README.md"'
    yield f"license = {json.dumps(project.license)}"
    yield 'license-files = ["LICENSE"]'
    yield f"requires-python = {json.dumps(project.requires_python)}"
    yield f"dependencies = {json.dumps(list(distribution.requires))}"
    for table, entries in (("scripts", distribution.scripts), ("gui-scripts", distribution.windows)):
        if entries:
            yield f"[project.{table}]"
            yield from (f"{name} = {json.dumps(function)}" for name, function in entries)
    if not distribution.packages:
        yield "[tool.setuptools]"
        yield "packages = []"
        return
    yield "[tool.setuptools.packages.find]"
    yield f"include = {json.dumps([f'{package}*' for package in distribution.packages])}"
    yield "[tool.setuptools.package-data]"
    yield from (f'{package} = ["**/*"]' for package in distribution.packages)

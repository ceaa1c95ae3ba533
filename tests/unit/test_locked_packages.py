"""The lists that set-up installs from: whole, hashed, within pyproject's ranges, and under licences that allow it."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALLERS = CHECKOUT / "installers"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))

sys.path.insert(0, str(INSTALLERS))
try:
    import licences
    import lock
    from steps_environment import LOCKED_RUNTIME, LOCKED_TESTS, TORCH
finally:
    sys.path.remove(str(INSTALLERS))

SYSTEMS = [
    {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"},
    {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64", "os_name": "posix"},
    {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"},
    {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64", "os_name": "nt"},
]
PYTHONS = ["3.11", "3.12", "3.13"]


def entries(file: str) -> list[str]:
    """What stands of each package: its requirement with the hashes that follow it."""
    text = re.sub(r"^#.*\n", "", (INSTALLERS / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.split(r"\n(?=\S)", text.strip())


def versions(file: str, system: dict[str, str], python: str) -> dict[str, str]:
    """The locked version of each package that is installed there."""
    there = {**system, "python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    found: dict[str, str] = {}
    for entry in entries(file):
        requirement = Requirement(entry.partition("\\\n")[0])
        if requirement.marker is None or requirement.marker.evaluate(there):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} twice for {there}"
            (found[name],) = (str(each.version) for each in requirement.specifier)
    return found


@pytest.mark.parametrize("file", [LOCKED_RUNTIME, LOCKED_TESTS])
def test_every_package_is_pinned_and_hashed_and_no_source_is_named(file: str) -> None:
    for entry in entries(file):
        assert re.fullmatch(
            r"[a-z0-9-]+==[a-z0-9.]+( ; [^\\\n]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n|$))+", entry
        ), entry.partition("\\")[0]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system["platform_machine"])
def test_the_locked_versions_are_what_the_project_asks_for(system: dict[str, str], python: str) -> None:
    runtime, tests = versions(LOCKED_RUNTIME, system, python), versions(LOCKED_TESTS, system, python)
    assert {name: version for name, version in tests.items() if runtime.get(name, version) != version} == {}
    there = {**system, "python_version": python, "python_full_version": f"{python}.1"}
    needs = [
        *((need, runtime) for need in (*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"])),
        *((need, runtime | tests) for need in PROJECT["dependency-groups"]["test"]),
        *((need, runtime) for need in lock.TORCH_NEEDS),
    ]
    for need, locked in needs:
        requirement = Requirement(need)
        name = canonicalize_name(requirement.name)
        if name == "torch":
            assert TORCH in requirement.specifier
        elif requirement.marker is None or requirement.marker.evaluate(there):
            assert locked.get(name, "0") in requirement.specifier, need


def test_pytorch_and_what_only_graphics_cards_need_are_not_forced_on_anybody() -> None:
    for system in SYSTEMS:
        for name in versions(LOCKED_RUNTIME, system, "3.12"):
            assert name not in ("torch", "triton", "cuda-bindings"), name
            assert not name.startswith("nvidia-") or name == "nvidia-ml-py"


def test_what_pytorch_needs_is_what_the_installed_one_says() -> None:
    if importlib.metadata.version("torch").partition("+")[0] != TORCH:
        pytest.skip("another PyTorch is installed here than the one that is set up")
    needs = [Requirement(each) for each in importlib.metadata.requires("torch") or ()]
    cpu = {
        str(Requirement(f"{each.name}{each.specifier}"))
        for each in needs
        if not each.name.startswith(("nvidia-", "cuda-", "triton"))
        and (each.marker is None or "extra" not in str(each.marker))
    }
    assert cpu == set(lock.TORCH_NEEDS)


def test_a_list_for_a_browser_s_python_is_cut_to_real_systems() -> None:
    listed = "a==1 ; sys_platform != 'emscripten'\nb==2 ; sys_platform == 'emscripten' \\\n    --hash=y\nc==3"
    assert lock._for_real_systems(listed) == "a==1\nc==3"


def test_every_licence_is_allowed() -> None:
    wrong = {name: licences.licence_of(name) for name in licences.locked_packages(LOCKED_RUNTIME, LOCKED_TESTS)}
    assert {name: licence for name, licence in wrong.items() if not licences.is_allowed(licence)} == {}


def test_the_table_of_licences_names_every_library() -> None:
    _, _, table = licences.THIRD_PARTY.read_text(encoding="utf-8").partition(licences.TABLE_HEAD)
    rows = [row.strip("| ").split(" | ") for row in table.strip().splitlines()[1:]]
    assert {name for _, names in rows for name in names.split(", ")} == licences.locked_packages(LOCKED_RUNTIME)
    assert all(licences.is_allowed(licence) for licence, _ in rows)


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MPL-2.0 AND MIT", True),
        ("LGPL-3.0-only OR GPL-2.0-only OR GPL-3.0-only", True),
        ("(MIT) AND (GPL-3.0-only)", False),
        ("GPL-3.0-only", False),
        ("", False),
    ],
)
def test_an_offer_of_licences_is_read(expression: str, allowed: bool) -> None:
    assert licences.is_allowed(expression) is allowed

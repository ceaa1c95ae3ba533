"""`engine.families` is all that the program knows of single families, and the library has what its files name."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from engine.checkpoint.gguf.arrangements import ARRANGEMENTS
from engine.families import PACKAGES, family_at, family_of, fast_path_of, library
from engine.families.family import Family
from engine.families.gguf import Made
from engine.families.gguf.table import GGUF, gguf_of
from engine.families.table import TABLE
from engine.runtime.adapters import adapter_for
from tests.engine.tiny_families import tiny_model

CHECKOUT = Path(__file__).resolve().parents[2]
MAY_NAME_FAMILIES = (
    "engine/families/",
    "engine/checkpoint/gguf/",  # llama.cpp names some architectures and tokenizers alike
    "engine/checkpoint/synthetic",  # makes models up
    "engine/checkpoint/starter/",  # writes the starter's config.json
)
ENGLISH = {"align", "beam", "git", "mamba"}
"""Words, and names of other things, that are also the `model_type` of a family."""
_QUOTED = re.compile(r"""(["'])([\w.-]+)\1""")
_IMPORTED = re.compile(r"^\s*(from|import)\s+transformers\.models\.(?!auto\.)", re.MULTILINE)


PACKAGE_NAMES = list(TABLE)


def first_of(package: str) -> Family:
    """The family of the first of a package's `model_type`s."""
    return family_of(next(model_type for model_type, place in PACKAGES.items() if place == package))


def test_every_row_is_needed() -> None:
    assert [package for package in PACKAGE_NAMES if first_of(package) == Family()] == []
    assert sorted(PACKAGE_NAMES) == PACKAGE_NAMES


def test_each_family_is_named_like_the_package_that_has_its_model_types() -> None:
    theirs = {model_type: package for model_type, package in PACKAGES.items() if not TABLE[package].own}
    assert {model_type: model_type_to_module_name(model_type) for model_type in theirs} == theirs
    assert theirs.keys() <= CONFIG_MAPPING_NAMES.keys()
    # The library has these as parts of others only, or computes something else than their makers.
    ours = {"glm5_next_text", "minimax", "step3p5"}
    assert CONFIG_MAPPING_NAMES.keys() & (PACKAGES.keys() - theirs.keys()) == ours
    listed = [row.types or (package,) for package, row in TABLE.items()]
    assert len(PACKAGES) == sum(map(len, listed))


@pytest.mark.parametrize("package", [package for package in PACKAGE_NAMES if first_of(package).fast_path is not None])
def test_the_library_has_the_classes_that_the_kernels_know(package: str) -> None:
    ours, theirs = f"engine.runtime.own.{package}", f"transformers.models.{package}.modeling_{package}"
    module = import_module(ours if TABLE[package].own else theirs)
    path = family_at(module.__name__).fast_path
    assert path is not None
    for part in ("model", "layer", "attention", "delta", "block"):
        if not getattr(path, part):
            continue
        kind = getattr(module, getattr(path, part))
        assert fast_path_of(kind.__new__(kind), part) is path  # type: ignore[arg-type]
        heir = type(kind.__name__, (kind,), {})  # may compute something else
        assert fast_path_of(heir.__new__(heir), part) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("package", [package for package in PACKAGE_NAMES if first_of(package).gate is not None])
def test_the_library_has_the_gates_that_the_kernels_know(package: str) -> None:
    module = import_module(f"transformers.models.{package}.modeling_{package}")
    gates = [kind._apply_gate for kind in vars(module).values() if "_apply_gate" in getattr(kind, "__dict__", {})]
    assert any(family_at(gate.__module__).gate is first_of(package).gate for gate in gates)


def test_the_library_is_the_one_that_is_pinned_and_has_what_we_recognise_in_it() -> None:
    assert transformers.__version__.startswith(f"{library.RELEASE}.")
    pins = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"transformers=={library.RELEASE}.*" in pins
    model = tiny_model("deepseek_v3")
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert all(hasattr(experts, name) for name in library.EXPERTS_INTERFACE)
    assert hasattr(model.config, library.CHOSEN_EXPERTS)
    assert library.gates_as_usual(experts)
    attention = model.get_submodule("model.layers.1.self_attn")
    code = library.code_of(attention)
    assert code is not None
    assert code is not type(attention).forward  # which renames arguments
    assert "cache" in inspect.signature(code).parameters


def test_every_adapter_can_be_imported_and_belongs_to_a_family() -> None:
    adapted = [model_type for model_type in PACKAGES if family_of(model_type).adapter]
    assert all(adapter_for(model_type) is not None for model_type in adapted)
    folder = CHECKOUT / "engine/runtime/adapters"
    assert {file.stem for file in folder.glob("*.py")} - {"__init__"} == {
        family_of(model_type).adapter for model_type in adapted
    }


def test_a_family_that_is_not_listed_needs_nothing() -> None:
    assert family_of("no_such_family") == Family()
    assert family_at("transformers.models.no_such_family.modeling") == Family()
    assert family_at("engine.runtime.own.parts") == Family()
    assert family_at("somebody.elses.llama.modeling_llama") == Family()
    assert adapter_for("no_such_family") is None


def test_nobody_else_names_a_family() -> None:
    found = [
        f"{place}: {name}"
        for place, text in _modules()
        for _, name in _QUOTED.findall(text)
        if name in CONFIG_MAPPING_NAMES and name not in ENGLISH
    ]
    assert found == []


def test_only_adapters_and_models_of_our_own_import_a_familys_classes() -> None:
    modules = {place: text for place, text in _modules() if _IMPORTED.search(text)}
    assert modules  # these do
    their_places = ("engine/runtime/adapters/", "engine/runtime/own/")
    assert [place for place in modules if not place.startswith(their_places)] == []


def _modules() -> Iterator[tuple[str, str]]:
    for root in ("engine", "app"):
        for file in sorted((CHECKOUT / root).rglob("*.py")):
            place = file.relative_to(CHECKOUT).as_posix()
            if not place.startswith(MAY_NAME_FAMILIES):
                yield place, file.read_text(encoding="utf-8")


def test_every_family_of_gguf_files_is_found_by_its_architecture() -> None:
    for architecture, families in GGUF.items():
        assert all(family.when is not None for family in families) or len(families) == 1
        for family in families:
            found = gguf_of(family.model_type)
            assert found is not None
            assert (family.architecture, family.model_type) == (architecture, found.model_type)
            ways = [way for ways in family.tensors.values() for way in (ways if isinstance(ways, tuple) else (ways,))]
            assert {way.how for way in ways if isinstance(way, Made)} <= ARRANGEMENTS.keys()

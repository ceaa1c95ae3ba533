"""`engine.families` is all that the program knows of single families, and the library has what its files name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

import engine.families
from engine.checkpoint.gguf.arrangements import ARRANGEMENTS
from engine.families import FILES, GGUF, family_at, family_of, fast_path_of
from engine.families.family import Family
from engine.families.gguf import Made
from engine.runtime.adapters import adapter_for

CHECKOUT = Path(__file__).resolve().parents[2]
MAY_NAME_FAMILIES = (
    "engine/families",
    "engine/checkpoint/gguf",  # llama.cpp names some architectures and tokenizers alike
    "engine/bench",  # makes models up, and writes GGUF files for a peer
    "engine/checkpoint/starter",  # writes the starter's config.json
)
ENGLISH = {"align", "beam", "git"}
"""Words, and names of other things, that are also the `model_type` of a family."""
_QUOTED = re.compile(r"""(["'])([\w.-]+)\1""")
_IMPORTED = re.compile(r"^\s*(from|import)\s+transformers\.models\.(?!auto\.)", re.MULTILINE)


def test_every_file_is_listed_and_needed() -> None:
    folder = Path(engine.families.__file__).parent
    assert {file.stem for file in folder.glob("*.py")} - {"__init__", "family", "gguf"} == FILES.keys()
    assert [file for file in FILES if Family() == import_module(f"engine.families.{file}").FAMILY] == []
    assert list(FILES) == sorted(FILES)


def test_each_family_is_named_like_the_package_that_has_its_model_types() -> None:
    packages = {model_type: model_type_to_module_name(model_type) for types in FILES.values() for model_type in types}
    assert packages == {model_type: file for file, types in FILES.items() for model_type in types}
    assert packages.keys() <= CONFIG_MAPPING_NAMES.keys()
    assert len(packages) == sum(map(len, FILES.values()))


@pytest.mark.parametrize("file", [file for file, types in FILES.items() if family_of(types[0]).fast_path is not None])
def test_the_library_has_the_classes_that_the_kernels_know(file: str) -> None:
    module = import_module(f"transformers.models.{file}.modeling_{file}")
    path = family_at(module.__name__).fast_path
    assert path is not None
    for part in ("model", "layer", "attention", *(["block"] if path.block else [])):
        kind = getattr(module, getattr(path, part))
        assert fast_path_of(kind.__new__(kind), part) is path  # type: ignore[arg-type]
        heir = type(kind.__name__, (kind,), {})  # may compute something else
        assert fast_path_of(heir.__new__(heir), part) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("file", [file for file, types in FILES.items() if family_of(types[0]).gate is not None])
def test_the_library_has_the_gates_that_the_kernels_know(file: str) -> None:
    module = import_module(f"transformers.models.{file}.modeling_{file}")
    gates = [kind._apply_gate for kind in vars(module).values() if "_apply_gate" in getattr(kind, "__dict__", {})]
    assert any(family_at(gate.__module__).gate is family_of(FILES[file][0]).gate for gate in gates)


def test_every_adapter_can_be_imported_and_belongs_to_a_family() -> None:
    named = {family_of(types[0]).adapter: types for types in FILES.values() if family_of(types[0]).adapter}
    for types in named.values():
        assert all(adapter_for(model_type) is not None for model_type in types)
    folder = CHECKOUT / "engine/runtime/adapters"
    assert {file.stem for file in folder.glob("*.py")} - {"__init__", "encoder_decoder"} == named.keys()


def test_a_family_that_is_not_listed_needs_nothing() -> None:
    assert family_of("no_such_family") == Family()
    assert family_at("transformers.models.no_such_family.modeling") == Family()
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


def test_only_adapters_import_a_familys_classes() -> None:
    modules = {place: text for place, text in _modules() if _IMPORTED.search(text)}
    assert modules  # the adapters do
    assert [place for place in modules if not place.startswith("engine/runtime/adapters/")] == []


def _modules() -> Iterator[tuple[str, str]]:
    for root in ("engine", "app"):
        for file in sorted((CHECKOUT / root).rglob("*.py")):
            place = file.relative_to(CHECKOUT).as_posix()
            if not place.startswith(tuple(f"{folder}/" for folder in MAY_NAME_FAMILIES)):
                yield place, file.read_text(encoding="utf-8")


def test_every_family_of_gguf_files_is_found_by_its_architecture() -> None:
    listed = [model_type for model_types in GGUF.values() for model_type in model_types]
    described = [file for file, types in FILES.items() if family_of(types[0]).gguf is not None]
    assert sorted(file for file, types in FILES.items() if set(types) & set(listed)) == described
    assert len(listed) == len(described)
    for architecture, model_types in GGUF.items():
        for model_type in model_types:
            family = family_of(model_type).gguf
            assert family is not None
            assert family.architecture == architecture
            ways = [way for ways in family.tensors.values() for way in (ways if isinstance(ways, tuple) else (ways,))]
            assert {way.how for way in ways if isinstance(way, Made)} <= ARRANGEMENTS.keys()

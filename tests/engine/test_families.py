"""`engine.families` is all that the program knows of single families: files, routers, and what the library has."""

import inspect
import json
import math
import random
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf.arrangements import ARRANGEMENTS
from engine.common.chat import ChatMessage
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode, never_cancelled
from engine.experts.dispatch import find_sites
from engine.families import PACKAGES, TABLE, family_at, family_of, fast_path_of, library
from engine.families.family import Family
from engine.families.gguf import Made
from engine.families.gguf.table import GGUF, gguf_of
from engine.runtime.adapters import adapter_for
from engine.runtime.engine import Engine
from engine.runtime.load.foresight import find_gates
from engine.runtime.load.library_models import build_skeleton, model_class_for, quiet_library, read_library_config
from tests.combinations import some
from tests.engine.tiny_configs import ADAPTED, DENSE, FAMILIES
from tests.engine.tiny_families import tiny_checkpoint, tiny_config, tiny_model
from tests.refusals import refused

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


def test_modules_are_taken_over_in_one_place() -> None:
    assigning = {
        str(file.relative_to(CHECKOUT))
        for file in (CHECKOUT / "engine").rglob("*.py")
        if re.search(r"\.forward = |__dict__.*[\"']forward[\"']|setattr\(.*[\"']forward[\"']", file.read_text("utf-8"))
    }
    assert assigning == {"engine/families/library.py"}


def test_a_module_is_taken_over_once_or_by_what_falls_back() -> None:
    module, other = torch.nn.Identity(), torch.nn.Identity()

    class Twice:
        def __init__(self) -> None:
            self.in_library = module.forward

        def __call__(self, x: int) -> int:
            return 2 * self.in_library(x)

    with pytest.raises(ZeroDivisionError), library.replaced([(module, lambda x: 5), (module, lambda x: 1 / x)]):
        module(0)
    assert library.own_forward(module) is None
    assert library.take_over((each, Twice()) for each in (module, module)) == 2
    assert module(1) == 4
    with library.replaced([(module, lambda _: 5), (other, lambda _: 6)]):
        assert (module(1), other(1)) == (5, 6)
    assert (module(1), other(1)) == (4, 1)
    with pytest.raises(RuntimeError, match=r"Identity is computed by .*Twice.* already"):
        library.take_over([(module, abs)])
    assert module(1) == 4


def test_every_adapter_can_be_imported_and_belongs_to_a_family() -> None:
    adapted = [model_type for model_type in PACKAGES if family_of(model_type).adapter]
    assert all(adapter_for(model_type) is not None for model_type in adapted)
    folder = CHECKOUT / "engine/runtime/adapters"
    assert {file.stem for file in folder.glob("*.py")} - {"__init__"} == {
        family_of(model_type).adapter.partition(".")[0] for model_type in adapted
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
            assert (family.architecture, family.model_type) == (architecture, found.model_type)
            ways = [way for ways in family.tensors.values() for way in (ways if isinstance(ways, tuple) else (ways,))]
            assert {way.how for way in ways if isinstance(way, Made)} <= ARRANGEMENTS.keys()


LIES: list[Any] = [
    *(0, -1, 1, 2, 3, 99, 30_000_000, 10**9, 2**62, 1.5, -0.5, 1e-320, math.nan, math.inf, True, False, None),
    *("x", [], [1], [0] * 300, ["full_attention"], {}, {"a": 1}, {"__float__": "NaN"}),
]
OF_ALL = (
    *("num_labels", "id2label", "problem_type", "return_dict", "output_hidden_states", "output_router_logits"),
    *("output_attentions", "use_cache", "is_encoder_decoder", "chunk_size_feed_forward", "per_layer_config"),
    *("rope_theta", "rope_scaling", "sliding_window", "layer_types", "head_dim", "quantization_config"),
)


def _lied(true: dict[str, Any], name: tuple[str, ...], lie: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(true))
    part = config
    for key in name[:-1]:
        part = part[key]
    part[name[-1]] = lie
    return config


def _names(part: dict[str, Any], of: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [(*of, name) for name in part if name not in ("model_type", "architectures")]
    return found + [
        name for key, inner in part.items() if isinstance(inner, dict) for name in _names(inner, (*of, key))
    ]


def _built(folder: Path) -> None:
    raw = read_config(folder)
    adapter = adapter_for(raw["model_type"])
    with quiet_library():
        model_class, part = model_class_for(read_library_config(folder, raw), adapter)
        build_skeleton(model_class, part, torch.bfloat16, adapter)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "count", [1, pytest.param(60, marks=pytest.mark.exhaustive)], ids=lambda count: f"{count} lies each"
)
def test_a_lie_in_any_field_of_any_family_is_refused_or_harmless(tmp_path: Path, count: int) -> None:
    chance = random.Random(count)
    file = tmp_path / "config.json"
    for family in {**FAMILIES, **ADAPTED}:
        with quiet_library():
            tiny_config(family).save_pretrained(tmp_path)
        true = json.loads(file.read_text())
        text = ("text_config",) if "text_config" in true else ()
        names = [*_names(true), *((*text, name) for name in OF_ALL)]
        for _ in range(count):
            name, lie = chance.choice(names), chance.choice(LIES)
            file.write_text(json.dumps(_lied(true, name, lie)))
            try:
                _built(tmp_path)
            except EngineError as error:
                assert error.code.is_users, (family, name, lie, error.message)  # noqa: PT017


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        *(("num_hidden_layers", lie) for lie in (0, -1, 5000)),
        *(("hidden_size", lie) for lie in (0, -32)),
        *(("num_experts_per_tok", lie) for lie in (99, -1, 0, 9)),
        *(("rope_theta", lie) for lie in (0, -1.0, math.nan, {"__float__": "NaN"})),
        *(("sliding_window", lie) for lie in (-1, 0, False)),
        ("num_key_value_heads", 3),
        ("n_group", 30_000_000),
    ],
)
def test_what_no_model_has_is_refused_by_name(tiny: Path, tmp_path: Path, name: str, lie: Any) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"use_sliding_window": True, name: lie}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError) as refused:
        read_config(tmp_path)
    assert refused.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert name in refused.value.message
    assert "again" not in refused.value.message


def test_what_a_family_does_not_need_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    lies = {
        "num_labels": 30_000_000,
        "id2label": {"0": "a"},
        "output_router_logits": True,
        "return_dict": False,
        "output_hidden_states": True,
        "output_attentions": True,
        "use_cache": False,
        "is_encoder_decoder": True,
        "chunk_size_feed_forward": -1,
        "_attn_implementation": "x",
        "attn_implementation": "x",
        "model": 7,
        "forward": None,
        "name_or_path": "elsewhere",
        "pruned_heads": {"0": [0]},
    }
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    answers = [_answer(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | lies))
    config = read_library_config(tmp_path, read_config(tmp_path))
    assert config.num_labels == 2
    answers.append(_answer(tmp_path))
    assert answers[0] == answers[1]


def test_what_fails_at_the_first_forward_is_told_of_the_configuration(tmp_path: Path) -> None:
    tiny_checkpoint("deepseek_v3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_group": -1, "topk_group": -1}))
    with refused(ErrorCode.CHECKPOINT_DAMAGED, match=r"does not fit its weights \(.+\): get both"):
        _answer(tmp_path)


def _answer(folder: Path) -> str:
    engine = Engine()
    try:
        engine.load(
            EngineConfig(model=str(folder), device="cpu"), on_progress=lambda *_: None, cancelled=never_cancelled
        )
        return engine.generate(
            (ChatMessage("user", "hello"),),
            SamplingParams(max_tokens=6),
            on_progress=lambda *_: None,
            on_text=lambda *_: None,
            cancelled=never_cancelled,
        ).text
    finally:
        engine.unload()


WANT_MORE = {"afmoe", "deepseek_v4", "hy_v3", "inkling_mm_model", "inkling_text", "lfm2_moe", "minimax_m2", "zaya"}
WANT_MORE |= {"smallthinker"}
"""Routers that take another input, or answer in another way."""
HIDDEN_DIFFERS = {"muse_spark"}
"""The experts get something narrower than the router."""
TOKENS = torch.tensor([[5, 17, 100, 33]])


def sites_of(model: Any) -> Any:
    return find_sites(model, lambda name, parameter: parameter.dtype)


@pytest.mark.parametrize("family", some([family for family in FAMILIES if family not in DENSE], first=5))
def test_asked_early_a_router_chooses_as_it_does(family: str) -> None:
    model = tiny_model(family)
    sites = sites_of(model)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def listen(name: str) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden, index, *_ = [*arguments, *keywords.values()]
            seen[name] = hidden.reshape(-1, hidden.shape[-1]), index

        return hook

    for site in sites:
        site.module.register_forward_pre_hook(listen(site.name), with_kwargs=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gates = find_gates(model, sites)
    assert len(gates) == len(sites)
    assert all(gate is None for gate in gates) == (family in WANT_MORE | HIDDEN_DIFFERS)
    with torch.no_grad():
        model(input_ids=TOKENS)
    for site, gate in zip(sites, gates, strict=True):
        if gate is None or site.name not in seen:
            continue
        hidden, index = seen[site.name]
        logits, chosen = gate(hidden)
        assert logits.shape == (len(hidden), site.num_experts)
        assert [set(row) for row in chosen.tolist()] == [set(row) for row in index.tolist()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", sorted(ADAPTED))
def test_families_of_another_kind_are_no_trouble(family: str) -> None:
    model = tiny_model(family)
    for gate in find_gates(model, sites_of(model)):
        if gate is not None:
            assert gate(torch.zeros(1, 32))[1].shape[0] == 1

"""What a checkpoint suggests: its own file, the recipe for the starter, and nothing where that makes no sense."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.manifest import Manifest, write_manifest
from engine.checkpoint.profile import suggested_sampling
from engine.checkpoint.starter.package import read_recipe
from engine.common.config import SamplingParams

NUMBERS = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3)


def write(folder: Path, **suggested: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(suggested))
    return folder


@given(st.dictionaries(st.sampled_from([*SamplingParams.__slots__, "do_sample", "eos_token_id"]), NUMBERS))
def test_nothing_in_the_file_is_a_reason_to_fail(
    tmp_path_factory: pytest.TempPathFactory, suggested: dict[str, Any]
) -> None:
    sampling = suggested_sampling(write(tmp_path_factory.mktemp("model"), **suggested))
    plain = SamplingParams()
    # How long, how wide and from which seed is not a model's to say.
    assert (sampling.max_tokens, sampling.seed, sampling.beams, sampling.stop) == (plain.max_tokens, None, 1, ())
    assert (sampling.temperature > 0) or suggested.get("do_sample") is not True or suggested.get("temperature") == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"do_sample": true, "temperature": NaN}'])
def test_a_broken_file_suggests_nothing_odd(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert suggested_sampling(tmp_path).temperature in (0.0, 1.0)
    assert suggested_sampling(tmp_path / "nowhere") == SamplingParams()


def test_a_starter_built_before_takes_the_recipes_suggestions(tmp_path: Path) -> None:
    recipe = read_recipe()
    write(tmp_path, do_sample=True, temperature=0.9)
    write_manifest(tmp_path, Manifest(f"recipe {recipe.name} 0123456789abcdef", ()))
    suggested = suggested_sampling(tmp_path)
    assert suggested.temperature == recipe.generation["temperature"]
    assert suggested.uses_dry
    assert suggested.dry_breakers == tuple(recipe.generation["dry_breakers"])
    for source in ("recipe of another model", "/a/path"):
        write_manifest(tmp_path, Manifest(source, ()))
        assert suggested_sampling(tmp_path).temperature == 0.9


def test_every_suggestion_of_the_recipe_is_understood(tmp_path: Path) -> None:
    recipe = read_recipe()
    suggested = suggested_sampling(write(tmp_path, **recipe.generation))
    assert suggested.temperature > 0
    for name in recipe.generation.keys() - {"do_sample"}:
        value = recipe.generation[name]
        assert getattr(suggested, name) == (tuple(value) if isinstance(value, list) else value)

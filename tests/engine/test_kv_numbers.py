"""What one token adds to the cache, from the configuration alone, against the cache of the model itself."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.config_file import text_part
from engine.checkpoint.kv_numbers import kv_elements_per_token
from engine.runtime.warm_up import kv_bytes_per_token
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_model

_ODD = ("deepseek_v4", "gemma4_text", "inkling_text", "jamba", "mimo_v2_flash", "nemotron_h", "longcat_flash")
"""Families that keep more or less than two numbers for each head and layer."""


@pytest.mark.parametrize("family", _ODD)
def test_families_with_caches_of_their_own(family: str) -> None:
    assert_counted(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES, *ADAPTED} - set(_ODD)))
def test_every_other_family(family: str) -> None:
    assert_counted(family)


def assert_counted(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        held = kv_bytes_per_token(model, torch.device("cpu"))
    assert kv_elements_per_token(text_part(model.config.to_dict())) * 4 == held

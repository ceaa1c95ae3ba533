"""Whatever is kept where and computed by whom: logits and tokens are those of transformers with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import CACHE_POLICIES, MISSES, PREFETCHES
from engine.experts.dispatcher import DECODE_TOKENS
from engine.runtime.loaded_model import LoadedModel
from tests.combinations import pairwise
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import (
    BEAMS,
    PROMPT,
    Reference,
    answer,
    chatting,
    memory_use,
    opened,
    reference,
    share_misses,
    slots,
)
from tests.engine.test_family_parity import first_difference, routed

FAMILIES = (
    "mixtral",
    "qwen3_moe",  # three experts for each token
    "olmoe",
    "gpt_oss",  # transposed, biases, gate and up interleaved and clamped
    "deepseek_v3",  # groups of experts, a shared one, a dense layer before
    "nemotron_h",  # no gate; state-space layers
    "phimoe",
    "llama4_text",  # scales what goes into an expert; every other layer is dense
    "granitemoe",
    "qwen2_moe",  # a shared expert with a gate of its own
)
FEW = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "llama4_text")
"""Whose experts differ."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "cache_slots": (0, 1, 5, 1000),
    "cache_policy": CACHE_POLICIES,
    "cache_ways": (None, 1, 2),
    "misses": MISSES,
    "prefetch": PREFETCHES,
    "devices": (1, 2),
}
SHORT = 12
"""Tokens of a prompt that is dispatched like a decode step."""


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_misses(monkeypatch)


@torch.inference_mode()
def logits(model: LoadedModel, tokens: int) -> torch.Tensor:
    """[1, tokens, V] of so much of the prompt."""
    result: torch.Tensor = model.model(input_ids=torch.tensor([PROMPT[:tokens]])).logits
    return result


def assert_equal(model: LoadedModel, expected: Reference) -> None:
    """Logits of a prefill, of a short prompt, and tokens of a conversation in two turns."""
    for tokens in (len(PROMPT), SHORT):
        torch.testing.assert_close(logits(model, tokens), expected.logits[:, :tokens], rtol=0, atol=1e-5)
    with chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        again = answer(session, expected.second_prompt)
        assert list(again.token_ids) == expected.second
        assert again.reused_tokens > 0
    for use in memory_use(model):
        assert use.peak <= use.total


def title(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.takes_turns(6)
@pytest.mark.parametrize("settings", pairwise({"family": FEW, **SETTINGS}), ids=title)
def test_every_two_settings_together(settings: dict[str, Any], checkpoints: Path) -> None:
    family, *_ = settings.values()
    expected = reference(family, checkpoints)
    options = {name: value for name, value in settings.items() if name != "family"}
    with opened(expected.folder, **options) as model:
        assert len(model.devices.devices) == settings["devices"]
        assert_equal(model, expected)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_experts_on_the_device(family: str, checkpoints: Path) -> None:
    expected = reference(family, checkpoints)
    with opened(expected.folder) as model:
        assert model.devices is not None
        assert slots(model) == 0
        assert memory_use(model)[0].by_category["experts"] == model.bank.nbytes > 0
        assert_equal(model, expected)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "nemotron_h", "llama4_text"])
def test_beams(family: str, devices: int, checkpoints: Path) -> None:
    expected = reference(family, checkpoints)
    with opened(expected.folder, devices, cache_slots=4) as model, chatting(model) as session:
        assert list(answer(session, PROMPT, beams=BEAMS).token_ids) == expected.beams
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert list(answer(session, PROMPT, beams=BEAMS).token_ids) == expected.beams


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("misses", ["mixed", "cpu", "fetch"])
def test_a_seed_says_what_is_drawn_wherever_experts_are(misses: str, checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    drawn = {"temperature": 1.5, "seed": 11}
    with opened(expected.folder, 0) as model, chatting(model) as session:
        on_cpu = answer(session, PROMPT, **drawn).token_ids
    answers = []
    for _ in range(2):
        with opened(expected.folder, cache_slots=5, misses=misses) as model, chatting(model) as session:
            answers += [answer(session, PROMPT, **drawn).token_ids for _ in range(2)]
            other = answer(session, PROMPT, temperature=1.5, seed=12).token_ids
    assert answers == [on_cpu] * 4
    assert other != on_cpu


def test_a_long_answer_goes_through_many_evictions(checkpoints: Path) -> None:
    """Every slot of a small cache changes hands again and again."""
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, 0) as model, chatting(model) as session:
        wanted = answer(session, PROMPT[:SHORT], 80).token_ids
    with opened(expected.folder, cache_slots=4, cache_policy="lru") as model, chatting(model) as session:
        assert answer(session, PROMPT[:SHORT], 80).token_ids == wanted
        counters = model.devices.experts.caches[0][0].counters
        assert counters.evictions > 20
        assert counters.lookups == counters.hits + counters.misses
        assert counters.misses == counters.on_cpu + counters.fetched


@pytest.mark.parametrize("policy", ["static", "auto"])
def test_experts_that_were_used_most_are_there_from_the_start(policy: str, checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, cache_slots=6, cache_policy=policy) as model, chatting(model) as session:
        assert ("not known" in model.info.device_note) == (policy == "static")
        answer(session, PROMPT[:SHORT], 30)
    with opened(expected.folder, cache_slots=6, cache_policy=policy) as model:
        (cache,) = model.devices.experts.caches[0]
        assert cache.policy == "static"  # `auto` can leave it
        cache.wait()
        assert sum(len(cache.residents(layer)) for layer in range(2)) > 0
        assert_equal(model, expected)


def test_a_prompt_leaves_what_decoding_keeps_alone(checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, cache_slots=5) as model, chatting(model) as session:
        answer(session, PROMPT[:SHORT], 40)
        (cache,) = model.devices.experts.caches[0]
        cache.wait()
        kept = [cache.residents(layer) for layer in range(2)]
        assert any(kept)
        prompt = random_prompt(2 * DECODE_TOKENS, seed=5)
        session.clear()
        answer(session, prompt, 1)
        cache.wait()
        assert [cache.residents(layer) for layer in range(2)] == kept


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_on_disk_under_a_device(family: str, devices: int, checkpoints: Path) -> None:
    """VRAM over RAM over disk: no tier holds all experts."""
    expected = reference(family, checkpoints)
    with opened(expected.folder, devices) as model:
        some = model.info.experts_bytes * 3 // 4  # the dense weights are on the devices
    with opened(expected.folder, devices, ram_bytes=some, cache_slots=3) as model:
        assert model.disk_backed is not None
        assert slots(model) > 0
        assert_equal(model, expected)


@pytest.mark.parametrize("misses", ["mixed", "fetch", "cpu"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_in_bf16_as_well(family: str, misses: str, checkpoints: Path) -> None:
    """Compared with the CPU alone, whose native kernels are the emulated device's as well."""
    folder = reference(family, checkpoints).folder
    found = []
    for devices in (0, 1):
        settings = {"cache_slots": 4, "misses": misses} if devices else {}
        with opened(folder, devices, precision="bf16", **settings) as model, routed(model.model) as routes:
            found.append((logits(model, SHORT).float(), list(routes)))
    (mine, my_routes), (theirs, their_routes) = found
    agreed = min(first_difference(my_routes, their_routes), SHORT)
    assert agreed >= SHORT // 2  # a near tie in a router may fall either way
    torch.testing.assert_close(mine[:, :agreed], theirs[:, :agreed], rtol=0, atol=2e-3)

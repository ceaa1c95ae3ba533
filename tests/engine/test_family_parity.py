"""Every family, loaded by transformers and by us from the same files, must say the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.families import family_of
from engine.families.library import ROUTER_CORRECTION
from engine.families.pictures import SIGHTS
from engine.runtime.load.library_models import leave_out_tower
from engine.runtime.loaded_model import LoadedModel
from tests.combinations import some
from tests.engine.loaded_tiny import opened_model
from tests.engine.tiny_configs import DENSE, FAMILIES, USUAL
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config

PROMPT = torch.tensor([[1, 5, 77, 200, 31, 8, 9, 300, 12, 44, 55, 66]])
NEW_TOKENS = 16
_ROUNDED = 4e-3
"""Between two results in bf16, each of which may be half as far from float32."""


@pytest.mark.parametrize("family", some(FAMILIES, (*USUAL, "inkling2_loop_text", "lara_mini")))
def test_logits_and_greedy_tokens_equal_the_librarys(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    compare_with_library(tmp_path, model_class(tiny_config(family)), moe=family not in DENSE)


def test_gemma_4_as_native_steps_know_it(tmp_path: Path) -> None:
    """The larger ones, which have no embeddings for each layer."""
    options = {"hidden_size_per_layer_input": 0}
    tiny_checkpoint("gemma4_text", tmp_path, **options)
    compare_with_library(tmp_path, model_class(tiny_config("gemma4_text", **options)))


def compare_with_library(folder: Path, library_class: Any, *, moe: bool = True) -> None:
    """Loads the checkpoint in both ways and compares: fp32 logits and tokens, bf16 logits."""
    with opened_model(folder, "fp32") as ours, torch.no_grad():
        reference = library_class.from_pretrained(folder, dtype=torch.float32).eval()
        assert_is_out_of_the_module(ours, moe)
        with routed(reference) as exact_routes:
            exact = logits(reference)
        with routed(reference) as exact_routes_of_steps:
            exact_steps = decoded_logits(reference)
        torch.testing.assert_close(logits(ours.model), exact, rtol=0, atol=1e-5)
        assert greedy(ours.model).tolist() == greedy(reference).tolist()
        if type(ours.model) is library_class:
            if ours.info.family in SIGHTS:  # read with the first picture
                leave_out_tower(reference)
            assert ours.info.parameters == sum(parameter.numel() for parameter in reference.parameters())
    with opened_model(folder, "bf16") as ours, torch.no_grad():
        reference = library_class.from_pretrained(folder, dtype=torch.bfloat16).eval()
        if type(ours.model) is library_class:  # else ours is its text part, with other names
            assert_buffers_equal(ours.model, reference)
        with routed(ours.model) as our_routes, routed(reference) as their_routes:
            mine, theirs = logits(ours.model), logits(reference)
        # In bf16 a near tie in a router may fall either way; what comes before it must agree all the same.  Where we
        # keep hidden states in float32, it falls as it does there.
        ways = ((their_routes, theirs), (exact_routes, exact))
        alike = first_difference(our_routes, their_routes, exact_routes)
        assert alike >= PROMPT.shape[1] // 2
        agreed, wanted = max(
            ((first_difference(our_routes, routes), out) for routes, out in ways),
            key=lambda way: (way[0], -float((mine - way[1])[:, :alike].abs().max())),
        )
        fast = family_of(ours.model.config.model_type).fast_path
        # Where few tokens are chosen, or scores are not scaled, each counts for more.
        rounded = (2 if fast.experts_beside else 1.5 if fast.indexes else 1) * _ROUNDED if fast else _ROUNDED
        torch.testing.assert_close(mine[:, :agreed].float(), wanted[:, :agreed].float(), rtol=0, atol=rounded)
        with routed(ours.model) as our_routes, routed(reference) as their_routes:
            steps, their_steps = decoded_logits(ours.model), decoded_logits(reference)
        layers = len(our_routes) // len(steps)
        for step, mine in enumerate(steps):
            far = layers * (step + 1)
            for routes, wanted in ((their_routes, their_steps[step]), (exact_routes_of_steps, exact_steps[step])):
                if first_difference(our_routes[:far], routes[:far]) >= 1:
                    # Layers that loop add their rounding up: as far off as the library's own step may ours be, too.
                    rounding = float((their_steps[step].float() - exact_steps[step]).abs().max())
                    torch.testing.assert_close(mine.float(), wanted.float(), rtol=0, atol=max(_ROUNDED, rounding))
                    break
            else:
                break


def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=PROMPT).logits
    return result


def decoded_logits(model: Any) -> list[torch.Tensor]:
    """Logits of a few tokens computed one by one, as decoding does, from the first on."""
    cache, steps = None, []
    for place in range(4):
        output = model(input_ids=PROMPT[:, place : place + 1], cache=cache, use_cache=True)
        cache = output.cache
        steps.append(output.logits)
    return steps


def greedy(model: Any, tokens: int = NEW_TOKENS) -> torch.Tensor:
    result: torch.Tensor = model.generate(
        PROMPT, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return result


def assert_is_out_of_the_module(ours: LoadedModel, moe: bool) -> None:
    assert (ours.bank is not None) == moe
    if ours.bank is None:
        return
    assert ours.info.experts_bytes == ours.bank.nbytes > 0
    for name in ours.bank.layers:
        assert not list(ours.model.get_submodule(name).parameters(recurse=False))


def assert_buffers_equal(ours: Any, reference: Any) -> None:
    """Also those that no checkpoint holds: rotary frequencies must not have been rounded to bf16.

    What is added to routers' scores stays in fp32, which the library forgets of some families.
    """
    theirs = dict(reference.named_buffers())
    for name, buffer in ours.named_buffers():
        assert buffer.dtype == (torch.float32 if name.endswith(ROUTER_CORRECTION) else theirs[name].dtype), name
        assert torch.equal(buffer.to(theirs[name].dtype), theirs[name]), name


@contextmanager
def routed(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects, sorted, the experts that each token was sent to, experts module by experts module."""
    routes: list[torch.Tensor] = []

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = args[1] if len(args) > 1 else kwargs["top_k_index"]
        routes.append(index.sort(dim=-1).values)

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel")
    ]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(ours: list[torch.Tensor], *theirs: list[torch.Tensor]) -> int:
    """The first position at which any layer routed as none of theirs, or the length of the prompt."""
    places = [
        int(row)
        for mine, *others in zip(ours, *theirs, strict=True)
        for row in torch.stack([(mine != other).any(dim=-1) for other in others]).all(dim=0).nonzero().flatten()
    ]
    return min(places, default=PROMPT.shape[1])

"""How the next token is chosen from logits: pure functions, in the order of llama.cpp's default chain.

A bias, penalties for what was said already, DRY (`dry.py`), what the answer must satisfy, top-k, top-p, min-p,
temperature, then one draw: what is unlikely is dropped by the model's own probabilities, and a high temperature does
not let it back in.  The vocabulary (49k to 200k entries) is never sorted when a small top-k, or the small mass of
unlikely tokens, makes it unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.common.config import SamplingParams
from engine.runtime.decode.generation import Chances

Chooser = Callable[[torch.Tensor], torch.Tensor]
"""Logits [1, V] to the chosen token [1, 1] int64, on the same device."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn.

    Attributes:
        probabilities: [m] float32, summing to one.
        token_ids: [m] int64; `None` if they are 0, 1, ..., V - 1.
    """

    probabilities: torch.Tensor
    token_ids: torch.Tensor | None


def greedy_token(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token [B, 1] of logits [B, V]; of equals, the one that `torch.argmax` takes in float32."""
    if logits.device.type == "cpu" and logits.shape[0] == 1:
        # The same token, several times faster: numpy's argmax is vectorised, torch's is not.
        return torch.tensor([[int(logits[0].float().numpy().argmax())]])
    return logits.float().argmax(dim=-1, keepdim=True)


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits [B, V] with those of the token ids `seen` [B, n] divided by `penalty` (multiplied, where negative).

    An id that occurs several times is penalised once (CTRL, Keskar et al. 2019, section 4.1).
    """
    chosen = logits.gather(-1, seen)
    largest = torch.finfo(chosen.dtype).max
    chosen = torch.where(chosen < 0, chosen * penalty, chosen / penalty).clamp(-largest, largest)
    return logits.scatter(-1, seen, chosen)


def penalise_presence(logits: torch.Tensor, ids: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits [B, V] less OpenAI's presence and frequency penalties for the tokens `ids` [n] of the answer so far."""
    counts = torch.bincount(ids, minlength=logits.shape[-1]).to(logits.device, torch.float32)
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def bias_vector(bias: Sequence[tuple[int, float]], logits: torch.Tensor) -> torch.Tensor:
    """What `bias` adds to logits [B, V], as [V] float32; ids beyond the vocabulary count for nothing."""
    known = [(token, value) for token, value in bias if token < logits.shape[-1]]
    ids = torch.tensor([token for token, _ in known], dtype=torch.long, device=logits.device)
    added = torch.tensor([value for _, value in known], dtype=torch.float32, device=logits.device)
    return torch.zeros(logits.shape[-1], device=logits.device).index_add(0, ids, added)


def chances_of(logits: torch.Tensor, token_id: int, top: int) -> Chances:
    """How likely a token was by logits [V], and the `top` most likely ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Chances(token_id, float(logprobs[token_id]), likeliest)


def candidates(logits: torch.Tensor, sampling: SamplingParams) -> Candidates:
    """What top-k, top-p and min-p leave of logits [V], none of them NaN or plus infinity.

    Top-k keeps exactly k tokens; of equally likely ones at its edge, any.
    """
    logits = logits.float()
    vocabulary = logits.shape[-1]
    token_ids: torch.Tensor | None = None
    ordered = False
    if 0 < sampling.top_k < vocabulary:
        logits, token_ids = logits.topk(sampling.top_k)
        ordered = True
    if sampling.top_p == 1 and sampling.min_p == 0:
        # From 0 down, so that nothing becomes infinite that is divided by little.
        return Candidates(((logits - logits.max()) / sampling.temperature).softmax(dim=-1), token_ids)

    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        if not ordered:
            probabilities, token_ids = _most_likely(probabilities, sampling.top_p)
        before = probabilities.cumsum(dim=-1) - probabilities
        # The most likely token has nothing before it, so it always stays.
        keep = int((before < sampling.top_p).sum())
        probabilities = probabilities[:keep]
        token_ids = token_ids[:keep] if token_ids is not None else None
        ordered = True

    if sampling.min_p > 0:
        most_likely = probabilities[0] if ordered else probabilities.max()
        kept = (probabilities >= sampling.min_p * most_likely).nonzero().squeeze(-1)
        probabilities = probabilities[kept]
        token_ids = token_ids[kept] if token_ids is not None else kept
    return Candidates((probabilities.log() / sampling.temperature).softmax(dim=-1), token_ids)


def _most_likely(probabilities: torch.Tensor, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens of [V] in falling order, enough of them to hold `mass`: ([m] probabilities, [m] ids).

    Tokens below (1 - mass) / V cannot reach 1 - mass even all together, so they are dropped before anything is sorted;
    half of that is the limit, as all may be equally likely but for rounding.
    """
    ids = (probabilities >= (1 - mass) / (2 * probabilities.shape[-1])).nonzero().squeeze(-1)
    kept = probabilities[ids]
    # On the CPU numpy's sort is vectorised, unlike torch's.
    on_cpu = kept.device.type == "cpu"
    order = torch.from_numpy((-kept.numpy()).argsort()) if on_cpu else kept.argsort(descending=True)
    return kept[order], ids[order]


def draw(choice: Candidates, generator: torch.Generator) -> torch.Tensor:
    """One token id [1, 1] int64, drawn with the candidates' probabilities."""
    # By the inverse of the cumulative distribution: `torch.multinomial` takes over ten times as long on a vocabulary.
    cumulative = choice.probabilities.cumsum(dim=-1, dtype=torch.float64)
    point = torch.rand(1, generator=generator, dtype=torch.float64, device=cumulative.device) * cumulative[-1]
    # `right`: a token of probability zero adds nothing to the sum, so no point can fall on it.
    index = torch.searchsorted(cumulative, point, right=True).clamp_(max=cumulative.shape[-1] - 1)
    token = index if choice.token_ids is None else choice.token_ids[index]
    return token.view(1, 1)


def seeded_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """A source of randomness that repeats itself for the same seed; `None` draws a fresh seed."""
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        # Any integer is a seed: torch takes only 64 bits of it.
        generator.manual_seed(seed % 2**63)
    return generator


def make_chooser(sampling: SamplingParams, device: torch.device) -> Chooser:
    """The function that picks each token of one answer, from penalised logits."""
    if sampling.is_greedy:
        return greedy_token
    generator = seeded_generator(sampling.seed, device)
    return lambda logits: draw(candidates(logits[0], sampling), generator)

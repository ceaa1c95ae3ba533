"""Compares contestants' next-token probabilities on a text with a reference stored on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Window = tuple[int, ...]
"""Token ids of a window of text, at least 2."""

Contestant = Callable[[Window], torch.Tensor]
"""A window -> logits of any floating type, [len(window) - 1, vocabulary]: row t is for the token after the t-th."""


@dataclass(frozen=True, slots=True)
class Score:
    """One contestant's figures for all tokens of all windows except first ones, fp32 or bool [tokens].

    Attributes:
        surprise: nats, negative log-likelihood of the actual token.
        divergence: nats, the Kullback-Leibler divergence from the reference's distribution.
        agrees: whether its most likely token is the reference's.
    """

    surprise: torch.Tensor
    divergence: torch.Tensor
    agrees: torch.Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise."""
        return math.exp(float(self.surprise.double().mean()))


class Reference:
    """The reference distributions.

    On disk, as distributions over the vocabulary for every token take gigabytes.

    Args:
        contestant: the reference model.
        windows: the text.
        folder: folder for its logits; the caller deletes it.
    """

    def __init__(self, contestant: Contestant, windows: Sequence[Window], folder: Path) -> None:
        self._windows = windows
        self._files = [folder / f"{number}.logits" for number in range(len(windows))]
        self._dtype = torch.float32
        self._vocabulary = 0
        surprise = []
        for window, file in zip(windows, self._files, strict=True):
            logits = contestant(window).cpu()
            self._dtype, self._vocabulary = logits.dtype, logits.shape[-1]
            surprise.append(_surprise(logits.float().log_softmax(-1), window))
            logits.contiguous().view(torch.uint8).numpy().tofile(file)
        together = torch.cat(surprise)
        self.score = Score(together, torch.zeros_like(together), torch.ones_like(together, dtype=torch.bool))

    def compare(self, contestant: Contestant) -> Score:
        """The score of another contestant on the same windows.

        Raises:
            ValueError: its vocabulary size differs.
        """
        scores = []
        for window, file in zip(self._windows, self._files, strict=True):
            theirs = contestant(window).cpu().float().log_softmax(-1)
            if theirs.shape[-1] != self._vocabulary:
                raise ValueError(f"it has {theirs.shape[-1]:,} ids, not {self._vocabulary:,}")
            kept = torch.from_file(str(file), size=theirs.numel(), dtype=self._dtype).view_as(theirs)
            ours = kept.float().log_softmax(-1)
            agrees = theirs.argmax(-1) == ours.argmax(-1)
            # An id with zero reference probability adds nothing.
            divergence = (ours.exp() * (ours - theirs)).nan_to_num_(0.0, posinf=torch.inf).sum(-1)
            scores.append(Score(_surprise(theirs, window), divergence, agrees))
        parts = ("surprise", "divergence", "agrees")
        return Score(*(torch.cat([getattr(score, part) for score in scores]) for part in parts))


def _surprise(log_probabilities: torch.Tensor, window: Window) -> torch.Tensor:
    return -log_probabilities.gather(-1, torch.tensor(window[1:])[:, None]).squeeze(-1)

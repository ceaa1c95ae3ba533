"""`switchyard bench quality`: the quality cost of int8 and int4 on the user's text, compared with llama.cpp's types.

Next-token probabilities of the contestants are compared with a reference stored on disk.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gguf import gguf_of
from benchmarks.peers.editions import LLAMA_CPP
from benchmarks.peers.peer import GgufPeer
from engine.bench.opened import opened
from engine.bench.report import PeerError, Report, ReportRow
from engine.checkpoint.gguf.export import Quantisation
from engine.checkpoint.gguf.names import gguf_at
from engine.common.errors import EngineError, ErrorCode
from engine.formats import AUTO

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.loaded_model import LoadedModel

Window = tuple[int, ...]
"""Token ids of a window of text, at least 2."""

Contestant = Callable[[Window], torch.Tensor]
"""A window -> logits of any floating type, [len(window) - 1, vocabulary]: row t is for the token after the t-th."""


@dataclass(frozen=True, slots=True)
class TextScore:
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
        self.score = TextScore(together, torch.zeros_like(together), torch.ones_like(together, dtype=torch.bool))

    def compare(self, contestant: Contestant) -> TextScore:
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
            scores.append(TextScore(_surprise(theirs, window), divergence, agrees))
        parts = ("surprise", "divergence", "agrees")
        return TextScore(*(torch.cat([getattr(score, part) for score in scores]) for part in parts))


def _surprise(log_probabilities: torch.Tensor, window: Window) -> torch.Tensor:
    return -log_probabilities.gather(-1, torch.tensor(window[1:])[:, None]).squeeze(-1)


_REFERENCE = "bf16"
_PEERS: dict[str, tuple[Quantisation | None, ...]] = {
    "int8": (Quantisation.Q8_0,),
    "int4": (Quantisation.Q4_0, Quantisation.Q4_1),
}
"""llama.cpp's types with similar bits; all use groups of 32."""
_OF_GGUF: dict[str, tuple[Quantisation | None, ...]] = {AUTO: (None,)}
"""A GGUF file as it is, by us and by llama.cpp."""


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """The first `tokens` of the file `text`, in windows of `window`; `peers`: also run llama.cpp on them."""

    text: Path
    tokens: int
    peers: bool
    window: int = 512


def bench_quality(config: EngineConfig, plan: QualityPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: perplexity, divergence from bf16 and agreement of the most likely token, by precision.

    Every window starts from an empty context, and all its tokens but the first count: the perplexities are comparable
    with each other, but not with those of programs that only count tokens after a long context.

    Raises:
        EngineError: the text cannot be read or is too short, the model reads no text of this kind, or as `load_model`.
    """
    text, checkpoint = _read(plan.text), Path(config.model)
    with tempfile.TemporaryDirectory(prefix="switchyard-quality-") as scratch:
        say(_REFERENCE)
        with opened(replace(config, precision="bf16")) as loaded:
            windows = _windows(loaded, text, plan)
            reference = Reference(_contestant(loaded), windows, Path(scratch))
            threads = loaded.info.threads
        _describe_reference(reference.score, report)
        for precision, types in (_PEERS if gguf_at(checkpoint) is None else _OF_GGUF).items():
            say(precision)
            with opened(replace(config, precision=precision)) as loaded:
                score, precision = reference.compare(_contestant(loaded)), loaded.info.precision
            _describe(precision, score, reference.score, report)
            for quantisation in types if plan.peers else ():
                name = f"llama.cpp, {quantisation.value if quantisation else 'same file'}"
                try:
                    say(name)
                    file = _file_for_peer(checkpoint, quantisation, say)
                    with GgufPeer(name, file, threads, plan.window) as peer:
                        theirs = reference.compare(_contestant_in_llama_cpp(peer))
                except (PeerError, EngineError, ValueError) as failure:
                    report.skip_peer(name, str(failure))
                    continue
                _describe(name, theirs, reference.score, report)
                report.rows += [_perplexity(precision, score, name, theirs), *_above(precision, score, name, theirs)]


def _file_for_peer(checkpoint: Path, quantisation: Quantisation | None, say: Callable[[str], None]) -> Path:
    """Written only if llama.cpp can run it; without `quantisation` the checkpoint is one."""
    if LLAMA_CPP.python() is None:
        raise PeerError(f"it is not built: run {LLAMA_CPP.how_to_build()}")
    return gguf_of(checkpoint, quantisation or Quantisation.BF16, say)


def _describe_reference(score: TextScore, report: Report) -> None:
    report.rows.append(ReportRow("tokens", len(score.surprise), "", 1))
    report.rows.append(ReportRow(f"perplexity of {_REFERENCE}", score.perplexity, "", 1))


def _describe(name: str, score: TextScore, reference: TextScore, report: Report) -> None:
    report.rows += [
        _perplexity(name, score, _REFERENCE, reference),
        *_above(name, score, _REFERENCE, reference),
        ReportRow(f"divergence of {name} from {_REFERENCE}", float(score.divergence.mean()), "nats", 1),
        ReportRow(f"tokens where {name} agrees with {_REFERENCE}", 100 * float(score.agrees.float().mean()), "%", 1),
    ]


def _above(name: str, score: TextScore, peer: str, other: TextScore) -> list[ReportRow]:
    """By how much one's perplexity is above the other's; the error is that of differences token by token."""
    more = (score.surprise - other.surprise).double()
    error = float(more.std()) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return [
        ReportRow(f"perplexity of {name} above that of {peer}", 100 * math.expm1(float(more.mean())), "%", 1),
        ReportRow(f"standard error of that ({name}, {peer})", 100 * error, "%", 1),
    ]


def _perplexity(name: str, score: TextScore, peer: str, other: TextScore) -> ReportRow:
    """Lower is better, so the ratio is the other's over ours."""
    ratio = other.perplexity / score.perplexity
    return ReportRow(f"perplexity of {name}", score.perplexity, "", 1, peer, other.perplexity, ratio)


def _contestant(loaded: LoadedModel) -> Contestant:
    def logits(window: Window) -> torch.Tensor:
        ids = torch.tensor([window[:-1]], device=loaded.device)
        with torch.inference_mode():
            result: torch.Tensor = loaded.model(ids, use_cache=False).logits[0]
        return result

    return logits


def _contestant_in_llama_cpp(peer: GgufPeer) -> Contestant:
    return lambda window: torch.from_numpy(peer.logits(window[:-1]))


def _windows(loaded: LoadedModel, text: str, plan: QualityPlan) -> list[Window]:
    """Consecutive windows of the tokenized text; a last one with a single token is dropped."""
    if loaded.model.config.is_encoder_decoder:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{loaded.info.name} answers a text rather than going on with it, so its quality is not measured this way.",
        )
    ids: list[int] = loaded.tokenizer(text, verbose=False)["input_ids"][: plan.tokens]
    length = min(plan.window, loaded.context_tokens)
    windows = [tuple(ids[begin : begin + length]) for begin in range(0, len(ids), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{plan.text} is too short: it needs two tokens or more.")
    return windows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} is not text in UTF-8: choose another file.") from error
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} cannot be read ({error.strerror}): choose another file."
        ) from error

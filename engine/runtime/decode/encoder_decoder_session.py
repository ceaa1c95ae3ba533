"""Generation with encoder-decoder models: the prompt goes through the encoder once, the decoder writes from there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from engine.common.chat import ChatMessage
from engine.common.errors import CancelCheck, RequestCancelled, never_cancelled
from engine.runtime.decode.generation import ProgressCallback, Reading, ReusedCallback, ignore_reused
from engine.runtime.decode.prompt import encodable, encode
from engine.runtime.kept.prefixes import Reused
from engine.runtime.kv.memory import cache_bytes
from engine.runtime.loaded_model import LoadedModel


def source_prompt(
    tokenizer: Any, messages: Sequence[ChatMessage], cancelled: CancelCheck = never_cancelled
) -> list[int]:
    """What the encoder reads: the last user message, after the system message if there is one.

    These models transform a text rather than converse; earlier turns would be transformed along with it.

    Raises:
        EngineError, RequestCancelled: see `encode`.
    """
    system = [message.content for message in messages if message.role == "system"]
    user = [message.content for message in messages if message.role == "user"]
    text = "\n".join([*system, *user[-1:]])
    return encode(tokenizer, encodable(text), special=True, written=(), cancelled=cancelled)


class EncoderDecoderSession:
    """An encoder-decoder model and the decoder's caches; nothing is reused from one prompt to the next."""

    is_whole = False

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._device = loaded.device
        settings = loaded.model.generation_config
        (self._start,) = self.prefix(loaded)
        self._forced_first: int | None = settings.forced_bos_token_id
        self._source: Any = None
        self._mask: torch.Tensor | None = None
        self._cache: Cache | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens held by the decoder's own cache."""
        return self._tokens

    @property
    def bytes(self) -> int:
        """Bytes of both caches."""
        cache = self._cache
        if cache is None:
            return 0
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)

    def usable(self, prompt: Sequence[int]) -> int:  # noqa: ARG002 - as of `KvSession`
        """Nothing is reused."""
        return 0

    def clear(self) -> None:
        """Frees the caches and the encoded prompt."""
        self._source = self._mask = self._cache = None
        self._tokens = 0

    @staticmethod
    def prefix(loaded: LoadedModel) -> list[int]:
        """What an answer continues: the decoder's start token."""
        start = loaded.model.generation_config.decoder_start_token_id
        return [int(start if start is not None else getattr(loaded.model.config, "decoder_start_token_id", None) or 0)]

    def read(
        self,
        prompt: Sequence[int],
        on_progress: ProgressCallback,
        cancelled: CancelCheck,
        on_reused: ReusedCallback = ignore_reused,  # noqa: ARG002 - as of `KvSession`
        *,
        repeats: bool = False,  # noqa: ARG002 - as of `KvSession`
        answer: Sequence[int] = (),
    ) -> Reading:
        """Encodes the prompt, in one go; logits [1, V] of the next token, and nothing reused."""
        self.clear()
        yield len(prompt) + len(answer)
        if cancelled():
            raise RequestCancelled
        on_progress(0, len(prompt))
        ids = torch.tensor([list(prompt)], device=self._device)
        mask = torch.ones_like(ids)
        source = self._model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)
        config = self._model.config.get_text_config(decoder=True)
        cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        start = torch.tensor([[self._start]], device=self._device)
        logits = decode_step(self._model, start, source, mask, cache)
        self._source, self._mask, self._cache, self._tokens = source, mask, cache, 1
        on_progress(len(prompt), len(prompt))
        for token_id in answer:
            if cancelled():
                raise RequestCancelled
            logits = self.step(torch.tensor([[token_id]], device=self._device), token_id)
        if self._forced_first is not None and not answer:
            forced = torch.full_like(logits, -torch.inf)
            forced[:, self._forced_first] = 0
            logits = forced
        return logits, Reused()

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:  # noqa: ARG002 - as of `KvSession`
        """Appends one token [1, 1] to the answer; logits [1, V] after it."""
        assert self._mask is not None
        logits = decode_step(self._model, token, self._source, self._mask, self._cache)
        self._tokens += 1
        return logits

    def beams(self, width: int) -> DecoderBeams:
        """`width` answers to the encoded prompt.  They take over this session's cache, which ends here."""
        assert self._mask is not None
        assert self._cache is not None
        beams = DecoderBeams(self._model, self._source, self._mask, self._cache, width)
        self.clear()
        return beams


class DecoderBeams:
    """Several answers to one encoded prompt."""

    def __init__(self, model: Any, source: Any, mask: torch.Tensor, cache: Cache, width: int) -> None:
        self._model = model
        self._source = copy.copy(source)
        self._source["last_hidden_state"] = source.last_hidden_state.expand(width, -1, -1)
        self._mask = mask.expand(width, -1)
        self._cache = cache
        self.reorder(torch.zeros(width, dtype=torch.long, device=mask.device))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to each answer, tokens [B, 1]; logits [B, V]."""
        return decode_step(self._model, tokens, self._source, self._mask, self._cache)

    def reorder(self, sources: torch.Tensor) -> None:
        """Answer i continues what answer `sources[i]` was; [B] int64."""
        self._cache.reorder_cache(sources)


def decode_step(model: Any, tokens: torch.Tensor, source: Any, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
    """One forward of the decoder: tokens [B, 1] over the encoder's output, of as many rows; logits [B, V]."""
    output = model(
        encoder_outputs=source,
        attention_mask=mask,
        decoder_input_ids=tokens,
        cache=cache,
        use_cache=True,
        return_dict=True,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits

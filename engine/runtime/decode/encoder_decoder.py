"""Models with an encoder: the prompt goes through it once, the decoder writes from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from engine.common.chat import ChatMessage
from engine.common.errors import CancelCheck, never_cancelled
from engine.runtime.decode.prompt import encodable, encode
from engine.runtime.decode.step_model import StepModel
from engine.runtime.kv.library_caches import Encoded
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


def decoder_start(model: Any) -> int:
    """The token that every answer continues."""
    start = model.generation_config.decoder_start_token_id
    return int(start if start is not None else getattr(model.config, "decoder_start_token_id", None) or 0)


class EncoderDecoderStep(StepModel):
    """As `StepModel`: its first tokens are those of the prompt, all of it, and the others those of answers."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.model, loaded.context_tokens)

    def __call__(
        self,
        tokens: torch.Tensor,
        cache: Any,
        start: int,  # noqa: ARG002 - as of `StepModel`
        given: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, Encoded]:
        model = self.model
        if cache is not None:
            return self._decode(tokens, cache), cache
        mask, config = torch.ones_like(tokens), model.config.get_text_config(decoder=True)
        source = model.get_encoder()(input_ids=tokens, attention_mask=mask, return_dict=True)
        made = Encoded(source, mask, EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)))
        logits = self._decode(torch.full_like(tokens[:, :1], decoder_start(model)), made)
        if (forced := model.generation_config.forced_bos_token_id) is not None:
            logits = torch.full_like(logits, -torch.inf)
            logits[:, forced] = 0
        return logits, made

    def _decode(self, tokens: torch.Tensor, encoded: Encoded) -> torch.Tensor:
        """Logits [B, V] after tokens [B, 1], over the encoder's output of as many rows."""
        output = self.model(
            encoder_outputs=encoded.source,
            attention_mask=encoded.mask,
            decoder_input_ids=tokens,
            cache=encoded.cache,
            use_cache=True,
            return_dict=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

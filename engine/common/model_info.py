"""Describes a loaded model, in messages to the window."""

from __future__ import annotations

from dataclasses import dataclass

from engine.common.config import Thinking


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded and where it actually runs.

    Attributes:
        name: the name to show; `path` is the checkpoint directory.
        family: transformers' `model_type`.
        device: `cpu`, `cuda:0`, ...; `device_note` says why it is not the requested one, if so.
        precision: of the weights in memory; `stored_as` is how their file has them, for people (`Q4_K_M`).
        experts, experts_per_token: 0 for dense models.
        weights_bytes, experts_bytes: bytes held by non-expert and expert weights.
        kv_bytes_per_token: bytes of KV that one more token of context costs.
        thinking: the values of `SamplingParams.thinking` that its chat template knows, besides `auto`.
        thinks: whether its answers may begin with reasoning.
        needs_restart: whether a card has failed for the engine's process: only another one may use it again.
        card_is_back: whether that card has been seen to compute for another process.
        is_hampered: whether `device_note` says that it runs slower, or elsewhere, than this machine would allow.
        sees: whether it is given pictures, too.
        template_note: set when the tokenizer has no chat template, and says what is used instead.
    """

    name: str
    path: str
    family: str
    device: str
    precision: str
    threads: int
    parameters: int
    layers: int
    experts: int
    experts_per_token: int
    context_tokens: int
    weights_bytes: int
    experts_bytes: int
    kv_bytes_per_token: int
    device_note: str = ""
    template_note: str = ""
    thinking: tuple[Thinking, ...] = ()
    thinks: bool = False
    sees: bool = False
    needs_restart: bool = False
    card_is_back: bool = False
    is_hampered: bool = False
    stored_as: str = ""

    @property
    def precision_words(self) -> str:
        """For people: a file's own type says more than that it is used as it is stored."""
        return self.stored_as if self.precision == "stored" and self.stored_as else self.precision

    @property
    def news(self) -> str:
        """What to say once it runs elsewhere than before."""
        return self.device_note or f"The model runs on {self.device} again."

    @property
    def is_tuned(self) -> bool:
        """Whether it runs with tuned settings: `device_note` then says when they were found, and the speed."""
        return self.device_note.startswith("Tuned")

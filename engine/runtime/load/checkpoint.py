"""What a checkpoint directory holds: its tokenizer, and a model without weights that says which it wants."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.checkpoint.config_file import read_config, unread_inputs
from engine.checkpoint.profile import ModelProfile, profile_of
from engine.checkpoint.shards import read_tensors
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign_file import check_foreign, reason
from engine.common.plain_text import plain_line
from engine.experts.sites import ExpertsSite, find_sites
from engine.foreign_text.child import MOST_TOKENIZER_BYTES, TOKENIZER_NAME
from engine.foreign_text.process import FOREIGN_TEXT, ForeignTextError
from engine.formats import PRECISIONS, as_stored
from engine.runtime.adapters import adapter_for
from engine.runtime.decode.generation import CancelCheck, never_cancelled
from engine.runtime.load.library_conversion import LoadingPlan, parameter_dtypes, plan_loading
from engine.runtime.load.library_models import (
    build_skeleton,
    count_weights,
    finish_generation_config,
    model_class_for,
    quantizer_for,
    quiet_library,
    read_library_config,
)

_UNKNOWN_CONTEXT = 32_768
"""For models that set themselves no limit (state-space models, say)."""
_FILES = (
    TOKENIZER_NAME, "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
_READ_BESIDES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "merges.txt")
_MOST_TIMES_LONGER = 64
"""What a decoder may make of a token's characters: none of use makes more than one."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint of which nothing but headers has been read.

    Attributes:
        model: on the meta device.
        sites: its experts modules, in the checkpoint's own precision.
        weights: how many the model has.
        unread: other inputs of the model than text, which are not supported, in words; may be empty.
    """

    directory: Path
    profile: ModelProfile
    tokenizer: Any
    model: Any
    sites: list[ExpertsSite]
    plan: LoadingPlan
    dtype: torch.dtype
    weights: int
    unread: str

    @property
    def name(self) -> str:
        """For people."""
        return self.directory.name

    @property
    def key(self) -> str:
        """Under which what is learned about the model is kept between sessions."""
        profile = self.profile
        return f"{self.name} {profile.family} {profile.parameters} {profile.bytes}"

    def context_tokens(self, config: EngineConfig) -> int:
        """The longest context that is asked for."""
        own = self.profile.context_tokens or _UNKNOWN_CONTEXT
        return min(own, config.context_tokens or own)


def open_checkpoint(config: EngineConfig) -> OpenedCheckpoint:
    """Reads headers and the tokenizer of `config.model`, and builds the model on the meta device.

    Raises:
        EngineError: the checkpoint is damaged, or not one that runs here.
    """
    if config.precision not in PRECISIONS:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"There is no precision '{config.precision}': choose from {', '.join(PRECISIONS)}.",
        )
    directory = Path(config.model)
    opened = read_headers(directory, config.precision)
    finish_generation_config(opened.model, directory)
    return replace(opened, tokenizer=load_tokenizer(directory))


def read_headers(directory: Path, precision: str) -> OpenedCheckpoint:
    """The same without the tokenizer; seconds, and no weights.

    Raises:
        EngineError: as `open_checkpoint`.
    """
    dtype = getattr(torch, as_stored(precision).dtype)
    raw = read_config(directory)
    library_config = read_library_config(directory, raw["model_type"])
    adapter = adapter_for(raw["model_type"])
    model_class, part = model_class_for(library_config, adapter)
    tensors = read_tensors(directory)
    profile = profile_of(raw, tensors.values())
    quantizer = quantizer_for(part, directory.name)
    model = build_skeleton(model_class, part, dtype, adapter)
    sites = find_sites(model, parameter_dtypes(model, dtype))
    weights = count_weights(model)
    plan = plan_loading(model, sites, tensors, dtype, quantizer, adapter)
    return OpenedCheckpoint(directory, profile, None, model, sites, plan, dtype, weights, unread_inputs(raw))


def load_tokenizer(directory: Path, cancelled: CancelCheck = never_cancelled) -> Any:
    """transformers' tokenizer of the checkpoint in `directory`, ready for prompts.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if it is missing or broken, or is made to take more than any tokenizer needs.
        RequestCancelled: `cancelled()` came true meanwhile.
    """
    if not any((directory / name).exists() for name in _FILES):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{directory} has no tokenizer (tokenizer.json), so text cannot be read or written: "
            "download or copy the whole model again.",
        )
    _check_files(directory)
    if (directory / TOKENIZER_NAME).exists():
        # Where it can be stopped: here it could not be.
        try:
            FOREIGN_TEXT.check(directory, cancelled)
        except ForeignTextError as error:
            raise _unreadable(directory, f"it {error}") from error
    try:
        with quiet_library():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises whatever it stumbled over, and what is no `Exception`
        raise _unreadable(directory, type(error).__name__) from error
    _check_template(directory, tokenizer.chat_template)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        _check_decoder(directory, backend.decoder)
        FOREIGN_TEXT.hold(tokenizer)
    return tokenizer


def _check_files(directory: Path) -> None:
    """All that the library may open by its name: regular files of a sensible size."""
    names = {directory / name for name in _FILES}
    for file in sorted(names.union(*(directory.glob(pattern) for pattern in _READ_BESIDES))):
        if file.exists() or file.is_symlink():
            try:
                check_foreign(file, MOST_TOKENIZER_BYTES)
            except FileNotFoundError:  # a link to nothing: the library sees no file either
                continue
            except OSError as error:
                raise EngineError(
                    ErrorCode.CHECKPOINT_DAMAGED,
                    f"{file} cannot be read ({reason(error)}): download or copy the model again.",
                ) from error


def _check_template(directory: Path, template: object) -> None:
    several = template if isinstance(template, dict) else {"default": template}
    if template is not None and not all(isinstance(text, str) for pair in several.items() for text in pair):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The chat_template in {directory / 'tokenizer_config.json'} is neither a text nor several texts with "
            "names: download or copy the model again.",
        )


def _check_decoder(directory: Path, decoder: Any) -> None:
    """It runs here, for every token: what it replaces by something longer, time and again, would fill memory."""
    times = _times_longer(json.loads(decoder.__getstate__())) if decoder is not None else 1.0
    if times > _MOST_TIMES_LONGER:
        raise _unreadable(directory, f"its decoder makes a text {times:.3g} times longer")


def _times_longer(part: dict[str, Any]) -> float:
    if part.get("type") == "Sequence":
        times = 1.0
        for decoder in part.get("decoders", ()):
            times *= _times_longer(decoder)
        return times
    if part.get("type") != "Replace":
        return 1.0
    pattern, content = part.get("pattern", {}), part.get("content", "")
    least = len(pattern.get("String", "")) if isinstance(pattern, dict) else 0
    # A regular expression may find an empty text between any two characters.
    return max(1.0, len(content) / least) if least else 1.0 + len(content)


def _unreadable(directory: Path, why: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"The tokenizer in {directory} cannot be used ({plain_line(why)}): download or copy its tokenizer files again.",
    )

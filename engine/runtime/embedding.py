"""Texts into vectors, by a model made for that: the library computes an encoder, the engine's own loader a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import transformers
from safetensors.torch import load_file

from engine.checkpoint.config_file import CONFIG_NAME, MAX_CONFIG_BYTES, TEXT_CLASS, read_config, read_json
from engine.checkpoint.embedding import Embedding, how_it_embeds
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.checkpoint import gguf_tensors
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.profile import read_profile
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, never_cancelled
from engine.common.sizes import rounded_up
from engine.common.untrusted import open_untrusted
from engine.families.known import ENCODERS
from engine.formats.ggml import GGML
from engine.runtime.load.library_models import first_line, quiet_library, read_library_config
from engine.runtime.load.model import load_model, set_threads
from engine.runtime.load.tokenizer import load_tokenizer

_TOGETHER, _TOGETHER_TOKENS = 16, 4096
"""Texts that an encoder reads at once, and their tokens with what fills them up."""
_EXACT_BYTES = 2 * 2**30
"""Weights of up to so much are computed in float32, as their makers measured them."""
_ENDLESS = 10**9

Text = str | Sequence[int]
"""A text, or its tokens."""


class Vectors(NamedTuple):
    """`rows` float32 [N, D], and how many tokens all texts had together."""

    rows: torch.Tensor
    tokens: int


class Embedder:
    """A loaded model that embeds; computes on the CPU.

    Raises:
        EngineError: it was not made for that, is damaged, or does not fit into memory.
    """

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.path, self._how = path, how_it_embeds(path)
        config, profile = read_config(path), read_profile(path)
        _check_memory(path, profile.bytes)
        self._close: Callable[[], None] = lambda: None
        if config["model_type"] not in ENCODERS and (gguf_at(path) is not None or _is_decoder(config)):
            self._read, most = self._of_engine(path, threads)
        else:
            set_threads(threads)
            self._read, most = self._of_library(path, config, profile.bytes)
        lengths = (self._how.most_tokens, most, self._tokenizer.model_max_length)
        self.most_tokens = int(min(length for length in lengths if 0 < length < _ENDLESS))
        self._dense = [_Dense(folder) for folder in self._how.dense]

    def embed(self, texts: Sequence[Text], *, dimensions: int | None = None, truncates: bool = False) -> Vectors:
        """The vectors of texts, in their order.

        Args:
            dimensions: keep so many of the first numbers (Matryoshka), and give what is left length 1.
            truncates: whether what is longer than the model reads is cut off.

        Raises:
            EngineError: `PROMPT_TOO_LONG` if it is not; `INVALID_REQUEST` for tokens or dimensions there are none of.
        """
        ids = [self._ids(text, number, truncates=truncates) for number, text in enumerate(texts, 1)]
        with torch.inference_mode():
            rows = self._finished(self._read(ids), dimensions)
        return Vectors(rows, sum(map(len, ids)))

    def close(self) -> None:
        """Frees the model."""
        self._close()

    def _ids(self, text: Text, number: int, *, truncates: bool) -> list[int]:
        if isinstance(text, str):
            ids = list(self._tokenizer(self._how.prompt + text, verbose=False)["input_ids"])
            if len(ids) > self.most_tokens and truncates:  # by the tokenizer: it keeps what it adds at the ends
                cut: dict[str, Any] = {"truncation": True, "max_length": self.most_tokens}
                ids = list(self._tokenizer(self._how.prompt + text, verbose=False, **cut)["input_ids"])
        else:
            ids = list(text)[: self.most_tokens] if truncates else list(text)
        if len(ids) > self.most_tokens:
            raise EngineError(
                ErrorCode.PROMPT_TOO_LONG,
                f"Text {number} has {len(ids):,} tokens, and {self.path.name} reads {self.most_tokens:,} at most: "
                "divide it.",
            )
        if not ids or not all(0 <= index < self._vocabulary for index in ids):
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"Text {number} is empty, or has tokens that {self.path.name} does not know."
            )
        return ids

    def _finished(self, pooled: torch.Tensor, dimensions: int | None) -> torch.Tensor:
        for layer in self._dense:
            pooled = layer(pooled)
        if dimensions is not None:
            if not 0 < dimensions <= pooled.shape[1]:
                raise EngineError(
                    ErrorCode.INVALID_REQUEST,
                    f"{self.path.name} makes vectors of {pooled.shape[1]:,} numbers, so there are none of "
                    f"{dimensions:,}.",
                )
            pooled = pooled[:, :dimensions]
        if self._how.normalises or dimensions is not None:
            pooled = torch.nn.functional.normalize(pooled, dim=1)
        return pooled

    def _of_engine(self, path: Path, threads: int | None) -> tuple[Callable[[list[list[int]]], torch.Tensor], int]:
        """A decoder, each text by itself."""
        config = EngineConfig(str(path), device="cpu", threads=threads)
        loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=never_cancelled)
        self._close, self._tokenizer = loaded.close, loaded.tokenizer
        self._vocabulary = int(loaded.model.config.get_text_config(decoder=True).vocab_size)

        def read(texts: list[list[int]]) -> torch.Tensor:
            states = (loaded.model.base_model(torch.tensor([ids]), use_cache=False)[0] for ids in texts)
            return torch.cat([_pooled(each, [each.shape[1]], self._how) for each in states])

        return read, loaded.context_tokens

    def _of_library(
        self, path: Path, raw: dict[str, Any], nbytes: int
    ) -> tuple[Callable[[list[list[int]]], torch.Tensor], int]:
        """An encoder, several texts of about one length at once."""
        config = read_library_config(path, raw)
        self._tokenizer = load_tokenizer(path)
        self._vocabulary = int(config.vocab_size)
        try:
            with quiet_library():
                model = _encoder(path, config, torch.float32 if nbytes <= _EXACT_BYTES else torch.bfloat16).eval()
        except Exception as error:  # the library raises whatever it stumbles over
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"The library cannot load {path.name} ({first_line(error)})."
            ) from error

        def read(texts: list[list[int]]) -> torch.Tensor:
            pooled: dict[int, torch.Tensor] = {}
            for group in _alike(texts):
                lengths = [len(texts[index]) for index in group]
                ids = torch.zeros(len(group), max(lengths), dtype=torch.long)
                mask = torch.zeros_like(ids)
                for row, index in enumerate(group):
                    ids[row, : lengths[row]] = torch.tensor(texts[index])
                    mask[row, : lengths[row]] = 1
                if self._tokenizer.pad_token_id is not None:  # positions of some families count what is not this one
                    ids[mask == 0] = self._tokenizer.pad_token_id
                states = model(input_ids=ids, attention_mask=mask)[0]
                pooled.update(zip(group, _pooled(states, lengths, self._how), strict=True))
            return torch.stack([pooled[index] for index in range(len(texts))])

        return read, int(getattr(config, "max_position_embeddings", 0) or 0)


def _encoder(path: Path, config: Any, dtype: torch.dtype) -> Any:
    gguf = gguf_at(path)
    if gguf is None:
        return transformers.AutoModel.from_pretrained(
            path, config=config, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=dtype
        )
    model = transformers.AutoModel.from_config(config, dtype=dtype)
    weights = {}
    for name, entry in gguf_tensors(read_gguf(gguf)).items():
        with open_untrusted(entry.file) as file:
            file.seek(entry.offset)
            raw = np.frombuffer(file.read(entry.nbytes), np.uint8)
        weights[name] = torch.from_numpy(GGML[entry.dtype].dequantise(raw)).reshape(entry.shape).to(dtype)
    lacking, _strange = model.load_state_dict(weights, strict=False)
    if any(not name.startswith("pooler.") for name in lacking):  # which stands behind what is pooled here
        raise ValueError(f"it lacks {lacking[0]}")
    return model


def _is_decoder(config: dict[str, Any]) -> bool:
    classes = config.get("architectures")
    return isinstance(classes, list) and any(isinstance(each, str) and TEXT_CLASS.search(each) for each in classes)


def _check_memory(path: Path, nbytes: int) -> None:
    free = psutil.virtual_memory().available
    if nbytes > free:
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{path.name} takes {rounded_up(nbytes)} of memory, and {rounded_up(free)} are free: close other programs, "
            "or free the chat model.",
        )


def _alike(texts: list[list[int]]) -> list[list[int]]:
    """Indices of texts that are read together, the longest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(texts)), key=lambda each: -len(texts[each])):
        last = groups[-1] if groups else []
        if not last or len(last) == _TOGETHER or (len(last) + 1) * len(texts[last[0]]) > _TOGETHER_TOKENS:
            groups.append([])
        groups[-1].append(index)
    return groups


def _pooled(states: torch.Tensor, lengths: list[int], how: Embedding) -> torch.Tensor:
    """[N, q, hidden] of so many tokens each -> float32 [N, hidden]."""
    states = states.float()
    if how.pooling == "cls":
        return states[:, 0]
    ends = torch.tensor(lengths)
    if how.pooling == "last":
        return states[torch.arange(len(lengths)), ends - 1]
    counts = torch.arange(states.shape[1])[None, :] < ends[:, None]
    return (states * counts[..., None]).sum(1) / ends[:, None]


class _Dense:
    """A linear layer behind the pooling, with the function that follows."""

    def __init__(self, folder: Path) -> None:
        said = read_json(folder / CONFIG_NAME, MAX_CONFIG_BYTES)
        name = str(said.get("activation_function", "Identity")).rpartition(".")[2]
        functions = {"Identity": torch.nn.Identity(), "Tanh": torch.nn.Tanh(), "GELU": torch.nn.GELU()}
        try:
            self._function = functions[name]
            weights = load_file(folder / "model.safetensors")
            self._weight = weights["linear.weight"].float()
            self._bias = weights["linear.bias"].float() if "linear.bias" in weights else None
        except Exception as error:  # no such function, no file, or another tensor
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"{folder} is no linear layer that Switchyard knows ({first_line(error)})."
            ) from error

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._function(torch.nn.functional.linear(rows, self._weight, self._bias))
        return found

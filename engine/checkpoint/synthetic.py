"""Models of a published model's shape with random weights: speed can be measured without a download.

`synthetic:NAME?layers=4` on a bench's command line: the checkpoint is made once, then found again. Its tokenizer maps
any text to ids byte by byte, and every id has a text. The weights are made quickly: windows of blocks of normal
numbers, scaled so that a model of any depth behaves: activations stay finite over long contexts, other tokens choose
other experts, and some experts are chosen more often than others, as in trained models (a cache would otherwise have
nothing to learn).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.safetensors_numpy import to_bfloat16, write_safetensors
from engine.checkpoint.staging import put_in_place, staging_folder
from engine.checkpoint.synthetic_shapes import SHAPES, Role, Shape, TensorSpec, config_of, tensors_of
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with `vocabulary` (at least 259) ids: 0 is padding, 1 begins
    and 2 ends a turn, then come the bytes and made-up words that only the model says.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocabulary < len(tokens):
        raise ValueError(f"a byte-level tokenizer has at least {len(tokens)} tokens")
    tokens += [f"\u0120w{index}" for index in range(vocabulary - len(tokens))]  # U+0120 is the byte-level space
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


_LARGEST_BLOCK = 2**23
_SPARE = 8
"""One part in so many of a block is spare: so many places a window may begin at, and matrices that share numbers do not
share rows."""
_COMMON_CHANNELS = 16
"""One channel in so many holds the same value for every token: what routers read there is an expert's popularity."""
_SKEW = 0.7
"""Spread of the experts' popularity, over that of what a router makes of the token itself."""
_ROUTER_SPREAD = 1.5
"""Standard deviation of router logits."""
_RESIDUAL_GAIN = 0.1
"""Of what a layer adds to the residual stream, so that tokens stay themselves over many layers."""
_COMMON_VALUE = _SKEW * math.sqrt(_COMMON_CHANNELS - 1)

Bits = NDArray[np.uint16]


class RandomWeights:
    """Fills tensors; the same seed and the same order of calls give the same weights.

    Args:
        largest: elements of the largest tensor; smaller models need smaller blocks.
    """

    def __init__(self, largest: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._blocks: dict[float, Bits] = {}
        self._block = min(_LARGEST_BLOCK, max(largest, 2**12))
        self._spare = self._block // _SPARE

    def fill(self, spec: TensorSpec) -> Bits:
        """bfloat16 bits of the spec's shape; perhaps a view that other tensors share, so not to be changed."""
        if spec.role is Role.ONES:
            return to_bfloat16(np.ones(spec.shape, np.float32))
        if spec.role is Role.ZEROS:
            return np.zeros(spec.shape, np.uint16)
        if spec.role is Role.FINAL_NORM:
            # The head sees no common channels, or a few words would win whatever the token.
            norm = np.ones(spec.shape, np.float32)
            norm[_common(spec.shape[0])] = 0
            return to_bfloat16(norm)
        if spec.role is Role.EMBEDDING:
            table = self._window(1.0, math.prod(spec.shape)).reshape(spec.shape).copy()
            table[:, _common(spec.shape[1])] = to_bfloat16(np.array([_COMMON_VALUE], np.float32))[0]
            return table
        gain = {Role.ROUTER: _ROUTER_SPREAD, Role.RESIDUAL: _RESIDUAL_GAIN}.get(spec.role, 1.0)
        return self._window(gain / math.sqrt(spec.fan_in), math.prod(spec.shape)).reshape(spec.shape)

    def _window(self, deviation: float, count: int) -> Bits:
        """`count` normal numbers of this deviation, from some place of a block on; tensors beyond it repeat it."""
        block = self._blocks.get(deviation)
        if block is None:
            numbers: NDArray[Any] = self._random.standard_normal(self._block + self._spare, dtype=np.float32)
            block = self._blocks[deviation] = to_bfloat16(numbers * np.float32(deviation))
        begin = int(self._random.integers(self._spare // 2)) * 2 + 1
        if count <= self._block - 1:
            return block[begin : begin + count]
        # An odd length: no two rows of a matrix of even width begin at the same place before all places are used.
        return np.resize(block[begin : begin + (self._block - 1 | 1)], count)


def _common(hidden: int) -> slice:
    return slice(0, max(1, hidden // _COMMON_CHANNELS))


_PREFIX = "synthetic:"
_FORMAT = 2
"""Part of the folder's name: increase it when the weights of a shape change."""
_SMALLEST = {"layers": 1, "vocab": 259, "experts": 1}
_LARGEST = {"layers": 1000, "vocab": 2**20, "experts": 4096}


def is_synthetic(model: str) -> bool:
    """Whether this names a synthetic model."""
    return model.startswith(_PREFIX)


def make_synthetic(model: str, say: Callable[[str], None] = lambda _text: None) -> Path:
    """The checkpoint directory of `synthetic:NAME`, created if missing.

    Args:
        model: `synthetic:NAME?option=number&...`; the options are `layers`, `vocab` and `experts`.
        say: called with progress messages.

    Raises:
        EngineError: `MODEL_NOT_FOUND` if no such shape is known, `INVALID_REQUEST` for an option that makes no sense,
            `DISK_FULL`.
    """
    name, shape = parse(model)
    folder = cache_dir() / "synthetic" / f"{name}-v{_FORMAT}"
    if (folder / "config.json").is_file():
        return folder
    nbytes = plain_nbytes(shape)
    say(f"making {name} with random weights in {folder.parent}: {nbytes / 1e9:.1f} GB, cached")
    with disk_errors_explained(folder.parent), staging_folder(folder.parent) as staged:
        require_space(folder.parent, nbytes)
        write_checkpoint(staged, shape)
        if not folder.exists():  # another process may have created it meanwhile
            put_in_place(staged, folder)
    return folder


def parse(model: str) -> tuple[str, Shape]:
    """The folder's name, and the shape.

    Raises:
        EngineError: as `make_synthetic`.
    """
    name, _, query = model.removeprefix(_PREFIX).partition("?")
    shape = SHAPES.get(name)
    if shape is None:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"There is no synthetic model {name!r}: use one of {', '.join(SHAPES)}."
        )
    options: dict[str, int] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        usable = key in _SMALLEST and value.isascii() and value.isdecimal() and len(value) < 10
        if not usable or not _SMALLEST[key] <= int(value) <= _LARGEST[key]:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{part!r} is not an option of a synthetic model: use for example {_PREFIX}{name}?layers=4&vocab=8192.",
            )
        options[key] = int(value)
    shape = shape.changed(**options)
    if shape.experts < shape.top_k:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"A token of {name} uses {shape.top_k} experts, so it needs at least that many."
        )
    return "-".join([name, *(f"{key}{value}" for key, value in sorted(options.items()))]), shape


def plain_nbytes(shape: Shape) -> int:
    """Bytes of the weights in bfloat16."""
    return 2 * sum(math.prod(spec.shape) for specs in tensors_of(shape) for spec in specs)


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Writes the checkpoint into an empty folder."""
    largest = max(math.prod(spec.shape) for specs in tensors_of(shape) for spec in specs)
    weights, files = RandomWeights(largest), shape.layers + 2
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(tensors_of(shape), start=1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        write_safetensors(folder / file, {spec.name: weights.fill(spec) for spec in specs})
        weight_map |= dict.fromkeys((spec.name for spec in specs), file)
    index = {"metadata": {"total_size": plain_nbytes(shape)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n", encoding="utf-8")

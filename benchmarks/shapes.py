"""GGUF files of published models' shapes with random weights, as llama.cpp would write them, for `bench --peers`.

Nothing big is converted or quantised: llama.cpp's converter is given a checkpoint with holes instead of matrices, its
quantiser says which types it would choose, and the file is filled with random blocks of these types.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from gguf import GGUFReader

from benchmarks.gguf import texts_of
from benchmarks.peers.editions import LLAMA_CPP
from benchmarks.peers.peer import FILE_TYPES, chosen_types
from engine.bench.report import PeerError
from engine.checkpoint.gguf.file import WHOLE, read_gguf
from engine.checkpoint.importing import staging_folder
from engine.checkpoint.synthetic import SHAPES, config_of, options_of, parse, write_tokenizer
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir
from engine.formats.ggml import GGML, BlockType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.checkpoint.headers import TensorEntry


@dataclass(frozen=True)
class Published:
    """A model, and how its published checkpoints differ from what the library writes.

    Attributes:
        config: beside the library's defaults.
        written: what the converter must find in config.json besides: the library drops what published files have.
            `None`: what it must not find.
        options: of the converter.
        renamed: patterns of names of tensors -> what published files have instead; nothing, if they lack them.
        split: whether published files have gates, ups and experts apart.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    split: bool = False


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_SIGMOID = {"scoring_func": "sigmoid"}
_GRANITE = {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}
_NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
PUBLISHED: dict[str, Published] = {
    "deepseek-v3": Published(
        "deepseek_v3", {"num_mtp_layers": 0, "max_position_embeddings": 163840, **_rope(1e4)}, _SIGMOID
    ),
    "deepseek-v3.2": Published("deepseek_v32", _rope(1e4), _SIGMOID, ("--no-mtp",)),
    "deepseek-v4-flash": Published(
        "deepseek_v4",
        {"num_nextn_predict_layers": 0, "layer_types": ["sliding_attention"] * 2 + [
            f"{('compressed_sparse', 'heavily_compressed')[n % 2]}_attention" for n in range(41)]},
        {"qk_rope_head_dim": 64, "scoring_func": "sqrtsoftplus", "num_hash_layers": 3, **_rope(1e4),
         "compress_ratios": [0, 0, *((4, 128)[n % 2] for n in range(41))]},
        renamed={r"^model\.": "", "^embed_tokens": "embed", "^lm_head": "head", r"^hc_head\.hc_": "hc_head_",
                 r"attn\.norm\.": "attn.kv_norm."},
    ),
    "ernie-4.5-21b-a3b": Published("ernie4_5_moe"),
    "gemma-4-26b-a4b": Published(
        "gemma4_text",
        {"hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8,
         "num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
         "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
         "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "max_position_embeddings": 262144},
    ),
    "glm-4.5-air": Published("glm4_moe", {"num_mtp_layers": 0, "attention_bias": True, "head_dim": 128, **_rope(
        1e6, partial_rotary_factor=0.5)}, {"num_nextn_predict_layers": 0}),
    "glm-4.7-flash": Published("glm4_moe_lite", _rope(1e6), {
        **_SIGMOID, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}),
    "glm-5": Published("glm_moe_dsa", _rope(1e6), _SIGMOID, ("--no-mtp",)),
    "granite-4.0-h-tiny": Published(
        "granitemoehybrid",
        {"vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 40,
         "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True, "num_local_experts": 64, "num_experts_per_tok": 6,
         "shared_intermediate_size": 1024, "position_embedding_type": "nope", "mamba_n_heads": 48, "mamba_d_head": 64,
         "mamba_d_state": 128, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
         "attention_multiplier": 1 / 128, **_GRANITE},
        _GRANITE,
    ),
    "kimi-linear-48b-a3b": Published(
        "kimi_linear",
        {"layer_types": [("linear_attention", "full_attention")[n % 4 == 3 or n == 26] for n in range(27)],
         "mlp_layer_types": ["dense"] + ["sparse"] * 26},
        {**_SIGMOID, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "linear_attn_config": {"full_attn_layers": [*range(4, 27, 4), 27], "head_dim": 128, "num_heads": 32,
                                "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4}},
        renamed={r"layers\.0\.block_sparse_moe\.": "layers.0.mlp."},
    ),
    "lfm2-8b-a1b": Published(
        "lfm2_moe",
        {"num_hidden_layers": 24,
         "layer_types": [("conv", "full_attention")[n in (2, 6, 10, 14, 18, 21)] for n in range(24)]},
    ),
    "minimax-m2": Published(
        "minimax_m2", _rope(5e6, partial_rotary_factor=0.5), _SIGMOID | {"rotary_dim": 64}
    ),
    "nemotron-3-nano-30b-a3b": Published(
        "nemotron_h",
        {"hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6,
         "routed_scaling_factor": 2.5, "max_position_embeddings": 262144, "layers_block_type": [
             _NEMOTRON[each] for each in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"]},
        {"num_heads": 64},
    ),
    "qwen3-next-80b-a3b": Published(
        "qwen3_next", {"max_position_embeddings": 262144, **_rope(1e7, partial_rotary_factor=0.25)},
        options=("--no-mtp",),
    ),
    "qwen3.5-35b-a3b": Published(
        "qwen3_5_moe_text",
        {"max_position_embeddings": 262144, **_rope(
            1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True)},
        {"full_attention_interval": 4},
        ("--no-mtp",),
    ),
}  # fmt: skip
"""What is not in `SHAPES`: of models whose layers are of several kinds."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def published_layers(name: str) -> int:
    """How many layers the model has."""
    return int(_cut(PUBLISHED[name], {})[0].num_hidden_layers)


def _cut(published: Published, options: Mapping[str, int]) -> tuple[Any, Published]:
    """transformers' configuration with so many `layers`, `vocab` or `experts`, and what the converter finds of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from engine.runtime.own import make_known

    make_known(published.model_type)
    kind = CONFIG_MAPPING[published.model_type]
    whole = kind(**published.config)
    all_layers = int(whole.num_hidden_layers)
    layers = min(options.get("layers", all_layers), all_layers)

    def first(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value[:layers] if isinstance(value, list) and len(value) == all_layers else value
            for name, value in values.items()
        }

    values = {name: value for name, value in whole.to_dict().items() if isinstance(value, list) or name in _EXPERTS}
    values = first({**values, **published.config})
    values |= {name: options["experts"] for name in _EXPERTS if "experts" in options and values.get(name)}
    if "layers_block_type" not in values:
        values["num_hidden_layers"] = layers
    config = kind(**{**values, "vocab_size": options.get("vocab", whole.vocab_size)})
    return config, replace(published, written=first(published.written))


def make_synthetic_gguf(model: str, kind: str, say: Callable[[str], None] = lambda _text: None) -> Path:
    """The GGUF file of a synthetic model, in the cache folder, created if missing.

    Args:
        model: as in `make_synthetic`, also of the shapes in `PUBLISHED`.
        kind: llama.cpp's name of the mix of types, such as "Q4_K_M".
        say: called with progress messages.

    Raises:
        EngineError: as `make_synthetic`; also `INVALID_REQUEST` for an unknown type, and `DEVICE_UNAVAILABLE` if
            llama.cpp is not built or cannot write it.
    """
    if kind not in FILE_TYPES:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"llama.cpp writes no GGUF files of type {kind!r}: try Q4_K_M.")
    plain_name, options = options_of(model, [*SHAPES, *PUBLISHED])
    name = "-".join([plain_name, *(f"{key}{value}" for key, value in sorted(options.items()))])
    file = cache_dir() / "gguf" / f"{name}-v{_FORMAT}-{kind}.gguf"
    if file.is_file():
        return file
    if LLAMA_CPP.python() is None or not _source().is_dir():
        why = f"llama.cpp is not built: run {LLAMA_CPP.how_to_build()}"
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, f"There is no {file.name}: {why}.")
    published = PUBLISHED.get(plain_name)
    if published is None:
        own = config_of(parse(model)[1])
        published, options = Published(own.pop("model_type"), own), {}
    config, published = _cut(published, options)
    say(f"writing {file}, cached")
    with disk_errors_explained(file.parent), staging_folder(file.parent) as staged:
        checkpoint, plain, made = staged / "checkpoint", staged / "plain.gguf", staged / file.name
        try:
            _write_outline(checkpoint, config, published)
            convert(published, checkpoint, plain, outline=True)
            kinds = chosen_types(plain, kind)
        except PeerError as failure:
            raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, f"There is no {file.name}: {failure}.") from failure
        _write(plain, kinds, made, FILE_TYPES[kind])
        made.replace(file)
    return file


_FORMAT = 2
"""Part of the file's name: increase it when the content for a shape and type changes."""
_LARGEST = 2**22
"""Elements of the largest tensor that is more than a hole on its way into the file."""


def _write_outline(folder: Path, config: Any, published: Published) -> None:
    """A checkpoint with the names of published ones whose larger tensors are holes in its file, and a tokenizer."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from engine.runtime.load.library_models import build_skeleton, model_class_for

    model_class, config = model_class_for(config, None)

    def own_of(module: torch.nn.Module) -> list[torch.Tensor]:
        return [*module.parameters(recurse=False), *module.buffers(recurse=False)]

    model = build_skeleton(model_class, config, torch.bfloat16, None)
    torch.manual_seed(0)
    for module in model.modules():
        own = own_of(module)
        if own and sum(each.numel() for each in own) <= _LARGEST:
            module.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for each in own_of(module):
                    each.zero_()
                model._init_weights(module)
                for each in own_of(module):
                    if each.dim() > 1 and each.is_floating_point():
                        each.normal_(0, math.prod(each.shape[1:]) ** -0.5)
    state = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    state = _as_published(published, state)
    header: dict[str, Any] = {}
    nbytes, filled = 0, list[tuple[int, bytes]]()
    for name, tensor in state.items():
        begin, nbytes = nbytes, nbytes + tensor.nbytes
        kind = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, nbytes]}
        if tensor.is_meta:
            continue
        if kind == "I64":  # a table of experts by token
            tensor = torch.arange(tensor.numel()).reshape(tensor.shape) % config.num_local_experts
        if tensor.dim() == 1 and ".layers." not in name and "norm" in name:
            # Where the head is the embedding, a token would otherwise be followed by itself.
            tensor = tensor - 2 * torch.randint(2, tensor.shape).to(tensor.dtype)
        filled.append((begin, tensor.contiguous().view(torch.uint8).numpy().tobytes()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for begin, content in filled:
            file.seek(start + begin)
            file.write(content)
        file.truncate(start + nbytes)
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    (folder / _VOCABULARY).write_text(json.dumps(texts_of(folder)), encoding="utf-8")


_VOCABULARY = "vocabulary.json"
_CONVERT = """
import json, logging, numpy as np, pathlib, sys
sys.path[:0] = [SOURCE + "/gguf-py", SOURCE]
logging.basicConfig(level=logging.ERROR)
import gguf, importlib
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.TextModel._set_vocab_glm = lambda self: self._set_vocab_gpt2()
def keys(self):
    for key, value in json.loads(pathlib.Path(FOLDER, VOCABULARY).read_text("utf-8")).items():
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        self.gguf_writer.add_key_value(key, value, kind, inner)
import convert_hf_to_gguf
for file in pathlib.Path(SOURCE, "conversion").glob("[a-z]*.py"):
    for kind in vars(importlib.import_module("conversion." + file.stem)).values():
        if isinstance(kind, type) and issubclass(kind, base.TextModel) and kind is not base.TextModel:
            kind.set_vocab = keys if OUTLINE else lambda self: self._set_vocab_gpt2()
            kind._get_suppress_tokens = lambda self: None
from conversion.deepseek import DeepseekV4Model
def as_they_are(self, bid, proj, key):
    names = [f"layers.{bid}.ffn.experts.{each}.{proj}.weight" for each in range(self.hparams["n_routed_experts"])]
    found = (self.model_tensors[name]() for name in names[: 1 if OUTLINE else None])
    each = [base.LazyTorchTensor.to_eager(tensor).float().numpy() for tensor in found]
    stack = np.broadcast_to(each[0], (len(names), *each[0].shape)) if OUTLINE else np.stack(each)
    self.gguf_writer.add_tensor(self.format_tensor_name(key, bid), stack)
    return names
DeepseekV4Model._write_mxfp4_expert_tensor = as_they_are
def with_holes(self, *, progress=False):
    self.write_ti_data_to_file()
    for file, tensors in zip(self.fout, self.tensors):
        self.write_padding(file, file.tell())
        for info in tensors.values():
            if np.prod(info.shape) > LARGEST:
                file.seek(info.nbytes, 1)
            else:
                info.tensor.tofile(file)
            self.write_padding(file, info.nbytes)
        file.truncate()
if OUTLINE:
    gguf.GGUFWriter.write_tensors_to_file = with_holes
kind = "bf16" if OUTLINE else "f32"
sys.argv = ["convert", FOLDER, "--outfile", FILE, "--outtype", kind, "--model-name", "tiny", *OPTIONS]
convert_hf_to_gguf.main()
"""


def _source() -> Path:
    return LLAMA_CPP.home() / "source" / "vendor" / "llama.cpp"


def convert(published: Published, folder: Path, file: Path, *, outline: bool = False) -> None:
    """Has llama.cpp's converter write a checkpoint to `file`.

    Args:
        outline: with holes instead of the larger tensors.

    Raises:
        PeerError: it cannot.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | published.written
    kept = {key: value for key, value in config.items() if value is not None or key not in published.written}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    if not outline:
        from safetensors.torch import load_file, save_file

        weights = folder / "model.safetensors"
        save_file(_as_published(published, load_file(weights)), weights, {"format": "pt"})
    names = {"SOURCE": str(_source()), "FOLDER": str(folder), "FILE": str(file), "OPTIONS": [*published.options]}
    run(sys.executable, _CONVERT, **names, OUTLINE=outline, VOCABULARY=_VOCABULARY, LARGEST=_LARGEST)


def run(python: str, program: str, **names: Any) -> None:
    """Runs a program in which these names are known.

    Raises:
        PeerError: it fails.
    """
    text = "\n".join(f"{key} = {value!r}" for key, value in names.items()) + program
    done = subprocess.run([python, "-c", text], env=LLAMA_CPP.environment(), capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"its program fails: {done.stderr.strip()[-2000:]}")


def _as_published(published: Published, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """With the names that the converter expects, and experts one by one where it wants them so."""
    named = dict(tensors)
    for pattern, name in published.renamed.items():
        named = {re.sub(pattern, name, key): values for key, values in named.items()}
    named.pop("", None)
    if not published.split:
        return named
    found: dict[str, Any] = {}
    for name, values in named.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = {"w2": values} if "down" in name else dict(zip(("w1", "w3"), values.chunk(2, 1), strict=True))
            stem = name.rpartition(".")[0]
            found |= {
                f"{stem}.{expert}.{part}.weight": matrix.contiguous()
                for part, stack in parts.items()
                for expert, matrix in enumerate(stack)
            }
        elif name.endswith("gate_up_proj.weight"):
            halves = zip(("gate", "up"), values.chunk(2), strict=True)
            found |= {name.replace("gate_up", part): half.contiguous() for part, half in halves}
        else:
            found[name] = values
    return found


def _write(plain: Path, kinds: Mapping[str, str], file: Path, file_type: int) -> None:
    """The file that llama.cpp's quantiser would write, with random blocks for what is a hole in `plain`."""
    reader, tensors = GGUFReader(plain, "r+"), read_gguf(plain).tensors
    reader.fields["general.file_type"].parts[-1][0] = file_type
    last = list(reader.fields.values())[-1]
    head = bytearray(reader.data[: last.offset + sum(part.nbytes for part in last.parts)])
    aligned = int(reader.alignment)
    types = {**GGML, WHOLE.name: WHOLE}
    infos, nbytes = bytearray(), 0
    for name, entry in tensors.items():
        block, text = types[kinds[name]], name.encode()
        layout = f"<Q{len(text)}sI{len(entry.shape)}QIQ"
        infos += struct.pack(layout, len(text), text, len(entry.shape), *reversed(entry.shape), block.id, nbytes)
        nbytes += -(-entry.numel // block.elements * block.nbytes // aligned) * aligned
    require_space(file.parent, nbytes)
    with file.open("wb") as made:
        made.write(head + infos)
        for name, entry in tensors.items():
            made.write(bytes(-made.tell() % aligned))
            if entry.numel <= _LARGEST and kinds[name] == entry.dtype:
                made.write(reader.data[entry.offset : entry.offset + entry.nbytes])
            else:
                _write_random(made, types[kinds[name]], entry)
        made.write(bytes(-made.tell() % aligned))
        made.flush()
        os.fsync(made.fileno())


_POOL = 2**24
_RESIDUAL = re.compile(r"attn_out|ffn_down|ssm_out|out_proj")
"""What writes to the residual stream does so quietly, so that tokens stay themselves over many layers."""


def _write_random(made: BinaryIO, block: BlockType, entry: TensorEntry) -> None:
    """Blocks from some place of a pool on, over and over."""
    quiet, is_table = (0.5 if _RESIDUAL.search(entry.key) else 1.0), "token_embd" in entry.key
    deviation = 1.0 if is_table else quiet / math.sqrt(entry.shape[-1])
    # With the numbers of the head, an embedding would have two tokens follow each other for ever.
    pool = random_blocks(block, _POOL // block.elements, deviation, seed=is_table)
    left, places = entry.numel // block.elements, np.random.default_rng(entry.numel)
    while left:
        begin = int(places.integers(len(pool) // 2))
        content = pool[begin : begin + left]
        made.write(content.tobytes())
        left -= len(content)


def random_blocks(block: BlockType, count: int, deviation: float, seed: int = 0) -> NDArray[np.uint8]:
    """[count, bytes of a block] of a type, which stand for numbers of this deviation around 0."""
    raw, sizes = _unscaled(block, count, seed)
    if not block.is_blocks:
        numbers = raw.view(np.float32) * np.float32(deviation)
        if block.name == "BF16":
            return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(count, -1)
        return numbers.astype("<f2" if block.name == "F16" else "<f4").view(np.uint8).reshape(count, -1)
    raw = raw.copy()
    _scale(block, raw, [size * deviation for size in sizes])
    return raw


@lru_cache(maxsize=4)
def _unscaled(block: BlockType, count: int, seed: int) -> tuple[NDArray[np.uint8], tuple[float, ...]]:
    """Random blocks, and the scales and offsets with which they stand for numbers of deviation 1 around 0."""
    draw = np.random.default_rng(seed)
    if not block.is_blocks:
        return draw.standard_normal((count, 1), np.float32).view(np.uint8), ()
    raw = draw.integers(0, 256, (count, block.nbytes), np.uint8)
    tried = raw[:4096].copy()

    def measured(*scales: float) -> tuple[float, float]:
        _scale(block, tried, scales)
        values = block.dequantise(tried)
        return float(values.mean()), float(values.std())

    if len(block.halves) < 2:
        return raw, (1 / measured(1.0)[1],)
    offset = -measured(1.0, 0.0)[0] / measured(0.0, 1.0)[0]
    size = 1 / measured(1.0, offset)[1]
    return raw, (size, size * offset)


def _scale(block: BlockType, raw: NDArray[np.uint8], scales: Sequence[float]) -> None:
    if block.put is not None:
        block.put(raw, np.full(len(raw), scales[0], np.float32))
    for at, scale in zip(block.halves, scales, strict=False):
        raw[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)

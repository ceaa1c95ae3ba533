"""Makes the mmproj files in tests/data/gguf: `python -m tests.engine.mmproj_files [NAME ...]`.

For maintainers, after `python -m benchmarks.peers build` and with llama.cpp's libmtmd (its target `mtmd`, with
-DLLAMA_BUILD_MTMD=ON, of the same sources) in the folder that MTMD_CPP_LIB names.  Towers of tiny random models of
transformers are written by llama.cpp's own converter; beside each file lies what transformers and llama.cpp make of a
picture with it.
"""

import base64
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.peers.editions import LLAMA_CPP
from engine.checkpoint.gguf.file import read_gguf
from tests.engine.gguf_files import DATA, save_tokenizer
from tests.engine.seeing_models import GEMMA4_TOWER, drawn
from tests.engine.tiny_families import model_class, tiny_config

CASES = {
    "deepseek3": ("kimi_k25", (48, 32)),
    "dots3note": ("dots3_note", (48, 32)),
    "gemma3": ("gemma3", (16, 16)),
    "gemma4": ("gemma4", (240, 168)),
    "glm4": ("glm4v", (96, 72)),
    "glm4-moe": ("glm4v_moe", (96, 72)),
    "glm5-next": ("glm5_next", (96, 72)),
    "kimivl": ("kimi_k25", (48, 32)),
    "llama4": ("llama4", (16, 16)),
    "minimax-m3": ("minimax_m3_vl", (96, 64)),
    "mistral3": ("mistral3", (48, 32)),
    "qwen2-vl": ("qwen2_vl", (160, 136)),
    "qwen2vl": ("qwen2_5_vl", (160, 136)),
    "qwen35": ("qwen3_5", (48, 32)),
    "qwen35moe": ("qwen3_5_moe", (48, 32)),
    "qwen3vl": ("qwen3_vl", (48, 32)),
    "qwen3vlmoe": ("qwen3_vl_moe", (48, 32)),
    "qwen4exp": ("qwen4_exp", (48, 32)),
    "step35": ("step3p7", (64, 64)),
}
"""By the name of the text's file: the whole model, and the size of the picture, which needs no other."""
TEXTS = {"kimivl": "deepseek3", "qwen2-vl": "qwen2vl"}
"""Those for which that is another."""
_LIMITS = {"min_pixels": 64, "max_pixels": 2**20}
SIZES = ((48, 32), (33, 50), (300, 22), (7, 9), (200, 301))
_ROWS = 6
_LEVELS = torch.tensor([-1.5, -0.5, 0.5, 1.5])

_CONVERT = """
import logging, sys
sys.path[:0] = [SOURCE + "/gguf-py", SOURCE]
logging.basicConfig(level=logging.ERROR)
import convert_hf_to_gguf
if LLAMA4:  # which has the same names as Gemma 4 for another norm, and gets them in this edition
    from gguf import MODEL_TENSOR, tensor_mapping
    del tensor_mapping.TensorNameMap.block_mappings_cfg[MODEL_TENSOR.V_ENC_ATTN_POST_NORM]
sys.argv = ["convert", FOLDER, "--outfile", FILE, "--outtype", "f32", "--model-name", "tiny", "--mmproj"]
convert_hf_to_gguf.main()
"""
_ENCODE = """
import ctypes, numpy as np
from llama_cpp import llama_cpp, mtmd_cpp
llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_default_params()
params.vocab_only = True
model = llama_cpp.llama_model_load_from_file(TEXT.encode(), params)
own = mtmd_cpp.mtmd_context_params_default()
own.use_gpu, own.n_threads, own.warmup, own.print_timings, own.flash_attn_type = False, 1, False, False, 0
context = mtmd_cpp.mtmd_init_from_file(FILE.encode(), model, own)
def chunk_of(wide, high, pixels):
    bitmap = mtmd_cpp.mtmd_bitmap_init(wide, high, pixels)
    text = b"a <__media__> b"
    given = mtmd_cpp.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    code = mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(given), (ctypes.c_void_p * 1)(bitmap), 1)
    assert code == 0, code
    found = [mtmd_cpp.mtmd_input_chunks_get(chunks, at) for at in range(mtmd_cpp.mtmd_input_chunks_size(chunks))]
    return [each for each in found if mtmd_cpp.mtmd_input_chunk_get_type(each) == 1]
def tokens_of(chunks):
    return sum(map(mtmd_cpp.mtmd_input_chunk_get_n_tokens, chunks))
pixels = open(FOLDER + "/pixels", "rb").read()
chunks = chunk_of(*SIZE, (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels))
rows = []
for chunk in chunks:
    assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
    count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk) * WIDE
    rows.append(np.array(mtmd_cpp.mtmd_get_output_embd(context)[:count], np.float32).reshape(-1, WIDE))
blank = [(wide, high, (ctypes.c_uint8 * (3 * wide * high))()) for wide, high in SIZES]
np.savez(FOLDER + "/encoded.npz", rows=np.concatenate(rows), tokens=[tokens_of(chunk_of(*each)) for each in blank])
"""


def main(names: list[str]) -> None:
    """Makes these files, or all."""
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            _make(name, *CASES[name], Path(folder))


def _make(name: str, whole: str, size: tuple[int, int], folder: Path) -> None:
    text = folder / "text.gguf"
    text.write_bytes(lzma.decompress((DATA / f"{TEXTS.get(name, name)}.gguf.xz").read_bytes()))
    width = int(read_gguf(text).value("embedding_length"))  # type: ignore[call-overload]
    model = tower(whole, width, name)
    model.save_pretrained(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    named = load_file(weights)
    for pattern, published in _PUBLISHED.get(name, _PUBLISHED.get(whole, {})).items():
        named = {re.sub(pattern, published, key): each for key, each in named.items()}
    save_file(named, weights, {"format": "pt"})
    said = json.loads(config.read_text(encoding="utf-8"))
    for part, values in _WRITTEN.get(name, {}).items():
        (said[part] if part else said).update(values)
    config.write_text(json.dumps(said), encoding="utf-8")
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["[IMG_BREAK]"])
    tokenizer.save_pretrained(folder)
    colours = (
        {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        if whole == "gemma4"
        else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    )
    said = {**colours, "image_seq_length": 4, **_PREPARED.get(name, {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")
    file, picture = folder / "mmproj.gguf", drawn(*size)
    # Without its assertions it writes tiny towers, too.
    _run([sys.executable, "-O"], _CONVERT, folder, file, LLAMA4=whole == "llama4")
    image = Image.open(io.BytesIO(base64.b64decode(picture.data))).convert("RGB")
    theirs, deep = _theirs(model, whole, image)
    (folder / "pixels").write_bytes(image.tobytes())
    wide = width * (1 + len(deep))
    _run([str(LLAMA_CPP.python())], _ENCODE, folder, file, TEXT=str(text), SIZE=size, SIZES=SIZES, WIDE=wide)
    with np.load(folder / "encoded.npz") as read:
        peer, tokens = read["rows"], read["tokens"].tolist()
    if whole == "llama4":  # llama.cpp gives a tile's tokens column by column
        side = round(len(peer) ** 0.5)
        peer = peer.reshape(side, side, -1).swapaxes(0, 1).reshape(peer.shape)
    elif whole == "mistral3":  # and beside Mistral's those that end rows
        row = size[0] // 8 + 1
        peer = np.delete(peer, np.arange(row - 1, len(peer), row), axis=0)
    theirs = np.concatenate([theirs, *deep], axis=1)
    away = float(np.abs(peer - theirs).max() / np.abs(theirs).max())
    places = np.linspace(0, len(theirs) - 1, _ROWS, dtype=int).tolist()
    kept = {
        "whole": whole,
        "picture": picture.data,
        "rows": len(theirs),
        "places": places,
        "transformers": np.round(theirs[places].astype(float), 5).tolist(),
        "llama.cpp": np.round(peer[places].astype(float), 5).tolist(),
        "apart": max(2 * away, 1e-5),
        "tokens": [[*each, count] for each, count in zip(SIZES, tokens, strict=True)] if "qwen" in whole else [],
    }
    (DATA / f"mmproj-{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    packed = lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
    (DATA / f"mmproj-{name}.gguf.xz").write_bytes(packed)
    sys.stdout.write(f"{name:12} {len(packed):7,} bytes; llama.cpp and transformers: {away:.1e} apart\n")
    sys.stdout.flush()


def tower(whole: str, width: int, seed: str) -> Any:
    """The library's model of a family with a random tower whose rows are so wide."""
    own = {"gemma4": GEMMA4_TOWER, "dots3_note": _DOTS}.get(whole)
    config = tiny_config(whole, **({"vision_config": own} if own else {}))
    vision = config.vision_config
    config.text_config.hidden_size = width
    usual = {"out_hidden_size": width, "depth": 2, "vision_use_head": False}
    for name, value in {**usual, **_CHANGES.get(whole, {})}.items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    if whole == "kimi_k25":
        config.projection_hidden_size = vision.hidden_size
    elif whole == "qwen2_vl":
        vision.hidden_size = width
    torch.manual_seed(sum(map(ord, seed)))
    model = model_class(config)(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            pick = _LEVELS[torch.randint(0, 4, parameter.shape)]
            if parameter.dim() > 1:
                parameter.copy_((pick * (0.8 / parameter[0].numel() ** 0.5)).half().float())
            else:
                parameter.copy_(pick * 0.125 + (1.0 if "norm" in key and not key.endswith("bias") else 0.0))
    return model


_DOTS = {
    "adapter_in_dim": 32, "adapter_out_dim": 32, "pyramid_num_routed": [-1, 4], "num_hidden_layers": 2,
    "moe_intermediate_size": 16, "capacity_factor": 2,
}  # fmt: skip
_KIMI = {"^model\\.": "", r"encoder\.patch_embed": "patch_embed"}
_PUBLISHED = {
    "gemma3": {r"^vision_tower\.": "vision_tower.vision_model."},
    "kimi_k25": _KIMI,
    "kimivl": {
        **_KIMI,
        "^mm_projector": "multi_modal_projector",
        r"\.proj\.0": ".linear_1",
        r"\.proj\.2": ".linear_2",
    },
    "mistral3": {r"^language_model\.model\.": "model."},
}
"""How names in what is published differ, by the case or its whole, if the library writes others."""
_WRITTEN: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek3": {
        "": {"architectures": ["KimiK25ForConditionalGeneration"]},
        "vision_config": {"init_pos_emb_height": 4, "init_pos_emb_width": 4},
    },
    "dots3note": {
        "": {"model_type": "unknown"},
        "vision_config": {
            "embed_dim": 32,
            "pyramid_num_routed": [-1, 4],
            "adapter_type": "patch_merger",
            "pre_pixel_shuffle": True,
            "use_qk_norm": True,
            "capacity_factor": 2,
        },
        "audio_config": {
            "use_conv2d_stem": True,
            "use_rope": True,
            "use_rms_norm": True,
            "chunk_seconds": 60,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0},
            "whisper_config": {
                "activation_function": "swiglu",
                "d_model": 32,
                "encoder_ffn_dim": 32,
                "encoder_attention_heads": 2,
                "encoder_layers": 1,
                "num_mel_bins": 16,
            },
        },
    },
    "kimivl": {"": {"architectures": ["KimiVLForConditionalGeneration"]}},
    "step35": {"": {"understand_projector_stride": 2}},
}
"""What config.json says there, by its parts, besides."""
_PREPARED = {
    "dots3note": {"min_pixels": 64, "max_pixels": 2**20},
    "glm5-next": {"patch_size": 4, "merge_size": 2, "min_image_tokens": 2, "max_image_tokens": 2000},
}
"""And preprocessor_config.json."""
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"intermediate_size": 48},
    **{each: {"num_hidden_layers": 3} for each in ("llama4", "mistral3")},
    "kimi_k25": {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
    "minimax_m3_vl": {"num_hidden_layers": 3, "hidden_size": 56},
    "qwen2_5_vl": {"window_size": 112, "fullatt_block_indexes": [2], "depth": 3, "intermediate_size": 48},
    "qwen2_vl": {"depth": 3},
    "step3p7": {"num_hidden_layers": 2, "image_size": 64},
}
"""Of towers: what llama.cpp takes for granted, and square matrices for swapped."""


def _theirs(model: Any, whole: str, image: Image.Image) -> tuple[Any, list[Any]]:
    """What transformers makes of a picture that needs no other size."""
    from engine.families.pictures import SIGHTS
    from engine.runtime.picture_processors import processor_of

    limits = _LIMITS if whole.startswith(("qwen", "dots")) else {}
    sizes = SIGHTS[whole].reading(model.config.vision_config.to_dict(), limits, model.config.to_dict())
    processor = processor_of(Path("none"), sizes)
    processor.image_mean = processor.image_std = [0.5] * 3
    given = processor(images=[image], return_tensors="pt")
    for unread in ("num_crops", "aspect_ratios", "num_soft_tokens_per_image"):
        given.pop(unread, None)
    given["pixel_values"] = given["pixel_values"].float()
    with torch.no_grad():
        made = getattr(model, "model", model).get_image_features(**given, return_dict=True)
        rows = made.pooler_output
        rows = model.multi_modal_projector(made.last_hidden_state) if rows is None else rows
    rows = torch.cat(tuple(rows)) if isinstance(rows, list | tuple) else rows
    deep = [torch.cat(tuple(each)) for each in getattr(made, "deepstack_features", None) or ()]
    return rows.reshape(-1, rows.shape[-1]).numpy(), [each.numpy() for each in deep]


def _run(python: list[str], program: str, folder: Path, file: Path, **names: Any) -> None:
    source = str(LLAMA_CPP.home() / "source" / "vendor" / "llama.cpp")
    given = {"SOURCE": source, "FOLDER": str(folder), "FILE": str(file), **names}
    text = "\n".join(f"{key} = {value!r}" for key, value in given.items()) + program
    env = {**LLAMA_CPP.environment(), "MTMD_CPP_LIB": os.environ.get("MTMD_CPP_LIB", "")}
    done = subprocess.run([*python, "-c", text], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
    done.check_returncode()


if __name__ == "__main__":
    main(sys.argv[1:])

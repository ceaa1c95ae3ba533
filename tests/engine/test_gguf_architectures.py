"""Each architecture's tiny GGUF file, read by us, must give what llama.cpp computes with it (see `gguf_files`)."""

import json
import lzma
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from engine.checkpoint.gguf.checkpoint import gguf_tensors
from engine.checkpoint.gguf.file import GgufFile, Strings, read_gguf
from engine.common.errors import EngineError, ErrorCode
from engine.families.gguf.table import REFUSED
from engine.formats import STORED
from engine.formats.tiles import dequantise
from engine.runtime.load.tensor_reader import TensorReader
from tests.combinations import some
from tests.engine.gguf_files import CASES, DATA
from tests.engine.loaded_tiny import opened_model
from tests.refusals import refused
from tests.tiny_gguf import dequantised, takes, write_gguf

TOLERANCE = 1e-4
TABLED = dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma4", "gemma4-e"), 1e-3)
"""llama.cpp looks GELU up in a table of 16-bit numbers."""
Q4_0 = GGMLQuantizationType.Q4_0
OWN = ("dbrx", "deepseek4", "glm5-next", "jamba", "kimi-linear", "minimax-01", "mistral4", "qwen3next")
"""Those for which there is more than a row of a table."""
PROMPT_IDS = torch.tensor([[1, 5, 77, 200, 31, 8, 9]])


@pytest.mark.parametrize("name", some(CASES, OWN, every=3, first=1))
def test_logits_and_tokens_are_llama_cpps(name: str, tmp_path: Path) -> None:
    file, wanted = unpacked(name, tmp_path)
    prompt, answer = wanted["prompt"], wanted["tokens"]
    with opened_model(file, "fp32") as ours, torch.no_grad():
        found = ours.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].float()
    tolerance = TABLED.get(name, TOLERANCE)
    for place, row in wanted["rows"].items():
        theirs = torch.tensor(row)
        assert (found[int(place)] - theirs).abs().max() < tolerance * theirs.abs().max()
    said = found[len(prompt) - 1 : -1].argmax(-1).tolist()
    near = 4 * tolerance * float(found.abs().max())
    clear = [at for at, margin in enumerate(wanted["margins"]) if margin > near]
    assert len(clear) > len(answer) // 2
    assert [said[at] for at in clear] == [answer[at] for at in clear]


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file, and what is known of it."""
    file = folder / f"{name}.gguf"
    file.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return file, json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def rewritten(file: Path, *, as_it_was: bool = False, kind: str = "", **changes: Any) -> Path:
    """The same file, changed.

    Args:
        as_it_was: matrices are quantised again as the first one of the file is; else all are float32.
        kind: the type that they are quantised to instead.
        changes: metadata by key without the architecture's name, with two underscores for a dot (`None`: without it);
            `tensors` is a function from all tensors to those of the new file.
    """
    read = read_gguf(file)
    change = changes.pop("tensors", lambda tensors: tensors)
    tensors = change({name: dequantised(entry) for name, entry in read.tensors.items()})
    own = {f"{read.architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    kinds = {kind} if kind else {entry.dtype for entry in read.tensors.values()} - {"F32"} if as_it_was else set()
    types = {name: kind for kind in kinds for name, values in tensors.items() if takes(kind, name, values)}
    return write_gguf(
        file.with_name("rewritten.gguf"), tensors, architecture=read.architecture, keys=_keys_of(read, own), types=types
    )


def _keys_of(read: GgufFile, changes: Mapping[str, Any] | None = None) -> Callable[[GGUFWriter], None]:
    """Adds the file's metadata, changed, to a writer."""

    def keys(writer: GGUFWriter) -> None:
        for key, value in {**read.metadata, **(changes or {})}.items():
            if key != "general.architecture" and value is not None:
                plain = value.tolist() if isinstance(value, np.ndarray) else value
                plain = list(plain) if isinstance(plain, Strings) else plain
                is_wide = isinstance(plain, list) and any(type(each) is int and each >= 2**31 for each in plain)
                inner = GGUFValueType.INT64 if is_wide else None
                writer.add_key_value(key, plain, GGUFValueType.get_type(plain), inner)

    return keys


def loads_alike(file: Path, other: Path) -> None:
    """Both files give the same logits."""
    with opened_model(file, "fp32") as ours, torch.no_grad():
        wanted = ours.model(input_ids=PROMPT_IDS).logits
    with opened_model(other, "fp32") as ours, torch.no_grad():
        torch.testing.assert_close(ours.model(input_ids=PROMPT_IDS).logits, wanted, rtol=0, atol=1e-5)


def test_layers_that_predict_further_are_left_out(tmp_path: Path) -> None:
    file, _ = unpacked("glm4-moe", tmp_path)

    def with_another(tensors: Any) -> Any:
        more = {name.replace("blk.1.", "blk.2."): value for name, value in tensors.items() if "blk.1." in name}
        return {**tensors, **more, "blk.2.nextn.eh_proj.weight": np.ones((4, 8), np.float32)}

    loads_alike(file, rewritten(file, tensors=with_another, block_count=3, nextn_predict_layers=1))


def test_keys_and_values_of_layers_that_share_others_are_left_out(tmp_path: Path) -> None:
    file, _ = unpacked("gemma4-e", tmp_path)

    def with_own(tensors: Any) -> Any:
        parts = [name for name in tensors if name.startswith(("blk.0.attn_k", "blk.0.attn_v", "blk.1.attn_k"))]
        return tensors | {f"blk.{int(name[4]) + 2}{name[5:]}": tensors[name] + 1 for name in parts}

    loads_alike(file, rewritten(file, tensors=with_own))


def test_what_would_be_rotated_is_no_matter_where_nothing_is(tmp_path: Path) -> None:
    file, _ = unpacked("nemotron-h-moe", tmp_path)
    loads_alike(file, rewritten(file, rope__dimension_count=10))


def test_files_from_before_llama_cpp_divided_the_latent_heads(tmp_path: Path) -> None:
    file, _ = unpacked("deepseek3", tmp_path)

    def whole(tensors: Any) -> Any:
        for layer in range(2):
            keys = tensors.pop(f"blk.{layer}.attn_k_b.weight").swapaxes(1, 2)
            heads = np.concatenate((keys, tensors.pop(f"blk.{layer}.attn_v_b.weight")), 1)
            tensors[f"blk.{layer}.attn_kv_b.weight"] = heads.reshape(-1, heads.shape[-1])
        return tensors

    widths = {"attention__key_length": 32, "attention__value_length": 16, "attention__head_count_kv": 4}
    older = {"attention__key_length_mla": None, "attention__value_length_mla": None}
    loads_alike(file, rewritten(file, tensors=whole, **widths, **older))


@pytest.mark.parametrize("name", ["glm4-moe", "granitemoe", "gemma4"])
def test_gates_and_ups_may_lie_in_one_tensor_or_in_two(name: str, tmp_path: Path) -> None:
    file, _ = unpacked(name, tmp_path)

    def other(tensors: Any) -> Any:
        for layer in range(2):
            gate, up, both = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "gate_up"))
            if both in tensors:
                tensors[gate], tensors[up] = np.split(tensors.pop(both), 2, 1)
            elif gate in tensors:
                tensors[both] = np.concatenate((tensors.pop(gate), tensors.pop(up)), 1)
        return tensors

    loads_alike(file, rewritten(file, tensors=other))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen35moe", {"ssm__time_step_rank": 3}),
        ("qwen35moe", {"ssm__time_step_rank": 0}),
        ("qwen35moe", {"ssm__group_count": 2**31 - 1}),
        ("qwen35moe", {"attention__recurrent_layers": [True]}),
        ("qwen35moe", {"rope__dimension_sections": "none"}),
        ("granitehybrid", {"attention__head_count_kv": [0, 0]}),
        ("granitehybrid", {"ssm__inner_size": "large"}),
        ("gemma4", {"attention__head_count_kv": [2]}),
        ("gemma4-e", {"feed_forward_length": [96, 96, 96, 192]}),
        ("lfm2moe", {"attention__head_count_kv": "many"}),
        ("llama4", {"interleave_moe_layer_step": 0}),
        ("deepseek3", {"attention__key_length_mla": "wide"}),
        ("deepseek3", {"expert_gating_func": 7}),
        ("deepseek3", {"attention__temperature_scale": 0.1}),
        ("glm4-moe", {"hyper_connection__count": 4}),
        ("qwen4exp", {"attention__compress_ratios": [0, 0]}),
        ("jamba", {"attention__head_count_kv": [0, 1, 1, 0]}),
        ("mimo2", {"attention__head_count_kv": [1, 1]}),
        ("kimi-linear", {"kda__head_dim": 0}),
        ("laguna", {"attention__head_count": [2]}),
        ("phi3", {"rope__scaling__original_context_length": 0}),
        ("minimax-m2", {"expert_gating_func": 1}),
        ("glm4-moe", {"nextn_predict_layers": 2}),
    ],
)
def test_metadata_that_make_no_sense_are_one_error(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    file, _ = unpacked(name, tmp_path)
    with pytest.raises(EngineError) as caught, opened_model(rewritten(file, **changes), "fp32"):
        pass
    assert caught.value.code in (ErrorCode.CHECKPOINT_DAMAGED, ErrorCode.MODEL_UNSUPPORTED)


@pytest.mark.parametrize("name", some(CASES, every=3))
def test_files_that_lie_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Each key in turn is missing, of another kind, or out of bounds."""
    read, random = read_gguf(unpacked(name, tmp_path)[0]), Random(name)
    lies = (None, "text", -1, 0, 2**31, 1.5, math.nan, True, [1, 2, 3], np.zeros(2, np.int32), np.full(4, np.nan))
    for key in read.metadata:
        if key.startswith(read.architecture):
            metadata = {**read.metadata, key: random.choice(lies)}
            if metadata[key] is None:
                del metadata[key]
            _is_read_or_refused(replace(read, metadata=metadata))
    for tensor in random.sample(sorted(read.tensors), min(len(read.tensors), 40)):
        entry = read.tensors[tensor]
        others = {other: each for other, each in read.tensors.items() if other != tensor}
        _is_read_or_refused(replace(read, tensors=others))
        shape = random.choice([(), (0,), (3,), (*entry.shape, 1), entry.shape[::-1]])
        _is_read_or_refused(replace(read, tensors={**others, tensor: replace(entry, shape=shape)}))


def _is_read_or_refused(file: GgufFile) -> None:
    refused: list[EngineError] = []
    try:
        gguf_tensors(file)
    except EngineError as error:
        refused.append(error)
    assert all(each.code in (ErrorCode.CHECKPOINT_DAMAGED, ErrorCode.MODEL_UNSUPPORTED) for each in refused)
    assert all(file.path.name in each.message for each in refused)


@pytest.mark.parametrize(("name", "nearest"), [("qwen35moex", "qwen35moe"), ("glm4moe2", "glm4moe"), ("zzz", "")])
def test_unknown_architectures_are_refused_by_name(name: str, nearest: str, tmp_path: Path) -> None:
    read = read_gguf(unpacked("smollm", tmp_path)[0])
    with pytest.raises(EngineError, match=f"'{name}'") as caught:
        gguf_tensors(replace(read, metadata={**read.metadata, "general.architecture": name}))
    assert (f"{nearest!r}" in caught.value.message) == bool(nearest)


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_cannot_run_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    read = read_gguf(unpacked("smollm", tmp_path)[0])
    with refused(ErrorCode.MODEL_UNSUPPORTED, match=f"'{name}', which Switchyard does not run: it "):
        gguf_tensors(replace(read, metadata={**read.metadata, "general.architecture": name}))


@pytest.mark.takes_turns(8)
@pytest.mark.parametrize("name", CASES)
def test_a_tensor_too_many_is_refused(name: str, tmp_path: Path) -> None:
    read = read_gguf(unpacked(name, tmp_path)[0])
    strange = "blk.0.attn_strange.weight"
    with pytest.raises(EngineError, match=strange):
        gguf_tensors(replace(read, tensors={**read.tensors, strange: next(iter(read.tensors.values()))}))


@pytest.mark.parametrize("factor", ["blk.0.attn_q.scale", "blk.0.ffn_up_exps.scale", "blk.0.attn_q.input_scale"])
def test_factors_beside_the_weights_are_refused_by_name(factor: str, tmp_path: Path) -> None:
    read = read_gguf(unpacked("qwen3vlmoe", tmp_path)[0])
    entry = replace(read.tensors["output_norm.weight"], key=factor)
    with refused(ErrorCode.MODEL_UNSUPPORTED, match=f"{re.escape(factor)}.*NVFP4"):
        gguf_tensors(replace(read, tensors={**read.tensors, factor: entry}))


@pytest.mark.parametrize("name", ["gpt-oss", "granitemoe", "qwen35moe", "deepseek3", "llama4", "phi3"])
def test_quantised_tensors_are_rearranged_alike(name: str, tmp_path: Path) -> None:
    file, _ = unpacked(name, tmp_path)
    read = read_gguf(file)
    tensors = {key: dequantised(entry) for key, entry in read.tensors.items()}
    plain = gguf_tensors(read)
    kinds = {key: "Q4_0" for key, values in tensors.items() if values.ndim > 1 and values.shape[-1] % 32 == 0}
    coded = {key: dequantize(quantize(tensors[key], Q4_0), Q4_0) for key in kinds}
    rounded = rewritten(file, tensors=lambda every: {**every, **coded})
    smaller = write_gguf(tmp_path / "q.gguf", tensors, architecture=read.architecture, types=kinds, keys=_keys_of(read))
    with TensorReader(lambda *_: None, lambda: False, 0, dtype=torch.float32) as reader:
        for key in plain:
            wanted, found = (reader.read(gguf_tensors(read_gguf(each))[key]) for each in (rounded, smaller))
            torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "kept_in"),
    [
        ("gpt-oss", "MXFP4", "lut4"),
        ("llama4", "Q4_0", "int4"),
        ("granitemoe", "Q8_0", "int8"),
        ("gemma4", "Q4_0", "int4"),
        ("qwen35moe", "Q4_0", "int4"),
    ],
)
def test_experts_keep_their_codes(
    name: str, kind: str, kept_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gates and ups are joined, alternate, or are transposed in the library's parameters."""
    monkeypatch.setattr("engine.runtime.load.plan.lies_in_place", lambda *_: False)
    read = read_gguf(unpacked(name, tmp_path)[0])
    tensors = {key: dequantised(entry) for key, entry in read.tensors.items()}
    kinds = {
        key: kind
        for key, values in tensors.items()
        if values.ndim > 1 and values.shape[-1] % 32 == 0 and "ffn_gate_inp" not in key and ".ssm_" not in key
    }
    file = write_gguf(tmp_path / "q.gguf", tensors, architecture=read.architecture, types=kinds, keys=_keys_of(read))
    with opened_model(file, "fp32") as exact, opened_model(file, "auto") as model:
        assert model.info.precision == STORED
        assert exact.bank is not None
        for module, layer in model.bank.layers.items():
            layout = layer.layout
            assert layout.tiled
            assert {each.name for _, each in layout.tiled} == {kept_in}
            for part, _ in layout.tiled:
                for expert in (0, layer.num_experts - 1):
                    own = exact.bank.layers[module].stacked[part][expert].float()
                    ours = dequantise(layout.matrix(layer.rows, part, expert), torch.float32)
                    assert (ours - own).abs().max() <= 0.005 * own.abs().max()

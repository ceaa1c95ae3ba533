"""What loading refuses, and that it takes nothing and leaves nothing when it does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.runtime.load import plan
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import open_model
from tests.engine.tiny_families import tiny_checkpoint, tiny_model
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.refusals import refused

PROMPT = torch.tensor([[1, 5, 77, 200, 31, 8, 9]])


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return tiny_checkpoint("mixtral", tmp_path / "mixtral")


def load(folder: Path, **options: Any) -> LoadedModel:
    return open_model(folder, **{"precision": "auto", **options})


def refusal(folder: Path, **options: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        load(folder, **options).close()
    assert caught.value.message.endswith(".")
    return caught.value


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_missing_kernels_are_told(mixtral: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engine.kernels.native.library.library_path", lambda: tmp_path / "not-built.so")
    for precision, told in (("bf16", True), ("fp32", False)):
        loaded = open_model(mixtral, precision)
        loaded.close()
        assert ("PyTorch's operators" in loaded.info.device_note) == told


def test_what_is_loaded_is_told_truly(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")  # asked for: then there is nothing to tell
    told: list[tuple[int, int]] = []
    config = EngineConfig(model=str(mixtral), device="cpu", threads=1, context_tokens=100)
    loaded = load_model(config, on_progress=lambda done, total: told.append((done, total)), cancelled=lambda: False)
    info = loaded.info
    original = tiny_model("mixtral")
    assert info.parameters == sum(parameter.numel() for parameter in original.parameters())
    assert (info.name, info.family, info.device, info.precision) == ("mixtral", "mixtral", "cpu", "bf16")
    assert (info.layers, info.experts, info.experts_per_token) == (2, 4, 2)
    assert (info.context_tokens, loaded.context_tokens) == (100, 100)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2  # layers, keys and values, KV heads, width, bytes
    experts = sum(p.numel() for name, p in original.named_parameters() if ".experts." in name)
    assert info.experts_bytes >= 2 * experts
    assert info.weights_bytes >= 2 * (info.parameters - experts)
    assert (info.device_note, info.template_note, info.threads) == ("", "", 1)
    assert told[-1][0] == told[-1][1] == (mixtral / "model.safetensors").stat().st_size - header_bytes(mixtral)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.generation_config.eos_token_id == 2
    loaded.close()
    loaded.close()


def header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def test_stop_tokens_come_from_generation_config(mixtral: Path) -> None:
    (mixtral / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    loaded = load(mixtral)
    assert loaded.model.generation_config.eos_token_id == [2, 7]
    loaded.close()


def test_a_tokenizer_without_a_chat_template_is_told(mixtral: Path) -> None:
    (mixtral / "chat_template.jinja").unlink(missing_ok=True)
    save_tiny_tokenizer(mixtral, template=None)
    loaded = load(mixtral)
    assert "no chat template" in loaded.info.template_note
    loaded.close()


# --- nothing but our function computes experts ----------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_any_other_path_raises(mixtral: Path, implementation: str) -> None:
    loaded = load(mixtral, precision="fp32")
    loaded.model.set_experts_implementation(implementation)
    with torch.no_grad(), pytest.raises((TypeError, AttributeError)):
        loaded.model(input_ids=PROMPT)
    loaded.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_closed_model_raises(mixtral: Path, precision: Any) -> None:
    loaded = load(mixtral, precision=precision)
    experts = loaded.model.model.layers[0].mlp.experts
    hidden, index, weights = torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
    loaded.close()
    with refused(ErrorCode.INTERNAL):
        experts(hidden, index, weights)


# --- requests that cannot be met ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "code"),
    [
        ("cuda:99", ErrorCode.DEVICE_UNAVAILABLE),
        ("emulated:rtx3060", ErrorCode.INVALID_REQUEST),
        ("toaster", ErrorCode.INVALID_REQUEST),
    ],
)
def test_devices_that_are_not_there(mixtral: Path, device: str, code: ErrorCode) -> None:
    assert refusal(mixtral, device=device).code is code


def test_too_little_memory_is_told_before_anything_is_read(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(plan, "available_ram", lambda: 50_000)
    with refused(ErrorCode.NOT_ENOUGH_MEMORY, "50 kB are free"):
        load_model(
            EngineConfig(model=str(mixtral), device="cpu"),
            on_progress=lambda done, total: read.append(done),
            cancelled=lambda: False,
        )
    assert read == []


def test_ram_budget(mixtral: Path) -> None:
    error = refusal(mixtral, ram_bytes=10_000)
    assert error.code is ErrorCode.NOT_ENOUGH_MEMORY
    assert "budget" in error.message


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel(mixtral: Path, after: int) -> None:
    asked = iter(range(10**6))
    with pytest.raises(RequestCancelled):
        load_model(
            EngineConfig(model=str(mixtral), device="cpu"),
            on_progress=lambda done, total: None,
            cancelled=lambda: next(asked) >= after,
        )


def test_a_broken_tokenizer_is_said_before_anything_else(mixtral: Path) -> None:
    (mixtral / "tokenizer.json").write_text("{}")
    error = refusal(mixtral, ram_bytes=10_000)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "tokenizer" in error.message


# --- checkpoints that are not what they say -------------------------------------------------------


def test_unknown_family(mixtral: Path) -> None:
    change_config(mixtral, model_type="wuzzle")
    error = refusal(mixtral)
    assert error.code is ErrorCode.MODEL_UNSUPPORTED
    assert "wuzzle" in error.message


@pytest.mark.parametrize("values", [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"hidden_act": "nonsense"}])
def test_config_that_makes_no_sense(mixtral: Path, values: dict[str, Any]) -> None:
    change_config(mixtral, **values)
    assert refusal(mixtral).code in (ErrorCode.CHECKPOINT_DAMAGED, ErrorCode.MODEL_UNSUPPORTED)


def test_config_of_another_size(mixtral: Path) -> None:
    change_config(mixtral, intermediate_size=40)
    assert refusal(mixtral).code is ErrorCode.CHECKPOINT_DAMAGED


def test_config_of_another_hidden_size(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    change_config(folder, intermediate_size=40)
    assert refusal(folder).code is ErrorCode.CHECKPOINT_DAMAGED


def test_a_model_that_does_not_chat(mixtral: Path) -> None:
    change_config(mixtral, model_type="vit")
    assert refusal(mixtral).code is ErrorCode.MODEL_UNSUPPORTED


@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.1.block_sparse_moe.experts.2.w2.weight"])
def test_a_tensor_missing(mixtral: Path, key: str) -> None:
    change_tensors(mixtral, lambda tensors: tensors.pop(key))
    assert refusal(mixtral).code is ErrorCode.CHECKPOINT_DAMAGED


def test_all_experts_missing(mixtral: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if ".experts." in key]:
            del tensors[key]

    change_tensors(mixtral, drop)
    assert refusal(mixtral).code is ErrorCode.CHECKPOINT_DAMAGED


def test_a_tensor_that_would_be_ignored(mixtral: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(mixtral, lambda tensors: tensors.update({name: torch.ones(32)}))
    error = refusal(mixtral)
    assert error.code is ErrorCode.MODEL_UNSUPPORTED
    assert name in error.message


def test_tensors_of_parts_that_are_not_run(mixtral: Path) -> None:
    extra = {
        "model.vision_tower.patch.weight": torch.ones(3),
        "model.layers.0.self_attn.k_proj.input_scale": torch.ones(1),
    }
    change_tensors(mixtral, lambda tensors: tensors.update(extra))
    load(mixtral).close()


def test_unreadable_quantization(mixtral: Path) -> None:
    change_config(mixtral, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    error = refusal(mixtral)
    assert error.code is ErrorCode.MODEL_UNSUPPORTED
    assert "bitsandbytes" in error.message


def test_shard_cut_short(mixtral: Path) -> None:
    file = mixtral / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    error = refusal(mixtral)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "model.safetensors" in error.message


def test_file_that_shrinks_while_it_is_read(mixtral: Path) -> None:
    file = mixtral / "model.safetensors"
    whole = file.read_bytes()

    def shrink(done: int, total: int) -> None:
        if file.stat().st_size == len(whole):
            file.write_bytes(whole[: len(whole) // 2])

    with refused(ErrorCode.CHECKPOINT_DAMAGED, "model.safetensors"):
        load_model(EngineConfig(model=str(mixtral), device="cpu"), on_progress=shrink, cancelled=lambda: False)


def test_no_tokenizer(mixtral: Path) -> None:
    for file in mixtral.glob("tokenizer*"):
        file.unlink()
    error = refusal(mixtral)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "tokenizer" in error.message


def test_broken_tokenizer(mixtral: Path) -> None:
    (mixtral / "tokenizer.json").write_text("{")
    assert refusal(mixtral).code is ErrorCode.CHECKPOINT_DAMAGED


def test_broken_generation_config(mixtral: Path) -> None:
    (mixtral / "generation_config.json").write_text("{")
    error = refusal(mixtral)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "generation_config.json" in error.message

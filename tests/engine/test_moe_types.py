"""Every MoE model type that the installed transformers knows is right, as a tiny model shows, or refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from engine import families
from engine.checkpoint.config_file import read_config
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import resources_dir
from engine.families import known
from engine.families.known import known_families
from engine.families.pictures import SIGHTS
from engine.runtime.load.checkpoint import open_checkpoint
from engine.runtime.load.library_models import read_library_config
from engine.verbs.models.hub import row_of
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_family_parity import greedy, logits
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config
from tests.refusals import refused

RIGHT = {*FAMILIES, *ADAPTED, "qwen3_omni_moe"}
"""Whose answers the tests compare with the library's: here, in test_family_parity and in test_*adapter_parity."""

_SOURCES = Path(transformers.__file__).parent / "models"
_HAS_EXPERTS = re.compile(
    r"@use_experts_implementation|^class \w*(Experts?|MoE|MOE|Moe|SparseMLP)\w*\(nn\.", re.MULTILINE
)
_COUNTS_EXPERTS = re.compile(r"^    (num_(local_|routed_)?experts|n_routed_experts|moe_num_experts)\b.*:", re.MULTILINE)


def moe_types() -> list[str]:
    """Model types whose folder has experts, or whose configuration names such a type as its text part."""
    folders = {file.parent.name for file in _SOURCES.glob("*/modeling_*.py") if _HAS_EXPERTS.search(_text(file))}
    for file in _SOURCES.glob("*/configuration_*.py"):
        if _COUNTS_EXPERTS.search(_text(file)):
            folders.add(file.parent.name)
    kinds = {kind for kind in CONFIG_MAPPING_NAMES if model_type_to_module_name(kind) in folders}
    part_of_it = re.compile(rf'model_type="({"|".join(sorted(kinds))})"')
    for file in _SOURCES.glob("*/configuration_*.py"):
        if part_of_it.search(_text(file)):
            folders.add(file.parent.name)
    return sorted(kind for kind in CONFIG_MAPPING_NAMES if model_type_to_module_name(kind) in folders)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def test_every_moe_type_is_right_or_refused_by_name(tmp_path: Path) -> None:
    kinds = moe_types()
    assert len(kinds) > 100
    assert {"mixtral", "dbrx", "kimi_k25", "gemma4_assistant", "vitpose_backbone"} <= set(kinds)
    neither = [kind for kind in kinds if kind not in RIGHT and not _is_refused(kind, tmp_path / kind)]
    assert neither == []


def _is_refused(kind: str, folder: Path) -> bool:
    """Whether loading ends in one sentence with the type's name, before weights or a tokenizer are looked for."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(EngineError) as refusal:  # there are no weights: those that are not refused get as far
        open_checkpoint(EngineConfig(str(folder), device="cpu"))
    error = refusal.value
    return error.code is ErrorCode.MODEL_UNSUPPORTED and repr(kind) in error.message and error.message.count(". ") == 0


def test_the_text_part_of_qwen3_omni_is_found_in_the_whole_model(tmp_path: Path) -> None:
    """The library can save the whole model, but only its thinker generates text alone: the folder is put together."""
    folder = tiny_checkpoint("qwen3_omni_moe_thinker", tmp_path)
    reference = model_class(tiny_config("qwen3_omni_moe_thinker")).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, tokens = logits(reference), greedy(reference).tolist()
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["talker.model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(8, 48, 32)
    tensors["code2wav.decoder.0.conv.bias"] = torch.zeros(4)
    save_file(tensors, file, {"format": "pt"})
    thinker = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker}))
    with opened_model(folder, "fp32") as ours, torch.no_grad():
        torch.testing.assert_close(logits(ours.model), expected, rtol=0, atol=1e-5)
        assert greedy(ours.model).tolist() == tokens
        assert "text and images only, no sound" in ours.info.device_note


@pytest.mark.parametrize(("family", "could"), [("aria", True), ("qwen3_vl_moe", False), ("qwen3_moe", False)])
def test_a_model_that_could_see_says_that_it_does_not(
    family: str, could: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SIGHTS, "aria")
    with opened_model(tiny_checkpoint(family, tmp_path), "fp32") as ours:
        assert ("images" in ours.info.device_note) == could


def test_nemotron_omni_as_published_has_other_names_of_its_parts(tmp_path: Path) -> None:
    file = tiny_checkpoint("nemotron_h_omni", tmp_path, image_token_id=18) / "config.json"
    with opened_model(tmp_path, "fp32") as ours:
        expected = logits(ours.model)
    config = json.loads(file.read_text())
    former = {"text_config": "llm_config", "image_token_id": "img_context_token_id", "audio_config": "sound_config"}
    former |= {"vision_hidden_size": "vit_hidden_size"}
    config["audio_config"] = {"model_type": "parakeet", "hidden_size": 32, "num_hidden_layers": 1, "num_mel_bins": 16}
    file.write_text(json.dumps({former.get(name, name): value for name, value in config.items()}))
    read = read_library_config(tmp_path, read_config(tmp_path))
    assert (read.image_token_id, read.audio_config.hidden_size) == (18, 32)
    config["audio_config"] = None
    file.write_text(json.dumps({former.get(name, name): value for name, value in config.items()}))
    with opened_model(tmp_path, "fp32") as ours:
        torch.testing.assert_close(logits(ours.model), expected, rtol=0, atol=0)


def test_minimax_m2_as_published_rotates_a_part_of_each_head(tmp_path: Path) -> None:
    file = tiny_checkpoint("minimax_m2", tmp_path) / "config.json"
    config = {**json.loads(file.read_text()), "rotary_dim": 4, "rope_theta": 5e6}
    del config["rope_parameters"]
    file.write_text(json.dumps(config))
    with opened_model(tmp_path, "fp32") as ours:
        assert ours.model.model.rotary_emb.inv_freq.shape == (2,)


def test_the_kinds_that_are_known_without_the_library_are_those_it_knows() -> None:
    """Before a download nothing asks the library. To renew: write this, sorted, a name a line."""
    tasks = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
    theirs = {name for task in tasks for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}
    experts = set(moe_types()) | {kind for kind in families.PACKAGES if families.family_of(kind).own}
    lines = [f"{name} experts" if name in experts else name for name in sorted(theirs | families.PACKAGES.keys())]
    assert (resources_dir() / "model_types.txt").read_text().splitlines() == lines


def test_the_list_of_architectures_is_what_the_table_says() -> None:
    """To renew: write these lines."""
    rows = [row_of(one) for one in known_families() if one.has_experts and not one.refused]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    page = (Path(__file__).parents[2] / "docs/families.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("| ")][1:] == lines


@pytest.mark.parametrize(("kind", "layers"), known._CLASSES.items())
def test_layers_of_another_family_are_what_the_library_builds(kind: str, layers: str) -> None:
    config = tiny_config(kind)
    if config.get_text_config(decoder=True).model_type != layers:
        names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert kind == "qwen3_omni_moe_thinker" or names[kind] == names[layers]


def test_a_newer_kind_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen9_moe"}))
    with refused(ErrorCode.MODEL_UNSUPPORTED, match=r"'qwen9_moe', .*\(the nearest that it reads is 'qwen\d_moe'\)"):
        open_checkpoint(EngineConfig(str(tmp_path), device="cpu"))

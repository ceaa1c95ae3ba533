"""Tiny random models of every family: configurations of a few thousand parameters that use what the family has.

`tiny_checkpoint("mixtral", folder)` writes one, made and saved by transformers, with a small working tokenizer.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

import engine.runtime.adapters.llama4  # noqa: F401 - mends the library's Llama 4, which does not run as it is
from engine.runtime.own import make_known
from tests.engine.tiny_configs import ADAPTED, COMMON, FAMILIES, SEEING, TOWER
from tests.engine.tiny_tokenizer import save_tiny_tokenizer

transformers.utils.logging.disable_progress_bar()


def tiny_model(family: str, **overrides: Any) -> Any:
    """A random model of the family, fp32, in eval mode; the same one every time."""
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = model_class(config)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                _stir(parameter)
            for name, table in model.named_buffers():
                if name.endswith("tid2eid"):  # experts by tokens
                    table.copy_(torch.rand(len(table), config.num_local_experts).argsort(-1)[:, : table.shape[1]])
            # Small logits: bf16 then resolves differences far below those that a wrong weight makes.
            output_embeddings(model).weight.mul_(0.1)
    return model


def output_embeddings(model: Any) -> Any:
    """The layer that makes logits, also where the library's model does not say."""
    return model.get_output_embeddings() or model.language_model.get_output_embeddings()


def tiny_config(family: str, *, drawn: Mapping[str, Any] = MappingProxyType({}), **overrides: Any) -> Any:
    """The configuration of `tiny_model`.

    Args:
        drawn: values of the part about text, as far as it knows them, by their names in `COMMON` (test_drawn_models);
            `stray_window` is a `sliding_window` where none belongs.
        overrides: values of the top level.
    """
    config = _config_of(family, drawn, overrides)
    text = config.get_text_config(decoder=True)
    if drawn.get("stray_window") and getattr(text, "sliding_window", None) is None:
        text.sliding_window = drawn["stray_window"]
    return config


def _config_of(family: str, drawn: Mapping[str, Any], overrides: dict[str, Any]) -> Any:
    make_known(family)
    library_default = transformers.AutoConfig.for_model(family)
    top = type(library_default)
    values = {**{**SEEING, **FAMILIES, **ADAPTED}[family], **overrides}
    if "text_config" not in top.sub_configs:
        for part, of in top.sub_configs.items():  # Dbrx keeps its attention and its experts in parts of their own
            values[part] = {**values[part], **_known_values(of, drawn)}
        return top(**{**_known_values(top, COMMON), **values, **_known_values(top, drawn)})
    for part in top.sub_configs:
        chosen = values.get(part, {}).get("model_type")
        of = transformers.CONFIG_MAPPING[chosen] if chosen else type(getattr(library_default, part))
        if of is not type(None):
            source, last = (COMMON, drawn) if part == "text_config" else (TOWER, _towards_text(drawn))
            values[part] = {**_known_values(of, source), **values.get(part, {}), **_known_values(of, last)}
    return top(**{**values, **_known_values(top, _towards_text(drawn))})


def _towards_text(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that have to be those of the part about text elsewhere."""
    names = ("text_hidden_size", "out_hidden_size", "adapter_out_dim")
    return dict.fromkeys(names, drawn["hidden_size"]) if "hidden_size" in drawn else {}


def _known_values(config_class: Any, source: dict[str, Any]) -> dict[str, Any]:
    """Those of `source` that the class has a field for, under the field's name."""
    fields: set[str] = set()
    for ancestor in config_class.__mro__:
        fields |= set(getattr(ancestor, "__annotations__", ()))
    renamed = getattr(config_class, "attribute_map", {})
    return {renamed.get(name, name): value for name, value in source.items() if {name, renamed.get(name)} & fields}


def tiny_checkpoint(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], None] | None = None,
    save: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Writes the family's tiny model and a tokenizer into `folder` and returns it.

    Args:
        prepare: changes the model before it is saved.
        save: arguments for `save_pretrained` (`max_shard_size`, say).
        overrides: values of the configuration.
    """
    key = repr((family, dtype, save, sorted(overrides.items()))) if prepare is None else ""
    files = _made.get(key)
    if files is None:
        model = tiny_model(family, **overrides)
        if prepare is not None:
            prepare(model)
        if dtype != torch.float32:
            _cast(model, dtype)
        is_new = not any(folder.glob("*"))
        model.save_pretrained(folder, **(save or {}))
        save_tiny_tokenizer(folder)
        if key and is_new:
            _made[key] = {file.name: file.read_bytes() for file in folder.iterdir()}
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return folder


_made: dict[str, dict[str, bytes]] = {}
"""The files of every tiny checkpoint that this process has made: most tests of a family want the same one."""


def model_class(config: Any) -> Any:
    """The library's class that generates text with this configuration, whole rather than its text part."""
    for mapping in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    raise KeyError(type(config).__name__)


def _stir(parameter: torch.nn.Parameter) -> None:
    """Random values where the library starts with zeros or ones, so that nothing can be left out unnoticed."""
    if parameter.dtype.is_floating_point and bool((parameter == parameter.flatten()[0]).all()):
        parameter.add_(torch.randn_like(parameter) * 0.02)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Weights to `dtype`, in place; buffers such as rotary frequencies stay as they are."""
    keep = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in keep):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype

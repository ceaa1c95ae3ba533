"""transformers' side of a model, part one: its configuration, class and skeleton.  What the library does not
promise to keep is used in `library_*.py` and `engine.families.library` alone; a test per family keeps it honest.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.monkey_patching import patch_output_recorders
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.utils import ContextManagers
from transformers.utils import logging as library_logging

from engine.checkpoint.config_file import read_json
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.checkpoint import gguf_generation
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.kept_tokenizer import kept_end_token_ids
from engine.checkpoint.quantised import LIBRARY_METHODS
from engine.common.errors import EngineError, ErrorCode
from engine.experts.dispatch import IMPLEMENTATION, experts_forward
from engine.families import family_of
from engine.families.known import known_types, nearest
from engine.families.library import CHOSEN_EXPERTS, ROUTER_CORRECTION
from engine.runtime.adapters import Adapter
from engine.runtime.later_modules import with_all_meta_operators
from engine.runtime.own import make_known

_MAX_CONFIG_BYTES = 16 * 2**20


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """The library's bars and tables stay off the terminal: what matters of them we say ourselves."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()


def read_library_config(directory: Path, raw: dict[str, Any]) -> Any:
    """transformers' configuration object for a checkpoint.

    Args:
        raw: its configuration as `read_config` gives it.
    """
    model_type = raw["model_type"]
    if "layer_types" in raw:
        model_type = family_of(model_type).with_layer_types or model_type
    make_known(model_type)
    if model_type not in CONFIG_MAPPING:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{directory.name} is of the kind {model_type!r}, which Switchyard does not know"
            f"{nearest(model_type, known_types())}: a newer version of Switchyard may.",
        )
    try:
        config_class = CONFIG_MAPPING[model_type]
        config = config_class(**_needed(config_class, config_class._decode_special_floats(raw)))
        text = config.get_text_config(decoder=True)
        if "sliding_attention" in (getattr(text, "layer_types", None) or ()) and not getattr(text, "sliding_window", 1):
            raise ValueError("some layers slide, but sliding_window is not a number")
        return config
    except Exception as error:  # the library raises whatever its validation or arithmetic stumbles over
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The configuration of {directory} does not make sense for a {model_type} model ({first_line(error)}).",
        ) from error


_NOT_NEEDED = frozenset(
    (
        *("num_labels", "id2label", "label2id", "problem_type", "task_specific_params", "classifier_dropout"),
        *("output_hidden_states", "output_attentions", "output_router_logits", "return_dict", "use_return_dict"),
        *("chunk_size_feed_forward", "tie_last_hidden_states", "transformers_version", "auto_map"),
        *("attn_implementation", "experts_implementation", "name_or_path", "use_cache"),
        *("pruned_heads", "is_encoder_decoder"),
    )
)
"""Fields that every family has for classifiers, for training, or for what a caller wants returned."""
_ALWAYS = frozenset(
    (
        *("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "head_dim"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings"),
        *("original_max_position_embeddings", "sliding_window", "attention_chunk_size", "layer_types"),
        *("per_layer_config", "tokenizer_class"),
        *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    )
)
"""Fields that the library reads for any family."""


def _needed(config_class: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """What a family's configuration is made from: its fields, and what its own code reads besides.

    All else is left out: the library would set whatever a file says on its object, and do as that says.
    """
    former = getattr(config_class, "_legacy_field_names", {})  # Nemotron-Omni's, of released checkpoints
    renamed = config_class.attribute_map
    known = _ALWAYS.union(config_class.__dataclass_fields__, renamed, renamed.values(), _read_by(config_class), former)
    kept = {
        name: value
        for name, value in raw.items()
        if name in known
        and name not in _NOT_NEEDED
        and name[0] != "_"
        # What is no field would stand in place of what the family makes of others.
        and (value is not None or name in config_class.__dataclass_fields__)
    }
    parts = config_class.sub_configs_defaults
    for name, spec in [*parts.items(), *((old, parts[new]) for old, new in former.items() if new in parts)]:
        inner = kept.get(name)
        if isinstance(inner, dict):
            kind = inner.get("model_type")
            is_open = not issubclass(spec.config_class, transformers.PreTrainedConfig)
            if is_open and spec.optional and kind not in CONFIG_MAPPING:  # as what Nemotron-Omni hears with says
                inner, kind = {key: value for key, value in inner.items() if key != "model_type"}, None
            its_class = CONFIG_MAPPING[kind or spec.model_type] if is_open else spec.config_class
            kept[name] = _needed(its_class, inner) | ({"model_type": kind} if kind else {})
    return kept


@functools.cache
def _read_by(config_class: Any) -> frozenset[str]:
    """The names and texts in a family's own code, among them what it takes from older files or may do without."""
    found: set[str] = set()
    for each in config_class.__mro__:
        if each in (transformers.PreTrainedConfig, object) or not each.__module__.startswith("transformers.models."):
            continue
        modules = [sys.modules[each.__module__]]
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(each.__module__.replace(".configuration_", ".modeling_")))
        for module in modules:
            for part in vars(module).values():
                if getattr(part, "__module__", None) == module.__name__:
                    members = [part, *vars(part).values()] if isinstance(part, type) else [part]
                    for member in members:
                        if callable(member):
                            found |= _texts_in(getattr(inspect.unwrap(member), "__code__", None))
    # As in `kwargs.pop(f"swa_{name}")`.
    begins = [each for each in found if each.isidentifier() and each[0] != "_" and each.endswith("_")]
    return frozenset(found.union(*({begin + each for each in found} for begin in begins)))


def _texts_in(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    found = {*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _texts_in(constant)
        else:
            parts = constant if isinstance(constant, tuple | frozenset) else (constant,)
            found.update(part for part in parts if isinstance(part, str))
    return found


def model_class_for(config: Any, adapter: Adapter | None) -> tuple[type, Any]:
    """The class that generates text with this configuration, and the (sub)configuration to build it from."""
    chosen: Any = adapter.model_class(config) if adapter is not None else None
    if chosen is None:
        for mapping in (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            MODEL_FOR_MULTIMODAL_LM_MAPPING,
        ):
            if type(config) in mapping:
                chosen = mapping[type(config)]
                break
    if isinstance(chosen, tuple | list):
        chosen = chosen[0]
    if chosen is None or not chosen.can_generate():
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"A model of the kind {config.model_type!r} does not generate text as a chat."
        )
    quantization = getattr(config, "quantization_config", None)
    for name in config.sub_configs:
        part = getattr(config, name)
        if type(part) is getattr(chosen, "config_class", None):
            if quantization is not None:
                part.quantization_config = quantization
            return chosen, part
    return chosen, config


def quantizer_for(config: Any) -> Any | None:
    """What turns quantised weights of the checkpoint into plain ones while it is loaded.

    `None` if they are plain, or unpacked as they are read (see `engine.checkpoint.quantised`).
    """
    stored: Any = getattr(config, "quantization_config", None)
    values = stored.to_dict() if hasattr(stored, "to_dict") else stored
    if not isinstance(values, dict) or values.get("quant_method") not in LIBRARY_METHODS:
        return None
    try:
        quantization = AutoQuantizationConfig.from_dict(dict(values))
        quantization.dequantize = True
        return AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    except Exception as error:  # the library raises whatever it stumbles over
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The model's quantization_config makes no sense ({first_line(error)}): get another version of the model.",
        ) from error


@contextlib.contextmanager
def _without_first_values() -> Iterator[None]:
    """Tensors on the meta device get no first values: there is no memory for them, and torch imports its compiler."""
    own = {name: function for name, function in vars(torch.nn.init).items() if name.endswith("_") and name[0] != "_"}

    def only_with_memory(function: Callable[..., Any]) -> Callable[..., Any]:
        def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

        return fill

    vars(torch.nn.init).update({name: only_with_memory(function) for name, function in own.items()})
    try:
        yield
    finally:
        vars(torch.nn.init).update(own)


class _PositionsOnCpu(TorchFunctionMode):
    """`torch.arange`, with which the frequencies of positions begin, computes on the CPU.

    Attributes:
        asked: whether a device was asked for: what is on the CPU in the end may then belong there.
    """

    asked = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            self.asked = True
        elif function is torch.arange:
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


def _without_compiler(model_class: Any, config: Any) -> Any | None:
    """The model, with next to nothing computed on the meta device; None if its code does not work that way.

    torch imports its compiler for arithmetic there, which takes longer than all else that is done before weights are
    read, and frequencies of positions are all that most models compute.
    """
    try:
        with _PositionsOnCpu() as positions:
            model = model_class(deepcopy(config))
    except Exception:  # it mixed them with what is on the meta device: done again as the library does it
        return None
    if positions.asked or not all(parameter.is_meta for parameter in model.parameters()):
        return None
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._buffers, module.__dict__):
            for name, value in own.items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    own[name] = moved.setdefault(id(value), value.to("meta"))
    return model


def _keep_corrections(model: Any) -> None:
    """What is added to routers' scores stays in float32, as in every checkpoint, where the library rounds it."""
    for module in model.modules():
        for held in (module._buffers, module._parameters):
            tensor = held.get(ROUTER_CORRECTION)
            if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                exact = tensor.float()
                held[ROUTER_CORRECTION] = torch.nn.Parameter(exact, False) if held is module._parameters else exact


def build_skeleton(model_class: Any, config: Any, dtype: torch.dtype, adapter: Adapter | None) -> Any:
    """The model without weights: every parameter and buffer on the meta device, in the type it will have."""
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    config = deepcopy(config)
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    setattr(config, CHOSEN_EXPERTS, IMPLEMENTATION)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is built holds plain weights
    try:
        with ContextManagers([*model_class.get_init_context(dtype, False, False, False), _without_first_values()]):
            model = _without_compiler(model_class, config)
            if model is None:
                with_all_meta_operators()
                model = model_class(config)
            patch_output_recorders(model)
            _keep_corrections(model)
            if adapter is not None:
                adapter.prepare(model)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"The library cannot build this {config.model_type} model ({first_line(error)}).",
        ) from error
    for module in model.modules():
        inner = getattr(module, "config", None)
        if isinstance(inner, transformers.PreTrainedConfig):
            setattr(inner, f"{CHOSEN_EXPERTS}_internal", IMPLEMENTATION)
    return model


def leave_out_tower(model: Any) -> bool:
    """Takes what sees or hears out of a skeleton, which runs text; whether it is the library's whole model."""
    inner: Any = getattr(model, "model", model)
    if not hasattr(inner, "get_image_features"):
        return False
    for name, module in inner.named_children():
        if module is not inner.language_model:
            setattr(inner, name, None)
    return True


def build_beside(model: Any, dtype: torch.dtype, make: Callable[[], Any]) -> Any:
    with ContextManagers([*type(model).get_init_context(dtype, False, False, False), _without_first_values()]):
        return make()


def finish_generation_config(model: Any, directory: Path) -> None:
    gguf = gguf_at(directory)
    if gguf is not None:
        read = read_gguf(gguf)
        ends = list(kept_end_token_ids(read)) or None
        model.generation_config = transformers.GenerationConfig(**{**gguf_generation(read), "eos_token_id": ends})
        return
    file = directory / "generation_config.json"
    how: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
    if file.is_file():
        read_json(file, _MAX_CONFIG_BYTES)  # the library would pass over a broken one in silence
        how = {}
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            str(directory), local_files_only=True, **how
        )
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file} cannot be read ({first_line(error)}).") from error


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:300]


def tied_to(model: Any) -> Mapping[str, str]:
    return getattr(model, "all_tied_weights_keys", None) or {}


def count_weights(model: Any) -> int:
    """Parameters of a skeleton, experts included as long as they are in their modules; tied ones count once."""
    tied = tied_to(model)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied)

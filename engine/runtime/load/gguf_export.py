"""A model of the library as a GGUF file for llama.cpp and the programs on it, checked by reading it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.export import Quantisation, read_back, same_tokens, vocabulary_of, write_gguf
from engine.checkpoint.gguf.tokenizer import tokenizer_files
from engine.checkpoint.importing import staging_folder
from engine.checkpoint.shards import read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, replace_file, require_space
from engine.runtime.load.library_models import read_library_config

_NO_MATTER = frozenset(
    (
        *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"),
        *("max_window_layers", "output_router_logits", "router_aux_loss_coef", "attention_dropout", "head_dim"),
        *("layer_types", "router_jitter_noise", "id2label", "label2id", "problem_type", "return_dict"),
    )
)
"""Fields of a configuration that change no answer, or follow from others."""


def export_gguf(
    checkpoint: Path, target: Path, quantisation: Quantisation, on_progress: Callable[[int, int], None]
) -> Path:
    """Writes a checkpoint as llama.cpp has it: `target`, or a file of the model's name in that folder."""
    if gguf_at(checkpoint) is not None:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{checkpoint.name} is a GGUF file already: copy it.")
    if target.is_dir() or target.suffix.lower() != ".gguf":
        target /= f"{checkpoint.name}-{quantisation.value}.gguf"
    if target.exists():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{target} is there already: remove it, or choose another name.")
    _check_config(checkpoint, quantisation)
    vocabulary = vocabulary_of(checkpoint)
    if not same_tokens(checkpoint, tokenizer_files(vocabulary, target)):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{checkpoint.name} cannot be written as llama.cpp has it: its tokenizer would make other tokens there.",
        )
    with disk_errors_explained(target.parent), staging_folder(target.parent) as staged:
        require_space(target.parent, sum(entry.nbytes for entry in read_tensors(checkpoint).values()))
        write_gguf(checkpoint, staged / target.name, quantisation, on_progress, vocabulary)
        replace_file(staged / target.name, target)
    return target


def _check_config(checkpoint: Path, quantisation: Quantisation) -> None:
    """That the library makes the same model of the file, also of what neither of the two says."""
    own = read_library_config(checkpoint, read_config(checkpoint)).to_dict()
    again = read_library_config(checkpoint, read_back(checkpoint, quantisation)).to_dict()
    for name in sorted((own.keys() | again.keys()) - _NO_MATTER):
        wanted, found = own.get(name), again.get(name)
        if not _alike(wanted, found):
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{checkpoint.name} cannot be written as llama.cpp has it: {name} is {wanted}, and would be {found}.",
            )


def _alike(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_alike(wanted[key], found[key]) for key in wanted.keys() & found.keys())
    if isinstance(wanted, float | int) and isinstance(found, float | int):
        return abs(wanted - found) <= 1e-3 * abs(wanted)
    return bool(wanted == found or (not wanted and not found))

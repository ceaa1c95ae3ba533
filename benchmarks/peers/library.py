"""The library as a peer of the benches, with the same prompt, tokens, precision and threads."""

from __future__ import annotations

import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.checkpoint import gguf_config
from engine.checkpoint.gguf.file import read_gguf
from engine.runtime.load.library_models import model_class_for, quiet_library, read_library_config

if TYPE_CHECKING:
    from collections.abc import Sequence


LIBRARY = "transformers"
"""What it is called where peers are chosen."""
OFFLOAD = "transformers with accelerate's offload"


class TransformersPeer:
    """transformers' model of a checkpoint directory, on the CPU unless `placement` says otherwise.

    Of a GGUF file, which the library would unpack, it is a model of the same shape in `dtype` with random weights.

    Args:
        experts_implementation: how transformers computes experts; `None` is its default for the model.
        placement: extra arguments for `from_pretrained`.

    Raises:
        OSError, ValueError, KeyError, RuntimeError, ImportError: any error of the library while loading; one of a GGUF
            file's shape that does not fit into memory is a ValueError as well.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        dtype: torch.dtype,
        experts_implementation: str | None = None,
        placement: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        file, self._experts = gguf_at(path), ""
        if file is not None:
            self._model = _of_same_shape(file, dtype)
            self._experts = experts_implementation or self._model.config._experts_implementation
            return
        options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, **(placement or {})}
        if experts_implementation:
            options["experts_implementation"] = experts_implementation
        with quiet_library():
            self._model = AutoModelForCausalLM.from_pretrained(path, **options).eval()

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def decode_rate(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens per second of decode: the time of `tokens` + 1 new tokens minus that of the first."""
        seconds_first = self._time(prompt, 1)
        seconds_all = self._time(prompt, tokens + 1)
        return tokens / (seconds_all - seconds_first)

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Tokens per second from an empty context to the first new token; after a short warm-up prompt."""
        self._time(prompt[: min(len(prompt), 80)], 1)
        return len(prompt) / self._time(prompt, 1)

    def batch_rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Generated tokens per second of one padded batch, including prompt time."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts])
        mask = torch.tensor([[*[0] * (longest - len(prompt)), *[1] * len(prompt)] for prompt in prompts])
        return len(prompts) * tokens / self._seconds(ids, mask, tokens)

    def _time(self, prompt: Sequence[int], new_tokens: int) -> float:
        ids = torch.tensor([list(prompt)])
        return self._seconds(ids, torch.ones_like(ids), new_tokens)

    def _seconds(self, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int) -> float:
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        if self._experts:  # as peers share the model
            self._model.set_experts_implementation(self._experts)
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                repetition_penalty=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        if ids.device.type == "cuda":
            torch.cuda.synchronize(ids.device)
        return time.perf_counter() - started


@lru_cache(maxsize=1)
def _of_same_shape(file: Path, dtype: torch.dtype) -> Any:
    """One for peers with different ways to compute experts: two of them would not fit into memory."""
    config = read_library_config(file, gguf_config(read_gguf(file)))
    model_class, config = model_class_for(config, None)
    config.dtype = dtype
    with torch.device("meta"), no_init_weights():
        needed = dtype.itemsize * sum(each.numel() for each in model_class(config).parameters())
    if needed > psutil.virtual_memory().available:
        raise ValueError(f"its weights would take {needed / 1e9:.1f} GB of memory")
    with local_torch_dtype(dtype), no_init_weights():
        model = model_class(config).eval()
    pool = torch.randn(2**22).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            for part in parameter.data.view(-1).split(len(pool)):
                torch.mul(pool[: len(part)], parameter.shape[-1] ** -0.5, out=part)
    return model


def accelerate_offload(path: Path, dtype: torch.dtype, vram_bytes: int | None) -> TransformersPeer:
    """The same model through accelerate: weights that do not fit on the card stay in RAM and are fetched on use.

    Raises:
        RuntimeError: there is no CUDA card.
        ImportError: accelerate is not installed.
        As `TransformersPeer`.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("it offloads from a CUDA card, and this machine has none")
    if find_spec("accelerate") is None:
        raise ImportError("the Python package accelerate is not installed")
    budget = vram_bytes if vram_bytes is not None else int(0.9 * torch.cuda.mem_get_info(0)[0])
    memory = {0: budget, "cpu": int(psutil.virtual_memory().available)}
    return TransformersPeer(OFFLOAD, path, dtype, placement={"device_map": "auto", "max_memory": memory})

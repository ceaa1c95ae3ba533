"""Imports the engine with its libraries, which takes most of the time until a first token."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from engine.common.collector import without_collector
from engine.common.errors import EngineError
from engine.common.falls import passed_over
from engine.process.lifetime import quiet_libraries

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.engine import Engine

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL))
"""In the order and the way in which torch loads them."""


def load_torch_meanwhile() -> None:
    """Loads torch's largest library on a thread: linking it takes a fifth of a second that Python can use.

    Where that does not work (another system or build) torch loads it itself, as ever.
    """
    quiet_libraries()  # they read it when they are loaded
    if sys.platform == "linux" and "torch" not in sys.modules:
        threading.Thread(target=_load_libraries, name="torch-libraries", daemon=True).start()


def _load_libraries() -> None:
    with passed_over("Libraries were not read ahead"):
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        for name, mode in _LIBRARIES:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=mode)


def begin_reading(config: EngineConfig) -> None:
    """Begins with the first model that this process is asked for, before it has its engine: reads its weights, and has
    its tokenizer checked.
    """
    if importlib.util.find_spec("torch") is None:
        return  # the engine's part is not there: that is told when the model is loaded
    from engine.checkpoint.names import resolve
    from engine.experts.file_image import EARLY_READS  # numpy, which torch needs anyway
    from engine.untrusted_text.process import UNTRUSTED_TEXT

    if EARLY_READS.begin(config.model, config.asked):
        with contextlib.suppress(EngineError, OSError):  # told when it is loaded
            UNTRUSTED_TEXT.begin_check(_tokenizer_folder(Path(resolve(config.model))))


def _tokenizer_folder(model: Path) -> Path:
    """Where a model's tokenizer.json is, or would be: a GGUF file has one only if it was kept."""
    from engine.checkpoint.gguf import gguf_at

    gguf = gguf_at(model)
    if gguf is None:
        return model
    from engine.checkpoint.gguf.file import read_gguf  # numpy, which torch needs anyway
    from engine.checkpoint.gguf.kept_tokenizer import kept_tokenizer

    return kept_tokenizer(read_gguf(gguf)) or model


def import_engine() -> type[Engine]:
    """The engine's class; seconds if this is the first time."""
    quiet_libraries()
    with without_collector():
        from engine.untrusted_text.process import UNTRUSTED_TEXT

        UNTRUSTED_TEXT.start()  # ready by the time torch is imported
        from engine.runtime.engine import Engine
    gc.freeze()  # modules are there for good: collections need not look through them
    return Engine

"""A checkpoint's tokenizer: loaded from its own folder and nowhere else, and what is asked of its vocabulary."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers

from engine.checkpoint.config_file import CONFIG_NAME, read_config
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.kept_tokenizer import keep_tokenizer, kept_tokenizer
from engine.checkpoint.gguf.tokenizer import tokenizer_files
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.plain_text import plain_line
from engine.common.untrusted import check_untrusted, reason
from engine.runtime.load.library_models import quiet_library, read_library_config
from engine.untrusted_text.child import MOST_TOKENIZER_BYTES, TOKENIZER_NAME
from engine.untrusted_text.process import UNTRUSTED_TEXT, UntrustedTextError

_FILES = (
    TOKENIZER_NAME, "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
_READ_BESIDES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "merges.txt")
_MOST_TIMES_LONGER = 64
"""What a decoder may make of a token's characters: none of use makes more than one."""


def load_tokenizer(directory: Path, cancelled: CancelCheck = never_cancelled) -> Any:
    """transformers' tokenizer of the checkpoint in `directory`, or of a GGUF file, ready for prompts."""
    gguf = gguf_at(directory)
    if gguf is None:
        _check(directory, directory, cancelled)
        return _held(_read(directory, directory))
    file = read_gguf(gguf)
    kept = kept_tokenizer(file)
    if kept is not None:
        UNTRUSTED_TEXT.begin_check(kept)  # it was of use before: both processes read it at once
        tokenizer = _read(kept, gguf)
        _check(kept, gguf, cancelled)
        return _held(tokenizer, kept)
    files = tokenizer_files(file.metadata, gguf)
    with tempfile.TemporaryDirectory(prefix="switchyard-tokenizer-") as made:
        for name, content in files.items():
            Path(made, name).write_text(content, encoding="utf-8")
        _check(Path(made), gguf, cancelled)
        tokenizer = _held(_read(Path(made), gguf), Path(made))
    keep_tokenizer(file, files)
    return tokenizer


@contextlib.contextmanager
def tokenizer_meanwhile(directory: Path) -> Iterator[Future[Any]]:
    """Loads the tokenizer on a thread while the body runs.

    What is wrong with it is raised whatever else the body finds wrong with the model.
    """
    stopped = threading.Event()
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        loading = pool.submit(load_tokenizer, directory, stopped.is_set)
        try:
            yield loading
        except EngineError:
            loading.result()
            raise
        except BaseException:
            stopped.set()
            raise


def _check(directory: Path, shown: Path, cancelled: CancelCheck) -> None:
    """That there is a tokenizer, and one of use, in a folder; errors name the model that it is `shown` as."""
    if not any((directory / name).exists() for name in _FILES):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{shown} has no tokenizer (tokenizer.json), so text cannot be read or written: "
            "download or copy the whole model again.",
        )
    _check_files(directory)
    if (directory / TOKENIZER_NAME).exists():
        # Where it can be stopped: here it could not be.
        try:
            UNTRUSTED_TEXT.check(directory, cancelled)
        except UntrustedTextError as error:
            raise _unreadable(shown, f"it {error}") from error


def _read(directory: Path, shown: Path) -> Any:
    config = None
    if (directory / CONFIG_NAME).exists():  # the library would make all of it that it says
        config = read_library_config(directory, read_config(directory))
        config.name_or_path = str(directory)
    try:
        with quiet_library():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, config=config, local_files_only=True, trust_remote_code=False
            )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises whatever it stumbled over, and what is no `Exception`
        raise _unreadable(shown, type(error).__name__) from error
    _check_template(shown, tokenizer.chat_template)
    backend = _backend(tokenizer)
    if backend is not None:
        _check_decoder(shown, backend.decoder)
    return tokenizer


def _held(tokenizer: Any, folder: Path | None = None) -> Any:
    if _backend(tokenizer) is not None:
        UNTRUSTED_TEXT.hold(tokenizer, folder)
    return tokenizer


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend if hasattr(backend, "to_str") else None


def _check_files(directory: Path) -> None:
    """All that the library may open by its name: regular files of a sensible size."""
    names = {directory / name for name in _FILES}
    for file in sorted(names.union(*(directory.glob(pattern) for pattern in _READ_BESIDES))):
        if file.exists() or file.is_symlink():
            try:
                check_untrusted(file, MOST_TOKENIZER_BYTES)
            except FileNotFoundError:  # a link to nothing: the library sees no file either
                continue
            except OSError as error:
                raise EngineError(
                    ErrorCode.CHECKPOINT_DAMAGED,
                    f"{file} cannot be read ({reason(error)}): download or copy the model again.",
                ) from error


def _check_template(directory: Path, template: object) -> None:
    several = template if isinstance(template, dict) else {"default": template}
    if template is not None and not all(isinstance(text, str) for pair in several.items() for text in pair):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The chat_template of {directory} is neither a text nor several texts with "
            "names: download or copy the model again.",
        )


def _check_decoder(directory: Path, decoder: Any) -> None:
    """It runs here, for every token: what it replaces by something longer, time and again, would fill memory."""
    times = _times_longer(json.loads(decoder.__getstate__())) if decoder is not None else 1.0
    if times > _MOST_TIMES_LONGER:
        raise _unreadable(directory, f"its decoder makes a text {times:.3g} times longer")


def _times_longer(part: dict[str, Any]) -> float:
    if part.get("type") == "Sequence":
        times = 1.0
        written: str | None = ""  # by the steps so far; `None` is anything
        for decoder in part.get("decoders", ()):
            found, longer = _literal(decoder), _times_longer(decoder)
            # What finds only characters that no step before it wrote makes other parts of the text longer.
            alone = bool(found) and written is not None and set(found).isdisjoint(written)
            times = max(times, longer) if alone else times * longer
            is_replace = decoder.get("type") == "Replace"  # others may write anything
            written = written + decoder.get("content", "") if written is not None and is_replace else None
        return times
    if part.get("type") != "Replace":
        return 1.0
    content, least = part.get("content", ""), len(_literal(part))
    # A regular expression may find an empty text between any two characters.
    return max(1.0, len(content) / least) if least else 1.0 + len(content)


def _literal(part: dict[str, Any]) -> str:
    pattern = part.get("pattern", {})
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""


def _unreadable(directory: Path, why: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"The tokenizer in {directory} cannot be used ({plain_line(why)}): download or copy its tokenizer files again.",
    )


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token, written as in the vocabulary; `None` if there is no such token."""
    # Not by `get_vocab`, which copies the vocabulary in tens of milliseconds.
    index = tokenizer.convert_tokens_to_ids(token)
    # Unknown tokens have the id of the unknown token, if the vocabulary has one.
    if index is None or tokenizer.convert_ids_to_tokens(index) != token:
        return None
    return int(index)


def knows_chatml(tokenizer: Any) -> bool:
    return all(token_id(tokenizer, token) is not None for token in ("<|im_start|>", "<|im_end|>"))


def template_note(tokenizer: Any) -> str:
    if tokenizer.chat_template is not None:
        return ""
    if knows_chatml(tokenizer):
        return "The tokenizer has no chat template; ChatML is used, whose turn tokens are in its vocabulary."
    return "The tokenizer has no chat template; turns are written as plain “User:” and “Assistant:” lines."

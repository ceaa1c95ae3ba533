"""What reads files that strangers made: each reader takes any bytes, and raises nothing but what it found to be wrong.

`READERS[name].fuzz(data)` is for fuzzers and for the corpus. An `EngineError` is an answer; it must be one short line.
"""

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint import library
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf import file as gguf_file
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.tokenizer import end_token_ids, tokenizer_files
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, as_array, is_packed, unpacked
from engine.checkpoint.profile import read_profile, suggested_sampling
from engine.checkpoint.shards import INDEX_NAME, read_tensors
from engine.common.errors import EngineError
from engine.common.plain_text import plain
from engine.untrusted_text import child
from engine.untrusted_text.templates import TemplateRefusedError
from tests.fuzz import mutation, seeds

_LONGEST_MESSAGE = 1000
_MOST_UNPACKED = 2**16


@dataclass(frozen=True, slots=True)
class Reader:
    """One way in.

    Attributes:
        fuzz: reads any bytes; what it raises is a fault.
        mutate: bytes and a random generator -> similar bytes, of the same structure more often than not.
        seeds: small inputs that are read to the end.
    """

    fuzz: Callable[[bytes], None]
    mutate: mutation.Mutate
    seeds: Callable[[], list[bytes]]


@contextlib.contextmanager
def _folder(**files: bytes | str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="switchyard-fuzz-") as name:
        for stem, content in files.items():
            file = Path(name, stem.replace("__", "."))
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield Path(name)


def _ask(read: Callable[..., Any], *arguments: Any) -> Any:
    """What a reader says; `None` if it refuses in one line."""
    try:
        return read(*arguments)
    except EngineError as error:
        _check_message(error.message)
        return None


def _check_message(message: str) -> None:
    assert "\n" not in message, repr(message)
    assert plain(message) == message, repr(message)
    assert len(message) <= _LONGEST_MESSAGE, f"{len(message)} characters: {message[:_LONGEST_MESSAGE]}"


def _describe(model: Path) -> None:
    """All that is read of a model before any weight is."""
    _ask(read_config, model)
    _ask(read_profile, model)
    _ask(find_shape, str(model))
    _check_message(library.describe(model, "model").problem)
    suggested_sampling(model)
    for entry in (_ask(read_tensors, model) or {}).values():
        _ask(_unpack, entry)


def _unpack(entry: TensorEntry) -> None:
    sources = entry.sources if isinstance(entry, PackedEntry) else (entry,)
    arrays = []
    for source in sources:
        assert 0 <= source.offset <= source.offset + source.nbytes <= source.file.stat().st_size, source
        if source.nbytes <= _MOST_UNPACKED and is_packed(entry):
            arrays.append(as_array(source, np.fromfile(source.file, np.uint8, source.nbytes, offset=source.offset)))
    if len(arrays) == len(sources):
        with np.errstate(all="ignore"):
            assert sum(piece.size for piece in unpacked(entry, arrays)) == entry.numel


def _gguf(data: bytes) -> None:
    gguf_file._read.cache_clear()
    with _folder(model__gguf=data) as folder:
        _describe(folder / "model.gguf")


def _gguf_tokenizer(data: bytes) -> None:
    gguf_file._read.cache_clear()
    with _folder(model__gguf=data) as folder:
        path = folder / "model.gguf"
        found = _ask(read_gguf, path)
        if found is None:
            return
        _ask(end_token_ids, found.metadata, path)
        files = _ask(tokenizer_files, found.metadata, path)
        if files is None:
            return
        config = json.loads(files["tokenizer_config.json"])
        assert isinstance(config, dict)
        _check_reply({"do": "check", "folder": str(path)}, "memory", "broken")


def _safetensors(data: bytes) -> None:
    with _folder(config__json=json.dumps(seeds.CONFIG), model__safetensors=data) as folder:
        _describe(folder)


def _quantised(data: bytes) -> None:
    """A JSON object with a `config` and the `header` of a safetensors file; `fill` is what a tensor's bytes repeat."""
    try:
        both = json.loads(data)
        config, raw = json.dumps(both["config"]), json.dumps(both["header"]).encode()
        content = len(raw).to_bytes(8, "little") + raw
        for tensor in both["header"].values():
            begin, end = tensor["data_offsets"]
            fill = bytes.fromhex(tensor.get("fill", "00"))
            content += (fill * min(end - begin, _MOST_UNPACKED))[: end - begin]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        return
    with _folder(config__json=config, model__safetensors=content) as folder:
        _describe(folder)


def _index(data: bytes) -> None:
    files = {INDEX_NAME.replace(".", "__"): data, "part__safetensors": seeds.safetensors()[0]}
    with _folder(config__json=json.dumps(seeds.CONFIG), **files) as folder:
        _describe(folder)


def _config(data: bytes) -> None:
    with _folder(config__json=data, model__safetensors=seeds.safetensors()[0]) as folder:
        _describe(folder)


def _generation_config(data: bytes) -> None:
    with _folder(generation_config__json=data) as folder:
        suggested_sampling(folder)


class _EndlessError(BaseException):
    """No `Exception`: a template would take it for its own."""


def _template(data: bytes) -> None:
    """Within the limits that its process has; one that has no end is stopped, as it is there."""
    request = {
        "do": "render",
        "template": data.decode("utf-8", "replace"),
        "values": seeds.VALUES,
        "own": {"bos_token": "<s>", "eos_token": "</s>"},
        "most_bytes": 2**28,
    }
    with contextlib.suppress(_EndlessError), _time_limit(1.0):
        _check_reply(request, "refused", "memory")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends the block by `_EndlessError` after so much of the processor's time."""
    if sys.platform == "win32":
        yield
        return

    def end(*_: object) -> None:
        raise _EndlessError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _check_reply(request: dict[str, Any], *kinds: str) -> None:
    """The child's answer is a result, or a problem of one of these kinds."""
    try:
        result = child._Child().answer(request, b"")
    except TemplateRefusedError as error:
        if "refused" not in kinds or len(str(error)) > _LONGEST_MESSAGE:
            raise
    except (MemoryError, _EndlessError):
        if "memory" not in kinds:
            raise
    except Exception:
        if "broken" not in kinds:
            raise
    except BaseException as error:  # what Rust libraries raise instead of an `Exception`
        if "broken" not in kinds or type(error).__name__ != "PanicException":
            raise
    else:
        json.dumps(result).encode("ascii")


READERS = {
    "gguf": Reader(_gguf, mutation.gguf, seeds.ggufs),
    "gguf_tokenizer": Reader(_gguf_tokenizer, mutation.gguf, seeds.gguf_tokenizers),
    "safetensors": Reader(_safetensors, mutation.safetensors, seeds.safetensors),
    "quantised": Reader(_quantised, mutation.quantised, seeds.quantised),
    "index": Reader(_index, mutation.json_text, seeds.indices),
    "config": Reader(_config, mutation.json_text, seeds.configs),
    "generation_config": Reader(_generation_config, mutation.json_text, seeds.generation_configs),
    "template": Reader(_template, mutation.template, seeds.templates),
}

"""Finds a checkpoint's tensors: a safetensors file, shards with an index, or GGUF files; rejects anything else.

The fingerprint of their files tells whether a checkpoint has changed since something was derived from it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from engine.checkpoint.config_file import CONFIG_NAME, MAX_CONFIG_BYTES, read_json
from engine.checkpoint.gguf import all_parts, gguf_at
from engine.checkpoint.headers import MAX_HEADER, TensorEntry, damaged, read_header
from engine.checkpoint.quantised import BESIDE, LIBRARY_METHODS, check_none_is_packed, declared_quantisation
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line, quoted
from engine.common.untrusted import Opener, open_untrusted, reason

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_BESIDE_WEIGHTS = (
    CONFIG_NAME, INDEX_NAME, "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    *BESIDE,
)  # fmt: skip
MAX_INDEX_BYTES = 64 * 2**20
MOST_FILES = 2000
_LONGEST_NAME = 255
_LARGE, _LOOKED_AT = 2**20, 2**12
_READ_WHOLE, _SAMPLES, _PLACES = 2**23, 256, 64
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_ASIDE = re.compile(r"^(adapter_model|consolidated|optimizer|.*\.fp32\b)")


def read_tensors(
    directory: Path,
    *,
    names: Collection[str] | None = None,
    open_file: Opener = open_untrusted,
    guesses: bool = False,
) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `directory`, or in a GGUF file, by name.  Reads headers only.

    Args:
        names: of the checkpoint's files, for weights that are not on this machine; `open_file` opens those, and the
            JSON files are in `directory`.
        guesses: of a GGUF file, with those of the layer that guesses tokens; a checkpoint's are always there.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` (a shard or tensor is missing, cut short or inconsistent), `CHECKPOINT_UNSAFE`
            (pickle), `MODEL_UNSUPPORTED` (weights quantised in a way, or a GGUF file of an architecture, that is not
            read).
    """
    gguf = gguf_at(directory)
    if gguf is not None:
        from engine.checkpoint.gguf.checkpoint import gguf_tensors  # imports numpy, which others do not need
        from engine.checkpoint.gguf.file import read_gguf
        from engine.checkpoint.gguf.projector import projector_of

        model = read_gguf(gguf)
        projector = projector_of(model)
        tensors = gguf_tensors(model, guesses=guesses)
        return projector.whole_tensors(tensors) if projector is not None else tensors
    index, file = directory / INDEX_NAME, directory / CONFIG_NAME
    if index.exists():
        tensors = _from_index(directory, index, open_file)
    else:
        tensors = _from_files(directory, weight_files(directory, names), open_file)
    config = read_json(file, MAX_CONFIG_BYTES) if file.exists() else {}
    stored = declared_quantisation(directory, config)
    if not stored:
        check_none_is_packed(directory.name, tensors)
    elif stored["quant_method"] not in LIBRARY_METHODS:
        from engine.checkpoint.quantised.tensors import quantised_tensors  # imports numpy

        return quantised_tensors(directory.name, str(config.get("model_type")), stored, tensors)
    return tensors


def check_filled(tensors: Iterable[TensorEntry], *, thorough: bool = False) -> None:
    """Refuses files that have their full size, but not yet their contents, as other programs' downloads do.

    Of the last large matrix of each file a beginning, a middle and an end are read: nothing but zeros is no matrix.
    Of 256 tensors a few blocks from the middle are looked at: a model with weights that are no numbers answers nothing.
    (Not from the end, where rows may be without meaning that no token has.)

    Args:
        thorough: looks at 64 places of every tensor instead, for who can wait some seconds.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`.
    """
    entries = [part for tensor in tensors for part in tensor.stored]
    last: dict[Path, TensorEntry] = {}
    for entry in entries:
        if (
            entry.nbytes >= _LARGE
            and len(entry.shape) > 1
            and entry.offset >= getattr(last.get(entry.file), "offset", 0)
        ):
            last[entry.file] = entry
    for file, entry in last.items():
        try:
            with open_untrusted(file) as stream:
                looked_at = b""
                for place in (0, (entry.nbytes - _LOOKED_AT) // 2, entry.nbytes - _LOOKED_AT):
                    stream.seek(entry.offset + place)
                    looked_at += stream.read(_LOOKED_AT)
        except OSError as error:
            raise damaged(file, f"cannot be read ({reason(error)})") from error
        if not any(looked_at):
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{file} has its full size, but its end is empty: another program is still downloading it, or gave up. "
                "Wait for that program, or download the model again.",
            )
    _check_numbers(entries, _PLACES if thorough else 1)


def _check_numbers(entries: list[TensorEntry], places: int) -> None:
    import numpy as np

    from engine.formats.ggml import GGML

    entries = [entry for entry in entries if entry.nbytes and (entry.dtype in GGML or entry.dtype.startswith("F8_"))]
    looked_at = entries[:: -(-len(entries) // _SAMPLES) or 1] if places == 1 else entries
    looked_at.sort(key=lambda each: (each.file, each.offset))
    for file, several in itertools.groupby(looked_at, lambda each: each.file):
        try:
            with open_untrusted(file, buffering=0) as stream:
                for entry in several:
                    kind = GGML.get(entry.dtype)
                    size = kind.nbytes if kind is not None else 1
                    blocks = entry.nbytes // size
                    few = min(blocks, -(-_LOOKED_AT // size))
                    read = b""
                    for at in sorted({(blocks - few) * (place + 1) // (places + 1) for place in range(places)}):
                        stream.seek(entry.offset + at * size)
                        read += stream.read(few * size)
                    if places > 1 and entry.nbytes >= _LARGE and len(entry.shape) > 1 and not any(read):
                        raise damaged(file, f"has nothing but zeros in {quoted(entry.key)}")
                    raw = np.frombuffer(read, np.uint8)
                    if kind is None:
                        is_broken = (raw == 0xFF).all()
                    elif not kind.is_blocks:  # a mask beside the weights may be infinite
                        is_broken = np.isnan(kind.dequantise(raw)).any()
                    elif kind.halves:
                        scales = raw.reshape(-1, size)[:, [at + byte for at in kind.halves for byte in (0, 1)]]
                        is_broken = not np.isfinite(np.ascontiguousarray(scales).view("<f2")).all()
                    else:
                        is_broken = not np.isfinite(kind.dequantise(raw)).all()
                    if is_broken:
                        raise damaged(file, f"has weights that are no numbers (NaN, in {quoted(entry.key)})")
        except OSError as error:
            raise damaged(file, f"cannot be read ({reason(error)})") from error


def weight_files(directory: Path, names: Collection[str] | None = None) -> list[Path]:
    """The safetensors files of a checkpoint, sorted; missing ones are not reported here.

    Args:
        names: of its files, if they are not on this machine.
    """
    if names is None:
        names = [file.name for file in directory.glob("*.safetensors") if file.is_file()]
    return [directory / name for name in sorted(names) if name.endswith(".safetensors") and not _ASIDE.match(name)]


def is_beside_weights(name: str) -> bool:
    return name in _BESIDE_WEIGHTS or name.endswith(".tiktoken")


def named_weights(directory: Path) -> list[Path]:
    """The safetensors files of the checkpoint in a folder with other things in it: those that `read_tensors` reads, by
    index and names alone, so that those of a damaged one are known too.

    Returns:
        Files that may be missing; none where the names do not tell which of several files are the checkpoint's.
    """
    index = directory / INDEX_NAME
    if index.exists():
        try:
            weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
        except EngineError:
            weight_map = None
        names = files_named(weight_map) if isinstance(weight_map, dict) else None
        if names is not None:
            return [directory / name for name in names if Path(name).name == name]
    files = weight_files(directory)
    if directory / SINGLE_NAME in files:
        return [directory / SINGLE_NAME]
    return files if len({_SHARD.sub("", file.name) for file in files}) == 1 else []


def _from_index(directory: Path, index: Path, open_file: Opener) -> dict[str, TensorEntry]:
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "lists no tensors")
    names = files_named(weight_map)
    if names is None:
        raise damaged(index, f"lists an invalid file name, or more than {MOST_FILES:,} files")
    headers: dict[str, dict[str, TensorEntry]] = {}
    for name in names:
        if Path(name).name != name:
            raise damaged(index, f"lists a file outside the model's folder ({quoted(name)})")
        if name.lower().endswith(PICKLE_SUFFIXES):
            raise _unsafe(directory, name)
        headers[name] = read_header(directory / name, open_file)
    tensors = {}
    for key, name in weight_map.items():
        entry = headers[name].get(key)
        if entry is None:
            raise damaged(index.name, f"lists {quoted(key)} in {directory / name}, which does not contain it")
        tensors[key] = entry
    return tensors


def files_named(weight_map: dict[str, Any]) -> list[str] | None:
    """The files in an index, sorted; None if one has an invalid name, or there are too many."""
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str) or plain_line(name) != name or len(name) > _LONGEST_NAME:
            return None
        names.add(name)
        if len(names) > MOST_FILES:
            return None
    return sorted(names)


def _from_files(directory: Path, files: list[Path], open_file: Opener) -> dict[str, TensorEntry]:
    single = directory / SINGLE_NAME
    files = [single] if single in files or single.exists() else files
    if not files:
        raise _no_weights(directory)
    if files != [single]:
        _check_complete(directory, files)
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        header = read_header(file, open_file)
        twice = tensors.keys() & header.keys()
        if twice:
            raise damaged(quoted(min(twice)), f"is in both {file} and {tensors[min(twice)].file.name}")
        tensors.update(header)
    return tensors


def _check_complete(directory: Path, files: list[Path]) -> None:
    numbered = [match for file in files if (match := _SHARD.search(file.name))]
    if not numbered:
        return
    have, total = {int(match[1]) for match in numbered}, int(numbered[0][2])
    # Stop at the first gap: the total in a file name may be any number.
    absent = next(number for number in itertools.count(1) if number not in have)
    if absent <= total:
        raise damaged(directory, f"has {len(have)} of {total} shards: number {absent} is missing")


def _no_weights(directory: Path) -> EngineError:
    names = sorted(file.name for file in directory.iterdir() if file.is_file())
    for name in names:
        if name.lower().endswith(PICKLE_SUFFIXES) and name not in _NOT_WEIGHTS:
            return _unsafe(directory, name)
    return damaged(directory, "has no safetensors file")


def _unsafe(directory: Path, name: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_UNSAFE,
        f"{directory / name} is a pickle file, which can run code when opened, so Switchyard never loads "
        "one: use the model's safetensors version.",
    )


def fingerprint(directory: Path) -> dict[str, Any]:
    """What tells this checkpoint, where it lies, from any other and from what it was before: names, sizes and times of
    its weights' files, and `content_digest`.
    """
    described: list[list[Any]] = []
    return {"content": _digest(directory, described), "files": described}


def content_digest(directory: Path) -> str:
    """What tells a checkpoint from others, on any machine and whatever it is called: config.json and its weights.

    What is not larger than 8 MiB is read whole; else the files' headers, and 4 KB at each of 256 places that are as
    far apart as the files allow.  Weights that differ only between two such places look the same.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`, naming the file that cannot be read.
    """
    return _digest(directory, [])


def _digest(directory: Path, described: list[list[Any]]) -> str:
    digest, gguf = hashlib.sha256(), gguf_at(directory)
    if gguf is not None:
        files = all_parts(gguf)
    else:
        files = [directory / CONFIG_NAME, *(named_weights(directory) or weight_files(directory))]
    for file in files:
        try:
            now = file.stat()
            # With the time of the last change of any kind, which nobody sets: a swapped file is read again.
            state = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns
            digest.update(_file_digest(file, state, len(files)))
        except OSError as error:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{file} cannot be read ({reason(error)}): check the disk, or download the model again.",
            ) from error
        described.append([file.name, now.st_size, now.st_mtime_ns])
    return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def _file_digest(file: Path, _state: tuple[int, ...], files: int) -> bytes:
    with open_untrusted(file, buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        for start, length in _looked_at(file, stream, size, files):
            stream.seek(start)
            digest.update(stream.read(length))
    return digest.digest()


def _looked_at(file: Path, stream: BinaryIO, size: int, files: int) -> Iterator[tuple[int, int]]:
    """Where one of so many files is read to tell it from others, and how much there."""
    if size <= _READ_WHOLE // files:
        yield 0, size
        return
    is_table = file.suffix == ".safetensors"
    yield 0, min(8 + int.from_bytes(stream.read(8), "little"), MAX_HEADER) if is_table else min(size, _LARGE)
    samples = max(4, _SAMPLES // files)
    for number in range(samples):
        yield max(0, size - _LOOKED_AT) * number // (samples - 1), _LOOKED_AT

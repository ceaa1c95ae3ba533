"""Which files of a repository make up a model that can run, and what that model is.

A repository of GGUF files holds the same model many times; one of safetensors files holds it once, in a folder. What
belongs to neither (pictures' encoders, adapters, importance matrices, other programs' formats) is left out.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from engine.checkpoint.config_file import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    TEXT_CLASS,
    check_numbers,
    read_config,
    text_part,
)
from engine.checkpoint.counted_shape import shape_of
from engine.checkpoint.embedding import MODULES, is_of_embedding
from engine.checkpoint.gguf import LABEL, PART, SUFFIX
from engine.checkpoint.hub import (
    QUALITIES,
    Candidate,
    Reference,
    RepoFile,
    Repository,
    file_url,
    parse_reference,
    place_of,
    quality_of,
    read_repository,
)
from engine.checkpoint.hub.http import Place, RemoteFile, fetch, in_time
from engine.checkpoint.model_shape import ModelShape
from engine.checkpoint.quantised import BESIDE, MLX, declared_quantisation
from engine.checkpoint.shards import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
    is_beside_weights,
    read_tensors,
    weight_files,
)
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.files import write_private
from engine.common.json_fields import from_fields
from engine.common.paths import cache_dir
from engine.common.plain_text import quoted
from engine.common.untrusted import parse_json, read_untrusted
from engine.families.known import ENCODERS, known_types

_WANTED = ("good", "near", "original", "fair", "poor")
"""The order in which one is taken for people who named none."""
_USUAL = ("Q4_K_M", "UD-Q4_K_M", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "Q4_K_S", "IQ4_XS", "Q5_K_M")
"""Of quality `good`, the most usual first."""
_ASIDE = re.compile(r"(^|[-_.])(mmproj|projector|clip|imatrix|lora|adapter|draft|vocab)([-_.]|$)", re.IGNORECASE)
"""GGUF files that are no model."""
SEES = re.compile(
    r"qwen[-_.]?3[-_.]?[568](?!b)|qwen[-_.]?(2|2[-_.]?5|3)[-_.]?vl|gemma[-_.]?[34](?![-_.]?n)|glm[-_.]?4[-_.]?[156][-_.]?v|"
    r"glm[-_.]?5[-_.]?3|kimi[-_.]?(vl|k2[-_.]?[56])|minimax[-_.]?m3|step[-_.]?3[-_.]?7|dots[-_.]?3[-_.]?note|"
    r"llama[-_.]?4|mistral[-_.]?small[-_.]?[34]|ministral[-_.]?3|magistral|devstral",
    re.IGNORECASE,
)
"""Names of models whose `mmproj` file is read: see `engine.families.gguf.towers`."""
_UNREAD = re.compile(r".*_\d_\d$")
"""Labels of GGUF files whose blocks nobody reads any more."""
_AHEAD_OF_GGUF, _AHEAD_OF_SAFETENSORS, _BUFFER = 2**18, 2**17, 2**16
_TOKENS, _TOKENIZER, _PROBE = b"tokenizer.ggml.tokens", b"tokenizer.", 4096
_KEPT_VERSION = 2
_MAX_KEPT_BYTES = 2**20


def candidates(repository: Repository, *, cancelled: CancelCheck = never_cancelled) -> tuple[Candidate, ...]:
    """What can be fetched and run of a repository, the best quality first; then what cannot, with its `problem`.

    There is always one; if nothing can run, it says why.
    """
    found = [*_in_gguf(repository), *_in_safetensors(repository, cancelled)]
    if not found:
        found = [_nothing(repository)]
    return tuple(sorted(found, key=lambda one: (bool(one.problem), QUALITIES.index(one.quality), -one.bytes)))


def find_candidate(reference: str, *, cancelled: CancelCheck = never_cancelled) -> Candidate:
    """The candidate that a reference means.

    Args:
        reference: as for `read_repository`, with `:LABEL` or `:FILE` behind it; without either, the most usual one of
            quality class `good`.

    Raises:
        EngineError: as `read_repository`; `MODEL_UNSUPPORTED`, with the reason, if there is nothing to run.
    """
    asked = parse_reference(reference)
    found = candidates(read_repository(reference, cancelled=cancelled), cancelled=cancelled)
    if asked.what:
        return _named(asked, found)
    able = [one for one in found if not one.problem]
    if not able:
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, found[0].problem)
    return _usual(able)


def candidate_named(what: str, found: Sequence[Candidate]) -> Candidate | None:
    """The candidate that a label or a file's name means; None if there is none."""
    wanted = _plain(what)
    names = [
        {_plain(name) for file in one.files for name in (one.label, file.path, PurePosixPath(file.path).name)}
        for one in found
    ]
    for each in (wanted, f"ud-{wanted}", wanted.removeprefix("ud-")):  # some makers mark all their labels so
        for one, called in zip(found, names, strict=True):
            if each in called:
                return one
    return None


def _named(asked: Reference, found: Sequence[Candidate]) -> Candidate:
    one = candidate_named(asked.what, found)
    if one is not None:
        return one
    there = ", ".join(one.label for one in found if not one.problem) or "nothing that can run"
    raise EngineError(
        ErrorCode.MODEL_NOT_FOUND,
        f"{asked.id} has no {quoted(asked.what[:60])}: there is {there}. Choose one of these.",
    )


def _plain(text: str) -> str:
    return re.sub(r"[^0-9a-z./]+", "-", text.casefold())


def _usual(able: Sequence[Candidate]) -> Candidate:
    def rank(one: Candidate) -> tuple[int, int, int]:
        usual = _USUAL.index(one.label) if one.label in _USUAL else len(_USUAL)
        return _WANTED.index(one.quality), usual, one.bytes

    return min(able, key=rank)


# GGUF


def _in_gguf(repository: Repository) -> Iterator[Candidate]:
    models: dict[tuple[str, int], list[RepoFile]] = {}
    for file in repository.files:
        path = PurePosixPath(file.path)
        if path.suffix.lower() != SUFFIX or _ASIDE.search(path.stem):
            continue
        part = PART.match(path.name)
        stem = str(path.with_name(part["stem"])) if part else str(path.with_suffix(""))
        models.setdefault((stem, int(part["count"]) if part else 1), []).append(file)
    stems = [stem for stem, _ in models]
    for (stem, count), files in models.items():
        label = _label_of(stem)
        problem = f"{len(files)} of its {count} parts are there: {stem}." if len(files) != count else ""
        if not problem and _UNREAD.match(label):
            problem = (
                f"Its weights are stored as {label}, which Switchyard does not read: choose Q4_K_M or another one."
            )
        yield Candidate(
            repository,
            label if _is_plainest(stem, label, stems) else PurePosixPath(stem).name,
            (*files, *_projector_for(repository, files[0])),
            quality_of(label, repository.id),
            problem,
        )


def _projector_for(repository: Repository, model: RepoFile) -> list[RepoFile]:
    """The `mmproj` file that is fetched with a model which sees with it: of several, that in 16 bits."""
    if not SEES.search(f"{repository.id}/{model.path}"):
        return []
    folder = PurePosixPath(model.path).parent
    found = [
        file
        for file in repository.files
        if file.path.lower().endswith(SUFFIX)
        and "mmproj" in PurePosixPath(file.path).name.lower()
        and PurePosixPath(file.path).parent == folder
    ]
    ranks = ("bf16", "f16", "f32")
    return sorted(found, key=lambda file: next((at for at, kind in enumerate(ranks) if kind in file.path.lower()), 9))[
        :1
    ]


def _label_of(stem: str) -> str:
    """`Q4_K_M` from a file's name without its ending, or from its folder's; the whole name without one."""
    path = PurePosixPath(stem)
    for name in (path.name, path.parent.name):
        found = LABEL.findall(name.upper())
        if found:
            return str(found[-1])
    return path.name


def _is_plainest(stem: str, label: str, stems: Sequence[str]) -> bool:
    """Whether a file is what its label means: alone with it, or the only one that ends with it."""
    same = [other for other in stems if _label_of(other) == label]
    ending = [other for other in same if other.upper().endswith(label)]
    return len(same) == 1 or ending == [stem]


# safetensors


def _in_safetensors(repository: Repository, cancelled: CancelCheck) -> Iterator[Candidate]:
    files = {file.path: file for file in repository.files if "/" not in file.path}
    embeds = MODULES in files
    parts = {file.path: file for file in repository.files if embeds and is_of_embedding(file.path)}
    weights = [path.name for path in weight_files(Path(), files)]
    if not weights or CONFIG_NAME not in files:
        return
    # transformers' own names alone are read if they are there.
    own = [name for name in weights if re.match(r"model(-\d+-of-\d+)?\.safetensors$", name)]
    names = [SINGLE_NAME] if SINGLE_NAME in files and INDEX_NAME not in files else own or weights
    beside = [name for name in files if is_beside_weights(name)]
    fetched = tuple((files | parts)[name] for name in sorted({*names, *beside, *parts}))
    label, problem = "safetensors", ""
    with _scratch(repository) as folder:
        try:
            _fetch_small(repository, folder, (CONFIG_NAME, *BESIDE), cancelled)
            config = read_config(folder)
            label = _label_of_folder(folder, config)
            problem = _of_unknown_kind(config, embeds=embeds) or ("" if embeds else _writes_no_text(config))
        except EngineError as error:
            if error.code is ErrorCode.DOWNLOAD_FAILED:
                raise
            problem = error.message.replace(f"{folder.parent}{os.sep}", "")
    is_original = label in ("BF16", "F16", "F32", "MXFP4", "safetensors")
    yield Candidate(repository, label, fetched, QUALITIES[0] if is_original else quality_of(label), problem)


def _label_of_folder(folder: Path, config: Mapping[str, Any]) -> str:
    stored = declared_quantisation(folder, config)
    if not stored:
        text = text_part(dict(config))
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
        return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(dtype, "BF16")
    method, bits = str(stored["quant_method"]), stored.get("bits") or stored.get("w_bit")
    if method == "modelopt":
        return str(stored.get("quant_algo") or method)[:20].upper()
    if method == "compressed-tensors":
        groups = stored.get("config_groups")
        schemes = list(groups.values()) if isinstance(groups, dict) else []
        weights = schemes[0].get("weights") if schemes and isinstance(schemes[0], dict) else None
        if isinstance(weights, dict):
            kind, bits = str(weights.get("type")), weights.get("num_bits")
            return f"FP{bits}" if kind == "float" else f"{method} {bits}-bit"
    name = method if method == "compressed-tensors" else method.upper()
    return f"{name} {bits}-bit" if type(bits) is int and method in ("gptq", "awq", MLX, "compressed-tensors") else name


def _of_unknown_kind(config: Mapping[str, Any], *, embeds: bool) -> str:
    kind = str(config["model_type"])
    if kind not in known_types() and not (embeds and kind in ENCODERS):
        return (
            f"It is a model of the kind {quoted(kind[:60])}, which Switchyard does not know: a newer version of "
            "Switchyard may, or there may be a GGUF version of it."
        )
    return ""


def _writes_no_text(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    if not names or any(TEXT_CLASS.search(name) for name in names):
        return ""
    return f"It is a {quoted(names[0][:60])}, which writes no text: Switchyard runs models for chat and text only."


def _nothing(repository: Repository) -> Candidate:
    names = [file.path.lower() for file in repository.files]
    pickles = tuple(file for file in repository.files if file.path.lower().endswith(PICKLE_SUFFIXES))
    if "adapter_config.json" in names:
        why = "It holds an adapter (LoRA), not a whole model: fetch the model that it was made for."
    elif "model_index.json" in names:
        why = "It makes pictures, not text."
    elif pickles:
        why = (
            "Its weights are pickle files, which can run code when opened, so Switchyard never loads them: look for "
            "its safetensors or GGUF version."
        )
    elif any(name.endswith(SUFFIX) for name in names):
        why = "Its GGUF files hold no language model, only parts for pictures, adapters or tables: look for the model."
    elif any(name.endswith(".onnx") for name in names):
        why = "It holds ONNX files, which Switchyard does not read: look for its safetensors or GGUF version."
    elif any(name.endswith(".safetensors") for name in names):
        why = f"It has weights but no {CONFIG_NAME} beside them, so it is not a whole model."
    else:
        why = "It holds no weights."
    return Candidate(repository, "none", (), QUALITIES[-1], f"Nothing in {repository.id} can run. {why}")


# Shapes


def candidate_shape(candidate: Candidate, *, cancelled: CancelCheck = never_cancelled) -> ModelShape:
    """The model, from the headers of its files; kept by commit, so that it is read over the network once.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, `CHECKPOINT_DAMAGED`, or a `HubError` with `DOWNLOAD_FAILED`.
    """
    if candidate.problem:
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, candidate.problem)
    repository = candidate.repository
    files = [(file.path, file.size, file.sha256) for file in candidate.files]
    what = json.dumps([repository.hub, repository.id, repository.commit, files])
    kept = cache_dir() / "hub" / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"
    shape = _read_kept(kept)
    if shape is None:
        shape = _read_shape(candidate, cancelled)
        with suppress(OSError):  # read again next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_private(kept, json.dumps({"version": _KEPT_VERSION, **asdict(shape)}))
    return shape


def _read_shape(candidate: Candidate, cancelled: CancelCheck) -> ModelShape:
    repository = candidate.repository
    place, name = _place(repository), f"{repository.id.rpartition('/')[2]} {candidate.label}"
    try:
        if candidate.files[0].path.lower().endswith(SUFFIX):
            config, tensors = _read_gguf(candidate, place, cancelled)
        else:
            with _scratch(repository) as folder:
                config, tensors = _read_folder(candidate, place, folder, cancelled)
        return shape_of(name, config, tensors, repository.id)
    except EngineError as error:
        if error.code is not ErrorCode.CHECKPOINT_DAMAGED:
            raise
        what = error.message.partition(": download")[0]
        raise EngineError(
            error.code, f"{repository.id} on {place.hub} cannot be used ({what}): choose another version."
        ) from None


def _read_gguf(candidate: Candidate, place: Place, cancelled: CancelCheck) -> tuple[dict[str, Any], list[Any]]:
    from engine.checkpoint.gguf.checkpoint import gguf_config, gguf_tensors
    from engine.checkpoint.gguf.file import read_gguf
    from engine.checkpoint.gguf.tokenizer import check_kind

    repository, key = candidate.repository, (candidate.repository.id, candidate.repository.commit)
    files = {Path(file.path): file for file in candidate.files}
    first = min(file for file in files if not _ASIDE.search(file.stem))
    head = _GgufHead(place, file_url(repository, files[first]), files[first].size, _heads_read.get(key, b""))
    open_file = _opener(repository, place, files, {first: head})

    def read() -> tuple[dict[str, Any], list[Any]]:
        file = read_gguf(first, open_file)
        config = gguf_config(file)
        check_numbers(first, config)
        check_kind(file.metadata, first)
        return config, list(gguf_tensors(file).values())

    found = in_time(place, [read], cancelled)[0]
    if key not in _heads_read:
        _heads_read.clear()  # one repository is looked at after another
        _heads_read[key] = head.beginning
    return found


_heads_read: dict[tuple[str, str], bytes] = {}
"""Repository and commit -> the beginning of a GGUF file that was read last."""


class _GgufHead(RemoteFile):
    """The beginning of a GGUF file, of which the vocabulary is not fetched again if another file has the same.

    That is nearly all of a header, and a repository has twenty files with the same. Recognised by its beginning and its
    end, which must be as far apart as in the other file; nothing that is between them decides about a model's shape.

    Args:
        like: the beginning of another file of the repository; empty if none has been read.
    """

    def __init__(self, place: Place, url: str, size: int, like: bytes) -> None:
        super().__init__(place, url, size, _AHEAD_OF_GGUF)
        self._like = like

    @property
    def beginning(self) -> bytes:
        """As much as is here without a gap."""
        found = bytearray()
        for begin, piece in sorted(self.pieces):
            if begin <= len(found) < begin + len(piece):
                found += piece[len(found) - begin :]
        return bytes(found)

    def ahead(self, nbytes: int = 0) -> None:
        super().ahead(nbytes)
        if self._like and len(self.pieces) == 1:
            self._recognise(self.pieces[0][1])

    def _recognise(self, head: bytes) -> None:
        like, begin, here = self._like, self._like.find(_TOKENS), head.find(_TOKENS)
        end = like.rfind(_TOKENIZER)
        known, shown = like[begin:end], head[here:]
        end_here = here + len(known)
        if min(begin, here) < 0 or len(known) <= len(shown) + _PROBE or end_here >= self.size:
            return
        if not known.startswith(shown):
            return
        tail = self.fetched(end_here - _PROBE, min(self.size, end_here + _AHEAD_OF_GGUF))
        if tail.startswith(known[-_PROBE:]):
            self.pieces += [(here, known), (end_here - _PROBE, tail)]
            self._ahead = 0  # what is left is little


def _read_folder(
    candidate: Candidate, place: Place, folder: Path, cancelled: CancelCheck
) -> tuple[dict[str, Any], list[Any]]:
    small = [CONFIG_NAME, INDEX_NAME, *BESIDE]
    _fetch_small(candidate.repository, folder, small, cancelled)
    weights = {folder / file.path: file for file in candidate.files if file.path.endswith(".safetensors")}
    heads: dict[Path, RemoteFile] = {}

    def begin(path: Path) -> None:
        head = RemoteFile(place, file_url(candidate.repository, weights[path]), weights[path].size)
        head.ahead(_AHEAD_OF_SAFETENSORS)
        heads[path] = head

    in_time(place, [functools.partial(begin, path) for path in weights], cancelled)
    open_file = _opener(candidate.repository, place, weights, heads)

    def read() -> tuple[dict[str, Any], list[Any]]:
        tensors = read_tensors(folder, names=[path.name for path in weights], open_file=open_file)
        return read_config(folder), list(tensors.values())

    try:
        return in_time(place, [read], cancelled)[0]
    except EngineError as error:
        error.message = error.message.replace(f"{folder}{os.sep}", "").replace(f"{folder.parent}{os.sep}", "")
        raise


def _opener(
    repository: Repository,
    place: Place,
    files: Mapping[Path, RepoFile],
    heads: dict[Path, RemoteFile] | None = None,
) -> Callable[[Path], BinaryIO]:
    """Opens files on the hub; `heads` are some of which the beginning is here already."""

    def open_file(path: Path) -> BinaryIO:
        file = files.get(path)
        if file is None:
            raise FileNotFoundError(2, "it is not in the repository", str(path))
        head = (heads or {}).pop(path, None) or RemoteFile(place, file_url(repository, file), file.size, _AHEAD_OF_GGUF)
        return io.BufferedReader(head, _BUFFER)

    return open_file


@contextmanager
def _scratch(repository: Repository) -> Iterator[Path]:
    """A folder for a moment, called like the model because messages name it."""
    with tempfile.TemporaryDirectory(prefix="switchyard-hub-") as scratch:
        folder = Path(scratch) / repository.id.rpartition("/")[2]
        folder.mkdir()
        yield folder


def _fetch_small(repository: Repository, folder: Path, names: Sequence[str], cancelled: CancelCheck) -> None:
    place, there = _place(repository), {file.path: file for file in repository.files}

    def one(file: RepoFile, most_bytes: int) -> None:
        answer = fetch(place, file_url(repository, file), most_bytes)
        (folder / file.path).write_bytes(answer.content)

    limits = {INDEX_NAME: MAX_INDEX_BYTES}
    wanted = [there[name] for name in names if name in there]
    jobs = [functools.partial(one, file, limits.get(file.path, MAX_CONFIG_BYTES)) for file in wanted]
    if jobs:
        in_time(place, jobs, cancelled)


def _place(repository: Repository) -> Place:
    return place_of(repository.hub, repository.id, repository.endpoint, gated=repository.gated)


def _read_kept(path: Path) -> ModelShape | None:
    """The shape that was kept; None if there is none, or it is from another version."""
    try:
        content = parse_json(read_untrusted(path, _MAX_KEPT_BYTES))
        if content.pop("version") != _KEPT_VERSION:
            return None
        shape = from_fields(ModelShape, content)
        return shape if isinstance(shape, ModelShape) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EngineError):
        return None

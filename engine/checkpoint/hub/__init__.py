"""What a hub tells of its models: the files of a repository with sizes and checksums, and a search."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

from engine.checkpoint.hub.http import Place, api, broken
from engine.checkpoint.mirror import chosen, mirror_of_environment
from engine.checkpoint.names import HUB_ID
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.plain_text import plain_line, quoted

HUGGINGFACE, MODELSCOPE = "huggingface", "modelscope"
NAMES = {HUGGINGFACE: "Hugging Face", MODELSCOPE: "ModelScope"}
"""For people."""
QUALITIES = ("original", "near", "good", "fair", "poor")
"""Of a quantisation, beside the model as it was published; best first."""
_QUALITY = (
    ("original", re.compile(r"BF16|FP?16|FP?32")),
    ("near", re.compile(r"Q8|Q6|FP8|[68]-BIT")),
    ("good", re.compile(r"Q5|Q4_K|IQ4|FP4|[45]-BIT")),
    ("fair", re.compile(r"Q4|Q3_K|IQ3_[SM]|3-BIT")),
    ("poor", re.compile(r"Q[123]|2-BIT")),
)
_HOSTS = {
    **dict.fromkeys(("huggingface.co", "www.huggingface.co", "hf.co"), HUGGINGFACE),
    **dict.fromkeys(("modelscope.cn", "www.modelscope.cn", "modelscope.ai", "www.modelscope.ai"), MODELSCOPE),
}
_REFERENCE = re.compile(
    r"(?:(?P<hub>huggingface|modelscope):)?(?P<id>[^@:\s]+)(?:@(?P<revision>[^:\s]+))?(?::(?P<what>.+))?"
)
_COMMIT = re.compile(r"[\w.-]{1,100}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_MOST_PAGES, _MOST_FILES, _LONGEST_PATH = 50, 20_000, 1024
_MODELSCOPE_REVISION = "master"

# What a repository's tags show of why nothing in it can run, the first that holds.
_RUNS = ("gguf", "safetensors", "mlx")
_NO_MODEL = {
    "lora": "it holds an adapter (LoRA), not a whole model",
    "peft": "it holds an adapter (LoRA), not a whole model",
    "diffusers": "it makes pictures, not text",
    "onnx": "it holds ONNX files, which Switchyard does not read",
    "openvino": "it holds OpenVINO files, which Switchyard does not read",
    "pytorch": "its weights are pickle files, which can run code when opened: look for its safetensors or GGUF version",
}
_TEXT_TASKS = (
    "text-generation", "text2text-generation", "image-text-to-text", "video-text-to-text", "audio-text-to-text",
    "any-to-any", "conversational", "feature-extraction", "sentence-similarity", "",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        sha256: of its content; empty where the hub does not tell.
    """

    path: str
    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Repository:
    """A model's repository at one commit.

    Attributes:
        commit: what `files` were listed of; later requests name it, so that nothing changes underneath them.
        gated: whether its files are given only to people who accepted its licence on the hub's page.
        endpoint: the hub's address without a slash at the end, a mirror's if one is set.
    """

    hub: str
    id: str
    commit: str
    files: tuple[RepoFile, ...]
    licence: str
    licence_link: str
    gated: bool
    downloads: int = 0
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing of a repository that can be fetched and run: a GGUF model with all its parts, or a safetensors folder.

    Attributes:
        label: for people: `Q4_K_M`, `BF16`, `GPTQ 4-bit`, `MXFP4`; no two of a repository have the same.
        files: everything to fetch, configuration and tokenizer included, and nothing else.
        quality: beside the original: `original`, `near`, `good`, `fair` or `poor`.
        problem: in a sentence, why it cannot run; empty if it can.
    """

    repository: Repository
    label: str
    files: tuple[RepoFile, ...]
    quality: str
    problem: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def reference(self) -> str:
        """What `find_candidate` finds it by: `ORG/NAME:Q4_K_M`, before it `modelscope:` for that hub."""
        hub = "" if self.repository.hub == HUGGINGFACE else f"{self.repository.hub}:"
        return f"{hub}{self.repository.id}:{self.label}"


def quality_of(label: str, model: str = "") -> str:
    """The quality class of a quantisation by its label.

    Args:
        model: its name: gpt-oss was published in MXFP4, so that this is its original.
    """
    if label.startswith("MXFP4") and "gpt-oss" in model.casefold():
        return QUALITIES[0]
    return next((name for name, pattern in _QUALITY if pattern.search(label.upper())), "fair")


@dataclass(frozen=True, slots=True)
class Found:
    """A repository that a search found.

    Attributes:
        updated: ISO 8601, or empty.
        problem: in a sentence, why nothing in it can run, as far as its tags show; empty if something may.
    """

    id: str
    hub: str
    downloads: int
    likes: int
    updated: str
    licence: str
    gated: bool
    parameters: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a user's words for a model on a hub mean.

    Attributes:
        revision: a branch, a tag or a commit; empty for the newest.
        what: a candidate's label, or a file's path; empty if none was named.
    """

    hub: str
    id: str
    revision: str = ""
    what: str = ""


def parse_reference(text: str) -> Reference:
    """The parts of a reference: see `read_repository`.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    text = text.strip()
    bare = text.partition("://")[2] if "://" in text else text
    own = {urlsplit(endpoint_of(hub)).netloc.casefold(): hub for hub in NAMES}
    hub = {**_HOSTS, **own}.get(bare.partition("/")[0].casefold(), "")
    if "://" in text or hub:
        return _from_address(text, bare, hub)
    found = _REFERENCE.fullmatch(text)
    if found is None or not HUB_ID.fullmatch(found["id"]):
        raise _no_reference(text)
    return Reference(found["hub"] or HUGGINGFACE, found["id"], found["revision"] or "", found["what"] or "")


def is_reference(text: str) -> bool:
    try:
        parse_reference(text)
    except EngineError:
        return False
    return True


def _from_address(text: str, bare: str, hub: str) -> Reference:
    """`huggingface.co/ORG/NAME/blob/main/FILE` and the like, and `hf.co/ORG/NAME:LABEL`."""
    parts = [unquote(part) for part in bare.partition("?")[0].partition("#")[0].rstrip("/").split("/")][1:]
    if hub == MODELSCOPE and parts[:1] == ["models"]:
        parts = parts[1:]
    if not hub or len(parts) < 2:
        raise _no_reference(text)
    name, _, what = parts[1].partition(":")
    name, _, revision = name.partition("@")
    if len(parts) > 3 and parts[2] in ("tree", "blob", "resolve", "raw"):
        revision, what = parts[3], "/".join(parts[4:]) or what
    found = f"{parts[0]}/{name}"
    if not HUB_ID.fullmatch(found):
        raise _no_reference(text)
    return Reference(hub, found, revision, what)


def _no_reference(text: str) -> EngineError:
    return EngineError(
        ErrorCode.INVALID_REQUEST,
        f"{quoted(text[:80])} is not a model on a hub: give ORG/NAME, modelscope:ORG/NAME, or the address of its page.",
    )


def endpoint_of(hub: str) -> str:
    """The hub's address: a mirror's if the environment names one, as the hubs' own tools do, or if one was chosen."""
    if hub == MODELSCOPE:
        domain = os.environ.get("MODELSCOPE_DOMAIN", "modelscope.cn")
        return (os.environ.get("MODELSCOPE_ENDPOINT") or f"https://{domain}").rstrip("/")
    return mirror_of_environment() or chosen("mirror") or "https://huggingface.co"


def place_of(hub: str, subject: str, endpoint: str = "", *, gated: bool = False) -> Place:
    endpoint = endpoint or endpoint_of(hub)
    page = f"{endpoint}/models/{subject}" if hub == MODELSCOPE else f"{endpoint}/{subject}"
    return Place(NAMES[hub], endpoint, subject, page if HUB_ID.fullmatch(subject) else endpoint, gated)


def read_repository(reference: str, *, cancelled: CancelCheck = never_cancelled) -> Repository:
    """The repository that a reference means; a label or a file name behind it is left aside.

    Args:
        reference: `ORG/NAME`, `ORG/NAME@REVISION`, `modelscope:ORG/NAME`, or an address of the hub's pages.

    Raises:
        EngineError: `INVALID_REQUEST`; a `HubError` with `MODEL_NOT_FOUND` or `DOWNLOAD_FAILED`.
    """
    asked = parse_reference(reference)
    place = place_of(asked.hub, asked.id)
    return (_on_modelscope if asked.hub == MODELSCOPE else _on_huggingface)(place, asked, cancelled)


def _on_huggingface(place: Place, asked: Reference, cancelled: CancelCheck) -> Repository:
    """Of the mirror's `/api/models/ORG/NAME` and its `/tree`, which comes in pages."""
    base = f"{place.endpoint}/api/models/"
    about = f"{base}{asked.id}" + (f"/revision/{quote(asked.revision, safe='')}" if asked.revision else "")
    said, _ = api(place, about, cancelled)
    if not isinstance(said, dict) or not _COMMIT.fullmatch(_text(said.get("sha"))):
        raise broken(place, "it does not say which commit is the newest")
    found = _text(said.get("id"))
    name = found if HUB_ID.fullmatch(found) else asked.id  # another one if it was renamed
    card = said.get("cardData") if isinstance(said.get("cardData"), dict) else {}
    assert isinstance(card, dict)
    url = f"{base}{name}/tree/{quote(said['sha'], safe='')}?recursive=true"
    files = _huggingface_files(place, url, cancelled)
    licence = _licence(card.get("license_name") if card.get("license") == "other" else card.get("license"), said)
    return Repository(
        HUGGINGFACE,
        name,
        said["sha"],
        files,
        licence,
        _licence_link(_text(card.get("license_link")), f"{place.endpoint}/{name}/blob/{said['sha']}", files, place),
        bool(said.get("gated")),
        _count(said.get("downloads")),
        place.endpoint,
    )


def _huggingface_files(place: Place, url: str, cancelled: CancelCheck) -> tuple[RepoFile, ...]:
    found: list[RepoFile] = []
    for _ in range(_MOST_PAGES):
        page, headers = api(place, url, cancelled)
        if not isinstance(page, list):
            raise broken(place, "it does not list the files")
        for item in page:
            if isinstance(item, dict) and item.get("type", "file") == "file":
                big = item.get("lfs") if isinstance(item.get("lfs"), dict) else {}
                assert isinstance(big, dict)
                found += _file(item.get("path"), big.get("size", item.get("size")), big.get("oid", big.get("sha256")))
        if len(found) > _MOST_FILES:
            break
        following = _NEXT.search(headers.get("link", ""))
        if following is None:
            return _listed(place, found)
        rest = urlsplit(urljoin(url, following[1]))
        here = urlsplit(place.endpoint)  # and not where the answer leads: some mirrors name the hub that they copy
        url = f"{place.endpoint}{rest.path.removeprefix(here.path)}?{rest.query}"
    raise broken(place, f"its list has more than {_MOST_FILES:,} files, or more than {_MOST_PAGES} pages")


def _on_modelscope(place: Place, asked: Reference, cancelled: CancelCheck) -> Repository:
    """Of its REST API: https://modelscope.cn/docs (models, and the files of a repository)."""
    base = f"{place.endpoint}/api/v1/models/{asked.id}"
    about = _modelscope_data(place, f"{base}", cancelled)
    query = urlencode({"Revision": asked.revision or _MODELSCOPE_REVISION, "Recursive": "true"})
    listed = _modelscope_data(place, f"{base}/repo/files?{query}", cancelled)
    items = listed.get("Files")
    if not isinstance(items, list):
        raise broken(place, "it does not list the files")
    files: list[RepoFile] = []
    for item in items:
        if isinstance(item, dict) and item.get("Type") != "tree":
            files += _file(item.get("Path"), item.get("Size"), item.get("Sha256"))
    newest = listed.get("LatestCommitter")
    commit = _text(newest.get("Id")) if isinstance(newest, dict) else ""
    commit = commit if _COMMIT.fullmatch(commit) else ""
    found = _listed(place, files)
    return Repository(
        MODELSCOPE,
        asked.id,
        commit or asked.revision or _MODELSCOPE_REVISION,
        found,
        _licence(about.get("License"), about),
        _licence_link("", f"{place.link}/file/view/{asked.revision or _MODELSCOPE_REVISION}", found, place),
        bool(about.get("ApprovalMode")),
        _count(about.get("Downloads")),
        place.endpoint,
    )


def _modelscope_data(place: Place, url: str, cancelled: CancelCheck) -> dict[str, Any]:
    said, _ = api(place, url, cancelled)
    data = said.get("Data", said.get("data")) if isinstance(said, dict) else None
    if not isinstance(data, dict):
        raise broken(place, "it does not say what it has")
    return data


def _file(path: object, size: object, sha256: object) -> list[RepoFile]:
    """The file, or none if its path or size could not be one on this machine."""
    if not isinstance(path, str) or type(size) is not int or not 0 <= size < 2**50:
        return []
    parts = path.split("/")
    if len(path) > _LONGEST_PATH or plain_line(path) != path or "\\" in path or ":" in path:
        return []
    if any(part in ("", ".", "..") for part in parts):
        return []
    digest = sha256.lower() if isinstance(sha256, str) else ""
    return [RepoFile(path, size, digest if _SHA256.fullmatch(digest) else "")]


def _listed(place: Place, files: list[RepoFile]) -> tuple[RepoFile, ...]:
    if len(files) > _MOST_FILES:
        raise broken(place, f"it lists more than {_MOST_FILES:,} files")
    return tuple(sorted({file.path: file for file in files}.values(), key=lambda file: file.path))


def _text(value: object) -> str:
    return plain_line(value)[:200] if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0


def _licence(said: object, about: Mapping[str, Any]) -> str:
    tags = (tag.removeprefix("license:") for tag in _tags(about) if tag.startswith("license:"))
    return _text(said) or _text(about.get("license")) or next(tags, "")


def _licence_link(said: str, folder: str, files: Iterable[RepoFile], place: Place) -> str:
    if said.startswith("https://"):
        return said
    names = {file.path.casefold(): file.path for file in files}
    name = next((names[each] for each in ("license", "license.md", "license.txt") if each in names), "")
    return f"{folder}/{name}" if name else place.link


def _tags(about: Mapping[str, Any]) -> list[str]:
    tags = about.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def file_url(repository: Repository, file: RepoFile) -> str:
    if repository.hub == MODELSCOPE:
        query = urlencode({"Revision": repository.commit, "FilePath": file.path})
        return f"{repository.endpoint}/api/v1/models/{repository.id}/repo?{query}"
    return f"{repository.endpoint}/{repository.id}/resolve/{quote(repository.commit, safe='')}/{quote(file.path)}"


def search(text: str, *, limit: int = 20, cancelled: CancelCheck = never_cancelled) -> tuple[Found, ...]:
    """Repositories whose names match, the most downloaded first; those with something to run before the others.

    Args:
        text: words; `modelscope:` before them asks that hub.
    """
    hub, words = HUGGINGFACE, text.strip()
    for each in NAMES:
        if words.startswith(f"{each}:"):
            hub, words = each, words.partition(":")[2].strip()
    words, place = words[:200], place_of(hub, quoted(words[:60]))
    if hub == MODELSCOPE:
        query = urlencode({"search": words, "sort": "downloads", "page_number": 1, "page_size": limit})
        items = _modelscope_data(place, f"{place.endpoint}/openapi/v1/models?{query}", cancelled).get("models")
    else:
        asked = [("search", words), ("sort", "downloads"), ("direction", "-1"), ("limit", limit)]
        query = urlencode([*asked, *(("expand[]", name) for name in _EXPANDED)])
        items, _ = api(place, f"{place.endpoint}/api/models?{query}", cancelled)
    if not isinstance(items, list):
        raise broken(place, "it does not list what it found")
    found = [_found(hub, item) for item in items if isinstance(item, dict) and HUB_ID.fullmatch(_text(item.get("id")))]
    return tuple(sorted(found[:limit], key=lambda one: bool(one.problem)))


_EXPANDED = ("downloads", "likes", "lastModified", "gated", "tags", "pipeline_tag", "safetensors", "gguf")


def _found(hub: str, item: Mapping[str, Any]) -> Found:
    tags = {tag.casefold() for tag in _tags(item)}
    counted = [item.get(kind) for kind in ("safetensors", "gguf")]
    numbers = [each.get("total") for each in counted if isinstance(each, dict)]
    return Found(
        _text(item["id"]),
        hub,
        _count(item.get("downloads")),
        _count(item.get("likes")),
        _text(item.get("lastModified") or item.get("last_modified")),
        _licence(None, item),
        bool(item.get("gated")),
        next((float(number) for number in numbers if type(number) is int and number > 0), None),
        _problem(tags, _text(item.get("pipeline_tag"))) if hub == HUGGINGFACE else "",
    )


def _problem(tags: set[str], task: str) -> str:
    for tag, why in _NO_MODEL.items():
        if tag in tags and (tag not in ("onnx", "openvino", "pytorch") or not tags.intersection(_RUNS)):
            return f"Nothing here can run: {why}."
    if task not in _TEXT_TASKS:
        return f"Nothing here can run: it is made for {task.replace('-', ' ')}, not for writing text."
    return ""

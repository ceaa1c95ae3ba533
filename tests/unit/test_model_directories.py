"""Models that lie elsewhere: in other folders of the user's and in other programs' stores, whole or odd."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint import library, model_directories
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.library import LibraryEntry, look_around, resolve, show, verify
from engine.checkpoint.manifest import MANIFEST_NAME
from engine.checkpoint.model_directories import (
    Found,
    add_model_folder,
    drop_model_folder,
    find_models,
    model_folders,
    origin_of,
)
from engine.checkpoint.names import check_new_name, folder_name, name_of
from engine.checkpoint.packed import write_safetensors
from engine.common.errors import ErrorCode
from engine.common.paths import config_dir, models_dir
from tests.refusals import refused
from tests.tiny_checkpoint import CONFIG, write_tiny_checkpoint
from tests.tiny_gguf import write_mixtral

COMMIT, OLDER = "0123456789" * 4, "abcdef0123" * 4


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, whose other programs' models are looked for."""
    for name in ("SWITCHYARD_FIND_MODELS", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    return home


def _entries() -> dict[str, LibraryEntry]:
    listing = look_around()
    assert listing.problems == ()
    return {entry.name: entry for entry in listing.entries}


def _hub_model(home: Path, name: str = "models--org--Tiny-MoE", commit: str = COMMIT, *, links: bool = True) -> Path:
    """A snapshot of the hub's library; without links as it is on Windows."""
    repository = home / ".cache" / "huggingface" / "hub" / name
    snapshot = repository / "snapshots" / commit
    write_tiny_checkpoint(snapshot)
    if links:
        (repository / "blobs").mkdir()
        for file in list(snapshot.iterdir()):
            blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            file.rename(blob)
            file.symlink_to(blob)
    return snapshot


def _ollama_model(store: Path, place: str = "registry.ollama.ai/library/tiny/latest") -> Path:
    """A model of Ollama's; returns its manifest."""
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    file = write_mixtral(store / "blobs" / "new.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    blob = file.rename(file.with_name(f"sha256-{digest}"))
    manifest = store / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": blob.stat().st_size,
    }
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}", "size": 10}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer, template]}))
    return manifest


def test_every_program_has_its_place(home: Path) -> None:
    _hub_model(home)
    lm_studio = home / ".lmstudio" / "models" / "maker" / "Tiny-GGUF"
    lm_studio.mkdir(parents=True)
    write_mixtral(lm_studio / "Tiny-Q4_K_M.gguf")
    (lm_studio / "mmproj-Tiny.gguf").write_bytes(b"GGUF")
    _ollama_model(home / ".ollama" / "models")
    jan = home / ".local" / "share" / "Jan" / "data" / "llamacpp" / "models" / "maker" / "Jan-tiny"
    gpt4all = home / ".local" / "share" / "nomic.ai" / "GPT4All"
    for folder, name in ((jan, "model.gguf"), (gpt4all, "Falcon.gguf"), (gpt4all, "incomplete-Other.gguf")):
        folder.mkdir(parents=True, exist_ok=True)
        write_mixtral(folder / name)
    entries = _entries()
    assert {name: entry.origin for name, entry in entries.items()} == {
        "org/Tiny-MoE": "hub cache",
        "Tiny-Q4_K_M": "LM Studio",
        "tiny:latest": "Ollama",
        "Jan-tiny": "Jan",
        "Falcon": "GPT4All",
    }
    assert all(entry.is_in_place and not entry.problem for entry in entries.values())
    assert entries["Tiny-Q4_K_M"].precision_words == "Q4_K_M"
    assert entries["org/Tiny-MoE"].precision_words == "bf16"
    for name, entry in entries.items():
        assert resolve(name) == entry.path
        assert (show(name).name, show(name).origin) == (name, entry.origin)
        assert (show(str(entry.path)).origin, origin_of(entry.path)) == (entry.origin, entry.origin)


def test_a_file_without_an_ending_is_known_by_its_first_bytes(home: Path) -> None:
    _ollama_model(home / ".ollama" / "models")
    (blob,) = (home / ".ollama" / "models" / "blobs").iterdir()
    assert resolve("tiny:latest") == resolve(str(blob)) == blob
    assert name_of(blob) == "tiny:latest"
    assert show("TINY:latest").experts == 4
    assert find_shape("tiny:latest").name == "tiny:latest"
    assert verify("tiny:latest").checked == "sha256"
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    assert set(verify("tiny:latest").damaged) == {blob.name}
    blob.write_bytes(b"ELF" + content[3:])
    with refused(ErrorCode.MODEL_NOT_FOUND, "is a file"):
        resolve(str(blob))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("registry.ollama.ai/library/qwen3/30b", "qwen3:30b"),
        ("registry.ollama.ai/somebody/qwen3/30b", "somebody/qwen3:30b"),
        ("hf.co/org/Qwen-GGUF/Q4_K_M", "hf.co/org/Qwen-GGUF:Q4_K_M"),
    ],
)
def test_ollamas_names(home: Path, place: str, name: str) -> None:
    _ollama_model(home / ".ollama" / "models", place)
    assert list(_entries()) == [name]


def test_an_ollama_store_elsewhere(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    _ollama_model(tmp_path / "store")
    assert list(_entries()) == ["tiny:latest"]


def _layers(digest: object, size: object = 4, kind: object = "application/vnd.ollama.image.model") -> object:
    return {"layers": [{"mediaType": kind, "digest": digest, "size": size}]}


@pytest.mark.parametrize(
    "content",
    [
        _layers("sha256:../../outside.gguf"),
        _layers("../../../../outside.gguf"),
        _layers(f"sha256:{'0' * 63}/"),
        _layers(f"sha256:{'0' * 64}", 99),
        _layers(f"sha256:{'1' * 64}"),  # a link to a file outside
        _layers(f"sha256:{'2' * 64}"),  # absent
        _layers(None),
        _layers(["sha256:"]),
        {"layers": {}},
        {"layers": [1]},
        {"layers": []},
        [],
        "x",
        None,
        {"layers": [*_layers(f"sha256:{'0' * 64}")["layers"], {"mediaType": "application/vnd.ollama.image.adapter"}]},  # type: ignore[index]
    ],
)
def test_ollama_manifests_lead_nowhere_else(home: Path, tmp_path: Path, content: object) -> None:
    store = home / ".ollama" / "models"
    manifest = _ollama_model(store)
    (tmp_path / "outside.gguf").write_bytes(b"GGUF")
    (store / "blobs" / f"sha256-{'0' * 64}").write_bytes(b"GGUF")
    (store / "blobs" / f"sha256-{'1' * 64}").symlink_to(tmp_path / "outside.gguf")
    manifest.write_text(json.dumps(content))
    assert _entries() == {}


@given(content=st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_ollama_manifests_of_any_content(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    store = tmp_path_factory.mktemp("store")
    manifest = store / "manifests" / "host" / "library" / "name" / "tag"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(content)
    assert list(model_directories._ollama(store, model_directories._Walk())) == []


@pytest.mark.parametrize("links", [True, False])
def test_the_hubs_cache(home: Path, links: bool) -> None:
    snapshot = _hub_model(home, links=links)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    newer = write_tiny_checkpoint(snapshot.with_name(OLDER))
    assert _entries()["org/Tiny-MoE"].path == snapshot
    assert resolve("org/tiny-moe") == snapshot
    assert name_of(snapshot) == "org/Tiny-MoE"
    (refs / "main").write_text(OLDER)
    assert _entries()["org/Tiny-MoE"].path == newer
    verdict = verify(str(snapshot))
    assert (verdict.checked, verdict.damaged) == ("sha256" if links else "headers", {})


def test_what_a_cache_lacks_is_left_out(home: Path) -> None:
    cut = _hub_model(home)
    (cut / "model.safetensors").resolve().unlink()  # its link leads nowhere: still being fetched
    shards = write_tiny_checkpoint(cut.parents[2] / "models--org--two" / "snapshots" / COMMIT, shards=2)
    (shards / "model-00002-of-00002.safetensors").unlink()
    only_config = cut.parents[2] / "models--org--three" / "snapshots" / COMMIT
    only_config.mkdir(parents=True)
    (only_config / "config.json").write_text("{}")
    split = cut.parents[2] / "models--org--four" / "snapshots" / COMMIT / "Q4"
    split.mkdir(parents=True)
    write_mixtral(split / "big-00001-of-00002.gguf")
    write_mixtral(split / "odd-00001-of-00000.gguf")
    assert _entries() == {}
    write_mixtral(split / "big-00002-of-00002.gguf")
    assert [(entry.name, entry.path.name) for entry in _entries().values()] == [("big", "big-00001-of-00002.gguf")]


@pytest.mark.parametrize(
    ("classes", "is_shown"),
    [
        (["Qwen3MoeForCausalLM"], True),
        (["GPT2LMHeadModel"], True),
        (["BertModel"], False),
        (["Qwen3ForSequenceClassification"], False),
        ([], True),
        (None, True),
        (7, True),
    ],
)
def test_a_cache_shows_language_models_only(home: Path, classes: object, is_shown: bool) -> None:
    config = _hub_model(home, links=False) / "config.json"
    config.write_text(json.dumps({**CONFIG, "architectures": classes}))
    assert bool(_entries()) == is_shown


def test_programs_that_keep_models_elsewhere(home: Path, tmp_path: Path) -> None:
    (home / ".lmstudio").mkdir()
    for key, content in (
        ("downloadsFolder", str(tmp_path / "theirs")),
        ("downloadsFolder", 7),
        ("downloadsFolder", "/a\0b"),
        ("other", ""),
    ):
        (home / ".lmstudio" / "settings.json").write_text(json.dumps({key: content}))
        (tmp_path / "theirs").mkdir(exist_ok=True)
        write_mixtral(tmp_path / "theirs" / "a.gguf")
        assert list(_entries()) == (["a"] if content == str(tmp_path / "theirs") else [])


@pytest.mark.skipif(sys.platform == "win32", reason="where these files are on other systems")
@pytest.mark.parametrize(
    ("file", "text", "inside", "origin"),
    [
        (".lmstudio-home-pointer", "{0}/théirs\n", "models/maker/model", "LM Studio"),
        (".config/nomic.ai/GPT4All.ini", "[General]\nmodelPath={0}/th\\xe9irs/\nserverChat=true\n", "", "GPT4All"),
        (".local/share/jan.ai.app/settings.json", '{{"data_folder": "{0}/théirs"}}', "llamacpp/models/a", "Jan"),
    ],
)
def test_where_other_programs_say_that_their_models_are(
    home: Path, tmp_path: Path, file: str, text: str, inside: str, origin: str
) -> None:
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    (home / file).write_text(text.format(tmp_path), encoding="utf-8")
    (tmp_path / "théirs" / inside).mkdir(parents=True)
    write_mixtral(tmp_path / "théirs" / inside / "a.gguf")
    assert {name: entry.origin for name, entry in _entries().items()} == {"a": origin}
    for damaged in ("", "{", "\0", "modelPath=\\xd800", "modelPath=relative", "x" * 3_000_000):
        (home / file).write_text(damaged)
        assert _entries() == {}


def test_other_programs_are_left_alone_if_so_wanted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_model(home)
    monkeypatch.setenv("SWITCHYARD_FIND_MODELS", "0")
    assert _entries() == {}


def test_the_users_folders(tmp_path: Path) -> None:
    mine = tmp_path / "disk"
    mine.mkdir()
    write_mixtral(mine / "loose.gguf")
    write_tiny_checkpoint(mine / "deep" / "er" / "Tiny")
    ours = write_tiny_checkpoint(mine / "downloaded")
    (ours / MANIFEST_NAME).write_text(json.dumps({"source": "a hub", "files": []}))
    assert add_model_folder(mine) == add_model_folder(mine) == model_folders() == (models_dir(), mine)
    entries = _entries()
    assert {name: entry.origin for name, entry in entries.items()} == {
        "loose": "folder",
        "Tiny": "folder",
        "downloaded": "switchyard",
    }
    assert resolve("Tiny") == mine / "deep" / "er" / "Tiny"
    assert {origin_of(entry.path) for entry in entries.values()} == {"folder", "switchyard"}
    with refused(ErrorCode.INVALID_REQUEST, "lies in"):
        add_model_folder(mine / "deep")
    with refused(ErrorCode.INVALID_REQUEST, "not a folder"):
        add_model_folder(mine / "loose.gguf")
    with refused(ErrorCode.INVALID_REQUEST, "stays in the list"):
        drop_model_folder(models_dir())
    assert drop_model_folder(mine) == (models_dir(),)
    with refused(ErrorCode.INVALID_REQUEST, "not a model folder"):
        drop_model_folder(mine)
    assert _entries() == {}
    assert (mine / "loose.gguf").exists()


def test_folders_added_at_once_are_all_added(tmp_path: Path) -> None:
    folders = [tmp_path / f"disk {number}" for number in range(8)]
    for folder in folders:
        folder.mkdir()
    threads = [threading.Thread(target=add_model_folder, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(model_folders()) == {models_dir(), *folders}


def test_a_folder_that_has_gone_or_cannot_be_read(tmp_path: Path) -> None:
    gone, shut = tmp_path / "gone", tmp_path / "shut"
    for folder in (gone, shut):
        folder.mkdir()
        add_model_folder(folder)
    gone.rmdir()
    shut.rmdir()
    shut.write_text("now a file")
    write_tiny_checkpoint(models_dir() / "here")
    listing = look_around()
    assert [entry.name for entry in listing.entries] == ["here"]
    assert [str(folder) in problem for folder, problem in zip((gone, shut), listing.problems, strict=True)] == [
        True
    ] * 2


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"folders": 3}', '{"folders": [1, "relative", "a\\u0000b", null]}', "\xff"]
)
def test_a_damaged_list_of_folders_is_none(content: str) -> None:
    config_dir().mkdir(parents=True)
    (config_dir() / "model-folders.json").write_text(content, encoding="latin-1")
    assert model_folders() == (models_dir(),)


def test_links_in_circles_end(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    write_tiny_checkpoint(folder / "one")
    (folder / "one" / "again").symlink_to(folder, target_is_directory=True)
    (folder / "self").symlink_to(folder / "self")
    (folder / "also").symlink_to(folder / "one", target_is_directory=True)
    add_model_folder(folder)
    assert len(_entries()) == 1


def test_search_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "disk"
    write_tiny_checkpoint(folder / "/".join("abcdefghij") / "too-deep")
    for number in range(30):
        (folder / f"{number}.txt").write_text("")
    add_model_folder(folder)
    assert _entries() == {}
    monkeypatch.setattr(model_directories, "_MOST_ENTRIES", 20)
    assert len(look_around().problems) == 1


def test_a_folder_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(models_dir() / "here")
    slow = tmp_path / "network"
    write_tiny_checkpoint(slow / "first")
    write_tiny_checkpoint(slow / "second")
    add_model_folder(slow)
    answers = threading.Event()
    searches: list[Path] = []

    def tree(folder: Path, origin: str, walk: model_directories._Walk) -> Iterator[Found]:
        searches.append(folder)
        yield Found("first", slow / "first", origin)
        answers.wait()
        yield Found("second", slow / "second", origin)

    monkeypatch.setattr(model_directories, "_tree", tree)
    try:
        while len((listing := look_around(within_s=0.1)).entries) < 2:
            pass
        assert [entry.name for entry in listing.entries] == ["here", "first"]
        assert len(listing.problems) == 1
        assert str(slow) in listing.problems[0]
        assert look_around(within_s=60, cancelled=lambda: True).problems != ()
        assert searches == [slow]  # one search, however often it is asked
    finally:
        answers.set()
    listing = look_around(within_s=60)
    assert ([entry.name for entry in listing.entries], listing.problems) == (["here", "first", "second"], ())


def test_a_name_is_one_models_only(home: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(models_dir() / "Same")
    for number, folder in enumerate((tmp_path / "disk" / "a" / "same", tmp_path / "disk" / "b" / "SAME")):
        write_tiny_checkpoint(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": number + 1}))
    add_model_folder(tmp_path / "disk")
    lm_studio = home / ".lmstudio" / "models"
    lm_studio.mkdir(parents=True)
    write_mixtral(lm_studio / "Same.gguf")
    entries = _entries()
    assert list(entries) == ["Same", "same (folder)", "SAME (folder 2)", "Same (LM Studio)"]
    assert [resolve(name) for name in entries] == [entry.path for entry in entries.values()]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen3-30B-A3B-Q4_K_M", "Q4_K_M"),
        ("model_UD-q4_k_xl", "UD-Q4_K_XL"),
        ("gpt-oss-20b-MXFP4", "MXFP4"),
        ("a-IQ4_XS-00001-of-00001", "IQ4_XS"),
    ],
)
def test_a_mixture_of_precisions_has_the_name_that_its_maker_gave_it(tmp_path: Path, name: str, words: str) -> None:
    assert show(str(write_mixtral(tmp_path / f"{name}.gguf"))).precision_words == words


@given(st.text() | st.sampled_from(["con", "Starter", "nul.gguf", "_x", "x." * 60, "CON-", "é", ""]))
def test_any_name_makes_a_name_for_the_library(name: str) -> None:
    check_new_name(folder_name(name))


@given(st.lists(st.tuples(st.sampled_from(["a", "A", "a (folder)", "a (folder 2)", "ß", "SS", ""]), st.integers(0, 9))))
def test_names_are_given_once(models: list[tuple[str, int]]) -> None:
    found = [Found(name, Path(str(number)), "folder") for name, number in models]
    named = model_directories._with_own_names(found)
    assert [model.path for model in named] == list(dict.fromkeys(model.path for model in found))
    assert len({model.name.casefold() for model in named}) == len(named)
    assert all(model.name for model in named)


NAMES = ["with space", "Grüße", "模型-🦙", "e\u0301", "x" * 240, "-dash", "a'b\"c", "tab\tname", "[red]", "%s"]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "disk"
    write_tiny_checkpoint(folder / name)
    add_model_folder(folder)
    (entry,) = _entries().values()
    assert resolve(entry.name) == entry.path
    assert show(entry.name) == entry


def test_an_undecodable_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"disk\xff")
    write_tiny_checkpoint(folder / os.fsdecode(b"broken\xff"))
    add_model_folder(folder)
    (entry,) = _entries().values()
    entry.name.encode()
    assert resolve(entry.name) == entry.path
    assert show(entry.name).family == "mixtral"


def test_a_vast_config_is_not_read(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(models_dir() / "vast")
    with (folder / "config.json").open("wb") as file:
        file.truncate(300 * 2**20)
    (entry,) = _entries().values()
    assert entry.problem


def test_one_model_that_cannot_be_described_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(models_dir() / "fine")
    write_tiny_checkpoint(models_dir() / "odd")
    read = library._read

    def fail(path: Path) -> LibraryEntry:
        if path.name == "odd":
            raise ArithmeticError
        return read(path)

    monkeypatch.setattr(library, "_read", fail)
    entries = _entries()
    assert {name: bool(entry.problem) for name, entry in entries.items()} == {"fine": False, "odd": True}


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models whose files are read, in order."""
    seen: list[Path] = []
    read: Callable[[Path], LibraryEntry] = library._read

    def noting(path: Path) -> LibraryEntry:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(library, "_read", noting)
    monkeypatch.setattr(library, "_descriptions", library._Descriptions())
    return seen


def test_what_a_model_can_do_is_kept_until_more_is_known_of_models(
    readings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files that people put there, whatever the catalogue says of models."""
    folder = write_tiny_checkpoint(models_dir() / "tiny")
    config = CONFIG | {"model_type": "qwen3_vl_moe", "text_config": CONFIG, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {"model.visual.a.weight": np.zeros((3, 4), np.uint16)})
    template = "{% if tools %}{{ tools }}{% endif %}<think></think>"
    (folder / "chat_template.jinja").write_text(template)
    encoder = write_tiny_checkpoint(models_dir() / "encoder")
    monkeypatch.setattr(library, "embedding_of", lambda path: object() if path == encoder else None)
    able = {entry.name: (entry.sees, entry.calls_tools, entry.thinks, entry.embeds) for entry in look_around().entries}
    assert able == {"tiny": (True, True, True, False), "encoder": (False, False, False, True)}
    for version, is_read in ((library._VERSION, False), ([6, "another"], True)):
        monkeypatch.setattr(library, "_descriptions", library._Descriptions())
        monkeypatch.setattr(library, "_VERSION", version)
        readings.clear()
        found = {
            entry.name: (entry.sees, entry.calls_tools, entry.thinks, entry.embeds) for entry in look_around().entries
        }
        assert (found, bool(readings)) == (able, is_read)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "models": {"x": {"state": 1}}}'])
def test_a_damaged_cache_is_not_used(readings: list[Path], content: str) -> None:
    write_tiny_checkpoint(models_dir() / "tiny")
    library._descriptions_file().parent.mkdir(parents=True)
    library._descriptions_file().write_text(content)
    assert look_around().entries[0].family == "mixtral"
    assert find_models()[1] == []

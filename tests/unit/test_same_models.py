"""A model that lies in several stores is listed once, with all its places; what only resembles it is not."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from engine.checkpoint.library import LibraryEntry, content_keys, listed_once, look_around
from engine.checkpoint.manifest import Manifest, describe_files, write_manifest
from engine.checkpoint.ownership import remove
from engine.checkpoint.synthetic import make_synthetic
from engine.cli import main
from engine.common.paths import models_dir
from tests.tiny_gguf import write_model


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_synthetic("synthetic:qwen3-moe-tiny?layers=2")
    return write_model(folder, tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf", "qwen3moe", quantised="Q8_0")


@pytest.fixture
def lm_studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: Path) -> Path:
    """A copy in another program's store."""
    home = tmp_path / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setenv("SWITCHYARD_FIND_MODELS", "1")
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    copy = home / ".lmstudio" / "models" / "org" / "tiny" / gguf.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(gguf.read_bytes())
    return copy


def _in_library(gguf: Path, name: str, *, by_link: bool = False) -> Path:
    """As an import leaves it."""
    folder = models_dir() / name
    folder.mkdir(parents=True)
    (os.link if by_link else shutil.copyfile)(gguf, folder / gguf.name)
    write_manifest(folder, Manifest("imported", describe_files(folder)))
    return folder


def test_a_copy_in_another_store_is_named_and_stays(
    lm_studio: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = _in_library(gguf, "tiny-Q8_0")
    (entry,) = look_around().entries
    assert (entry.path, entry.origin, entry.also) == (own, "switchyard", (("LM Studio", lm_studio),))
    assert main(["models", "list"]) == 0
    assert "also in LM Studio" in capsys.readouterr().out
    assert main(["models", "remove", "tiny-Q8_0", "--permanently", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copies_left"] == [str(lm_studio)]
    (left,) = look_around().entries
    assert (left.path, left.origin, left.also) == (lm_studio, "LM Studio", ())


def test_one_that_differs_in_a_byte_is_another(lm_studio: Path, gguf: Path) -> None:
    _in_library(gguf, "tiny-Q8_0")
    content = bytearray(lm_studio.read_bytes())
    content[-1] ^= 1
    lm_studio.write_bytes(content)
    assert len(look_around().entries) == 2
    lm_studio.write_bytes(gguf.read_bytes())
    assert len(look_around().entries) == 1
    lm_studio.rename(lm_studio.with_name("other-Q8_0.gguf"))  # of another name: nobody has compared all its bytes
    assert len(look_around().entries) == 2


def test_a_link_is_the_same_file_whatever_its_name(lm_studio: Path, gguf: Path) -> None:
    own = _in_library(lm_studio, "mine", by_link=True)
    lm_studio.rename(lm_studio.with_name("other.gguf"))
    assert os.stat(own / gguf.name).st_nlink == 2
    assert len(look_around().entries) == 1
    assert remove("mine", permanently=True).bytes > 0
    assert look_around().entries[0].origin == "LM Studio"


def test_names_that_are_checksums_tell_it_without_reading(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    digest = hashlib.sha256(content).hexdigest()
    blob, link = tmp_path / f"sha256-{digest}", tmp_path / "blobs" / digest
    link.parent.mkdir()
    for file in (blob, link):
        file.write_bytes(content)
    (tmp_path / "model.safetensors").symlink_to(link)
    one = content_keys([blob], tmp_path, None)
    assert one == content_keys([tmp_path / "model.safetensors"], tmp_path, None) == (f"sha256:{digest}",)
    assert content_keys([], tmp_path, None) == content_keys([tmp_path / "gone"], tmp_path, None) == ()


def test_whoever_is_the_same_as_two_makes_them_one() -> None:
    def entry(name: str, origin: str, *content: str, problem: str = "") -> LibraryEntry:
        return LibraryEntry(name, Path("/m") / name, origin=origin, content=content, problem=problem)

    found = listed_once(
        [
            entry("a", "LM Studio", "one"),
            entry("b", "Ollama", "two"),
            entry("c", "folder", "one", "two"),
            entry("d", "Jan", "one", problem="damaged"),
            entry("e", "Jan"),
            entry("f", "Jan"),
        ]
    )
    assert [one.name for one in found] == ["c", "d", "e", "f"]
    assert found[0].also == (("LM Studio", Path("/m/a")), ("Ollama", Path("/m/b")))

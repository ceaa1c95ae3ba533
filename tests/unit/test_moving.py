"""Models that are moved to another disk, copied out, put into the trash: whole at every moment, and never in use."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint import moving
from engine.checkpoint.importing import import_model
from engine.checkpoint.library import (
    converted_path,
    exclusive_use,
    look_around,
    note_use,
    read_usage,
    reading,
    resolve,
    show,
    verify,
)
from engine.checkpoint.manifest import MANIFEST_NAME, Manifest, describe_files, write_manifest
from engine.checkpoint.model_directories import add_model_folder, model_folders
from engine.checkpoint.moving import export, move
from engine.checkpoint.ownership import remove
from engine.checkpoint.shards import fingerprint
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import data_dir, models_dir
from tests.combinations import DAY
from tests.refusals import refused
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.tiny_gguf import write_mixtral


@pytest.fixture
def other_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder can be renamed to another: as between disks."""
    rename = Path.rename

    def between_folders(source: Path, target: Path) -> Path:
        if source.parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", between_folders)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model of the library."""
    return import_model(write_tiny_checkpoint(tmp_path / "source", shards=2), "tiny").path


def _bank(model: Path) -> Path:
    bank = converted_path(model, "bf16")
    bank.parent.mkdir(parents=True, exist_ok=True)
    bank.write_bytes(b"prepared")
    return bank


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("to_other_disk", [False, True])
def test_a_model_moves_with_all_that_is_known_of_it(
    tiny: Path, tmp_path: Path, to_other_disk: bool, request: pytest.FixtureRequest
) -> None:
    if to_other_disk:
        request.getfixturevalue("other_disk")
    _bank(tiny)
    note_use(tiny, "cpu", 12.5, 100)
    before, mark = _files(tiny), fingerprint(tiny)
    heard: list[tuple[int, int]] = []
    entry = move("tiny", tmp_path / "disk", on_progress=lambda done, total: heard.append((done, total)))
    assert (entry.name, entry.path, entry.origin) == ("tiny", tmp_path / "disk" / "tiny", "switchyard")
    assert (entry.converted_bytes, entry.measured_tokens_per_s) == (8, 12.5)
    assert model_folders() == (models_dir(), tmp_path / "disk")
    assert resolve("tiny") == entry.path
    assert _files(entry.path) == before
    assert fingerprint(entry.path) == mark  # its prepared experts are still its own
    assert list(models_dir().iterdir()) == []
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["tiny"]
    assert verify("tiny").damaged == {}
    if to_other_disk:
        assert heard[-1][0] == heard[-1][1] > 0
    assert move(str(entry.path), models_dir()).path == tiny  # as the window names it
    assert _files(tiny) == before


def test_a_model_that_was_put_into_the_library_by_hand_moves_too(tmp_path: Path, other_disk: None) -> None:
    folder = write_tiny_checkpoint(models_dir() / "mine")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "note").write_text("kept")
    entry = move("mine", tmp_path / "disk")
    assert (entry.path / "deep" / "er" / "note").read_text() == "kept"
    assert (entry.origin, folder.exists()) == ("switchyard", False)


def test_a_move_is_refused_and_changes_nothing(tiny: Path, tmp_path: Path, other_disk: None) -> None:
    before = _files(tiny)
    disk = tmp_path / "disk"
    (disk / "TINY").mkdir(parents=True)
    lm_studio = write_tiny_checkpoint(tmp_path / "theirs" / "linked")
    (models_dir() / "linked").symlink_to(lm_studio, target_is_directory=True)
    for name, folder, code in (
        ("tiny", disk, ErrorCode.INVALID_REQUEST),  # the name is taken where case does not count
        ("tiny", models_dir(), ErrorCode.INVALID_REQUEST),
        ("tiny", tiny / "config.json", ErrorCode.INVALID_REQUEST),
        ("tiny", tmp_path / "no" / "such", ErrorCode.INVALID_REQUEST),
        ("linked", disk, ErrorCode.INVALID_REQUEST),
        ("nothing", disk, ErrorCode.MODEL_NOT_FOUND),
        (str(tmp_path / "source"), disk, ErrorCode.INVALID_REQUEST),
    ):
        with refused(code):
            move(name, folder)
    with pytest.raises(RequestCancelled):
        move("tiny", tmp_path / "cancelled", cancelled=lambda: True)
    assert list((tmp_path / "cancelled").iterdir()) == []
    assert _files(tiny) == before


def test_a_damaged_model_is_not_moved(tiny: Path, tmp_path: Path, other_disk: None) -> None:
    (tiny / "tokenizer_config.json").write_text('{"a": 1}')
    with refused(ErrorCode.CHECKPOINT_DAMAGED):
        move("tiny", tmp_path / "disk")
    assert (tiny / "tokenizer_config.json").exists()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_move_that_fails_keeps_the_prepared_experts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, rename = _bank(tiny), Path.rename
    note_use(tiny, "cpu", 12.5, 100)

    def fails(source: Path, target: Path) -> Path:
        if source == tiny:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(EngineError):
        move("tiny", tmp_path / "disk")
    assert bank.exists()
    assert read_usage(tiny).tokens_per_s == (12.5,)


def test_a_copy_that_went_wrong_is_noticed(
    tiny: Path, tmp_path: Path, other_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_file = moving.copy_file

    def badly(file: Path, copy: Path, advance: Callable[[int], None]) -> str:
        digest = copy_file(file, copy, advance)
        content = bytearray(copy.read_bytes())
        content[-1] ^= 1
        copy.write_bytes(content)
        return digest

    monkeypatch.setattr(moving, "copy_file", badly)
    with refused(ErrorCode.CHECKPOINT_DAMAGED):
        move("tiny", tmp_path / "disk")
    assert verify("tiny").damaged == {}
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_copied(
    tiny: Path, tmp_path: Path, other_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, _needed: int) -> None:
        raise EngineError(ErrorCode.DISK_FULL, "There is no room.")

    monkeypatch.setattr(moving, "require_space", full)
    with refused(ErrorCode.DISK_FULL):
        move("tiny", tmp_path / "disk")
    assert verify("tiny").damaged == {}


_KILLED = """
import errno, itertools, os, shutil, sys
from pathlib import Path

home, first, step, is_other_disk = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
os.environ["SWITCHYARD_HOME"] = str(home / "live")
from engine.checkpoint import moving
from engine.checkpoint.importing import import_model
from engine.checkpoint.library import converted_path, look_around
from engine.checkpoint.manifest import damaged_files, read_manifest
from engine.checkpoint.library import note_use, read_usage
from engine.common.errors import EngineError
from engine.common.paths import models_dir

if is_other_disk:
    moving._renamed = lambda source, target: False
model = import_model(home / "source", "tiny").path
note_use(model, "cpu", 12.5, 100)
banks = [converted_path(model, precision) for precision in ("bf16", "int4")]
banks[0].parent.mkdir(parents=True)
for bank in banks:
    bank.write_bytes(b"prepared")
os.rename(home / "live", home / "fresh")
disk, place = home / "disk", models_dir() / "tiny"

def in_a_process(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except EngineError as error:
            os.write(2, error.message.encode())
            os._exit(2)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def killed_at(number):
    def body():
        calls = itertools.count()
        watched = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime", "os.chmod")
        def hook(event, _arguments):
            if event in watched and next(calls) == number:
                os._exit(9)
        sys.addaudithook(hook)
        moving.move("tiny", disk)
    return body

def is_whole(folder):
    manifest = read_manifest(folder)
    return manifest is not None and not damaged_files(folder, manifest)

for number in itertools.count(first, step):
    for folder in (home / "live", disk):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "fresh", home / "live")
    disk.mkdir()
    code = in_a_process(killed_at(number))
    assert code in (0, 9), (number, code)
    whole = [folder for folder in (place, disk / "tiny") if folder.exists()]
    assert whole and all(map(is_whole, whole)), (number, whole)
    assert in_a_process(lambda: look_around()) == 0
    again = in_a_process(lambda: moving.move("tiny", disk))  # refused only where it was moved already
    assert again == 0 or (again == 2 and not place.exists()), (number, again)
    assert is_whole(disk / "tiny") and not place.exists(), number
    there = {converted_path(disk / "tiny", precision) for precision in ("bf16", "int4")}
    assert set(banks[0].parent.iterdir()) == there, number
    assert read_usage(disk / "tiny").tokens_per_s == (12.5,), number
    left = [file.name for folder in (models_dir(), disk) for file in folder.iterdir() if file.name != "tiny"]
    assert left == [], (number, left)
    if code == 0:
        print(number)
        break
"""


def _killed(tmp_path: Path, step: int, *, is_other_disk: bool = True) -> int:
    """Kills a move at one of so many of its steps, another one each day; the last that was tried."""
    write_tiny_checkpoint(tmp_path / "source", shards=2)
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(DAY % step), str(step), str(is_other_disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills copies of itself")
def test_a_killed_move_leaves_a_whole_model(tmp_path: Path) -> None:
    assert _killed(tmp_path, 18) > 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills copies of itself")
def test_a_killed_renaming_leaves_no_prepared_experts_behind(tmp_path: Path) -> None:
    assert _killed(tmp_path, 6, is_other_disk=False) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_other_disk", [False, True])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills copies of itself")
def test_a_move_killed_at_every_moment_leaves_a_whole_model(tmp_path: Path, is_other_disk: bool) -> None:
    assert _killed(tmp_path, 1, is_other_disk=is_other_disk) > 10


def test_copies_of_any_model(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with refused(ErrorCode.INVALID_REQUEST):
        export("tiny", out)
    out.mkdir()
    assert _files(export("tiny", out)) == _files(tiny)
    with refused(ErrorCode.INVALID_REQUEST):
        export("tiny", out)
    with pytest.raises(RequestCancelled):
        export(str(tmp_path / "source"), out, cancelled=lambda: True)
    blob = write_mixtral(tmp_path / "blob.gguf").rename(tmp_path / "sha256-of a blob")
    copy = export(str(blob), out)
    assert [file.suffix for file in copy.iterdir() if file.name != MANIFEST_NAME] == [".gguf"]
    assert verify(str(copy)).damaged == {}
    assert len(list(out.iterdir())) == 2


@pytest.fixture
def trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where removed models go."""
    folder = tmp_path / "trash"
    folder.mkdir()
    monkeypatch.setattr("send2trash.send2trash", lambda path: Path(path).rename(folder / Path(path).name))
    return folder


def test_a_removed_model_lies_in_the_trash(tiny: Path, trash: Path) -> None:
    bank, before = _bank(tiny), _files(tiny)
    note_use(tiny, "cpu")
    size = show("tiny").bytes_on_disk
    assert remove("tiny").bytes == size + 8
    assert _files(trash / "tiny") == before
    assert not bank.exists()
    assert read_usage(tiny).last_used is None
    assert look_around().entries == ()


def test_without_a_trash_it_stays(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from send2trash import TrashPermissionError

    def none(path: Path) -> None:
        raise TrashPermissionError(str(path))

    monkeypatch.setattr("send2trash.send2trash", none)
    with refused(ErrorCode.INVALID_REQUEST, "--permanently"):
        remove("tiny")
    assert verify("tiny").damaged == {}


def test_of_a_folder_with_other_things_only_the_model_is_removed(tmp_path: Path, trash: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "disk")
    other = write_mixtral(folder / "loose.gguf")
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.png").write_bytes(b"cat")
    write_tiny_checkpoint(folder / "photos" / "alone")
    add_model_folder(folder)
    assert {entry.name for entry in look_around().entries} == {"disk", "loose", "alone"}
    remove("loose")
    assert not other.exists()
    remove("alone")
    assert {path.name for path in folder.rglob("*")} == {
        "photos",
        "cat.png",
        "config.json",
        "tokenizer_config.json",
        "model.safetensors",
    }
    remove("disk")
    assert {path.name for path in folder.rglob("*")} == {"photos", "cat.png"}


_OTHERS = ("taxes.pdf", "passwords.txt", "accounts.json", "notes.md", "README.md", "license.txt", "lora.safetensors")


@pytest.mark.parametrize("model", ["alone", "with an index", "of one odd name", "damaged", "with a record"])
def test_what_lies_beside_a_model_is_neither_removed_nor_copied(tmp_path: Path, model: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "disk" / "Downloads", shards=1 + (model == "with an index"))
    others = set(_OTHERS)
    if model == "of one odd name":
        (folder / "model.safetensors").rename(folder / "gptq-4bit.safetensors")
        others.remove("lora.safetensors")
    elif model == "damaged":
        (folder / "model.safetensors").write_bytes(b"cut")
    elif model == "with a record":
        write_manifest(folder, Manifest("a hub", describe_files(folder)))
    for name in others:
        (folder / name).write_bytes(b"mine")
    write_mixtral(folder / "other.gguf")
    add_model_folder(tmp_path / "disk")
    out = tmp_path / "out"
    out.mkdir()
    if model != "damaged":
        copied = {file.name for file in export("Downloads", out).iterdir()}
        assert not copied & {"taxes.pdf", "passwords.txt", "accounts.json", "notes.md", "lora.safetensors"}
        assert "config.json" in copied
    assert remove("Downloads", permanently=True).bytes > 0
    assert {file.name for file in folder.iterdir()} == {*others, "other.gguf"}


def _put_by_hand(name: str = "by-hand") -> Path:
    """A model that somebody copied into the library's folder, without a record of its files."""
    return write_tiny_checkpoint(models_dir() / name)


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("other", ["notes.txt", ".hidden", "photos/cat.png", ".git/config", "link"])
def test_others_files_in_the_library_stay_when_the_model_goes(
    tmp_path: Path, trash: Path, other: str, has_record: bool
) -> None:
    folder = _put_by_hand()
    if has_record:
        write_manifest(folder, Manifest("a hub", describe_files(folder)))
    (folder / other).parent.mkdir(exist_ok=True)
    if other == "link":
        (tmp_path / "albums").mkdir()
        (folder / other).symlink_to(tmp_path / "albums", target_is_directory=True)
    else:
        (folder / other).write_bytes(b"mine")
    removed = remove("by-hand")
    assert (removed.others, removed.folder) == (1, folder)
    assert [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()] == [folder / other]
    assert "model.safetensors" in {file.name for file in trash.iterdir()}
    assert look_around().entries == ()  # what is left is no model, damaged or not


def test_a_folder_in_the_library_with_nothing_else_goes_whole(trash: Path) -> None:
    folder = _put_by_hand()
    (folder / "README.md").write_text("about the model")
    (folder / ".DS_Store").write_bytes(b"the system's")
    assert remove("by-hand").others == 0
    assert not folder.exists()
    assert [file.name for file in trash.iterdir()] == ["by-hand"]


def test_what_the_hubs_library_downloaded_is_the_models(trash: Path) -> None:
    folder = _put_by_hand()
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "picture.png", "other.gguf"):
        (notes / f"{name}.metadata").write_text("commit")
    (folder / "picture.png").write_bytes(b"of its card")
    assert remove("by-hand").others == 0
    assert not folder.exists()
    folder = _put_by_hand("two")
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    for name in ("picture.png", "other.gguf"):
        (folder / ".cache" / "huggingface" / "download" / f"{name}.metadata").write_text("commit")
        (folder / name).write_bytes(b"another")
    removed = remove(str(folder))
    assert removed.others == 1
    assert (folder / "other.gguf").is_file()  # weights, which may be another model's


def test_a_library_folder_whose_files_cannot_be_told_stays(trash: Path) -> None:
    folder = models_dir() / "papers"
    folder.mkdir(parents=True)
    (folder / "taxes.pdf").write_bytes(b"mine")
    with refused(ErrorCode.INVALID_REQUEST, "no record"):
        remove("papers")
    assert _files(folder) == {"taxes.pdf": b"mine"}
    (folder / "taxes.pdf").unlink()
    assert remove("papers").bytes == 0
    assert not folder.exists()


def test_a_move_to_another_disk_loses_nothing_beside_the_model(tmp_path: Path, other_disk: None) -> None:
    folder = _put_by_hand()
    (folder / "notes.txt").write_bytes(b"mine")
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    before = {path.name for path in folder.iterdir()}
    with refused(ErrorCode.INVALID_REQUEST, "broken is a link"):
        move("by-hand", tmp_path / "disk")
    assert {path.name for path in folder.iterdir()} - {MANIFEST_NAME} == before
    (folder / "broken").unlink()
    moved = move("by-hand", tmp_path / "disk").path
    assert (moved / "notes.txt").read_bytes() == b"mine"
    assert not folder.exists()


def test_what_is_written_during_a_move_stays_where_it_was(
    tiny: Path, tmp_path: Path, other_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = moving._put

    def written_meanwhile(staging: Path, source: Path, target: Path) -> None:
        put(staging, source, target)
        if staging != source:
            (tiny / "new.txt").write_bytes(b"mine")

    (tiny / "notes.txt").write_bytes(b"mine")
    monkeypatch.setattr(moving, "_put", written_meanwhile)
    moved = move("tiny", tmp_path / "disk").path
    assert (moved / "notes.txt").read_bytes() == b"mine"
    assert _files(tiny) == {"new.txt": b"mine"}
    assert {entry.path for entry in look_around().entries} == {moved}


def test_a_model_folder_with_a_record_in_it_is_not_removed_whole(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "disk")
    write_manifest(folder, Manifest("a hub", describe_files(folder)))
    (folder / "photos").mkdir()
    add_model_folder(folder)
    remove("disk", permanently=True)
    assert [file.name for file in folder.iterdir()] == ["photos"]


def test_a_folder_of_the_models_own_goes_with_it(tmp_path: Path, trash: Path) -> None:
    for name in ("mine", "downloaded"):
        folder = write_tiny_checkpoint(tmp_path / "disk" / name)
        (folder / "LICENSE").write_text("free")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    write_manifest(folder, Manifest("a hub", describe_files(folder)))
    add_model_folder(tmp_path / "disk")
    remove("mine", permanently=True)
    remove("downloaded")
    assert list((tmp_path / "disk").iterdir()) == []
    assert [file.name for file in trash.iterdir()] == ["downloaded"]


def test_a_model_whose_files_cannot_be_told_from_others_stays(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "disk" / "Downloads")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "two.safetensors").write_bytes(b"another")
    add_model_folder(tmp_path / "disk")
    before = _files(folder)
    for change in (lambda: remove("Downloads", permanently=True), lambda: export("Downloads", tmp_path)):
        with refused(ErrorCode.INVALID_REQUEST):
            change()
    assert _files(folder) == before


@pytest.fixture
def lm_studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of LM Studio, with one model; stores are not looked at."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    store = tmp_path / "home" / ".lmstudio" / "models"
    write_mixtral(write_tiny_checkpoint(store / "maker" / "Theirs") / "loose.gguf")
    return store


@pytest.mark.parametrize("finds_stores", ["0", "1"])
@pytest.mark.parametrize(
    "way", ["a link to the store", "a link to a maker", "the store itself", "what the store is in"]
)
def test_another_programs_model_in_a_model_folder_stays(
    lm_studio: Path, tmp_path: Path, way: str, finds_stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_FIND_MODELS", finds_stores)
    mine = tmp_path / "mine"
    mine.mkdir()
    if way.startswith("a link"):
        (mine / "link").symlink_to(lm_studio if "store" in way else lm_studio / "maker", target_is_directory=True)
    add_model_folder({"the store itself": lm_studio, "what the store is in": lm_studio.parent}.get(way, mine))
    before = sorted(lm_studio.rglob("*"))
    models = look_around().entries
    assert {"Theirs", "loose"} <= {entry.name for entry in models}
    for name in [text for entry in models for text in (entry.name, str(entry.path))]:
        for change in (lambda name: remove(name, permanently=True), lambda name: move(name, tmp_path / "disk")):
            with refused(ErrorCode.INVALID_REQUEST, "LM Studio"):
                change(name)
    assert sorted(lm_studio.rglob("*")) == before


def test_of_a_link_to_another_programs_model_the_link_is_removed(lm_studio: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "linked").symlink_to(lm_studio / "maker" / "Theirs", target_is_directory=True)
    add_model_folder(mine)
    before = sorted(lm_studio.rglob("*"))
    assert remove("linked", permanently=True).bytes == 0
    assert list(mine.iterdir()) == []
    assert sorted(lm_studio.rglob("*")) == before


def test_what_belongs_to_another_program_stays(tmp_path: Path, trash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_FIND_MODELS", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    theirs = tmp_path / "home" / ".lmstudio" / "models"
    theirs.mkdir(parents=True)
    file = write_mixtral(theirs / "Tiny.gguf")
    for change in (remove, lambda name: remove(name, permanently=True), lambda name: move(name, tmp_path / "disk")):
        with refused(ErrorCode.INVALID_REQUEST, "LM Studio"):
            change("Tiny")
    assert file.exists()
    assert list(trash.iterdir()) == []


def test_a_model_in_use_is_neither_moved_nor_removed(tiny: Path, tmp_path: Path) -> None:
    with reading(tiny), reading(tiny):
        for change in (lambda: remove("tiny", permanently=True), lambda: move("tiny", tmp_path / "disk")):
            with refused(ErrorCode.BUSY):
                change()
    with exclusive_use(tiny):
        with refused(ErrorCode.BUSY), exclusive_use(tiny):
            pass
        with refused(ErrorCode.BUSY):
            verify("tiny")
        with refused(ErrorCode.BUSY), reading(tiny):
            pass
    assert verify("tiny").damaged == {}
    assert remove("tiny", permanently=True).bytes > 0
    assert [file for file in (data_dir() / "locks").rglob("*") if file.is_file()] == []


def test_another_process_keeps_a_model_until_it_is_killed(tiny: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from engine.checkpoint.library import reading\n"
        "with reading(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tiny)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with refused(ErrorCode.BUSY):
                remove("tiny", permanently=True)
        finally:
            other.kill()
    remove("tiny", permanently=True)
    assert not tiny.exists()


def test_where_no_lock_can_be_kept_a_model_is_used_all_the_same(tiny: Path) -> None:
    (data_dir() / "locks").write_text("in the way")
    with reading(tiny):
        pass
    with refused(ErrorCode.INVALID_REQUEST), exclusive_use(tiny):
        pass


def test_speed_is_the_median_of_the_last_long_answers(tiny: Path) -> None:
    assert read_usage(tiny).measured_tokens_per_s is None
    note_use(tiny, "cpu")
    note_use(tiny, "cpu", 1000.0, tokens=2)
    usage = read_usage(tiny)
    assert (usage.measured_tokens_per_s, usage.last_used is not None) == (None, True)
    for speed in (1.0, *[5.0] * 5, 6.0, 7.0, 8.0, 9.0):
        note_use(tiny, "cpu", speed, tokens=100)
    assert read_usage(tiny).tokens_per_s[0] == 5.0
    assert look_around().entries[0].measured_tokens_per_s == 5.0
    note_use(tiny, "cuda:0", 50.0, tokens=100)
    assert look_around().entries[0].measured_tokens_per_s == 50.0


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"last_used": "x"}', '{"last_used": 1, "how": "", "tokens_per_s": [null]}', "1" * 99999]
)
def test_a_damaged_record_of_use_is_forgotten(tiny: Path, content: str) -> None:
    note_use(tiny, "cpu")
    (file,) = (data_dir() / "usage").iterdir()
    file.write_text(content)
    assert show("tiny").last_used is None
    note_use(tiny, "cpu", 5.0, 100)
    assert json.loads(file.read_text())["tokens_per_s"] == [5.0]

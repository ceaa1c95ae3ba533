"""Blocks on disk: within the budget, found if whole, and harmless whatever happens to their files."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.common.kept_context import (
    OTHER_PROGRAMS,
    KeptContextSettings,
    clear_kept_context,
    folder_of,
    forget_chat,
    forget_other_chats,
    is_key_in_file,
    keep_chat,
    keeping_requests,
    kept_context_bytes,
    kept_context_dir,
    kept_context_key,
    kept_context_settings,
    kept_files,
    room_on_disk,
    save_kept_context_settings,
)
from engine.common.paths import config_dir
from engine.runtime.prefix_cache.files import SpillFiles

CHAT = "a chat"


def files_in(folder: Path, room: int) -> SpillFiles:
    keep_chat(CHAT, folder)
    files = SpillFiles(folder, lambda _folder, _held: room, lambda: bytes(range(32)))
    assert files.is_open(CHAT, 30)
    return files


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data_of(number: int, nbytes: int = 1000) -> memoryview:
    once = bytes((number + place) % 251 for place in range(251))
    return memoryview(bytearray((once * (nbytes // 251 + 1))[:nbytes]))


def read(files: SpillFiles, number: int, nbytes: int = 1000) -> bytes | None:
    target = bytearray(nbytes)
    return bytes(target) if files.read_into(CHAT, key_of(number), memoryview(target)) else None


def add(files: SpillFiles, *numbers: int, nbytes: int = 1000) -> list[bool]:
    with files.writing() as writing:
        writing.spare(CHAT, map(key_of, numbers))
        return [writing.add(CHAT, key_of(n), index, b"[]", data_of(n, nbytes)) for index, n in enumerate(numbers)]


_DO = st.lists(
    st.tuples(
        st.sampled_from(["add", "read", "use", "break", "other", "clear"]), st.integers(0, 12), st.integers(1, 3)
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(steps=_DO, budget=st.integers(500, 9000))
def test_the_budget_holds_and_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], budget: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    files, other = (files_in(folder, budget) for _ in range(2))
    broken = set[int]()
    for what, number, count in steps:
        path = files.path(CHAT, key_of(number))
        if what in ("add", "other"):
            there = add(files if what == "add" else other, *range(number, number + count))
            assert all(files.has(CHAT, key_of(number + i)) for i, is_in in enumerate(there) if is_in)
        elif what == "read":
            found = read(files, number)
            if found is not None:
                assert found == bytes(data_of(number))
            assert (found is not None) == path.exists()  # what is damaged is gone now
            broken.discard(number)
        elif what == "use":
            files.used(CHAT, [key_of(number)])
        elif what == "break" and path.exists():
            content = bytearray(path.read_bytes())
            content[count * 31 % len(content)] ^= 1
            path.write_bytes(content[: len(content) - (count - 1)])
            broken.add(number)
        elif what == "clear":
            path.unlink(missing_ok=True)
        assert sum(file.stat().st_size for file in folder.rglob("*.kept")) <= budget
        assert not list(folder.rglob("*.part"))
    whole = sum(file.stat().st_size for file in folder.rglob("*.kept"))
    with files.writing() as writing:
        assert writing.held == whole


def test_what_was_of_no_use_for_longest_gives_way_and_the_end_before_the_beginning(tmp_path: Path) -> None:
    size = 1000 + 36 + 2 + 2 * 16
    files = files_in(tmp_path, 5 * size)
    assert add(files, 1, 2, 3) == [True] * 3
    assert add(files, 4, 5) == [True] * 2
    files.used(CHAT, [key_of(1), key_of(2), key_of(3)])
    assert add(files, 6, 7) == [True] * 2
    assert [number for number in range(1, 8) if files.has(CHAT, key_of(number))] == [1, 2, 3, 6, 7]
    assert add(files, 8) == [True]
    assert [number for number in range(1, 9) if files.has(CHAT, key_of(number))] == [1, 2, 6, 7, 8]
    with files.writing() as writing:
        writing.spare(CHAT, [key_of(number) for number in (1, 2, 6, 7, 8)])
        assert not writing.add(CHAT, key_of(9), 0, b"[]", data_of(9))


def test_files_are_private_and_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    files = files_in(folder, 10**6)
    add(files, 1)
    (file,) = folder.rglob("*.kept")
    if os.name != "nt":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    part = files.path(CHAT, key_of(2)).with_suffix(".part")
    part.write_bytes(file.read_bytes()[:50])
    (folder / "notes.txt").write_text("mine")
    assert read(files, 2) is None
    add(files, 3)
    assert not part.exists()
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(kept_files(folder)) == 2


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path, 10**6)

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(OSError, match="No space"):
        add(files, 1)
    assert not list(tmp_path.rglob("*.part"))
    assert not list(tmp_path.rglob("*.kept"))
    assert files.nbytes == 0


def test_another_program_that_writes_is_waited_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.common.kept_context._PATIENCE_S", 0.05)
    one, other = (files_in(tmp_path, 10**6) for _ in range(2))
    with one.writing() as mine, other.writing() as theirs:
        assert mine is not None
        assert theirs is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"on_disk": 1, "disk_bytes": 5}', '{"on_disk": true}', "[" * 9999])
def test_settings_that_make_no_sense_are_the_usual_ones(text: str) -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "kept-context.json").write_text(text)
    assert kept_context_settings() == KeptContextSettings()
    save_kept_context_settings(KeptContextSettings(False, 10**9))
    assert kept_context_settings() == KeptContextSettings(False, 10**9)
    assert room_on_disk(config_dir(), 0) == 0


def test_the_verb_shows_clears_and_turns_off(capsys: pytest.CaptureFixture[str]) -> None:
    add(files_in(kept_context_dir(), 10**6), 1, 2)
    assert kept_context_bytes() > 2000
    assert main(["kept"]) == 0
    assert "are kept in" in capsys.readouterr().out
    assert main(["kept", "on", "--budget", "2GB"]) == 0
    assert kept_context_settings() == KeptContextSettings(True, 2 * 10**9)
    assert main(["kept", "on", "--budget", "1kB"]) == 2
    assert "between" in capsys.readouterr().err
    assert main(["kept", "off", "--json"]) == 0
    assert '"on_disk": false' in capsys.readouterr().out
    assert kept_context_bytes() == clear_kept_context() == 0
    assert not SpillFiles(kept_context_dir()).is_open(CHAT)
    keep_chat(CHAT)
    assert not SpillFiles(kept_context_dir()).is_open(CHAT)


def test_a_file_says_nothing_without_the_key_and_is_of_one_chat_and_block(tmp_path: Path) -> None:
    files, secret = files_in(tmp_path, 10**8), b"the password is hunter2 " * 100_000
    with files.writing() as writing:
        assert writing.add(CHAT, key_of(1), 0, b"[]", memoryview(secret))
    (file,) = tmp_path.rglob("*.kept")
    content = file.read_bytes()
    assert not any(secret[at : at + 16] in content for at in range(24))
    assert key_of(1) not in content
    assert key_of(1).hex() not in file.name
    target = bytearray(len(secret))
    assert files.read_into(CHAT, key_of(1), memoryview(target))
    assert target == secret
    other_key = SpillFiles(tmp_path, lambda _folder, _held: 10**8, lambda: bytes(32))
    assert other_key.is_open(CHAT, 30)
    keep_chat("another", tmp_path)
    for reader, chat, number in ((other_key, CHAT, 1), (files, "another", 1), (files, CHAT, 2)):
        assert not reader.has(chat, key_of(number))
        file_there = reader.path(chat, key_of(number))
        file_there.write_bytes(content)  # as somebody might who wants it to be used
        assert not reader.read_into(chat, key_of(number), memoryview(target))
        assert not file_there.exists()


@pytest.mark.parametrize(
    ("change", "at"),
    [
        *(("flip", at) for at in (0, 8, 24, 32, 36, 40, 60, -1)),
        *(("cut", at) for at in (0, 50, -1)),
        ("longer", 40),
        ("swap", 0),
    ],
)
def test_an_altered_file_is_refused_and_removed(tmp_path: Path, change: str, at: int) -> None:
    files, nbytes = files_in(tmp_path, 10**8), 2 * 2**20
    add(files, 1, nbytes=nbytes)
    (file,) = tmp_path.rglob("*.kept")
    content = bytearray(file.read_bytes())
    if change == "flip":
        content[at] ^= 1
    elif change == "cut":
        del content[at:]
    elif change == "longer":
        content.insert(at % len(content), 7)
    else:  # two pieces of the same size
        piece, begin = 2**20 + 16, len(content) - 2 * (2**20 + 16)
        content[begin:] = content[begin + piece :] + content[begin : begin + piece]
    file.write_bytes(content)
    assert read(files, 1, nbytes) is None
    assert not file.exists()


def test_nothing_comes_back_of_a_chat_that_is_gone(tmp_path: Path) -> None:
    folder, files = kept_context_dir(), files_in(kept_context_dir(), 10**6)
    keep_chat("another")
    add(files, 1, 2)
    with files.writing() as writing:  # an engine that is at it
        assert writing.add("another", key_of(1), 0, b"[]", data_of(1))
        folder_of(CHAT, folder).rename(tmp_path / "gone")  # what `forget_chat` does first
        assert not writing.add(CHAT, key_of(3), 0, b"[]", data_of(3))
    assert not files.keeps(CHAT)
    assert files.has("another", key_of(1))
    forget_chat("another")
    forget_chat("nobody's")
    assert not list(folder.rglob("*.kept"))
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_server_that_keeps_nothing_leaves_one_alone_that_keeps_what_it_reads() -> None:
    folder = folder_of(OTHER_PROGRAMS, kept_context_dir())
    with keeping_requests(wanted=True):
        with keeping_requests(wanted=False):
            assert folder.is_dir()
        assert folder.is_dir()
    assert folder.is_dir()  # for the next one that keeps
    with keeping_requests(wanted=False):
        assert not folder.exists()
    assert [path.name for path in kept_context_dir().iterdir()] == ["lock"]


def test_what_is_left_of_chats_that_no_longer_exist_is_removed() -> None:
    folder, files = kept_context_dir(), files_in(kept_context_dir(), 10**6)
    add(files, 1)
    for chat in ("deleted", "another"):
        keep_chat(chat)
    (folder / f"{key_of(1).hex()}.kept").write_bytes(b"plain, from an earlier version")
    (folder / "gone-0123456789abcdef").mkdir()  # half removed
    (folder / "notes.txt").write_text("mine")
    forget_other_chats([CHAT, "another"])
    there = {path.name for path in folder.iterdir()}
    assert there == {folder_of(CHAT, folder).name, folder_of("another", folder).name, "lock", "notes.txt"}
    assert files.has(CHAT, key_of(1))


def test_the_key_is_in_the_keyring_or_else_in_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    key = kept_context_key()
    assert is_key_in_file()
    (file,) = config_dir().glob("*.key")
    if os.name != "nt":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert kept_context_key() == key != bytes(32)
    ring = dict[str, str]()
    monkeypatch.setattr("engine.common.kept_context.ask_keyring", lambda name: ring.get(name, ""))
    monkeypatch.setattr("engine.common.kept_context.tell_keyring", ring.__setitem__)
    assert kept_context_key() == key  # it moves there
    assert not is_key_in_file()
    assert list(ring.values()) == [key.hex()]
    assert kept_context_key() == key

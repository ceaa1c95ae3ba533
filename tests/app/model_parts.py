"""Made-up models, downloads, repositories and fit cards for tests and pictures of the Models page."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.downloads.queue import Download, DownloadState

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
    is_mine: bool = False,
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
        is_mine,
    )

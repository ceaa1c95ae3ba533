"""Downloads in words."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.widgets.quantities import SEPARATOR, duration, figures, file_size, number, percent
from engine.checkpoint.downloads.queue import Download, DownloadState

translate = QCoreApplication.translate


def rate_words(bytes_per_s: float) -> str:
    """`48.2 MB/s`."""
    if bytes_per_s >= 1e6:
        return f"{figures(bytes_per_s / 1e6)} MB/s"
    return f"{number(bytes_per_s / 1e3, 0)} kB/s"


def download_words(download: Download) -> str:
    """State and figures of a download in one line; why it failed takes more than that."""
    done, total = file_size(download.done_bytes), file_size(download.total_bytes)
    amount = translate("Downloads", "{0} of {1}").format(done, total)
    if download.problem and download.state is not DownloadState.FAILED:
        return f"{amount}{SEPARATOR}{download.problem}"
    if download.state is DownloadState.RUNNING:
        parts = [amount]
        parts.append(rate_words(download.bytes_per_s) if download.bytes_per_s else translate("Downloads", "connecting"))
        if download.eta_s is not None:
            parts.append(translate("Downloads", "{0} left").format(duration(download.eta_s)))
        return SEPARATOR.join(parts)
    words = {
        DownloadState.WAITING: translate("Downloads", "waits for its turn"),
        DownloadState.PAUSED: translate("Downloads", "paused"),
        DownloadState.FAILED: translate("Downloads", "failed"),
        DownloadState.DONE: translate("Downloads", "done"),
    }[download.state]
    return f"{amount if download.done_bytes else total}{SEPARATOR}{words}"


def download_text(download: Download) -> str:
    """A download for screen readers."""
    share = download.done_bytes / download.total_bytes if download.total_bytes else 0.0
    problem = download.problem if download.state is DownloadState.FAILED else ""
    return "\n".join(filter(None, (f"{download.title}, {percent(share)}", download_words(download), problem)))

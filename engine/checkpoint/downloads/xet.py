"""Ranges of a file from the hub's chunk store, for files that it gives out in no other way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from engine.checkpoint.downloads.source import LineBroken, Stream
from engine.common.errors import EngineError, ErrorCode


@contextlib.contextmanager
def open_xet(found: Any, size: int, start: int, end: int, headers: dict[str, str]) -> Iterator[Stream]:
    """The bytes from `start` to `end` (not included).

    Args:
        found: hash and address for a token, as the hub's library reads them from an answer.
        size: of the whole file.
        headers: what the hub itself may see, its token included.

    Raises:
        LineBroken: it did not work this time.
        EngineError: `DOWNLOAD_FAILED` (the library for it is missing).
    """
    try:
        from hf_xet import XetFileInfo
        from huggingface_hub.utils._xet import get_xet_session, refresh_xet_connection_info, xet_headers_without_auth
    except ImportError:
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED, "This file needs the library hf_xet, which is missing: run the set-up again."
        ) from None
    with _again():
        connection = refresh_xet_connection_info(file_data=found, headers=headers)
        session: Any = get_xet_session()  # type: ignore[no-untyped-call]
        group = session.new_download_stream_group(
            endpoint=connection.endpoint,
            token=connection.access_token,
            token_expiry_unix_secs=connection.expiration_unix_epoch,
            token_refresh_url=found.refresh_route,
            token_refresh_headers=headers,
            custom_headers=xet_headers_without_auth(headers),
        )

    def abort() -> None:
        # Not the stream's own `cancel`, which fails while another thread waits for bytes; nor the group's end as a
        # context, which raises after this.
        with contextlib.suppress(Exception):
            group.abort()

    try:
        with _again():
            stream = group.download_stream(XetFileInfo(found.file_hash, size), start=start, end=end)
        yield Stream(_chunks(stream), abort)
    finally:
        abort()


def _chunks(stream: Any) -> Iterator[bytes]:
    with _again():
        chunks = iter(stream)
    while True:
        with _again():
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


@contextlib.contextmanager
def _again() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its errors are its own, and all mean: try again
        raise LineBroken("The hub's chunk store does not answer: trying again.") from error

"""The shape of a model on a hub, from its configuration and file headers, without downloading weights."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from engine.checkpoint.config_file import CONFIG_NAME, MAX_CONFIG_BYTES, read_config, read_json
from engine.checkpoint.headers import DTYPE_BITS, MAX_HEADER, TensorEntry
from engine.checkpoint.quantised.declared import LIBRARY_METHODS, declared_quantisation
from engine.checkpoint.shards import INDEX_NAME, MAX_INDEX_BYTES, SINGLE_NAME, files_named
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import parse_json

_TIMEOUT_S = 15.0
ANSWER_S = 120.0
"""Time limit for one file's header or configuration."""
_LOOK_S = 0.05
_AT_ONCE = 8
_MAX_LIST_BYTES = 16 * 2**20
_FIRST_BYTES = 100_000
"""Bytes fetched first of a weight file: enough for most headers."""

_Result = TypeVar("_Result")


def read_hub_model(
    hub_id: str, *, revision: str | None = None, cancelled: Callable[[], bool] = lambda: False
) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The configuration and the tensors of `ORG/NAME`; `HF_ENDPOINT` names another hub.

    The entries' `file` is the file's name on the hub.

    Raises:
        EngineError: `MODEL_NOT_FOUND`, `MODEL_UNSUPPORTED` (no safetensors files), `DOWNLOAD_FAILED` (no network, no
            permission, cancelled).
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    try:
        with tempfile.TemporaryDirectory(prefix="switchyard-hub-") as scratch:
            return _read(endpoint, hub_id, revision, Path(scratch), cancelled)
    except GatedRepoError:
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED,
            f"{hub_id} requires its licence to be accepted: do so on its hub page, then log in with `hf auth login`.",
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"The hub has no model {hub_id}: check its spelling, including capitals."
        ) from None
    except LocalEntryNotFoundError as error:
        raise _unreachable(hub_id, error) from None
    except EntryNotFoundError:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{hub_id} has no {CONFIG_NAME} or no safetensors files: choose the model's original version.",
        ) from None
    except (OfflineModeIsEnabled, HfHubHTTPError, OSError, ValueError) as error:
        raise _unreachable(hub_id, error) from None
    except Exception as error:
        # Errors of the HTTP library, which the hub's package does not wrap and has replaced before.
        if type(error).__module__.partition(".")[0] in ("httpx2", "httpx", "httpcore", "requests"):
            raise _unreachable(hub_id, error) from None
        raise


def _read(
    endpoint: str, hub_id: str, revision: str | None, scratch: Path, cancelled: Callable[[], bool]
) -> tuple[dict[str, Any], list[TensorEntry]]:
    from huggingface_hub import hf_hub_url

    def url(name: str) -> str:
        return hf_hub_url(hub_id, name, revision=revision, endpoint=endpoint)

    def one(address: str, most_bytes: int) -> bytes:
        return _all_in_time([lambda: _fetch(address, most_bytes)], cancelled)[0]

    def kept(name: str, most_bytes: int) -> Path:
        file = scratch / name
        file.write_bytes(one(url(name), most_bytes))
        return file

    about = parse_json(one(_about(endpoint, hub_id, revision), _MAX_LIST_BYTES))
    siblings = about.get("siblings") if isinstance(about, dict) else None
    names = [file.get("rfilename") for file in siblings if isinstance(file, dict)] if isinstance(siblings, list) else []
    config = read_config(kept(CONFIG_NAME, MAX_CONFIG_BYTES).parent)
    files: list[str] | None = [SINGLE_NAME]
    if INDEX_NAME in names:
        weight_map = read_json(kept(INDEX_NAME, MAX_INDEX_BYTES), MAX_INDEX_BYTES).get("weight_map")
        files = files_named(weight_map) if isinstance(weight_map, dict) else []
    if not files or not all(name.endswith(".safetensors") for name in files):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"{hub_id} has no safetensors files: choose the model's original version."
        )

    def header(name: str) -> list[TensorEntry]:
        raw = _fetch(url(name), _FIRST_BYTES, until=_FIRST_BYTES)
        size = 8 + int.from_bytes(raw[:8], "little")
        if len(raw) < 8 or size > MAX_HEADER:
            raise _damaged(hub_id)
        if len(raw) < size:
            raw = _fetch(url(name), size, until=size)
        try:
            content = parse_json(raw[8:size])
            content.pop("__metadata__", None)
            return [_entry(name, key, tensor) for key, tensor in content.items()]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _damaged(hub_id) from None

    entries = _all_in_time([functools.partial(header, name) for name in files], cancelled)
    tensors = {entry.key: entry for some in entries for entry in some}
    stored = declared_quantisation(scratch, config, hub_id)
    if stored and stored["quant_method"] not in LIBRARY_METHODS:
        from engine.checkpoint.quantised.tensors import quantised_tensors  # imports numpy, which others do not need

        tensors = quantised_tensors(hub_id, str(config["model_type"]), stored, tensors)
    return config, list(tensors.values())


def _about(endpoint: str, hub_id: str, revision: str | None) -> str:
    about = f"{endpoint}/api/models/{hub_id}"
    return about if revision is None else f"{about}/revision/{quote(revision, safe='')}"


def _fetch(url: str, most_bytes: int, until: int | None = None) -> bytes:
    """The hub's response, or its first `until` bytes.

    The hub library's functions would accept any amount of data.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # no compression: it could unpack to more
    if until is not None:
        headers["Range"] = f"bytes=0-{until - 1}"
    got = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
        if response.status_code >= 400:  # skip an error's body: it may be endless
            bare = [(name, value) for name, value in response.headers.items() if not name.startswith("content-")]
            hf_raise_for_status(type(response)(response.status_code, headers=bare, json={}, request=response.request))
        for chunk in response.iter_raw():
            got += chunk
            if until is not None and len(got) >= until:  # some servers ignore ranges
                return bytes(got[:until])
            if len(got) > most_bytes:
                raise ValueError(f"{url.rpartition('/')[2]} is larger than {most_bytes // 2**20} MiB")
    return bytes(got)


def _all_in_time(jobs: Sequence[Callable[[], _Result]], cancelled: Callable[[], bool]) -> list[_Result]:
    """The results of the jobs, some of which run at the same time.

    A server can send a byte now and then forever, which a connection's timeout does not notice. So this waits at most
    `ANSWER_S` for one job, and then abandons its thread.

    Raises:
        EngineError: `DOWNLOAD_FAILED`, if it was cancelled.
        TimeoutError: a job took too long.
        Exception: what a job raised.
    """
    changed = threading.Condition()
    waiting = iter(range(len(jobs)))
    begun: dict[int, float] = {}
    results: dict[int, _Result] = {}
    errors: list[Exception] = []
    given_up = False

    def work() -> None:
        while True:
            with changed:
                number = next(waiting, None)
                if number is None or given_up:
                    return
                begun[number] = time.monotonic()
            try:
                result = jobs[number]()
            except Exception as error:  # re-raised in the waiting thread
                with changed:
                    errors.append(error)
                    changed.notify_all()
                return
            with changed:
                results[number] = result
                changed.notify_all()

    threads = [threading.Thread(target=work, name="hub", daemon=True) for _ in range(min(_AT_ONCE, len(jobs)))]
    for thread in threads:
        thread.start()
    with changed:
        try:
            while len(results) < len(jobs):
                changed.wait(_LOOK_S)
                if errors:
                    raise errors[0]
                if cancelled():
                    raise EngineError(ErrorCode.DOWNLOAD_FAILED, "Reading from the hub was cancelled.")
                if any(time.monotonic() - begun[number] > ANSWER_S for number in begun.keys() - results.keys()):
                    raise TimeoutError(f"no complete response within {ANSWER_S:.0f} seconds")
        finally:
            given_up = True
    return [results[number] for number in range(len(jobs))]


def _entry(file: str, key: str, tensor: Any) -> TensorEntry:
    dtype, shape, (begin, end) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if dtype not in DTYPE_BITS or any(type(number) is not int or number < 0 for number in (*shape, begin, end - begin)):
        raise ValueError(f"tensor {key!r} of {file} has an unknown type")
    return TensorEntry(Path(file), key, dtype, tuple(shape), begin, end - begin)


def _damaged(hub_id: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED, f"{hub_id}'s files on the hub have broken headers: choose another version."
    )


def _unreachable(hub_id: str, error: Exception) -> EngineError:
    why = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
    return EngineError(
        ErrorCode.DOWNLOAD_FAILED,
        f"Could not read {hub_id} from the hub ({why}): check the network, or give a folder.",
    )

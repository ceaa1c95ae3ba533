"""What a model on a hub is made of, from its configuration and the headers of its files: no weight is downloaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.config_file import CONFIG_NAME, read_config, read_json
from engine.checkpoint.headers import DTYPE_BITS, TensorEntry
from engine.checkpoint.shards import INDEX_NAME, SINGLE_NAME
from engine.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TIMEOUT_S = 15.0
_AT_ONCE = 8
_MOST_FILES = 2000
_MAX_INDEX_BYTES = 512 * 2**20


def read_hub_model(
    hub_id: str, *, revision: str | None = None, cancelled: Callable[[], bool] = lambda: False
) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The configuration and the tensors of `ORG/NAME`; `HF_ENDPOINT` names another hub.

    The entries' `file` is the file's name on the hub.

    Raises:
        EngineError: `MODEL_NOT_FOUND`, `MODEL_UNSUPPORTED` (no safetensors files), `DOWNLOAD_FAILED` (no network, no
            permission, cancelled).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        SafetensorsParsingError,
    )

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        with tempfile.TemporaryDirectory(prefix="switchyard-hub-") as scratch:
            return _read(api, hub_id, revision, Path(scratch), cancelled)
    except GatedRepoError:
        raise EngineError(
            ErrorCode.DOWNLOAD_FAILED,
            f"{hub_id} wants its licence to be accepted: do so on the hub's page, then log in with `hf auth login`.",
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"The hub has no model {hub_id}: check how it is written, capitals too."
        ) from None
    except LocalEntryNotFoundError as error:
        raise _unreachable(hub_id, error) from None
    except (EntryNotFoundError, NotASafetensorsRepoError):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{hub_id} has no {CONFIG_NAME} or no safetensors files: choose the model's original version.",
        ) from None
    except SafetensorsParsingError:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED, f"The hub's files of {hub_id} have broken headers: choose another version."
        ) from None
    except (OfflineModeIsEnabled, HfHubHTTPError, OSError, ValueError) as error:
        raise _unreachable(hub_id, error) from None
    except Exception as error:
        # The HTTP library's own errors, which the hub's package does not wrap; the library has changed before.
        if type(error).__module__.partition(".")[0] in ("httpx2", "httpx", "httpcore", "requests"):
            raise _unreachable(hub_id, error) from None
        raise


def _read(
    api: HfApi, hub_id: str, revision: str | None, scratch: Path, cancelled: Callable[[], bool]
) -> tuple[dict[str, Any], list[TensorEntry]]:
    def fetch(name: str) -> Path:
        return Path(api.hf_hub_download(hub_id, name, revision=revision, cache_dir=scratch, etag_timeout=_TIMEOUT_S))

    # First: it is not repeated for half a minute where there is no network, as downloads are.
    names = {file.rfilename for file in api.model_info(hub_id, revision=revision, timeout=_TIMEOUT_S).siblings or ()}
    config = read_config(fetch(CONFIG_NAME).parent)
    if INDEX_NAME in names:
        weight_map = read_json(fetch(INDEX_NAME), _MAX_INDEX_BYTES).get("weight_map")
        files = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    else:
        files = [SINGLE_NAME]
    if not files or len(files) > _MOST_FILES or not all(name.endswith(".safetensors") for name in files):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"{hub_id} has no safetensors files: choose the model's original version."
        )

    def header(name: str) -> list[TensorEntry]:
        if cancelled():
            raise EngineError(ErrorCode.DOWNLOAD_FAILED, f"Looking at {hub_id} was stopped.")
        found = api.parse_safetensors_file_metadata(hub_id, name, revision=revision, timeout=_TIMEOUT_S)
        return [_entry(name, key, tensor) for key, tensor in found.tensors.items()]

    with ThreadPoolExecutor(_AT_ONCE, "hub") as pool:
        return config, [entry for entries in pool.map(header, files) for entry in entries]


def _entry(file: str, key: str, tensor: Any) -> TensorEntry:
    begin, end = tensor.data_offsets
    if tensor.dtype not in DTYPE_BITS or end < begin:
        raise ValueError(f"tensor {key!r} of {file} is of an unknown kind")
    return TensorEntry(Path(file), key, str(tensor.dtype), tuple(tensor.shape), begin, end - begin)


def _unreachable(hub_id: str, error: Exception) -> EngineError:
    why = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
    return EngineError(
        ErrorCode.DOWNLOAD_FAILED,
        f"What {hub_id} is made of could not be read from the hub ({why}): check the network, or give a folder.",
    )

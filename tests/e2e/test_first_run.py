"""A person's first minutes, by mouse alone: a recommended model, two pauses, a killed window, an answer.

The model is the starter's files, offered by a hub on this machine under another name.  With
`SWITCHYARD_PICTURES=FOLDER` a picture of each step is kept there.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import psutil
import pytest

from engine.checkpoint.catalogue import find_shape, use_catalogue
from engine.checkpoint.downloads.queue import Download, DownloadState, downloads
from engine.checkpoint.manifest import MANIFEST_NAME
from engine.common.paths import models_dir
from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import RealWindow, real_window
from tests.hub_server import HubServer

PICTURES_VARIABLE = "SWITCHYARD_PICTURES"
NAME = "Pocket MoE"
REPOSITORY = "pocket/Pocket-MoE"
LABEL = "BF16"
LINE_BYTES_PER_S = 4e6
"""Slow enough that a download of 270 MB is there to be paused; later, the line is as fast as it can be."""
STEP_BYTES = 5_000_000
QUESTION = "What is the capital of France? Answer in one sentence."
BUTTON = "push button"
ALL_S = 10 * PATIENCE_S


def offered_files(starter: Path) -> dict[str, bytes | Path]:
    """What a repository of that model would hold."""
    return {file.name: file for file in starter.iterdir() if file.is_file() and file.name != MANIFEST_NAME}


def write_catalogue(path: Path, starter: Path, size: int) -> Path:
    """A catalogue of that one model, newer than the shipped one."""
    shape = find_shape(str(starter))
    model = {
        "name": NAME, "family": "Pocket", "kind": "moe", "parameters": shape.parameters,
        "active": shape.parameters, "licence": "Apache-2.0", "licence_link": "https://example.org/licence",
        "context": shape.context_tokens, "strengths": "Short questions about well-known things.",
        "languages": "English", "files": [{"reference": f"{REPOSITORY}:{LABEL}", "bytes": size}],
        "shape": dataclasses.asdict(shape) | {"hub_id": REPOSITORY, "licence": "Apache-2.0", "source": "counted"},
    }  # fmt: skip
    path.write_text(json.dumps({"date": "2099-12-31", "models": [model]}), encoding="utf-8")
    return path


def the_download(*states: DownloadState, least_bytes: int = 0) -> Download:
    """The only download, once it is in one of these states and has so much."""

    def look() -> Download | None:
        found = downloads()
        return found[0] if found and found[0].state in states and found[0].done_bytes >= least_bytes else None

    return eventually(look, f"the download was {' or '.join(states)}", ALL_S)


def picture(screen: Screen, name: str) -> None:
    folder = os.environ.get(PICTURES_VARIABLE)
    if folder:
        screen.keep_picture(Path(folder) / f"{name}.png", 1280, 800)


def click_beginning(window: RealWindow, words: str) -> None:
    """Clicks the button whose name begins so."""
    buttons = eventually(
        lambda: [one for one in window.accessible.showing() if one.role == BUTTON and one.name.startswith(words)],
        f"a button called {words!r} showed",
    )
    window.click(buttons[0].name, role=BUTTON)


@pytest.mark.timeout(1800)
@pytest.mark.exhaustive
def test_a_first_model_is_chosen_fetched_and_answers(
    screen: Screen, starter: Path, switchyard_home: Path, tmp_path: Path
) -> None:
    files = offered_files(starter)
    with HubServer(bytes_per_s=LINE_BYTES_PER_S) as hub:
        hub.add(REPOSITORY, files)
        size = sum(hub.repos[REPOSITORY].size(path) for path in files)
        use_catalogue(write_catalogue(tmp_path / "catalogue.json", starter, size))
        line = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}

        with real_window(screen, switchyard_home, None, line) as window:
            window.widget(f"Download: {NAME}")
            picture(screen, "1-first-run")
            assert hub.sent_bytes() == 0, "something was fetched before a click"
            window.click(f"Download: {NAME}")
            so_far = 0
            for _ in range(2):
                came = the_download(DownloadState.RUNNING, least_bytes=so_far + STEP_BYTES).done_bytes
                click_beginning(window, "Pause: ")
                so_far = the_download(DownloadState.PAUSED).done_bytes
                assert so_far >= came, "the pause lost parts that were under way"
                picture(screen, "2-paused")
                click_beginning(window, "Resume: ")
            the_download(DownloadState.RUNNING, least_bytes=so_far + STEP_BYTES)
            picture(screen, "3-downloading")
            helpers = psutil.Process(window.process.pid).children(recursive=True)
            window.process.kill()
            window.process.wait()  # else those that it started would be waited for
        before = the_download(*DownloadState)
        assert before.state is not DownloadState.DONE, "the download was over before the window could be killed"

        hub.bytes_per_s = 0.0
        # The next window goes on by itself, loads what has come, and the chat is there.
        with real_window(screen, switchyard_home, None, line) as window:
            eventually(lambda: window.shows(QUESTION), "the chat showed", ALL_S)
            window.click(QUESTION)
            answer = window.wait_for_answer(1, "complete")
            assert "Paris" in answer.content
            click_beginning(window, "Pocket-MoE")
            window.widget("Set as default")
            picture(screen, "4-models")
            assert window.close() == 0
        psutil.wait_procs(helpers, timeout=PATIENCE_S)
        sent = hub.sent_bytes()

    (model,) = (folder for folder in models_dir().iterdir() if not folder.name.startswith("."))
    fetched = {file.name: file for file in model.iterdir() if file.name != MANIFEST_NAME}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched.keys() <= files.keys()
    for name, file in fetched.items():
        assert hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256((starter / name).read_bytes()).digest()
    assert sent < 1.5 * size, "much was fetched twice"

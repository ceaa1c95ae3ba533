"""A person's first quarter of an hour: a chat, a stop, an edit, an engine killed in mid-answer, a restart."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import RealWindow, StoredMessage, real_window

COMPOSER = "Message"
LONG_ANSWER = "Write a long story about a lighthouse keeper and the sea, with many chapters."


def ask(window: RealWindow, question: str) -> StoredMessage:
    """Types a question and sends it; the message as it was stored."""
    before = len(window.messages())
    window.click(COMPOSER)
    window.screen.type(question)
    eventually(lambda: window.accessible.text(window.widget(COMPOSER)) == question, "the question stood in the box")
    window.screen.press("Return")
    stored = eventually(lambda: window.messages()[before:], "the question was stored")[0]
    assert (stored.role, stored.content) == ("user", question)
    return stored


def answer_predictably(window: RealWindow) -> None:
    """Sets this chat's sampling: the likeliest token always, and an end to what does not end by itself."""
    window.click("Sampling: Recommended")
    window.fill("Temperature", "0")
    window.fill("Max tokens", "600")
    window.screen.press("Escape")
    eventually(lambda: not window.shows("Temperature"), "the sampling card closed")


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_chat_stop_edit_kill_and_restart(screen: Screen, starter: Path, switchyard_home: Path) -> None:
    with real_window(screen, switchyard_home, starter) as window:
        # A chat.
        answer_predictably(window)
        first = ask(window, "What is the capital of France?")
        answer = window.wait_for_answer(1, "complete")
        assert answer.parent_id == first.id
        assert "Paris" in answer.content
        eventually(lambda: "Paris" in window.transcript(), "the answer showed")

        # A stop, in the middle of a long answer.
        second = ask(window, LONG_ANSWER)
        so_far = window.wait_for_text(2).content
        screen.press("Escape")
        stopped = window.wait_for_answer(2, "partial")
        assert stopped.reason_code == "cancelled"
        assert stopped.content.startswith(so_far)

        # An edit: a branch beside the old question, not in its place.
        window.click("Edit the message", last=True)
        window.widget("Edit message")
        screen.press("ctrl+a")
        screen.type("What is the capital of Italy?")
        screen.press("Return")
        branch = window.wait_for_answer(3, "complete")
        by_id = {message.id: message for message in window.messages()}
        edited = by_id[branch.parent_id or ""]
        assert edited.content == "What is the capital of Italy?"
        assert edited.parent_id == second.parent_id
        assert edited.chosen
        assert not by_id[second.id].chosen
        assert by_id[stopped.id].content == stopped.content

        # The engine killed in mid-answer: the window and the text so far stay, and it says what happened.
        ask(window, LONG_ANSWER)
        so_far = window.wait_for_text(4).content
        (worker,) = window.workers()
        os.kill(worker.pid, signal.SIGKILL)
        broken = window.wait_for_answer(4, "partial", "failed")
        assert broken.reason_code == "engine_died"
        assert broken.content.startswith(so_far)
        assert window.process.poll() is None
        # A word of it: line breaks and Markdown look different on the screen.
        word = re.search(r"\w+", so_far)
        eventually(lambda: word is None or word[0] in window.transcript(), "the text so far still showed")

        # A restart of the engine on a click, and the chat goes on.
        window.click("Restart engine")
        (restarted,) = eventually(window.workers, "a new engine ran")
        assert restarted.pid != worker.pid
        ask(window, "What is the capital of France?")
        assert window.wait_for_answer(5, "complete").content

        kept = window.messages()
        assert window.close() == 0
        gone, alive = psutil.wait_procs([restarted], timeout=PATIENCE_S)
        assert (len(gone), alive) == (1, [])

    # The window opened again: every word is still there.  When it is killed, its engine goes.
    with real_window(screen, switchyard_home, starter) as window:
        eventually(lambda: "Paris" in window.transcript(), "the chat was back")
        assert window.messages() == kept
        workers = eventually(window.workers, "the engine ran")
        window.process.kill()
        gone, _ = psutil.wait_procs(workers, timeout=PATIENCE_S)
        assert len(gone) == len(workers)

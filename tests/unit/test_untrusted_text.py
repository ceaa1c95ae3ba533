"""Chat templates and tokenizers run where they can be stopped, within limits of time and memory."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from engine.common import confined
from engine.common.errors import RequestCancelled
from engine.untrusted_text.process import RequestLimits, UntrustedText, UntrustedTextError
from engine.untrusted_text.templates import TemplateRefusedError, render
from tests.untrusted_tokenizers import (
    PANIC_TEXT,
    SLOW_TEXT,
    split_by,
    write_multiplying_tokenizer,
    write_panicking_tokenizer,
    write_slow_tokenizer,
    write_tokenizer,
)

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SHORT = RequestLimits(seconds=0.3, characters_per_s=10**9)
SMALL = RequestLimits(memory_bytes=200 * 2**20)


def never() -> bool:
    return False


class Held:
    """As much of transformers' tokenizer as is asked for here."""

    split_special_tokens = False

    def __init__(self, folder: Path) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def text() -> Iterator[UntrustedText]:
    text = UntrustedText()
    yield text
    pid = text.pid
    text.close()
    assert pid is None or not psutil.pid_exists(pid)


def test_one_process_for_many_requests(text: UntrustedText, tmp_path: Path) -> None:
    assert text.pid is None
    assert text.render("{{ a }}", {"a": "ä\ud800"}, never).text == "ä?"
    pid = text.pid
    write_tokenizer(tmp_path)
    text.check(tmp_path, never)
    held, other = Held(tmp_path), Held(tmp_path)
    for tokenizer in (held, other, held):
        assert text.encode(tokenizer, "a b a", special=False, cancelled=never) == [1, 0, 1]
    text.drop(held)
    assert text.encode(held, "a", special=False, cancelled=never) == [1]
    assert text.pid == pid


@pytest.mark.parametrize("between", ["nothing", "another check", "it dies"])
def test_what_was_checked_need_not_be_sent(
    text: UntrustedText, tmp_path: Path, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name)
    held = Held(tmp_path / "a")
    text.check(tmp_path / "a", never)
    if between == "another check":
        text.check(tmp_path / "b", never)
    elif between == "it dies":
        assert text.pid is not None
        psutil.Process(text.pid).kill()
        psutil.wait_procs([psutil.Process(text.pid)], timeout=10)
    else:
        monkeypatch.setattr(held, "backend_tokenizer", None)
    text.hold(held, tmp_path / "a")
    assert text.encode(held, "a b a", special=False, cancelled=never) == [1, 0, 1]


def test_a_process_that_died_is_started_again(text: UntrustedText, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    held = Held(tmp_path)
    assert text.encode(held, "a", special=False, cancelled=never) == [1]
    assert text.pid is not None
    psutil.Process(text.pid).kill()
    psutil.wait_procs([psutil.Process(text.pid)], timeout=10)
    assert text.encode(held, "a", special=False, cancelled=never) == [1]


def test_a_template_that_never_ends_is_stopped_and_after_three_times_not_tried_again(
    text: UntrustedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        text.limits = RequestLimits(seconds=0.1, characters_per_s=10**9)
        with pytest.raises(UntrustedTextError, match="seconds"):
            text.render(ENDLESS, {}, never)
        text.limits = RequestLimits()
    assert text.render("x", {}, never).text == "x"
    monkeypatch.setattr(confined, "started", None)  # nothing is started for it
    with pytest.raises(UntrustedTextError, match="3 times"):
        text.render(ENDLESS, {}, never)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 20000000000 }}",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{{ 'a'.ljust(20000000000) }}",
        "{{ '%20000000000d' % 1 }}",
        "{{ messages | tojson(indent=20000000000) }}",
    ],
)
def test_a_template_that_fills_memory_is_stopped(text: UntrustedText, template: str) -> None:
    text.limits = SMALL
    with pytest.raises((UntrustedTextError, TemplateRefusedError)):
        text.render(template, {"messages": [{"role": "user"}]}, never)
    assert text.pid is None or psutil.Process(text.pid).memory_info().rss < 2 * 2**30
    assert text.render("x", {}, never).text == "x"


def test_memory_is_watched_where_no_system_limits_it(text: UntrustedText) -> None:
    text.limits = RequestLimits(memory_bytes=1)
    with pytest.raises(UntrustedTextError, match="of memory"):
        text.render(ENDLESS, {}, never)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a part of a process allocates")
def test_a_template_has_less_memory_than_a_tokenizer(text: UntrustedText) -> None:
    text.limits = RequestLimits(template_bytes=2**26)
    with pytest.raises(UntrustedTextError, match="64 MiB"):
        text.render("{{ 'a' * 99999999 }}", {}, never)
    assert text.render("{{ 'a' * 9999999 }}", {}, never).text == "a" * 9999999


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", "{{ messages ** messages }}"])
def test_a_power_that_nothing_could_interrupt_is_refused(template: str) -> None:
    with pytest.raises(TemplateRefusedError):
        render(template, {"messages": 10**9})
    assert render("{{ 2 ** 10 }}", {}) == "1024"


def test_a_template_that_writes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.untrusted_text.templates.MOST_CHARACTERS", 1000)
    with pytest.raises(TemplateRefusedError, match="more than 1,000"):
        render("{% for i in range(1001) %}a{% endfor %}", {})


def test_a_broken_template_says_why_and_its_words_steer_no_terminal(text: UntrustedText) -> None:
    for template in (
        "{% for",
        "{{ 1 / 0 }}",
        "{{ raise_exception('No.') }}",
        "{{ raise_exception('\x1b[2J') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{" + "(" * 9000,
        "{{ namespace(_a=1) }}",
    ):
        with pytest.raises((TemplateRefusedError, UntrustedTextError)) as refused:
            text.render(template, {"messages": []}, never)
        assert str(refused.value).isprintable(), template
        assert str(refused.value)


def rendering(text: UntrustedText, _folder: Path, cancelled: Callable[[], bool]) -> None:
    text.render(ENDLESS, {}, cancelled)


def encoding(text: UntrustedText, folder: Path, cancelled: Callable[[], bool]) -> None:
    write_slow_tokenizer(folder)
    text.encode(Held(folder), SLOW_TEXT, special=False, cancelled=cancelled)


@pytest.mark.parametrize("work", [rendering, encoding])
def test_stop_works_meanwhile(text: UntrustedText, tmp_path: Path, work: Any) -> None:
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(RequestCancelled):
        work(text, tmp_path, cancelled)
    assert text.pid is None
    assert text.render("x", {}, never).text == "x"


def test_stop_works_while_another_thread_has_the_process(text: UntrustedText) -> None:
    stop = threading.Event()

    def first() -> None:
        with pytest.raises(RequestCancelled):
            text.render(ENDLESS, {}, stop.is_set)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        while text.pid is None:
            stop.wait(0.01)
        with pytest.raises(RequestCancelled):
            text.render("x", {}, lambda: True)
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is no signal there")
def test_ctrl_c_ends_the_work(text: UntrustedText) -> None:
    asked = 0

    def press() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            signal.raise_signal(signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        text.render(ENDLESS, {}, press)
    assert text.pid is None


# --- tokenizers ---


def test_a_tokenizer_that_never_ends_is_stopped(text: UntrustedText, tmp_path: Path) -> None:
    write_slow_tokenizer(tmp_path)
    text.limits = SHORT
    slow = Held(tmp_path)
    for why in ("seconds", "seconds", "seconds", "3 times"):
        with pytest.raises(UntrustedTextError, match=why):
            text.encode(slow, SLOW_TEXT, special=False, cancelled=never)
    with pytest.raises(UntrustedTextError, match="seconds"):  # another one is another's
        text.encode(Held(tmp_path), SLOW_TEXT, special=False, cancelled=never)


def test_a_tokenizer_that_multiplies_is_refused(text: UntrustedText, tmp_path: Path) -> None:
    text.limits = SMALL
    write_multiplying_tokenizer(tmp_path)
    with pytest.raises(UntrustedTextError):
        text.check(tmp_path, never)
    with pytest.raises(UntrustedTextError):
        text.encode(Held(tmp_path), "e" * 1000, special=False, cancelled=never)


def test_a_tokenizer_that_panics_says_why(text: UntrustedText, tmp_path: Path) -> None:
    write_panicking_tokenizer(tmp_path)
    with pytest.raises(UntrustedTextError, match="fails"):
        text.encode(Held(tmp_path), PANIC_TEXT, special=False, cancelled=never)


def test_a_tokenizer_that_cannot_be_read(text: UntrustedText, tmp_path: Path) -> None:
    for parts in ({"pre_tokenizer": split_by("(")}, {"model": {"type": "BPE"}}, {"normalizer": 3}):
        write_tokenizer(tmp_path, **parts)
        with pytest.raises(UntrustedTextError, match="fails"):
            text.check(tmp_path, never)
    (tmp_path / "tokenizer.json").write_text('{"normalizer":' * 100_000)
    with pytest.raises(UntrustedTextError):
        text.check(tmp_path, never)


def test_a_check_that_was_begun_early_is_not_made_again(
    text: UntrustedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
    write_tokenizer(good)
    (bad / "tokenizer.json").write_text("{}", encoding="utf-8")
    asked: list[object] = []
    ask = text._ask

    def counted(request: dict[str, Any], **how: Any) -> Any:
        asked.append(request["folder"])
        return ask(request, **how)

    monkeypatch.setattr(text, "_ask", counted)
    text.begin_check(good)
    text.start()
    text.check(good, never)
    assert asked == [str(good)]
    text.check(good, never)  # each is of use once
    assert asked == [str(good)] * 2
    text.begin_check(bad)
    with pytest.raises(UntrustedTextError, match="fails"):
        text.check(bad, never)
    text.begin_check(good)
    write_tokenizer(good)
    text.check(good, never)  # the file is not the one that was checked
    assert asked[2:] == [str(bad), str(good), str(good)]
    text.begin_check(tmp_path)  # there is none
    with pytest.raises(UntrustedTextError):
        text.check(tmp_path, never)
    with text._lock:
        text.begin_check(good)
        with pytest.raises(RequestCancelled):
            text.check(good, lambda: True)


def test_closing_ends_an_early_check(text: UntrustedText, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text._lock.acquire()
    try:
        text.begin_check(tmp_path)
        (early,) = (thread for thread in threading.enumerate() if thread.name == "early-check")
        closing = threading.Thread(target=text.close)
        closing.start()
    finally:
        time.sleep(0.1)  # the check and the close now wait for the same lock
        text._lock.release()
    closing.join()
    early.join()
    assert text.pid is None


def test_the_process_knows_nothing_of_our_environment(text: UntrustedText, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "HTTPS_PROXY", "SWITCHYARD_KEY", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, "hidden")
    assert text.render("x", {}, never).text == "x"
    assert text.pid is not None
    environment = psutil.Process(text.pid).environ()
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert "hidden" not in environment.values()

"""Saved prompts and presets: kept in a file, filled in, and never lost to a damaged one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytestqt.qtbot import QtBot

from app.services.kept import Named, SavedPresets, SavedPrompts, fill, variables
from app.services.settings import Settings
from engine.common.config import SamplingParams

Open = Callable[[], SavedPrompts]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.json"


@pytest.fixture
def open_prompts(qtbot: QtBot, path: Path) -> Iterator[Open]:
    opened: list[SavedPrompts] = []

    def build() -> SavedPrompts:
        opened.append(SavedPrompts(path=path))
        return opened[-1]

    yield build
    for prompts in opened:
        prompts.close()


def ready(qtbot: QtBot, prompts: SavedPrompts) -> SavedPrompts:
    qtbot.waitUntil(lambda: not prompts._doing.is_busy)
    return prompts


def test_prompts_are_there_after_a_restart(open_prompts: Open, qtbot: QtBot) -> None:
    prompts = ready(qtbot, open_prompts())
    prompts.put(" Sum\nup ", "Summarise {{text}}.")
    prompts.put("also", "x")
    prompts.put("ALSO", "y")
    prompts.put("Short", "Be brief.", instead_of="also")
    again = ready(qtbot, ready(qtbot, prompts) and open_prompts())
    assert again.entries == (Named("Short", "Be brief."), Named("Sum up", "Summarise {{text}}."))
    again.remove("short")
    assert [entry.name for entry in ready(qtbot, ready(qtbot, again) and open_prompts()).entries] == ["Sum up"]


def test_what_is_kept_before_the_file_is_read_is_kept(open_prompts: Open, qtbot: QtBot) -> None:
    first = ready(qtbot, open_prompts())
    first.put("one", "1")
    ready(qtbot, first)
    second = open_prompts()
    second.put("two", "2")
    ready(qtbot, second)
    assert [entry.name for entry in second.entries] == ["one", "two"]
    assert [entry.name for entry in ready(qtbot, open_prompts()).entries] == ["one", "two"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_set_aside_and_told_of(open_prompts: Open, qtbot: QtBot, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    prompts = open_prompts()
    with qtbot.waitSignal(prompts.trouble) as told:
        pass
    assert "damaged" in told.args[0]
    (kept,) = path.parent.glob("prompts.json.broken-*")
    assert kept.read_bytes() == content
    prompts.put("one", "1")
    assert ready(qtbot, ready(qtbot, prompts) and open_prompts()).entries == (Named("one", "1"),)


@pytest.mark.parametrize(
    "content", ["[]", "3", '{"entries": 3}', '{"entries": [3, {"name": 3}, {"name": "a", "value": 3}, {"name": " "}]}']
)
def test_what_is_no_prompt_is_passed_over(open_prompts: Open, qtbot: QtBot, path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
    assert ready(qtbot, open_prompts()).entries == ()


def test_a_file_that_cannot_be_read_is_not_written_over(open_prompts: Open, qtbot: QtBot, path: Path) -> None:
    path.mkdir()
    prompts = open_prompts()
    with qtbot.waitSignal(prompts.trouble):
        pass
    prompts.put("one", "1")
    ready(qtbot, prompts)
    assert prompts.entries == (Named("one", "1"),)
    assert path.is_dir()


def test_presets_keep_every_value(qtbot: QtBot, tmp_path: Path) -> None:
    path = tmp_path / "presets.json"
    presets = SavedPresets(path=path)
    sampling = SamplingParams(temperature=0.9, top_k=5, stop=("a", "\n"), seed=3, presence_penalty=0.5, thinking="low")
    presets.put("Mine", sampling)
    qtbot.waitUntil(lambda: not presets._doing.is_busy)
    again = SavedPresets(path=path)
    qtbot.waitUntil(lambda: bool(again.entries))
    assert again.entries == (Named("Mine", sampling),)
    for each in (presets, again):
        each.close()


def test_new_chats_keep_their_sampling_in_the_settings(settings: Settings) -> None:
    assert settings.default_sampling is None
    sampling = SamplingParams(temperature=0.9, stop=("a",))
    settings.default_sampling = sampling
    settings.save()
    assert Settings(settings.path).default_sampling == sampling
    settings.default_sampling = None
    assert settings.default_sampling is None


names = st.from_regex(r"[a-z][a-z ]{0,6}[a-z]", fullmatch=True)


@given(st.lists(st.tuples(names, st.text(max_size=8)), min_size=1, max_size=5), st.text("{} a\n", max_size=5))
def test_every_variable_is_found_and_filled(parts: list[tuple[str, str]], between: str) -> None:
    between = between.replace("{{", "{").replace("}}", "}").strip("{}")
    text = between.join(f"{{{{ {name} }}}}" for name, _ in parts)
    values = dict(parts)
    assert variables(text) == tuple(dict.fromkeys(name for name, _ in parts))
    assert fill(text, values) == between.join(values[name] for name, _ in parts)
    assert fill(text, {}) == text


def test_braces_in_a_value_mean_nothing() -> None:
    assert fill("{{a}} {{b}}", {"a": "{{b}}", "b": "x"}) == "{{b}} x"
    assert variables("{{}} { {a} } {{ }}") == ()

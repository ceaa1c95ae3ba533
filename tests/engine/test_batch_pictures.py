"""Pictures in batch files: a column of them, or parts of requests in OpenAI's format, answered by a model that sees."""

import base64
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import cli
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import BatchJob
from engine.common.errors import EngineError
from engine.common.pictures import pictures_of
from tests.engine.seeing_models import seeing_checkpoint
from tests.engine.tiny_families import tiny_checkpoint
from tests.made_pictures import coloured, file_of, png_of


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_checkpoint("qwen3_vl_moe", tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(file_of(coloured(number), "PNG"))
    (tmp_path / "broken.png").write_bytes(file_of(coloured(), "PNG")[:50])
    (tmp_path / "huge.png").write_bytes(png_of(20_000, 20_000))
    return tmp_path


def asked(folder: Path, rows: Sequence[dict[str, Any]], template: str, **job: Any) -> list[RowRequest | Answer]:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = BatchJob(str(source), str(folder / "out.jsonl"), template=template, **{"image_column": "photo", **job})
    prepared = prepare(made)
    return [prepared.prompts(row) for row in prepared.source.rows()]


def kinds(row: RowRequest | Answer) -> list[str]:
    assert isinstance(row, RowRequest), row
    return [part.get("text", "(picture)") for part in json.loads(row.messages[-1].parts)]


def test_a_cell_is_a_path_an_address_or_a_list(photos: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(file_of(coloured(3), 'PNG')).decode()}"
    cells: list[Any] = ["0.png", str(photos / "1.png"), (photos / "2.png").as_uri(), url, ["0.png", url]]
    rows = asked(photos, [{"photo": cell, "what": "colour"} for cell in cells], "Which {{what}} is it?")
    for row, count in zip(rows, (1, 1, 1, 1, 2), strict=True):
        assert kinds(row) == [*["(picture)"] * count, "Which colour is it?"]
        assert row.messages[-1].content == "Which colour is it?"
        assert len(pictures_of(row.messages[-1])) == count


def test_the_template_may_say_where_a_picture_stands(photos: Path) -> None:
    (row,) = asked(photos, [{"photo": "0.png", "what": "cat"}], "Is {{photo}} a {{what}}?")
    assert kinds(row) == ["Is ", "(picture)", " a cat?"]
    (row,) = asked(photos, [{"photo": "0.png"}], "Describe it.")
    assert kinds(row) == ["(picture)", "Describe it."]
    (row,) = asked(photos, [{"photo": "0.png", "prompt": "What?"}], "")
    assert kinds(row) == ["(picture)", "What?"]


def test_what_is_wrong_with_a_cell_is_said_of_its_row(photos: Path) -> None:
    cells = {
        "gone.png": "cannot be read",
        "": "has nothing in 'photo'",
        "broken.png": "cut off",
        "huge.png": "20,000 × 20,000 pixels",
        "rows.jsonl": "no picture that is read here",
        ".": "cannot be read",
        "https://example.org/a.png": "nothing is fetched",
        "data:image/png;base64,!!": "not valid base64",
        "file://server/a.png": "another machine",
        "\0": "cannot be read",
    }
    rows = asked(photos, [{"photo": cell} for cell in cells], "Describe it.")
    rows += asked(photos, [{"photo": 7}, {"other": "x"}, {"photo": ["0.png"] * 65}], "Describe it.")
    for row, words in zip(rows, [*cells.values(), "'7' in 'photo'", "lacks the column", "65 pictures"], strict=True):
        assert words in row.problem
        assert row.problem.startswith(("has ", "lacks "))


def test_files_of_data_sets_hold_the_bytes(tmp_path: Path) -> None:
    data = file_of(coloured(), "JPEG")
    file = tmp_path / "set.parquet"
    pq.write_table(pa.table({"image": [{"bytes": data, "path": "a.jpg"}], "raw": [data]}), file)
    for column in ("image", "raw"):
        prepared = prepare(BatchJob(str(file), str(tmp_path / "o.jsonl"), template="What?", image_column=column))
        (row,) = map(prepared.prompts, prepared.source.rows())
        assert kinds(row) == ["(picture)", "What?"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"image_column": "picture"}, "no column 'picture' of pictures: its columns are photo"),
        ({"template": ""}, "such as 'Describe the picture.'"),
        ({"template": "{{other}}"}, "the input's columns are photo"),
    ],
)
def test_a_column_that_is_not_there_ends_the_job_at_once(photos: Path, job: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        asked(photos, [{"photo": "0.png"}], job.pop("template", "What?"), **job)


def answers_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_rows_with_pictures_are_answered_and_bad_ones_are_errors_of_their_own(
    seeing: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = photos / "rows.csv", photos / "out.jsonl"
    cells = ["0.png", "gone.png", "1.png", "broken.png", "0.png"]
    with source.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["photo"], *([cell] for cell in cells)])
    command = ["batch", str(source), "-o", str(output), "--model", str(seeing), "--image-column", "photo"]
    command += ["--template", "Describe {{photo}}", "--max-tokens", "6", "--device", "cpu", "--json"]
    assert cli.main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["failed"]) == (5, 2)
    rows = answers_of(output)
    assert [row["photo"] for row in rows] == cells
    assert [bool(row["problem"]) for row in rows] == [False, True, False, True, False]
    assert rows[0]["answer"] == rows[4]["answer"] != rows[2]["answer"]
    assert rows[0]["prompt_tokens"] > 6
    # Mended, only the failed ones are answered, and the others stay as they were.
    (photos / "gone.png").write_bytes(file_of(coloured(2), "PNG"))
    assert cli.main([*command, "--redo", "failed"]) == 0
    again = answers_of(output)
    assert [bool(row["problem"]) for row in again] == [False, False, False, True, False]
    assert [again[at] for at in (0, 2, 4)] == [rows[at] for at in (0, 2, 4)]
    # Another column, or none, is another job.
    assert cli.main([*command[:6], "--template", "{{photo}}", "--max-tokens", "6", "--device", "cpu", "--resume"]) == 2


def test_requests_in_openai_s_format_have_pictures(
    seeing: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = photos / "rows.jsonl", photos / "out.jsonl"
    urls = ["0.png", (photos / "1.png").as_uri(), "https://example.org/a.png", "gone.png"]
    with source.open("w", encoding="utf-8") as file:
        for number, url in enumerate(urls):
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
            body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    assert cli.main(["batch", str(source), "-o", str(output), "--model", str(seeing), "--device", "cpu"]) == 0
    assert [row["custom_id"] for row in answers_of(output)] == ["0", "1"]
    bad = [row["response"]["body"]["error"]["message"] for row in answers_of(photos / "out.errors.jsonl")]
    assert "nothing is fetched" in bad[0]
    assert "cannot be read" in bad[1]
    capsys.readouterr()


def test_a_model_that_reads_text_only_says_so(
    photos: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_checkpoint("mixtral", tmp_path_factory.mktemp("blind") / "model")
    source = photos / "rows.jsonl"
    source.write_text('{"photo": "0.png"}\n', encoding="utf-8")
    command = ["batch", str(source), "--model", str(model), "--image-column", "photo", "--template", "What?"]
    for more in ([], ["--sample", "1"]):
        assert cli.main([*command, "--device", "cpu", *more]) == 2
        assert "reads text only: " in capsys.readouterr().err

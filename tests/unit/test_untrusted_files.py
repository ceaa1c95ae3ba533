"""What others made is read within limits: regular files only, no more of them than belongs there, never a wait."""

import errno
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import openpyxl
import pytest

from app.services.chat_store.reading import Unread, read_chats
from engine.batch_files.opening import open_source
from engine.batch_files.rows import Constraint, grammar_of
from engine.checkpoint import headers, library
from engine.checkpoint.importing import import_model
from engine.checkpoint.model_shape import read_model
from engine.checkpoint.shards import INDEX_NAME, MOST_FILES, read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import check_untrusted, open_untrusted, parse_json, read_untrusted
from engine.experts.replay import read_trace
from engine.tuning.saved_results import model_mark
from tests.refusals import refused
from tests.unit.checkpoint_files import header_of, write_config, write_safetensors

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices in the file system")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


odd_kinds = pytest.mark.parametrize("make", [a_pipe, a_link_to_a_pipe, an_endless_device])


@posix
@odd_kinds
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    make(path)
    for read in (open_untrusted, lambda path: read_untrusted(path, 10), lambda path: check_untrusted(path, 10)):
        with pytest.raises(OSError, match="pipe or a device"):
            read(path)


@posix
def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_untrusted(tmp_path / "link", 3) == b"abc"


def test_no_more_is_read_than_belongs_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: nobody could read it whole
    with pytest.raises(OSError, match="1 MiB"):
        read_untrusted(path, 2**20)
    with pytest.raises(OSError, match="1 MiB"):
        check_untrusted(path, 2**20)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="name") as raised:
        open_untrusted(tmp_path / name)
    assert raised.value.errno == errno.EINVAL


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "9" * 10_000, "", b"\xff\xfe"])
def test_json_that_cannot_be_read_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)


def test_json_nested_deeper_than_anything_of_use() -> None:
    fits = "[" * 10 + "]" * 10
    assert json.dumps(parse_json(fits, deepest=10)) == fits
    with pytest.raises(ValueError, match="10 levels"):
        parse_json(f"[{fits}]", deepest=10)
    assert len(parse_json("[" + ",".join(["[]"] * 50) + "]", deepest=10)) == 50


# --- models ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder)
    write_safetensors(folder / "model.safetensors", header_of({"a": ("F32", [2])}))
    return folder


@posix
@odd_kinds
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX_NAME])
def test_a_model_with_a_pipe_in_place_of_a_file(model: Path, name: str, make: Callable[[Path], None]) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    found = library.describe(model, "model")
    assert found.problem
    with pytest.raises(EngineError) as refused:
        import_model(model, "mine")
    assert refused.value.code.is_users
    if name != "config.json":  # without one it is no model at all
        assert library.verify(str(model)).damaged


@posix
@odd_kinds
def test_a_model_is_told_from_others_without_waiting(model: Path, make: Callable[[Path], None]) -> None:
    (model / "config.json").unlink()
    make(model / "config.json")
    assert model_mark(model)


@posix
def test_a_manifest_that_is_a_pipe_is_none(model: Path) -> None:
    a_pipe(model / "switchyard-manifest.json")
    assert library.verify(str(model)).checked == "headers"


@posix
def test_a_listed_file_that_became_a_pipe_is_damage(model: Path, tmp_path: Path) -> None:
    entry = import_model(model, "mine")
    (entry.path / "config.json").unlink()
    a_pipe(entry.path / "config.json")
    assert "config.json" in library.verify("mine").damaged


def test_a_total_of_shards_that_nobody_can_count_to(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-99999999999.safetensors")
    with refused(ErrorCode.CHECKPOINT_DAMAGED, "number 2"):
        read_tensors(model)


@pytest.mark.parametrize("name", ["a\0.safetensors", "\ud800.safetensors", "\x1b[2J.safetensors", 3, None, ["x"]])
def test_an_index_that_names_no_file(model: Path, name: object) -> None:
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with refused(ErrorCode.CHECKPOINT_DAMAGED):
        read_tensors(model)


def test_an_index_of_too_many_files(model: Path) -> None:
    weight_map = {str(number): f"{number}.safetensors" for number in range(MOST_FILES + 1)}
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(EngineError, match="more than"):
        read_tensors(model)


def test_a_header_larger_than_any_model_has(model: Path) -> None:
    file = model / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((headers.MAX_HEADER + 1).to_bytes(8, "little"))
        stream.truncate(2 * headers.MAX_HEADER)
    with pytest.raises(EngineError, match="MiB"):
        read_tensors(model)


def test_a_tensor_whose_name_is_no_text(model: Path) -> None:
    header = header_of({"a": ("F32", [2])})
    write_safetensors(model / "model.safetensors", {"\ud800": header["a"]})
    with refused(ErrorCode.CHECKPOINT_DAMAGED):
        read_tensors(model)


def test_a_configuration_nested_beyond_reading(model: Path) -> None:
    (model / "config.json").write_text('{"a":' * 100_000)
    assert "nested" in library.describe(model, "model").problem


@posix
@odd_kinds
def test_profiles_and_traces_are_regular_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file.json")
    for read in (lambda: read_model(str(tmp_path / "file.json")), lambda: read_trace(tmp_path / "file.json")):
        with refused(ErrorCode.INVALID_REQUEST):
            read()


# --- chats ---


@posix
@odd_kinds
def test_chats_are_imported_from_regular_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "chats.json")
    unread = Unread()
    assert not list(read_chats([tmp_path / "chats.json"], unread, lambda _share: None, lambda: False))
    assert [why for _, why in unread.problems if "pipe" in why]


# --- rows ---


def test_thousands_of_equal_headers(tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_text(",".join(["x"] * 20_000) + "\n" + ",".join(["1"] * 20_000) + "\n")
    source = open_source(path)
    assert len(set(source.columns)) == 20_000
    assert source.columns[:3] == ("x", "x_2", "x_3")


def _renumbered(path: Path, number: int) -> None:
    """A sheet whose only row has this number."""
    book = openpyxl.Workbook()
    book.active.append(["text"])
    book.save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    sheet = parts["xl/worksheets/sheet1.xml"].decode()
    parts["xl/worksheets/sheet1.xml"] = (
        sheet.replace('<row r="1"', f'<row r="{number}"').replace("A1", f"A{number}").encode()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_a_sheet_whose_only_row_is_far_down(tmp_path: Path) -> None:
    _renumbered(tmp_path / "input.xlsx", 999_999_999)
    with pytest.raises(EngineError, match="has no rows"):  # it names the columns
        open_source(tmp_path / "input.xlsx")


@pytest.mark.parametrize("ending", ["csv", "txt", "jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_half_a_surrogate_pair_is_a_rows_problem(tmp_path: Path, ending: str, encoding: str) -> None:
    path = tmp_path / f"input.{ending}"
    path.write_bytes("\ufefftext\n\ud83d\nsound\n".encode(encoding, "surrogatepass"))
    problems = [bool(row.problem) for row in open_source(path).rows()] if ending != "jsonl" else []
    if ending == "jsonl":  # none of its lines is JSON, which is said
        with pytest.raises(EngineError):
            open_source(path)
    elif ending == "csv":
        assert problems == [True, False]
    else:
        assert problems == [False, True, False]


@pytest.mark.parametrize("depth", [101, 5_000, 200_000])
def test_a_row_nested_beyond_use_is_a_problem(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('{"text": "sound"}\n{"text": ' + "[" * depth + "]" * depth + "}\n")
    assert [bool(row.problem) for row in open_source(path).rows()] == [False, True]


@pytest.mark.parametrize("depth", [101, 5_000, 200_000])
def test_a_schema_nested_beyond_use_is_refused(depth: int) -> None:
    schema = '{"type":"array","items":' * depth + "{}" + "}" * depth
    with refused(ErrorCode.INVALID_REQUEST, match=r"nested|more than"):
        grammar_of(Constraint(schema=schema))


def test_a_schema_as_deep_as_allowed_can_be_followed() -> None:
    assert grammar_of(Constraint(schema='{"type":"array","items":' * 99 + "{}" + "}" * 99))


@pytest.mark.parametrize(
    "schema", ['{"enum":["' + "a" * 300_000 + '"]}', "{" + ",".join(f'"{n}":{{}}' for n in range(4_000)) + "}"]
)
def test_a_schema_of_a_size_that_takes_minutes_is_refused(schema: str) -> None:
    with refused(ErrorCode.INVALID_REQUEST, match="more than"):
        grammar_of(Constraint(schema=schema))


def test_only_annotations_are_taken_out_of_a_schema() -> None:
    known, unknown = {"type": "string", "format": "uuid"}, {"type": "string", "format": "path"}
    schema = {
        "properties": {"format": unknown, "id": known, "x": {"const": {"format": "path"}}},
        "$defs": {"f": unknown},
    }
    grammar = grammar_of(Constraint(schema=json.dumps({"anyOf": [schema, unknown]})))
    assert (grammar.count('"format"'), grammar.count("path"), grammar.count("uuid")) == (3, 1, 1)


@pytest.mark.parametrize(
    "values", [{"num_hidden_layers": 10**12}, {"text_config": {"num_experts": 10**9}}, {"n_layer": 1e300}]
)
def test_a_model_with_more_parts_than_can_be_gone_through(model: Path, values: dict[str, object]) -> None:
    write_config(model, **values)
    assert "config.json gives" in library.describe(model, "model").problem

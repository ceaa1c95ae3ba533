"""The catalogue: whole, honest about what nobody checked, and comparable with a hub."""

import json
from pathlib import Path

import pytest

from benchmarks.catalogue import differences, main
from engine.checkpoint.catalogue import (
    catalogue_dir,
    find_shape,
    own_catalogue,
    read_catalogue,
    use_catalogue,
)
from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.hub.contents import SEES
from engine.common.errors import ErrorCode
from engine.common.files import write_whole
from tests.hub_server import HubServer
from tests.refusals import refused

SHIPPED = catalogue_dir() / "catalogue.json"


def written(folder: Path, change: dict[str, object], date: str = "2030-01-01") -> Path:
    """A catalogue with one entry, the first one of the shipped with these changes."""
    content = json.loads(SHIPPED.read_text(encoding="utf-8"))
    model = {**content["models"][0], **change}
    path = folder / "catalogue.json"
    write_whole(path, json.dumps({"date": date, "models": [model]}))
    return path


def test_the_shipped_one_is_whole() -> None:
    catalogue = read_catalogue(SHIPPED)
    assert sum(entry.kind == "moe" for entry in catalogue.entries) >= 20
    assert sum(entry.kind == "dense" for entry in catalogue.entries) >= 3
    assert len({entry.name for entry in catalogue.entries}) == len(catalogue.entries)
    references = [file.reference for entry in catalogue.entries for file in entry.files]
    assert len(set(references)) == len(references)
    for entry in catalogue.entries:
        assert entry.licence_link.startswith("https://")
        assert entry.shape.context_tokens == entry.context
        # The shape, the published size and the files say the same of the model.
        assert entry.shape.total_weights == pytest.approx(entry.parameters, rel=0.05), entry.name
        assert entry.active <= entry.parameters
        for file in entry.files:
            bits = 8 * file.bytes / entry.parameters
            assert 3 < bits < 17, file.reference
            shape = as_quantised(entry.shape, file.label)
            held = shape.all_expert_bytes(shape.precisions[0]) + shape.non_expert_bytes()
            assert held < 4.5 * entry.parameters


def test_every_entry_is_found_by_its_name_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    for entry in read_catalogue(SHIPPED).entries:
        shape = find_shape(entry.name.upper())
        assert shape.name == entry.name
        assert shape == as_quantised(entry.shape, entry.usual.label)


def test_a_newer_one_is_kept_and_read(tmp_path: Path) -> None:
    use_catalogue(written(tmp_path, {"name": "Mine"}))
    assert [entry.name for entry in read_catalogue().entries] == ["Mine"]
    own_catalogue().write_text("{", encoding="utf-8")
    assert len(read_catalogue().entries) > 1  # damaged since: the shipped one


def test_an_older_one_is_refused(tmp_path: Path) -> None:
    with refused(ErrorCode.INVALID_REQUEST):
        use_catalogue(written(tmp_path, {}, "2020-01-01"))
    assert not own_catalogue().exists()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sparse"},
        {"parameters": -1},
        {"files": []},
        {"files": [{"reference": "org/name", "bytes": 5}]},
        {"files": [{"reference": "org/name:Q4_K_M", "bytes": 0}]},
        {"shape": {}},
        {"shape": None},
        {"licence": ""},
        {"profile": "no such"},
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with refused(ErrorCode.INVALID_REQUEST):
        read_catalogue(written(tmp_path, change))


@pytest.mark.parametrize("content", ["", "[]", '{"date": "x", "models": []}', '{"date": "2026-11-22", "models": 5}'])
def test_what_is_no_catalogue_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content, encoding="utf-8")
    with refused(ErrorCode.INVALID_REQUEST):
        read_catalogue(tmp_path / "c.json")


def test_a_maintainer_sees_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = [
        {"reference": "org/model-GGUF:Q4_K_M", "bytes": 100},
        {"reference": "org/model-GGUF:Q8_0", "bytes": 200},
        {"reference": "org/model-GGUF:Q5_K_M", "bytes": 150},
        {"reference": "org/gone:Q4_K_M", "bytes": 100},
    ]
    path = written(tmp_path, {"name": "Model", "licence": "MIT", "files": files})
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.add("org/model-GGUF", {"m-Q4_K_M.gguf": bytes(100), "m-Q8_0.gguf": bytes(201)}, licence="apache-2.0")
        found = differences(read_catalogue(path))
        assert sum("apache-2.0" in line for line in found) == 1
        assert sum("has no Q5_K_M" in line for line in found) == 1
        assert sum("201 bytes, not 200" in line for line in found) == 1
        assert sum("org/gone" in line for line in found) == 1
        assert len(found) == 4
        assert main(["check", "--file", str(path)]) == 1
        assert len(capsys.readouterr().out.splitlines()) == 4
        agreed = written(tmp_path, {"licence": "Apache 2.0", "files": files[:1]})
        assert main(["check", "--file", str(agreed)]) == 0
    assert main(["check", "--file", str(tmp_path / "none.json")]) == 2


def test_what_is_marked_to_see_is_fetched_with_what_sees() -> None:
    entries = read_catalogue(SHIPPED).entries
    marked = {entry.name for entry in entries if "pictures" in entry.abilities}
    towers_within = {"Mistral Small 4 119B A6B"}  # in safetensors, of a type in `SIGHTS`
    by_name = {entry.name for entry in entries if all(SEES.search(file.reference) for file in entry.files)}
    assert marked == by_name | towers_within
    assert marked

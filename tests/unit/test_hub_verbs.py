"""`switchyard models search`, `recommend` and `fit` of what is on a hub."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.catalogue import catalogue_dir, own_catalogue
from engine.checkpoint.hub.contents import _heads_read, find_candidate
from engine.checkpoint.hub.http import read_token, save_token
from engine.checkpoint.mirror import chosen
from engine.checkpoint.synthetic import make_synthetic
from engine.cli import main
from engine.common.paths import cache_dir, config_dir
from engine.tuning.fit import ASSUMED_LINE_BYTES_PER_S
from engine.verbs.models.hub import candidate_for_here
from tests.hub_server import Fault, HubServer
from tests.tiny_gguf import write_model
from tests.unit.made_up_tuning import MACHINE

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as all other tests have it
    monkeypatch.setattr("engine.tuning.machine_state.probe_machine", lambda: MACHINE)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)` -> exit code, the JSON document of `switchyard models ...`; the text is printed first."""

    def call(*arguments: str) -> tuple[int, Any]:
        shown = main(["models", *arguments])
        assert capsys.readouterr().out or shown == 2
        code = main(["models", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out or "null")

    return call


def test_search(hub: HubServer, run: Run) -> None:
    hub.add("org/tiny-GGUF", {}, tags=("gguf",))
    hub.add("org/tiny-lora", {}, tags=("lora",))
    code, found = run("search", "tiny")
    assert code == 0
    assert [(one["id"], bool(one["problem"])) for one in found["found"]] == [
        ("org/tiny-GGUF", False),
        ("org/tiny-lora", True),
    ]
    assert run("search", "nothing") == (0, {"endpoint": hub.endpoint, "found": []})


def test_fit_compares_every_file_of_a_repository(hub: HubServer, run: Run, tmp_path: Path) -> None:
    folder = make_synthetic("synthetic:qwen3-moe-tiny?layers=2")
    files: dict[str, bytes | Path] = {path.name: path for path in folder.iterdir()}
    files["tiny-Q8_0.gguf"] = write_model(folder, tmp_path / "tiny-Q8_0.gguf", "qwen3moe", quantised="Q8_0")
    hub.add("org/tiny", {**files, "tiny-IQ2_XXS.gguf": b"GGUF", "tiny-Q6_K.gguf": b"GGUF"})
    code, card = run("fit", "org/tiny", "--context", "256")
    assert code == 0
    assert [row["label"] for row in card["rows"]] == ["BF16", "Q8_0", "Q6_K", "IQ2_XXS"]
    verdicts = {row["label"]: row["verdict"] for row in card["rows"]}
    assert verdicts == {"BF16": "fast", "Q8_0": "fast", "Q6_K": "too-large", "IQ2_XXS": "too-large"}
    assert card["recommended"] in ("org/tiny:BF16", "org/tiny:Q8_0")
    assert all(row["why"] for row in card["rows"])
    assert card["endpoint"] == hub.endpoint
    one = run("fit", "org/tiny:Q8_0")[1]
    assert [row["label"] for row in one["rows"]] == ["Q8_0"]
    assert run("fit", "org/tiny:IQ2_XXS")[0] == 2


def test_offline_is_a_users_matter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run("fit", "org/tiny")[0] == 2
    assert run("search", "tiny")[0] == 2


def test_recommend_asks_no_network(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("engine.tuning.machine_state.probe_machine", lambda: MACHINE)
    content = json.loads((catalogue_dir() / "catalogue.json").read_text(encoding="utf-8"))
    newer = {**content, "date": "2030-01-01", "models": content["models"][-4:]}
    file = tmp_path / "newer.json"
    file.write_text(json.dumps(newer), encoding="utf-8")
    code, found = run("recommend", "--catalogue", str(file))
    assert code == 0
    assert own_catalogue().exists()
    assert found["catalogue"] == "2030-01-01"
    assert (found["line_is_measured"], found["line_bytes_per_s"]) == (False, ASSUMED_LINE_BYTES_PER_S)
    assert found["recommendations"]
    for one in found["recommendations"]:
        assert one["seconds_to_first_answer"] > one["bytes"] / found["line_bytes_per_s"]
        assert one["unchecked"]


def test_the_mirror_of_the_settings_is_asked_and_named(
    hub: HubServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    assert run("mirror") == (0, {"endpoint": "https://huggingface.co", "mirror": ""})
    assert run("mirror", f"{hub.endpoint}/")[1] == {"endpoint": hub.endpoint, "mirror": hub.endpoint}
    hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": bytes(8)})
    code, found = run("search", "tiny")
    assert (code, found["endpoint"]) == (0, hub.endpoint)
    assert [one["id"] for one in found["found"]] == ["org/tiny"]
    monkeypatch.setenv("HF_ENDPOINT", "https://other.example/")
    assert run("mirror")[1] == {"endpoint": "https://other.example", "mirror": hub.endpoint}
    assert run("mirror", "none")[1]["mirror"] == ""


@pytest.mark.parametrize(
    "address",
    ["mirror", "http://mirror.example", "https://", "https://a:b@mirror.example", "https://m.example?x", "ftp://m.example",
     "https://m.example:99999999", "https://m exa.mple", "https://[::1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_changes_nothing(run: Run, address: str) -> None:
    assert run("mirror", "https://mirror.example")[0] == 0
    assert run("mirror", address)[0] == 2
    assert chosen("mirror") == "https://mirror.example"
    (config_dir() / "hub.json").write_text(json.dumps({"mirror": address}))  # by hand
    assert chosen("mirror") == ""


def test_a_token_is_forgotten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    save_token("mirror.example", "hf_abc")
    assert run("forget-token") == (0, {"host": "mirror.example", "is_another_left": False})
    assert read_token("mirror.example") == ""
    monkeypatch.setenv("HF_TOKEN", "hf_env")
    assert run("forget-token", "huggingface") == (0, {"host": "mirror.example", "is_another_left": True})


def test_a_model_without_a_label_is_the_one_that_fit_recommends(hub: HubServer, run: Run, tmp_path: Path) -> None:
    folder = make_synthetic("synthetic:qwen3-moe-tiny?layers=2")
    files = {
        f"tiny-{label}.gguf": write_model(folder, tmp_path / f"tiny-{label}.gguf", "qwen3moe", quantised=label)
        for label in ("Q8_0", "Q5_0", "Q4_0")
    }
    hub.add("org/tiny", files)
    recommended = run("fit", "org/tiny")[1]["recommended"]
    assert recommended != find_candidate("org/tiny").reference  # else the test would show nothing
    assert candidate_for_here("org/tiny").reference == recommended
    assert candidate_for_here("org/tiny:Q4_0").label == "Q4_0"
    hub.order(Fault("status", path="*.gguf", times=-1, value=500))
    shutil.rmtree(cache_dir() / "hub")
    _heads_read.clear()
    assert candidate_for_here("org/tiny").reference == find_candidate("org/tiny").reference

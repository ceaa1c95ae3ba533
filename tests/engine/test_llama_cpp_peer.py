"""llama.cpp beside us: built with less where it does not run, a sentence where it is missing or dies, and else it
computes what we compute; and its own tests of its server, as far as they test an interface that `switchyard serve` has.

`SWITCHYARD_LLAMA_CPP` names a checkout of llama.cpp; without it, the sources are taken that the benches' peer was built
from, if it was.  Which tests must pass, and why the others are left out, is said in `llama_cpp_server/choice.toml`."""

import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import shapes
from benchmarks.peers import build as building
from benchmarks.peers.beside import files_beside
from benchmarks.peers.build import Builder, PeerBuildError, find_sources
from benchmarks.peers.editions import EDITIONS, IK_LLAMA_CPP, LLAMA_CPP, Edition
from benchmarks.peers.instructions import GROUPS, Instructions
from benchmarks.peers.peer import GgufPeer
from engine.bench.opened import resolve_model
from engine.bench.report import PeerError, Report, in_turn
from engine.checkpoint.gguf.export import Quantisation, write_gguf
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from tests.engine.llama_cpp_server.plugin import FOLDER, STARTER, WORDLESS
from tests.engine.loaded_tiny import opened_model
from tests.engine.single_streams import Alone
from tests.peers import BUILT, built, users_peers  # noqa: F401 - the last is a fixture
from tests.refusals import refused
from tests.starter import starter_for_tests

needs_peer = pytest.mark.skipif(not built(LLAMA_CPP), reason=f"not built: {LLAMA_CPP.how_to_build()}")
posix_only = pytest.mark.skipif(os.name != "posix", reason="a shell script plays the peer")


def stand_in(folder: Path, script: str) -> Path:
    """A program that takes the interpreter's place."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_without_the_binding_it_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switchyard_home: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(PeerError, match=r"run python -m benchmarks\.peers build"):
        GgufPeer("llama.cpp", tmp_path / "model.gguf", 1, 64)


@posix_only
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -ILL $$", "died of SIGILL"),
        ("echo 'ModuleNotFoundError: no binding' >&2; exit 1", r"status 1 \(ModuleNotFoundError: no binding\)"),
        ("""read line; echo '{"error": "cannot load"}'; read line""", "cannot load"),
    ],
)
def test_a_peer_that_dies_or_refuses_while_loading(script: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=reason):
        GgufPeer("llama.cpp", tmp_path / "model.gguf", 1, 64, python=stand_in(tmp_path, script))


OPENS = """read line; echo '{"seconds": 1}'; read line; echo '{"seconds": 0.5}'"""


@posix_only
def test_a_peer_that_dies_while_it_computes(tmp_path: Path) -> None:
    script = f"{OPENS}; read line; kill -SEGV $$"
    with (
        GgufPeer("llama.cpp", tmp_path / "model.gguf", 1, 64, python=stand_in(tmp_path, script)) as peer,
        pytest.raises(PeerError, match="died of SIGSEGV"),
    ):
        peer.decode_rate([1, 2], 4)


def test_the_extra_and_the_build_are_of_one_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["peers"] == [f"llama-cpp-python=={LLAMA_CPP.version}"]


def our_greedy(checkpoint: Path, prompt: list[int], tokens: int) -> list[int]:
    """The ids that our engine generates on the CPU in bfloat16."""
    with opened_model(checkpoint) as loaded:
        result = Alone(loaded).generate_from_ids(
            prompt,
            SamplingParams(max_tokens=tokens),
            on_progress=lambda _done, _total: None,
            on_text=lambda _text, _count: None,
            cancelled=lambda: False,
            end_ids=frozenset(),
        )
        return list(result.token_ids)


@pytest.mark.exhaustive
@needs_peer
@pytest.mark.usefixtures("users_peers")
def test_the_starter_says_the_same_in_llama_cpp_and_here(tmp_path: Path) -> None:
    checkpoint = starter_for_tests()
    write_gguf(checkpoint, tmp_path / "starter.gguf", Quantisation.BF16)
    prompt = [504, 3575, 282, 4649, 314]  # The capital of France is
    ours = our_greedy(checkpoint, prompt, 4)
    with GgufPeer("llama.cpp", tmp_path / "starter.gguf", 1, 128) as peer:
        for flags in LLAMA_CPP.flags:
            peer.set_up(flags, 128)
            assert peer.greedy(prompt, 4) == ours


@needs_peer
@pytest.mark.usefixtures("users_peers")
@pytest.mark.parametrize("edition", BUILT)
def test_no_flags_change_what_is_computed(edition: Edition, tmp_path: Path) -> None:
    write_gguf(make_synthetic(SMALL.split("&gguf")[0]), tmp_path / "model.gguf", Quantisation.BF16)
    ids = list(range(3, 40))
    with GgufPeer("llama.cpp", tmp_path / "model.gguf", 1, 64) as peer:
        theirs = peer.logits(ids)
    with GgufPeer("peer", tmp_path / "model.gguf", 1, 64, edition=edition) as peer:
        for flags in edition.flags:
            peer.set_up(flags, 64)
            assert ((peer.logits(ids) - theirs) ** 2).sum() < 1e-4 * (theirs**2).sum()


@pytest.mark.usefixtures("users_peers")
@pytest.mark.parametrize("edition", BUILT)
def test_a_long_context_is_filled_with_copies(edition: Edition, tmp_path: Path) -> None:
    write_gguf(make_synthetic("synthetic:qwen3-moe-tiny"), tmp_path / "model.gguf", Quantisation.BF16)
    prompt = [3 + at % 90 for at in range(1600)]
    with GgufPeer("peer", tmp_path / "model.gguf", 1, 2048, edition=edition) as peer:
        for _ in range(2):
            assert peer.decode_rate(prompt, 4) > 0
        answer = peer.greedy(prompt[:40], 4)
        assert peer.decode_rate(prompt, 4) > 0
        assert peer.greedy(prompt[:40], 4) == answer


@pytest.mark.takes_turns(2)
@needs_peer
@pytest.mark.usefixtures("users_peers")
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "olmoe"])
def test_every_family_computes_in_llama_cpp_what_it_computes_in_transformers(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(
        family,
        **sizes,
        **({} if family == "llama" else experts),
        num_key_value_heads=4 if family == "olmoe" else 2,
        head_dim=16,
        vocab_size=120,
        max_position_embeddings=128,
        norm_topk_prob=family != "olmoe",
        initializer_range=0.2,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # what the file can hold
    model.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf", Quantisation.BF16)
    prompt = torch.randint(3, 120, (40,)).tolist()
    with GgufPeer("llama.cpp", tmp_path / "model.gguf", 1, 64) as peer:
        theirs = peer.greedy(prompt, 20)
    with torch.inference_mode():
        ours = model(torch.tensor([prompt + theirs[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    # llama.cpp rounds activations to bfloat16: of two tokens or experts almost as good, it may take the other one.
    assert sum(one == other for one, other in zip(theirs, ours, strict=True)) >= 16


@pytest.mark.usefixtures("users_peers")
@pytest.mark.parametrize("edition", BUILT)
@pytest.mark.parametrize("quantisation", Quantisation)
def test_every_type_of_matrix_loads_and_answers(quantisation: Quantisation, edition: Edition, tmp_path: Path) -> None:
    write_gguf(make_synthetic("synthetic:qwen3-moe-tiny"), tmp_path / "model.gguf", quantisation)
    with GgufPeer("peer", tmp_path / "model.gguf", 1, 64, edition=edition) as peer:
        answer = peer.greedy([3, 4, 5], 4)
        assert len(answer) == 4
        assert peer.greedy([3, 4, 5], 4) == answer  # nothing is left of the first context


@needs_peer
@pytest.mark.usefixtures("users_peers")
def test_a_file_that_is_no_model_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(PeerError, match="cannot load"):
        GgufPeer("llama.cpp", tmp_path / "model.gguf", 1, 64)


def test_a_bench_goes_on_without_a_peer_that_dies() -> None:
    def dies_at_last(_repeat: int) -> float:
        died.append(1)
        if len(died) == 3:
            raise PeerError("its process died of SIGILL")
        return 1.0

    died: list[int] = []
    report = Report({})
    contestants: dict[str, Callable[[int], float]] = {"ours": lambda _repeat: 2.0, "llama.cpp": dies_at_last}
    rates = in_turn(contestants, 4, report, lambda _text: None)
    assert rates == {"ours": [2.0] * 4}
    (missing,) = report.peers_not_run
    assert (missing["peer"], "SIGILL" in missing["reason"]) == ("llama.cpp", True)


SMALL = "synthetic:qwen3-moe-small?experts=8&layers=1&vocab=512&gguf="
HYBRID = "synthetic:granite-4.0-h-tiny?experts=6&layers=6&vocab=512&gguf="


@needs_peer
@pytest.mark.usefixtures("users_peers")
@pytest.mark.parametrize("model", [SMALL, pytest.param(HYBRID, marks=pytest.mark.exhaustive)])
def test_a_synthetic_file_has_the_types_that_llama_cpp_chooses(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "cache_dir", lambda: tmp_path)
    file = resolve_model(f"{model}Q4_K_M", lambda _text: None)
    assert {path.name for path in file.parent.iterdir()} == {file.name}
    written = file.stat().st_mtime_ns
    assert {"Q4_K", "Q6_K", "F32"} <= {entry.dtype for entry in read_gguf(file).tensors.values()}
    prompt = list(range(3, 40))
    with GgufPeer("llama.cpp", file, 1, 64) as peer:
        theirs = peer.logits(prompt)
    with opened_model(file, "fp32") as ours, torch.no_grad():
        assert len(ours.tokenizer("two words")["input_ids"]) == 9
        mine = ours.model(torch.tensor([prompt])).logits[0].numpy()
    assert ((mine - theirs) ** 2).sum() < 0.1**2 * (mine**2).sum()  # it rounds activations to 8 bits
    assert resolve_model(f"{model}Q4_K_M", lambda _text: None).stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (f"{SMALL}Q4_K_XXL", ErrorCode.INVALID_REQUEST),
        (f"{SMALL}Q4_K_M&layers=0", ErrorCode.INVALID_REQUEST),
        ("synthetic:no-such-shape?gguf=Q4_K_M", ErrorCode.MODEL_NOT_FOUND),
    ],
)
def test_a_synthetic_file_that_cannot_be(model: str, code: ErrorCode, switchyard_home: Path) -> None:
    with pytest.raises(EngineError) as refused:
        resolve_model(model, lambda _text: None)
    assert refused.value.code is code
    assert not switchyard_home.exists()


def test_without_llama_cpp_there_is_no_quantised_file(switchyard_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with refused(ErrorCode.DEVICE_UNAVAILABLE):
        resolve_model(f"{SMALL}Q4_K_M", lambda _text: None)
    assert not list(switchyard_home.rglob("*.gguf"))


def test_without_llama_cpp_no_file_is_written_for_it(switchyard_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    report = Report({})
    assert files_beside(switchyard_home / "starter", "bf16", report, lambda _text: None, ["llama.cpp"]) == []
    assert "python -m benchmarks.peers build" in report.peers_not_run[0]["reason"]
    assert not switchyard_home.exists()


def builder(edition: Edition = LLAMA_CPP, heard: list[str] | None = None, named: Path | None = None) -> Builder:
    return Builder(edition, (heard if heard is not None else []).append, named=named)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The steps that take minutes or a network, replaced; holds what each compilation was asked to use."""
    asked: list[list[str]] = []

    def compile_(_builder: Builder, instructions: Sequence[Instructions], _tree: Path, _sources: Path) -> None:
        asked.append([group.name for group in instructions])

    monkeypatch.setenv("CXX", "c++")
    for step in ("_make_environment", "_install"):
        monkeypatch.setattr(Builder, step, lambda _builder: None)
    monkeypatch.setattr(Builder, "_sources", lambda _builder: Path("sources"))
    monkeypatch.setattr(Builder, "_compile", compile_)
    monkeypatch.setattr(building, "working_instructions", lambda _compiler: list(GROUPS[:3]))
    return asked


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda edition: edition.name)
def test_the_last_instructions_go_until_it_runs(
    edition: Edition, compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "fault_of", lambda _edition: "died of SIGILL" if len(compiled) < 3 else None)
    names = [group.name for group in GROUPS]
    assert builder(edition).build() == names[:1]
    assert compiled == [names[:3], names[:2], names[:1]]
    receipt = json.loads(edition.receipt().read_text(encoding="utf-8"))
    assert receipt == {"version": edition.version, "instructions": names[:1], "sources": "sources"}


def test_sources_that_somebody_names(tmp_path: Path) -> None:
    with pytest.raises(PeerBuildError, match=r"holds no sources of ik_llama\.cpp"):
        find_sources(IK_LLAMA_CPP, tmp_path)
    for folder in (tmp_path / "checkout", tmp_path / "archive" / IK_LLAMA_CPP.folder):
        (folder / "include").mkdir(parents=True)
        (folder / "include" / "llama.h").touch()
        (folder / "CMakeLists.txt").touch()
    assert builder(IK_LLAMA_CPP, named=tmp_path / "checkout")._sources() == (tmp_path / "checkout").resolve()
    assert find_sources(IK_LLAMA_CPP, tmp_path / "archive") == tmp_path / "archive" / IK_LLAMA_CPP.folder
    with pytest.raises(PeerBuildError, match="no Python binding"):
        find_sources(LLAMA_CPP, tmp_path / "checkout")


ROOT = Path(__file__).resolve().parents[2]
CHOICE = Path(__file__).parent / "llama_cpp_server" / "choice.toml"
FEWEST = 60
_TESTS = Path("tools") / "server" / "tests"


@cache
def _choice() -> dict[str, Any]:
    return tomllib.loads(CHOICE.read_text(encoding="utf-8"))


def _tests() -> Path:
    """The folder of their tests."""
    named = os.environ.get("SWITCHYARD_LLAMA_CPP")
    # Not by `LLAMA_CPP.home()`: tests have a cache of their own.
    built = Path.home() / ".cache" / "Switchyard"
    found = [Path(named)] if named else sorted(built.glob("llama-cpp-python-*/source/vendor/llama.cpp"))
    for checkout in found:
        if (checkout / _TESTS / "utils.py").is_file():
            return checkout / _TESTS
    return pytest.skip("SWITCHYARD_LLAMA_CPP names no checkout of llama.cpp with the tests of its server")


def _chosen() -> list[str]:
    return [f"{file}::{name}" for file, names in _choice()["passes"].items() for name in names]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_each_of_their_tests_is_chosen_or_left_out_with_a_reason() -> None:
    unit, left_out = _tests() / "unit", _choice()["left_out"]
    names = {
        f"unit/{file.name}::{name}"
        for file in unit.glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    chosen = {name.split("[")[0] for name in _chosen()}
    assert chosen <= names
    assert {
        name for name in names if name not in chosen | left_out.keys() and name.split("::")[0] not in left_out
    } == set()
    assert {name for name in left_out if name not in names and not (unit.parent / name).is_file()} == set()
    assert all(left_out.values())


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.name != "posix", reason="links to a model's files")
def test_those_that_are_chosen_pass(tmp_path: Path) -> None:
    tests, results = _tests(), tmp_path / "results.xml"
    variables = {
        "PYTHONPATH": str(ROOT),
        FOLDER: str(tmp_path),
        STARTER: str(starter_for_tests()),
        WORDLESS: "\n".join(_choice()["wordless"]["tests"]),
    }
    options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "120", "-q"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.engine.llama_cpp_server.plugin", *options]
    done = subprocess.run(
        [*command, f"--junitxml={results}", *_chosen()],
        cwd=tests,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert results.exists(), (done.stdout + done.stderr)[-3000:]
    cases = ET.parse(results).getroot().findall(".//testcase")
    failed = [f"{case.get('name')}: {part.get('message')}" for case in cases for part in case if part.tag != "skipped"]
    assert failed == [], (tmp_path / "errors.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
    passed = [case for case in cases if not list(case)]
    assert len(passed) >= FEWEST

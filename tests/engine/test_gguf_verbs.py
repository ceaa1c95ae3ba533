"""GGUF files on the command line: chat, the library, plans, and what is refused."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian

from engine import cli
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.shards import fingerprint
from engine.common.errors import ErrorCode
from engine.common.paths import cache_dir, data_dir, models_dir
from engine.tuning.saved_results import model_mark
from engine.untrusted_text.child import serve
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_gguf, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    options = {"use_sliding_window": False, "norm_topk_prob": True, "max_position_embeddings": 4096}
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "tiny", **sizes, **options)


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with nothing beside it."""
    file = tmp_path_factory.mktemp("made") / "Tiny-MoE-Q8_0.gguf"
    return write_model(folder, file, "qwen3moe", quantised="Q8_0")


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return Path(shutil.copy(made, tmp_path / "files" / made.name))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(*arguments)` -> exit code and document of `switchyard ... --json`."""

    def call(*arguments: str | Path) -> tuple[int, Any]:
        code = cli.main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


CHAT = ("--prompt", "a question", "--max-tokens", "4", "--device", "cpu", "--threads", "1")


def test_chat(run: Any, file: Path, folder: Path) -> None:
    code, answer = run("chat", "--model", file, *CHAT, "--precision", "fp32")
    assert code == 0
    assert answer["generated_tokens"] > 0
    assert answer["model"] == file.stem
    # The checkpoint's own tokenizer and template make as many tokens of the question.
    assert answer["prompt_tokens"] == run("chat", "--model", folder, *CHAT)[1]["prompt_tokens"]


def test_tokens_are_counted_by_the_files_own_tokenizer(file: Path, folder: Path) -> None:
    texts = ["a question", "what is the capital of France?"]
    requests = [{"do": "count", "folder": str(path), "texts": texts, "seconds": 60} for path in (file, folder)]
    answers = io.BytesIO()
    serve(io.BytesIO("".join(f"{json.dumps(request)}\n" for request in requests).encode()), answers)
    ours, theirs = (json.loads(line)["result"] for line in answers.getvalue().splitlines())
    assert ours == theirs
    assert all(ours)


def test_experts_from_disk(run: Any, file: Path) -> None:
    expected = run("chat", "--model", file, *CHAT, "--precision", "bf16")[1]["text"]
    code, answer = run("chat", "--model", file, *CHAT, "--precision", "bf16", "--ram", "400KB")
    assert (code, answer["text"]) == (0, expected)
    assert [made.name.startswith(file.name) for made in (data_dir() / "converted").glob("*.gguf")] == [True]


def test_the_library(run: Any, file: Path) -> None:
    code, entry = run("models", "import", file)
    assert code == 0
    assert (entry["name"], entry["family"], entry["dtype"], entry["experts"]) == (file.stem, "qwen3_moe", "q8_0", 8)
    assert entry["context_tokens"] == 4096
    assert entry["bytes_on_disk"] > file.stat().st_size
    held = models_dir() / file.stem / file.name
    assert os.path.samefile(held, file)
    assert [one["name"] for one in run("models", "list")[1]["models"]] == [file.stem]
    assert run("models", "show", file.stem)[1]["problem"] == ""
    code, verdict = run("models", "verify", file.stem)
    assert (code, verdict["checked"], verdict["files"]) == (0, "sha256", 1)
    assert run("chat", "--model", file.stem, *CHAT)[1]["model"] == file.stem
    assert len(list((cache_dir() / "tokenizers").iterdir())) == 1
    assert run("models", "import", file)[0] == 2  # the name is taken
    assert run("models", "import", held)[0] == 2
    assert run("models", "remove", file.stem, "--permanently")[0] == 0
    assert file.exists()
    assert list(models_dir().iterdir()) == []
    assert list((cache_dir() / "tokenizers").iterdir()) == []


def test_a_file_with_a_converters_name_takes_the_models_own(run: Any, folder: Path, tmp_path: Path) -> None:
    file = write_model(folder, tmp_path / "ggml-model-Q8_0.gguf", "qwen3moe", name="Tiny MoE")
    assert run("models", "import", file)[1]["name"] == "Tiny-MoE"


def test_a_file_outside_of_the_library(run: Any, file: Path) -> None:
    code, entry = run("models", "show", file)
    assert (code, entry["name"], entry["bytes_on_disk"]) == (0, str(file), file.stat().st_size)
    code, verdict = run("models", "verify", file)
    assert (code, verdict["checked"], verdict["files"], verdict["ok"]) == (0, "headers", 1, True)
    code, plan = run("plan", "--model", file)
    assert (code, plan["model"]) == (0, file.stem)
    assert run("models", "fit", file)[0] == 0
    assert run("models", "remove", file)[0] == 2
    assert file.exists()


def test_a_model_of_ollamas(run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": file.stat().st_size,
    }
    manifest = tmp_path / "store" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "8b"
    for folder in (manifest.parent, tmp_path / "store" / "blobs"):
        folder.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob = tmp_path / "store" / "blobs" / f"sha256-{digest}"
    os.link(file, blob)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SWITCHYARD_FIND_MODELS")
    assert [(one["name"], one["origin"]) for one in run("models", "list")[1]["models"]] == [("tiny:8b", "Ollama")]
    code, answer = run("chat", "--model", "tiny:8b", *CHAT)
    assert (code, answer["model"]) == (0, "tiny:8b")
    assert answer["text"] == run("chat", "--model", file, *CHAT)[1]["text"]
    assert run("models", "show", "tiny:8b")[1]["last_used"] is not None
    assert run("models", "remove", "tiny:8b")[0] == 2
    code, entry = run("models", "import", "tiny:8b")
    assert (code, entry["name"], entry["problem"]) == (0, "tiny-8b", "")
    assert (models_dir() / "tiny-8b" / "tiny-8b.gguf").is_file()
    assert blob.exists()


def test_all_parts_are_imported(run: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_model(folder, tmp_path / "files" / "split.gguf", "qwen3moe", split_max_tensors=10)
    parts = sorted((tmp_path / "files").iterdir())
    assert len(parts) > 2
    code, entry = run("models", "import", parts[1])
    assert (code, entry["name"]) == (0, "split")
    assert run("models", "verify", "split")[1]["files"] == len(parts)
    code, answer = run("chat", "--model", "split", *CHAT)
    assert (code, answer["generated_tokens"] > 0) == (0, True)
    run("models", "remove", "split", "--permanently")
    parts[-1].unlink()
    code, document = run("models", "import", parts[0])
    assert (code, document["error"]["code"]) == (2, ErrorCode.CHECKPOINT_DAMAGED)
    assert list(models_dir().iterdir()) == []


def test_a_file_that_changed_is_another(file: Path) -> None:
    mark, print_before = model_mark(file), fingerprint(file)
    assert model_mark(file) == mark
    with file.open("ab") as stream:
        stream.write(b"more")
    assert model_mark(file) != mark
    assert fingerprint(file) != print_before


def _bad_files(folder: Path, made: Path, at: Path) -> Iterator[tuple[Path, ErrorCode]]:
    content = made.read_bytes()

    def changed(name: str, *replacements: tuple[bytes, bytes]) -> Path:
        raw = content
        for old, new in replacements:
            assert old in raw
            raw = raw.replace(old, new)
        (at / name).write_bytes(raw)
        return at / name

    def model(name: str, architecture: str = "qwen3moe", **more: Any) -> Path:
        return write_model(folder, at / name, architecture, **more)

    (at / "short.gguf").write_bytes(content[:-1000])
    (at / "empty.gguf").write_bytes(b"")
    for name, key in (("nan.gguf", "blk.1.ffn_up_exps.weight"), ("norm.gguf", "blk.2.attn_norm.weight")):
        entry = read_gguf(made).tensors[key]
        raw = content[: entry.offset] + b"\xff" * entry.nbytes + content[entry.offset + entry.nbytes :]
        (at / name).write_bytes(raw)
        yield at / name, ErrorCode.CHECKPOINT_DAMAGED
    few = {"token_embd.weight": np.zeros((4, 4))}
    yield at / "short.gguf", ErrorCode.CHECKPOINT_DAMAGED
    yield at / "empty.gguf", ErrorCode.CHECKPOINT_DAMAGED
    yield at / "none.gguf", ErrorCode.MODEL_NOT_FOUND
    yield changed("old.gguf", (b"GGUF\3", b"GGUF\1")), ErrorCode.MODEL_UNSUPPORTED
    yield changed("other.gguf", (b"qwen3moe", b"qwen9moe")), ErrorCode.MODEL_UNSUPPORTED
    yield (
        changed("key.gguf", (b"qwen3moe.expert_used_count", b"qwen3moe.expert_used_cOunt")),
        ErrorCode.CHECKPOINT_DAMAGED,
    )
    yield changed("pre.gguf", (b"gpt-2", b"xyz-2")), ErrorCode.MODEL_UNSUPPORTED
    yield changed("tensor.gguf", (b"blk.1.attn_q.weight", b"blk.1.attn_z.weight")), ErrorCode.MODEL_UNSUPPORTED
    yield model("gate.gguf", expert_gating_func=2), ErrorCode.MODEL_UNSUPPORTED
    yield model("scale.gguf", expert_weights_scale=2.5), ErrorCode.MODEL_UNSUPPORTED
    yield model("vocabulary.gguf", tokens=300), ErrorCode.CHECKPOINT_DAMAGED
    yield write_gguf(at / "lora.gguf", few, keys=lambda writer: writer.add_type("adapter")), ErrorCode.MODEL_UNSUPPORTED
    yield write_gguf(at / "mmproj.gguf", few, architecture="clip"), ErrorCode.MODEL_UNSUPPORTED
    yield write_gguf(at / "big.gguf", few, endianess=GGUFEndian.BIG), ErrorCode.MODEL_UNSUPPORTED


def test_a_broken_file_is_shown_with_its_problem(made: Path, tmp_path: Path, run: Any) -> None:
    for name, content in (("short.gguf", made.read_bytes()[:-1000]), ("empty.gguf", b""), ("other.gguf", b"PK\3\4")):
        (tmp_path / name).write_bytes(content)
        code, entry = run("models", "show", tmp_path / name)
        assert (code, entry["bytes_on_disk"]) == (2, len(content))
        assert name in entry["problem"]


def test_bad_files_are_refused_and_leave_nothing(
    folder: Path, made: Path, tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, code in _bad_files(folder, made, tmp_path):
        for command in (("models", "import", file), ("chat", "--model", file, *CHAT)):
            exit_code, document = run(*command)
            assert (exit_code, document["error"]["code"]) == (2, code), (command, document)
            assert "\n" not in document["error"]["message"]
            assert cli.main([*map(str, command)]) == 2
            told = capsys.readouterr()
            assert (told.out, told.err.count("\n")) == ("", 1)
        assert not models_dir().exists() or list(models_dir().iterdir()) == []
    assert not list(data_dir().rglob("*.bank"))

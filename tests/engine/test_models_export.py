"""`models export --to gguf`: what is written is read back as the same model, and answers alike."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.peers.editions import LLAMA_CPP
from engine.checkpoint.gguf.export import Quantisation
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.tokenizer import tokenizer_files
from engine.cli import main
from engine.common.errors import ErrorCode
from engine.runtime.load.gguf_export import export_gguf
from tests.combinations import some
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_family_parity import greedy, logits
from tests.engine.tiny_families import tiny_checkpoint
from tests.engine.tiny_tokenizer import TEXT
from tests.peers import python_of
from tests.refusals import refused

PEER = python_of(LLAMA_CPP)


def _answers(path: Path) -> tuple[torch.Tensor, list[int], list[int]]:
    with opened_model(path, "fp32") as loaded, torch.no_grad():
        ids = loaded.tokenizer.encode("Hello wörld, it's 12345!\n", add_special_tokens=False)
        return logits(loaded.model), greedy(loaded.model, 8)[0].tolist(), list(ids)


@pytest.mark.parametrize("family", some(["llama", "mixtral", "qwen3_moe", "olmoe", "qwen3", "qwen2_moe"], every=4))
def test_a_file_that_was_written_is_the_same_model(family: str, tmp_path: Path) -> None:
    options = {"use_sliding_window": False} if family.startswith("qwen") else {}
    if family in ("qwen3_moe",):
        options["norm_topk_prob"] = True
    checkpoint = tiny_checkpoint(family, tmp_path / "model", **options)
    file = export_gguf(checkpoint, tmp_path, Quantisation.BF16, lambda _done, _total: None)
    assert file == tmp_path / "model-BF16.gguf"
    wanted, found = _answers(checkpoint), _answers(file)
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-2)  # its weights are rounded to bf16
    assert found[2] == wanted[2]


_SAYS = """
import json, sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(sys.stdin)
print(json.dumps([model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]))
"""
_TEXTS = ["The router chooses 17 experts", "what is  the capital\n of France?", "Größe 你好 🙂 \t!", "a"]


def _of_sentence_piece() -> Tokenizer:
    """As the library makes one of a SentencePiece model: every way to make a token of two, the best token's first."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=180, show_progress=False))
    content = json.loads(trained.to_str())
    learnt = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    known = set(learnt)
    merges = [
        (token[:at], token[at:])
        for token in learnt
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    own = Tokenizer(
        models.BPE(
            {name: at for at, name in enumerate(names)}, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
        )
    )
    own.normalizer = trained.normalizer
    return own


def _of_unigrams() -> Tokenizer:
    own = Tokenizer(models.Unigram())
    own.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")])
    own.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return own


@pytest.mark.parametrize(("make", "kind"), [(_of_sentence_piece, "llama"), (_of_unigrams, "t5")])
def test_tokenizers_without_a_sentence_piece_model_are_written(
    make: Callable[[], Tokenizer], kind: str, tmp_path: Path
) -> None:
    own = make()
    checkpoint = tiny_checkpoint("llama", tmp_path / "model", vocab_size=512)
    for stale in checkpoint.glob("*token*"):
        stale.unlink()
    PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(
        checkpoint
    )
    file = export_gguf(checkpoint, tmp_path, Quantisation.BF16, lambda _done, _total: None)
    assert read_gguf(file).metadata["tokenizer.ggml.model"] == kind
    wanted = [own.encode(text, add_special_tokens=False).ids for text in _TEXTS]
    again = Tokenizer.from_str(tokenizer_files(read_gguf(file).metadata, file)["tokenizer.json"])
    assert [again.encode(text, add_special_tokens=False).ids for text in _TEXTS] == wanted
    if PEER is not None:
        said = subprocess.run(
            [str(PEER), "-I", "-c", _SAYS, str(file)],
            input=json.dumps(_TEXTS),
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(said.stdout.splitlines()[-1]) == wanted


def test_what_llama_cpp_does_not_have_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint("mixtral", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "longcat_flash"}))
    assert main(["models", "export", str(checkpoint), str(tmp_path), "--to", "gguf"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written as llama.cpp has it" in said[-1]
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(
    ("family", "why"), [("grove_moe", "another input"), ("k2_horizon", "branch"), ("smallthinker", "have a window")]
)
def test_families_that_are_not_written_say_why(family: str, why: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "model")
    with refused(ErrorCode.MODEL_UNSUPPORTED, match=f"cannot be written as llama.cpp has it: .*{why}"):
        export_gguf(checkpoint, tmp_path, Quantisation.BF16, lambda _done, _total: None)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    (tmp_path / "a.gguf").write_text("mine")
    with refused(ErrorCode.INVALID_REQUEST, match="is there already"):
        export_gguf(checkpoint, tmp_path / "a.gguf", Quantisation.BF16, lambda _done, _total: None)
    assert (tmp_path / "a.gguf").read_text() == "mine"
    shutil.rmtree(checkpoint)

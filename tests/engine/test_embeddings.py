"""Models made for embeddings: their vectors are the library's, and programs get them over HTTP from a process."""

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGUFWriter, PoolingType, get_tensor_name_map
from safetensors.torch import save_file

from engine.checkpoint.embedding import Embedding, embedding_of
from engine.checkpoint.library import describe, model_files
from engine.checkpoint.packed import read_safetensors
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.families.known import ENCODERS
from engine.runtime.embedding import Embedder
from engine.runtime.engine import Engine
from engine.serving import embeddings
from engine.serving.server import Address, Server
from engine.serving.service import LibraryModels, Service
from tests.engine.tiny_tokenizer import VOCABULARY, save_tiny_tokenizer
from tests.refusals import refused
from tests.scripted_broker import ScriptedBroker
from tests.tiny_gguf import add_vocabulary, takes, write_gguf, write_model

TEXTS = [
    "What is the capital of France?",
    "Paris.",
    "The router chooses a few experts for each token, and the answer is the weighted sum of what they say.",
    "Paris.",
]
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {"intermediate_size": 64}),
    "xlm-roberta": ("XLMRobertaModel", {"intermediate_size": 64, "max_position_embeddings": 130, "pad_token_id": 0}),
    "nomic_bert": ("NomicBertModel", {"intermediate_size": 64, "head_dim": 16, "pad_token_id": 0}),
    "modernbert": ("ModernBertModel", {"intermediate_size": 64, "pad_token_id": 0}),
    "gemma3_text": (
        "Gemma3TextModel",
        {"intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 1, "use_bidirectional_attention": True},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 1}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}

_OF_NOMIC = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
"""The library's names in a layer -> those of the file, which llama.cpp's converter makes from the makers' own."""


def _made(folder: Path, kind: str, pooling: str, *others: str, dtype: torch.dtype | None = None) -> Path:
    """A model of a kind, drawn at random, as sentence-transformers would save it."""
    name, options = _KINDS[kind]
    torch.manual_seed(7)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**{**sizes, **options}))
    own = torch.bfloat16 if name.endswith("CausalLM") else torch.float32
    model.to(dtype or own).save_pretrained(folder)
    save_tiny_tokenizer(folder, template=None)
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *((f"{n}_{other}", other) for n, other in enumerate(others, 2)),
    ]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 32, "pooling_mode_max_tokens": False, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    if "Dense" in others:
        dense = folder / f"{others.index('Dense') + 2}_Dense"
        dense.mkdir()
        function = {"in_features": 32, "out_features": 16, "activation_function": "torch.nn.modules.activation.Tanh"}
        (dense / "config.json").write_text(json.dumps(function))
        save_file({"linear.weight": torch.randn(16, 32), "linear.bias": torch.randn(16)}, dense / "model.safetensors")
    return folder


def _expected(folder: Path, pooling: str) -> torch.Tensor:
    """Each text by itself through the library's whole model, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for text in TEXTS:
            states = model(torch.tensor([tokenizer(text)["input_ids"]]))[0][0]
            found.append({"cls_token": states[0], "mean_tokens": states.mean(0), "lasttoken": states[-1]}[pooling])
    return torch.stack(found)


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("kind", list(_KINDS))
def test_vectors_are_the_librarys(kind: str, pooling: str, tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", kind, pooling, "Normalize")
    with closing(Embedder(folder)) as embedder:
        found = embedder.embed(TEXTS)
        alone = embedder.embed(TEXTS[:1])
    expected = torch.nn.functional.normalize(_expected(folder, pooling), dim=1)
    is_rounded = kind.startswith("qwen3")  # computed in bf16
    torch.testing.assert_close(found.rows, expected, atol=0.03 if is_rounded else 1e-4, rtol=0)
    assert torch.equal(found.rows[1], found.rows[3])
    torch.testing.assert_close(alone.rows, found.rows[:1], atol=1e-5, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert found.tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)


def test_layers_behind_the_pooling_and_fewer_dimensions(tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", "bert", "mean_tokens", "Dense", "Normalize")
    embedder = Embedder(folder)
    dense = torch.nn.Linear(32, 16)
    with torch.no_grad():
        from safetensors.torch import load_file

        weights = load_file(folder / "2_Dense" / "model.safetensors")
        dense.weight.copy_(weights["linear.weight"])
        dense.bias.copy_(weights["linear.bias"])
        expected = torch.tanh(dense(_expected(folder, "mean_tokens")))
    torch.testing.assert_close(embedder.embed(TEXTS).rows, torch.nn.functional.normalize(expected, dim=1))
    fewer = torch.nn.functional.normalize(expected[:, :5], dim=1)
    torch.testing.assert_close(embedder.embed(TEXTS, dimensions=5).rows, fewer)
    with pytest.raises(EngineError, match="vectors of 16 numbers"):
        embedder.embed(TEXTS, dimensions=17)


def test_a_gguf_file_made_for_it(tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", "qwen3", "lasttoken", dtype=torch.float32)
    file = write_model(folder, tmp_path / "model.gguf", "qwen3", pooling_type=3)
    assert embedding_of(file) == Embedding("last")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with closing(Embedder(file)) as embedder:
        assert len(embedder.embed(TEXTS).rows) == 4
        found = embedder.embed([tokenizer(text)["input_ids"] for text in TEXTS]).rows
    expected = torch.nn.functional.normalize(_expected(folder, "lasttoken"), dim=1)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(("kind", "quantised"), [("bert", ""), ("nomic_bert", ""), ("nomic_bert", "Q8_0")])
def test_an_encoder_in_a_gguf_file(kind: str, quantised: str, tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", kind, "mean_tokens")
    architecture = kind.replace("_", "-")
    names = get_tensor_name_map({"bert": MODEL_ARCH.BERT, "nomic_bert": MODEL_ARCH.NOMIC_BERT}[kind], 2)
    tensors = {}
    for name, values in read_safetensors(folder / "model.safetensors").items():
        layer = re.match(r"layers\.(\d+)\.(.*)\.(weight|bias)", name)
        found = (
            f"blk.{layer[1]}.{_OF_NOMIC[layer[2]]}.{layer[3]}" if layer else names.get_name(name, (".weight", ".bias"))
        )
        if not name.startswith("pooler."):
            assert found is not None, name
            tensors[found] = values
    config = json.loads((folder / "config.json").read_text())

    def keys(writer: GGUFWriter) -> None:
        writer.add_block_count(2)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(64)
        writer.add_head_count(2)
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_causal_attention(False)
        writer.add_pooling_type(PoolingType.MEAN)
        if kind == "nomic_bert":
            writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        add_vocabulary(writer, folder, VOCABULARY)

    types = {name: quantised for name, values in tensors.items() if quantised and takes(quantised, name, values)}
    file = write_gguf(tmp_path / "model.gguf", tensors, architecture=architecture, keys=keys, types=types)
    entry = describe(file, "model")
    assert (entry.embeds, entry.problem) == (True, "")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = Embedder(file).embed([tokenizer(text)["input_ids"] for text in TEXTS]).rows
    expected = torch.nn.functional.normalize(_expected(folder, "mean_tokens"), dim=1)
    torch.testing.assert_close(found, expected, atol=0.05 if quantised else 1e-4, rtol=0)


def test_long_texts_are_refused_or_cut(tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", "bert", "cls_token")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    embedder = Embedder(folder)
    assert embedder.most_tokens == 12
    long = " ".join(TEXTS)
    with refused(ErrorCode.PROMPT_TOO_LONG, match=r"Text 2 has \d+ tokens, and model reads 12 at most"):
        embedder.embed(["Paris.", long])
    ids = transformers.AutoTokenizer.from_pretrained(folder)(long)["input_ids"]
    cut = embedder.embed([long], truncates=True)
    assert cut.tokens == 12
    assert torch.equal(cut.rows, embedder.embed([ids[:12]]).rows)
    with pytest.raises(EngineError, match="does not know"):
        embedder.embed([[VOCABULARY]])


def test_how_models_embed_is_read(tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", "bert", "cls_token")
    settings = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert embedding_of(folder) == Embedding("cls", normalises=False, prompt="query: ")
    entry = describe(folder, "model")
    assert (entry.embeds, entry.problem) == (True, "")
    names = {file.relative_to(folder).as_posix() for file in model_files(folder)}
    assert {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"} <= names
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert embedding_of(folder) == Embedding("mean", normalises=False, prompt="query: ")
    for broken in ('{"pooling_mode_max_tokens": true}', '{"pooling_mode": "weighted"}', "{}"):
        (folder / "1_Pooling" / "config.json").write_text(broken)
        with pytest.raises(EngineError, match="a pooling other than"):
            embedding_of(folder)
        assert "pooling" in describe(folder, "model").problem
    for broken in ("[3]", '[{"type": "x.Pooling", "path": "../.."}]', "no"):
        (folder / "modules.json").write_text(broken)
        with pytest.raises(EngineError, match=r"modules\.json"):
            embedding_of(folder)
    (folder / "modules.json").unlink()
    assert embedding_of(folder) is None
    with pytest.raises(EngineError, match="is a chat model"):
        Embedder(folder)


def test_the_library_knows_the_encoders() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert set(CONFIG_MAPPING) >= ENCODERS


def test_such_a_model_does_not_chat(tmp_path: Path) -> None:
    folder, engine = _made(tmp_path / "model", "qwen3", "lasttoken"), Engine()
    with pytest.raises(EngineError, match="made for embeddings and does not chat"):
        engine.load(EngineConfig(str(folder)), on_progress=lambda _done, _total: None, cancelled=lambda: False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[httpx2.Client, Path, Service]]:
    folder = _made(tmp_path / "words", "bert", "mean_tokens", "Normalize")
    models = LibraryModels(folder, "words")
    service = Service(ScriptedBroker(ends=True), models)
    server = Server(service, Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"
    with httpx2.Client(base_url=url, timeout=60) as client:
        try:
            yield client, folder, service
        finally:
            server.stop()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": []}, "has no input"),
    ("/v1/embeddings", {"input": ["a", 3]}, "neither text nor a list of tokens"),
    ("/v1/embeddings", {"input": ["a", ""]}, "an empty text"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "at most 2,048"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "float or base64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 33}, "vectors of 32 numbers"),
    ("/v1/embeddings", {"input": [99999]}, "does not know"),
    ("/v1/embeddings", {"input": "a", "model": "nothing"}, "no model named"),
    ("/api/embed", {"model": "words", "input": "a", "dimensions": "x"}, "dimensions"),
    ("/api/embed", {"model": "words", "input": "Paris. " * 2000, "truncate": False}, "divide it"),
]


def test_programs_ask_for_embeddings_of_a_process_that_ends_when_unused(
    served: tuple[httpx2.Client, Path, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, folder, service = served
    expected = torch.nn.functional.normalize(_expected(folder, "mean_tokens"), dim=1)
    answer = client.post("/v1/embeddings", json={"model": "words", "input": TEXTS}).json()
    rows = torch.tensor([each["embedding"] for each in answer["data"]])
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    packed = client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    numbers = torch.frombuffer(bytearray(base64.b64decode(packed["data"][0]["embedding"])), dtype=torch.float32)
    torch.testing.assert_close(numbers, rows[0])
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
    few = client.post("/v1/embeddings", json={"input": ids, "dimensions": 4}).json()["data"]
    assert len(few) == 1
    assert len(few[0]["embedding"]) == 4
    theirs = client.post("/api/embed", json={"model": "words", "input": TEXTS, "keep_alive": -1}).json()
    torch.testing.assert_close(torch.tensor(theirs["embeddings"]), rows)
    assert client.post("/api/embed", json={"model": "words", "input": []}).json()["embeddings"] == []
    old = client.post("/api/embeddings", json={"model": "words", "prompt": TEXTS[1]}).json()
    torch.testing.assert_close(torch.tensor(old["embedding"]), rows[1], atol=1e-5, rtol=0)
    shown = client.post("/api/show", json={"model": "words"}).json()
    assert shown["capabilities"] == ["embedding"]
    for path, body, words in REFUSED:
        refused = client.post(path, json=body)
        assert refused.status_code in (400, 404)
        assert words in refused.text
    first = service._embeddings.pid
    psutil.Process(first).kill()
    again = client.post("/v1/embeddings", json={"input": TEXTS})
    assert again.status_code in (200, 503)  # the process may end while it is asked
    assert client.post("/v1/embeddings", json={"input": TEXTS}).status_code == 200
    assert service._embeddings.pid != first
    monkeypatch.setattr(embeddings, "IDLE_S", 0.2)
    made, looks = service._embeddings, 0

    def leaves() -> bool:
        nonlocal looks
        looks += 1
        return looks > 2

    with pytest.raises(RequestCancelled):  # nobody waits for who has gone
        made.embed(folder, ["a"] * 64, cancelled=leaves)
    found: list[int] = []
    several = [
        threading.Thread(
            target=lambda: found.append(len(made.embed(folder, ["a"] * 20, cancelled=lambda: False).vectors))
        )
        for _ in range(4)
    ]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert found == [20] * 4
    process = psutil.Process(made.pid)
    until = time.monotonic() + 20
    while made.pid and time.monotonic() < until:
        time.sleep(0.02)
    assert not made.pid
    process.wait(20)
    made.close()
    with pytest.raises(EngineError, match="stopped"):
        made.embed(folder, ["a"], cancelled=lambda: False)

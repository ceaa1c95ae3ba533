"""What a hub has, and what of it would run: read over real HTTP from a hub on this machine, within limits."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.hub import (
    Candidate,
    Reference,
    contents,
    file_url,
    http,
    is_reference,
    parse_reference,
    read_repository,
    search,
)
from engine.checkpoint.hub.contents import candidate_shape, candidates, find_candidate
from engine.checkpoint.hub.http import HubError, HubReason, forget_token, save_token
from engine.checkpoint.synthetic import SHAPES, config_of, make_synthetic, tensors_of
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import cache_dir
from tests.hub_server import Fault, HubServer
from tests.refusals import refused
from tests.tiny_gguf import write_gguf, write_model
from tests.unit.test_gguf_checkpoint import EXPERTS, HIDDEN, KEYS, TENSORS

SHAPE = SHAPES["qwen3-moe-tiny"].changed(layers=2, vocab=2048)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as all other tests have it
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.modelscope)
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A checkpoint, its GGUF files, and what its shape is on this disk."""
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_HOME", str(home))
        folder = make_synthetic("synthetic:qwen3-moe-tiny?layers=2&vocab=2048")
        one = write_model(folder, home / "tiny-Q8_0.gguf", "qwen3moe", quantised="Q8_0")
        write_model(folder, home / "tiny-Q4_0.gguf", "qwen3moe", quantised="Q4_0", split_max_tensors=10)
        shapes = {path.name: find_shape(str(path)) for path in (folder, one)}
        parts = sorted(home.glob("tiny-Q4_0-0*.gguf"))
        shapes["Q4_0"] = find_shape(str(parts[0]))
    return SimpleNamespace(folder=folder, one=one, parts=parts, shapes=shapes)


def sharded() -> dict[str, bytes]:
    """A checkpoint in shards with an index; the weights are zeros."""
    count = len(list(tensors_of(SHAPE)))
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    files = {"config.json": json.dumps(config_of(SHAPE)).encode(), "tokenizer.json": b"{}", "README.md": b"#"}
    weight_map = {}
    for name, specs in zip(names, tensors_of(SHAPE), strict=True):
        offset, header = 0, {}
        for spec in specs:
            numel = 2
            for size in spec.shape:
                numel *= size
            header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [offset, offset + numel]}
            offset += numel
            weight_map[spec.name] = name
        raw = json.dumps(header).encode()
        files[name] = len(raw).to_bytes(8, "little") + raw + bytes(offset)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


def only(candidate: Candidate) -> set[str]:
    return {file.path for file in candidate.files}


def fails(reason: HubReason) -> Any:
    return pytest.raises(HubError, check=lambda error: error.reason is reason)


def one_of(hub: HubServer, files: dict[str, bytes | Path]) -> Candidate:
    """The only candidate of a repository with these files."""
    hub.add("org/model", files, commit=COMMIT)
    (found,) = candidates(read_repository("org/model"))
    return found


# References


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("org/model", Reference("huggingface", "org/model")),
        ("org/model@v1:Q4_K_M", Reference("huggingface", "org/model", "v1", "Q4_K_M")),
        ("org/model:GPTQ 4-bit", Reference("huggingface", "org/model", "", "GPTQ 4-bit")),
        ("modelscope:org/model:Q8_0", Reference("modelscope", "org/model", "", "Q8_0")),
        ("https://huggingface.co/org/model", Reference("huggingface", "org/model")),
        ("https://huggingface.co/org/model/tree/v1", Reference("huggingface", "org/model", "v1")),
        (
            "https://huggingface.co/org/model/blob/main/a%20b/x.gguf?download=true",
            Reference("huggingface", "org/model", "main", "a b/x.gguf"),
        ),
        ("hf.co/org/model:Q4_0", Reference("huggingface", "org/model", "", "Q4_0")),
        ("https://modelscope.cn/models/org/model/", Reference("modelscope", "org/model")),
    ],
)
def test_references(text: str, meant: Reference) -> None:
    assert parse_reference(text) == meant


@pytest.mark.parametrize(
    "text",
    ["", "model", "a/b/c", "../up", "org/../x", "https://example.com/org/model", "https://huggingface.co/", "ö/ä"],
)
def test_what_is_no_reference(text: str) -> None:
    assert not is_reference(text)
    with refused(ErrorCode.INVALID_REQUEST):
        read_repository(text)


# Repositories


def test_a_repository(hub: HubServer) -> None:
    hub.add("org/model", {"config.json": b"{}", "LICENSE": b"x", "w.safetensors": b"abc"}, commit=COMMIT, downloads=7)
    found = read_repository("org/model")
    assert (found.id, found.commit, found.licence, found.downloads) == ("org/model", COMMIT, "apache-2.0", 7)
    assert found.licence_link.endswith("/LICENSE")
    assert [(file.path, file.size, bool(file.sha256)) for file in found.files] == [
        ("LICENSE", 1, False),
        ("config.json", 2, False),
        ("w.safetensors", 3, True),
    ]
    assert COMMIT in file_url(found, found.files[0])


@pytest.mark.parametrize("named", ["its own", "another"])
def test_a_list_in_pages(hub: HubServer, named: str) -> None:
    """The following ones come from the same hub, whatever host its links name."""
    hub.page = 3
    hub.add("org/model", {f"part-{number}.txt": b"" for number in range(10)})
    if named == "another":
        hub.endpoint = "http://127.0.0.1:9"
    assert len(read_repository("org/model").files) == 10


def test_a_renamed_repository_is_found_by_its_new_name(hub: HubServer) -> None:
    hub.add("org/new", {"config.json": b"{}"})
    hub.add("org/old", {}, renamed_to="org/new")
    assert read_repository("org/old").id == "org/new"


def test_a_pinned_commit(hub: HubServer) -> None:
    hub.add("org/model", {"config.json": b"{}"}, commit=COMMIT)
    assert read_repository(f"org/model@{COMMIT}").commit == COMMIT
    with fails(HubReason.NOT_FOUND):
        read_repository("org/model@nowhere")


def test_modelscope(hub: HubServer, made: SimpleNamespace) -> None:
    hub.add("org/model", {"tiny-Q8_0.gguf": made.one}, commit=COMMIT, hub="modelscope")
    (found,) = candidates(read_repository("modelscope:org/model"))
    assert found.reference == "modelscope:org/model:Q8_0"
    assert found.repository.commit == COMMIT
    assert len(found.files[0].sha256) == 64
    assert candidate_shape(found).stored == made.shapes["tiny-Q8_0.gguf"].stored
    assert [one.id for one in search("modelscope:mod")] == ["org/model"]


def test_paths_that_could_be_none_here_are_left_out(hub: HubServer) -> None:
    hub.add("org/model", dict.fromkeys(("../up.gguf", "a/../b.gguf", "c\\d.gguf", "/e.gguf", "e\n.gguf", "ok"), b""))
    assert [file.path for file in read_repository("org/model").files] == ["ok"]


# Candidates


def test_gguf_files_by_quantisation(hub: HubServer) -> None:
    names = [
        "m-Q4_K_M.gguf", "m-Q8_0.gguf", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf",
        "UD-Q4_K_XL/m-00001-of-00001.gguf", "m-IQ2_XXS.gguf", "m-Q6_K-00001-of-00003.gguf",
        "mmproj-F16.gguf", "m-imatrix.gguf", "lora-adapter.gguf", "imatrix.dat", "README.md",
    ]  # fmt: skip
    hub.add("org/model-GGUF", {name: bytes(100 - at) for at, name in enumerate(names)})
    found = {one.label: one for one in candidates(read_repository("org/model-GGUF"))}
    assert list(found) == ["BF16", "Q8_0", "Q4_K_M", "UD-Q4_K_XL", "IQ2_XXS", "Q6_K"]
    assert len(found["BF16"].files) == 2
    assert [bool(found[label].problem) for label in ("Q6_K", "IQ2_XXS", "Q4_K_M")] == [True, False, False]
    assert find_candidate("org/model-GGUF").label == "Q4_K_M"
    assert find_candidate("org/model-GGUF:q8-0").label == "Q8_0"
    assert find_candidate("org/model-GGUF:m-Q4_K_M.gguf").label == "Q4_K_M"
    with refused(ErrorCode.MODEL_NOT_FOUND):
        find_candidate("org/model-GGUF:Q9")


def test_two_models_in_one_repository_keep_their_names(hub: HubServer) -> None:
    hub.add("org/both", {"base-Q4_K_M.gguf": b"", "chat-Q4_K_M.gguf": b""})
    assert {one.label for one in candidates(read_repository("org/both"))} == {"base-Q4_K_M", "chat-Q4_K_M"}


def test_the_plainest_of_a_label_has_it(hub: HubServer) -> None:
    hub.add("org/more", {"m-Q4_K_M.gguf": b"", "m-Q4_K_M-for-phones.gguf": b"", "m.BF16-mmproj.gguf": b""})
    assert {one.label for one in candidates(read_repository("org/more"))} == {"Q4_K_M", "m-Q4_K_M-for-phones"}


def test_what_sees_with_its_mmproj_is_fetched_with_it(hub: HubServer) -> None:
    seeing = "Qwen3.6-35B-A3B Qwen3.8-Flash-Next Qwen2-VL-7B GLM-4.1V-9B-Thinking GLM-4.6V GLM-5.3-Flash Kimi-K2.5"
    seeing += " Kimi-VL-A3B-Instruct MiniMax-M3 Step-3.7-Flash dots3-note-prev gemma-4-26B-A4B-it Llama-4-Scout-17B-16E"
    blind = "of-text GLM-4.5-Air GLM-5.2 Kimi-K2-Instruct MiniMax-M2 Step-3.5-Flash Qwen3-30B-A3B gemma-3n-E4B-it"
    for name, sees in (*((name, True) for name in seeing.split()), *((name, False) for name in blind.split())):
        name = f"org/{name}-GGUF"
        hub.add(name, {"m-Q4_K_M.gguf": b"", "mmproj-F32.gguf": b"", "mmproj-F16.gguf": b""})
        (found,) = candidates(read_repository(name))
        assert [file.path for file in found.files] == ["m-Q4_K_M.gguf", *["mmproj-F16.gguf"] * sees]


def test_a_makers_mark_before_labels_may_be_left_out(hub: HubServer) -> None:
    hub.add("org/marked", {"m-UD-Q4_K_M.gguf": b"", "m-Q8_0.gguf": b""})
    assert find_candidate("org/marked:Q4_K_M").label == find_candidate("org/marked").label == "UD-Q4_K_M"
    assert find_candidate("org/marked:UD-Q8_0").label == "Q8_0"


def test_a_folder_of_safetensors_files(hub: HubServer) -> None:
    more = {"consolidated.safetensors": b"", "pytorch_model.bin": b"", "original/x.safetensors": b"", "train.py": b""}
    files = sharded()
    found = one_of(hub, files | more | {"generation_config.json": b"{}", "chat_template.jinja": b""})
    assert (found.label, found.quality, found.problem) == ("BF16", "original", "")
    assert only(found) == files.keys() - {"README.md"} | {"generation_config.json", "chat_template.jinja"}


@pytest.mark.parametrize(("kind", "runs"), [("nomic_bert", True), ("bert", True), ("of_tomorrow", False)])
def test_a_model_for_embeddings_comes_with_how_it_embeds(hub: HubServer, kind: str, runs: bool) -> None:
    config = json.dumps({"model_type": kind, "architectures": ["AModel"]}).encode()
    parts = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/model.safetensors": b""}
    beside = {"onnx/model.onnx": b"", "openvino/config.json": b"{}"}
    found = one_of(hub, {"config.json": config, "model.safetensors": b"", **parts, **beside})
    assert (not found.problem) is runs
    assert only(found) == {"config.json", "model.safetensors", *parts}


@pytest.mark.parametrize(
    ("stored", "label"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ 4-bit"),
        ({"quant_method": "awq", "bits": 4}, "AWQ 4-bit"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"bits": 4, "group_size": 64}, "MLX 4-bit"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}},
            "compressed-tensors 4-bit",
        ),
    ],
)
def test_quantised_folders_are_labelled(hub: HubServer, stored: dict[str, object], label: str) -> None:
    config = {"model_type": "qwen3_moe", "quantization_config": stored}
    found = one_of(hub, {"config.json": json.dumps(config).encode(), "model.safetensors": b""})
    assert (found.label, found.problem) == (label, "")


@pytest.mark.parametrize(
    "files",
    [
        {"pytorch_model.bin": b"", "config.json": b"{}"},
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b""},
        {"model.onnx": b""},
        {"mmproj-F16.gguf": b""},
        {"README.md": b""},
        {"config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}', "model.safetensors": b""},
        {"config.json": b'{"model_type": "of_tomorrow"}', "model.safetensors": b""},
        {"config.json": b'{"quantization_config": {"quant_method": "quip"}, "model_type": "llama"}',
         "model.safetensors": b""},
    ],
)  # fmt: skip
def test_a_repository_without_anything_to_run_says_why(hub: HubServer, files: dict[str, bytes | Path]) -> None:
    found = one_of(hub, files)
    assert found.problem
    assert "/tmp" not in found.problem
    for ask in (find_candidate, find_shape):
        with refused(ErrorCode.MODEL_UNSUPPORTED):
            ask("org/model")


# Shapes


def test_the_same_shape_as_on_disk(hub: HubServer, made: SimpleNamespace) -> None:
    files: dict[str, bytes | Path] = {path.name: path for path in made.folder.iterdir()}
    files |= {path.name: path for path in (made.one, *made.parts)}
    hub.add("org/model", files)
    found = {one.label: candidate_shape(one) for one in candidates(read_repository("org/model"))}
    for label, there in (("BF16", made.folder.name), ("Q8_0", "tiny-Q8_0.gguf"), ("Q4_0", "Q4_0")):
        here = made.shapes[there]
        assert found[label].stored == here.stored
        assert found[label].total_weights == here.total_weights
        assert found[label].kv_bytes_per_token() == here.kv_bytes_per_token()
    assert len(made.parts) > 1


def test_a_shape_that_was_kept_is_the_same(hub: HubServer, made: SimpleNamespace) -> None:
    found = one_of(hub, {"m-Q8_0.gguf": made.one})
    shape = candidate_shape(found)
    assert shape.stored is not None
    asked = len(hub.asked("*", method="any"))
    assert candidate_shape(found) == shape
    assert hash(candidate_shape(found)) == hash(shape)
    assert len(hub.asked("*", method="any")) == asked
    (kept,) = (cache_dir() / "hub").iterdir()
    kept.write_text(kept.read_text(encoding="utf-8").replace('"layers"', '"of another version"'), encoding="utf-8")
    assert candidate_shape(found) == shape
    assert len(hub.asked("*", method="any")) > asked


def test_only_headers_are_fetched(hub: HubServer, made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.hub.contents._AHEAD_OF_GGUF", 2**16)
    found = one_of(hub, {"tiny-Q8_0.gguf": made.one})
    candidate_shape(found)
    assert hub.sent_bytes("tiny-Q8_0.gguf") < made.one.stat().st_size / 2


def with_vocabulary(file: Path, seed: int, kind: str, *, count: int = 20_000, pre: str = "qwen2") -> Path:
    """A GGUF file of which nearly all of the header is its vocabulary."""
    tensors = {**TENSORS, "token_embd.weight": (count, HIDDEN)}

    def keys(writer: GGUFWriter) -> None:
        for name, value in KEYS.items():
            writer.add_key_value(f"llama.{name}", value, GGUFValueType.get_type(value))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([f"token {seed} {number}" for number in range(count)])
        writer.add_eos_token_id(7)

    return write_gguf(
        file,
        {name: np.ones(shape) for name, shape in tensors.items()},
        keys=keys,
        types={"token_embd.weight": kind},
    )


def test_a_vocabulary_is_fetched_once_for_a_repository(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_AHEAD_OF_GGUF", 2**14)
    monkeypatch.setattr(contents, "_heads_read", {})
    drawn = {"m-F32": (0, "F32"), "m-F16": (0, "F16"), "m-Q8_0": (1, "F16")}  # the last one has other tokens
    hub.add("org/model", {f"{name}.gguf": with_vocabulary(tmp_path / name, *of) for name, of in drawn.items()})
    found = read_repository("org/model")
    shapes = [candidate_shape(find_candidate(f"org/model:{name}.gguf")) for name in drawn]
    assert {(shape.layers, shape.experts, shape.vocabulary) for shape in shapes} == {(1, EXPERTS, 20_000)}
    first, again, other = (hub.sent_bytes(f"{name}.gguf") for name in drawn)
    assert again < first / 4
    assert other > first / 2
    assert len(found.files) == 3


def test_a_text_splitter_that_is_unknown_is_found_before_the_download(hub: HubServer, tmp_path: Path) -> None:
    found = one_of(hub, {"m-F16.gguf": with_vocabulary(tmp_path / "m", 0, "F16", count=10, pre="of tomorrow")})
    with refused(ErrorCode.MODEL_UNSUPPORTED):
        candidate_shape(found)


def test_a_known_model_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    assert find_shape("Qwen/Qwen3-30B-A3B").name == "qwen3-30b-a3b"
    with refused(ErrorCode.MODEL_NOT_FOUND):
        find_shape("nonsense")


# Searching


def test_a_search_shows_first_what_may_run(hub: HubServer) -> None:
    hub.add("org/pickled", {}, tags=("pytorch",), downloads=900)
    hub.add("org/lora", {}, tags=("safetensors", "lora"), downloads=800)
    hub.add("org/pictures", {}, tags=("safetensors",), pipeline="text-to-image", downloads=700)
    hub.add("org/both", {}, tags=("pytorch", "safetensors"), downloads=600, parameters=5)
    hub.add("org/gguf", {}, tags=("gguf",), downloads=500)
    found = search("org")
    assert [one.id for one in found] == ["org/both", "org/gguf", "org/pickled", "org/lora", "org/pictures"]
    assert [bool(one.problem) for one in found] == [False, False, True, True, True]
    assert (found[0].parameters, found[0].licence, found[0].likes) == (5, "apache-2.0", 10)
    assert search("org", limit=2)[0].id == "org/pickled"
    assert search("nothing of this name") == ()


# Servers that are wrong, slow or away


def test_without_a_network_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for ask in (read_repository, search, find_shape):
        with pytest.raises(HubError) as refused:
            ask("org/model")
        assert (refused.value.code, refused.value.reason) == (ErrorCode.DOWNLOAD_FAILED, HubReason.OFFLINE)
        assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, HubReason.NOT_FOUND),
        (401, {"X-Error-Code": "RepoNotFound"}, HubReason.NOT_FOUND),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, HubReason.WRONG_TOKEN),
        (401, {"X-Error-Code": "GatedRepo"}, HubReason.NEEDS_LICENCE),
        (403, {"X-Error-Code": "GatedRepo"}, HubReason.NEEDS_LICENCE),
        (429, {"Retry-After": "30"}, HubReason.TOO_MANY),
        (500, {}, HubReason.OFFLINE),
    ],
)
def test_refusals(hub: HubServer, status: int, headers: dict[str, str], reason: HubReason) -> None:
    hub.add("org/model", {})
    hub.order(Fault("status", value=status, headers=headers, times=-1))
    with pytest.raises(HubError) as refused:
        read_repository("org/model")
    assert (refused.value.reason, refused.value.status) == (reason, status)


def test_gated_models_name_the_page_and_open_with_a_token(hub: HubServer, made: SimpleNamespace) -> None:
    hub.add("org/model", {"m-Q8_0.gguf": made.one}, gated="manual", token="hf_right")
    found = find_candidate("org/model")
    assert found.repository.gated
    with pytest.raises(HubError) as refused:
        candidate_shape(found)
    assert refused.value.reason is HubReason.NEEDS_LICENCE
    assert refused.value.link == f"{hub.endpoint}/org/model"
    save_token("127.0.0.1", "hf_right")
    try:
        assert candidate_shape(found).experts == SHAPE.experts
    finally:
        forget_token("127.0.0.1")
    assert {each.authorization for each in hub.asked(host="second")} == {""}  # the token stays with its host


@pytest.mark.parametrize("message", ["Invalid credentials in Authorization header", ""])
def test_a_token_that_has_expired_bars_nothing_that_is_open(
    hub: HubServer, made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setattr("engine.checkpoint.hub.http._refused", set())
    monkeypatch.setattr("engine.checkpoint.hub.http._this_run", {"127.0.0.1": "hf_expired"})
    headers = {"X-Error-Message": message}
    hub.add("org/model", {"m-Q8_0.gguf": made.one})
    hub.order(Fault("status", value=401, headers=headers))
    assert candidate_shape(find_candidate("org/model")).experts == SHAPE.experts
    assert [bool(each.authorization) for each in hub.requests if each.host == "hub"][:3] == [True, False, False]


def test_a_token_that_has_expired_is_named_where_it_is_needed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.hub.http._this_run", {"127.0.0.1": "hf_expired"})
    hub.add("org/model", {})
    hub.order(Fault("status", value=401, headers={"X-Error-Message": "Invalid credentials"}, times=-1))
    with fails(HubReason.WRONG_TOKEN):
        read_repository("org/model")
    assert len(hub.requests) == 2


@pytest.mark.parametrize("ask", [search, read_repository])
def test_a_refusal_that_names_no_licence_is_not_taken_for_one(hub: HubServer, ask: Callable[[str], object]) -> None:
    hub.add("org/model", {})
    hub.order(Fault("status", value=403, times=-1))
    with fails(HubReason.REFUSED):
        ask("org/model")


def test_a_file_of_a_gated_repository_needs_its_licence(hub: HubServer, made: SimpleNamespace) -> None:
    hub.add("org/model", {"m-Q8_0.gguf": made.one}, gated="auto")
    found = find_candidate("org/model")
    hub.order(Fault("status", value=403, path="m-Q8_0.gguf", times=-1))
    with fails(HubReason.NEEDS_LICENCE):
        candidate_shape(found)


def test_a_list_of_too_many_files_is_given_up_at_once(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.hub._MOST_FILES", 5)
    hub.page = 3
    hub.add("org/model", {f"part-{number:02}.txt": b"" for number in range(30)})
    with fails(HubReason.BROKEN):
        read_repository("org/model")
    assert len(hub.requests) == 3  # what it is, and two pages


def test_cancelled(hub: HubServer) -> None:
    hub.add("org/model", {})
    with fails(HubReason.CANCELLED):
        read_repository("org/model", cancelled=lambda: True)


def test_files_have_limits(hub: HubServer) -> None:
    hub.add("org/model", {"config.json": b" " * (17 * 2**20), "model.safetensors": b""})
    with fails(HubReason.BROKEN):
        candidates(read_repository("org/model"))


@pytest.mark.parametrize("path", ["/api/models/org/model", "config.json"])
def test_an_answer_without_end_is_given_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    if path.startswith("/api"):
        monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1000)
        hub.add("org/model", {f"{number:0100}": b"" for number in range(100)})
    else:
        hub.add("org/model", {"config.json": b"{}", "model.safetensors": b""})
        hub.order(Fault("endless", path="config.json"))
    with fails(HubReason.BROKEN):
        candidates(read_repository("org/model"))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("wrong_range", value=10, times=-1), HubReason.BROKEN),
        (Fault("no_range", times=-1), HubReason.BROKEN),
        (Fault("drop", after_bytes=100, times=-1), HubReason.OFFLINE),
        (Fault("refuse", times=-1), HubReason.OFFLINE),
        (Fault("short", value=50, times=-1), HubReason.BROKEN),
    ],
)
def test_ranges_that_lie(hub: HubServer, made: SimpleNamespace, fault: Fault, reason: HubReason) -> None:
    found = one_of(hub, {"m-Q8_0.gguf": made.one})
    fault.path, fault.host = "m-Q8_0.gguf", "second"
    hub.order(fault)
    with fails(reason):
        candidate_shape(found)


def test_a_file_of_another_size_than_listed(hub: HubServer, made: SimpleNamespace) -> None:
    found = one_of(hub, {"m-Q8_0.gguf": made.one})
    hub.repos["org/model"].files["m-Q8_0.gguf"] = made.one.read_bytes() + b"more"
    with fails(HubReason.BROKEN):
        candidate_shape(found)


def test_a_server_that_ignores_ranges_sends_no_weights(hub: HubServer, made: SimpleNamespace) -> None:
    found = one_of(hub, {"m-Q8_0.gguf": made.one})
    hub.order(Fault("ignore_range", path="m-Q8_0.gguf", host="second", times=-1))
    assert candidate_shape(found).experts == SHAPE.experts


@pytest.mark.parametrize("name", ["m-Q8_0.gguf", "model.safetensors"])
def test_damaged_headers(hub: HubServer, name: str) -> None:
    config = json.dumps(config_of(SHAPE)).encode()
    found = one_of(hub, {name: b"GGUF\3\0\0\0" + b"\xff" * 1000, "config.json": config})
    with pytest.raises(EngineError) as refused:
        candidate_shape(found)
    assert refused.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "/tmp" not in refused.value.message


@pytest.mark.parametrize(
    "answer", [b"[]", b"{", b'{"sha": 5}', b'{"sha": "x", "id": []}', b"[" * 100_000, b'{"sha": "x", "cardData": 1}']
)
def test_nonsense_about_a_model_is_one_sentence(hub: HubServer, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(http, "fetch", lambda *_a, **_k: http.Answer(answer, None, {}))
    with fails(HubReason.BROKEN):
        read_repository("org/model")


KEYS_OF_HUBS = (
    "sha", "id", "cardData", "license", "license_link", "gated", "downloads", "tags", "type", "path", "size",
    "lfs", "oid", "Data", "Files", "Path", "Size", "Sha256", "LatestCommitter", "Id", "License", "models",
)  # fmt: skip


def drawn_value(draw: random.Random, depth: int = 0) -> object:
    if depth < 3 and draw.random() < 0.4:
        if draw.random() < 0.5:
            return [drawn_value(draw, depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(KEYS_OF_HUBS): drawn_value(draw, depth + 1) for _ in range(draw.randrange(6))}
    return draw.choice([None, True, 0, -1, 2**70, float("nan"), "", "org/model", "x" * 300, "../m.gguf", "a" * 64,
                        "\ud800", "m-Q4_K_M.gguf", "config.json"])  # fmt: skip


def test_any_nonsense_is_an_answer_or_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(16)

    def fetch(_place: http.Place, url: str, *_limits: int, **_range: int) -> http.Answer:
        value = drawn_value(draw)
        if "/tree/" in url:
            value = [
                value,
                {"type": "file", "path": draw.choice(["config.json", "m.gguf", 5]), "size": drawn_value(draw)},
            ]
        elif isinstance(value, dict):
            value = {**value, "sha": "abc"} if draw.random() < 0.7 else {"Data": value}
        return http.Answer(json.dumps(value).encode("utf-8", "surrogatepass"), None, {})

    monkeypatch.setattr(http, "fetch", fetch)
    monkeypatch.setattr(contents, "fetch", fetch)
    read = 0
    for number in range(300):
        name = ("org/model", "modelscope:org/model")[number % 2]
        try:
            assert all(one.reference for one in candidates(read_repository(name)))
            read += 1
            search(name)
        except EngineError as error:
            assert "\n" not in error.message  # noqa: PT017 - most do not raise
    assert read > 10


@pytest.mark.parametrize("path", ["/api/models/org/model", "config.json", "model-00002*"])
def test_a_server_that_drips_is_given_up_or_stopped(hub: HubServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    hub.add("org/model", dict(sharded()))
    stalled = threading.Event()
    hub.order(Fault("stall", path=path, host="any", times=-1, after_bytes=5))
    if path.startswith("/api"):
        hub.faults = [Fault("slow", path=path, value=1000, times=-1)]

    def ask(cancelled: Callable[[], bool]) -> None:
        candidate_shape(candidates(read_repository("org/model", cancelled=cancelled), cancelled=cancelled)[0],
                        cancelled=cancelled)  # fmt: skip

    def met() -> bool:
        if any(fault.met for fault in hub.faults):
            stalled.set()
        return stalled.is_set()

    with fails(HubReason.CANCELLED):
        ask(met)
    monkeypatch.setattr(http, "ANSWER_S", 0.2)
    with fails(HubReason.OFFLINE):
        ask(lambda: False)

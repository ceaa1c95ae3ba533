import os
from pathlib import Path

import pytest

from engine.checkpoint.importing import import_model
from engine.checkpoint.library import converted_path, list_models, resolve, show, verify
from engine.checkpoint.manifest import MANIFEST_NAME
from engine.checkpoint.ownership import remove
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import models_dir
from tests.refusals import refused
from tests.tiny_checkpoint import write_tiny_checkpoint


def _refusal(model: str) -> tuple[ErrorCode, str]:
    with pytest.raises(EngineError) as caught:
        resolve(model)
    return caught.value.code, caught.value.message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has none in folders")
def test_what_is_neither_file_nor_folder_says_so(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    assert _refusal(str(pipe)) == (
        ErrorCode.MODEL_NOT_FOUND,
        f"{pipe} is neither a file nor a folder: give one with a model.",
    )


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("", ErrorCode.MODEL_NOT_FOUND),
        ("nothing-of-that-name", ErrorCode.MODEL_NOT_FOUND),
        ("/no/such/folder", ErrorCode.MODEL_NOT_FOUND),
        ("../elsewhere", ErrorCode.MODEL_NOT_FOUND),
        ("~nobody-of-that-name/model", ErrorCode.MODEL_NOT_FOUND),
        ("nul\0byte", ErrorCode.MODEL_NOT_FOUND),
        ("x" * 5000, ErrorCode.MODEL_NOT_FOUND),
        ("folder/model.gguf", ErrorCode.MODEL_NOT_FOUND),
        ("Qwen/Qwen3-30B-A3B", ErrorCode.MODEL_UNSUPPORTED),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(model: str, code: ErrorCode) -> None:
    found, message = _refusal(model)
    assert found is code
    assert message.endswith(".")
    assert "\n" not in message


def test_files_in_place_of_folders_are_refused(tmp_path: Path) -> None:
    for name, code in (
        ("pytorch_model.bin", ErrorCode.CHECKPOINT_UNSAFE),
        ("model.safetensors", ErrorCode.MODEL_NOT_FOUND),
    ):
        (tmp_path / name).write_bytes(b"")
        assert _refusal(str(tmp_path / name))[0] is code
    (tmp_path / "empty").mkdir()
    assert _refusal(str(tmp_path / "empty"))[0] is ErrorCode.MODEL_NOT_FOUND


@pytest.mark.parametrize("shards", [1, 3])
def test_import_list_verify_remove(tmp_path: Path, shards: int) -> None:
    source = write_tiny_checkpoint(tmp_path / "Tiny Model", shards)
    heard: list[tuple[int, int]] = []
    entry = import_model(source, on_progress=lambda done, total: heard.append((done, total)))
    assert (entry.name, entry.family, entry.parameters) == ("Tiny-Model", "mixtral", 48)
    assert (entry.experts, entry.experts_per_token, entry.context_tokens, entry.dtype) == (4, 2, 128, "bfloat16")
    assert heard[-1][0] == heard[-1][1] > 0
    assert resolve("Tiny-Model") == models_dir() / "Tiny-Model"
    assert list_models() == [entry]
    assert verify("Tiny-Model").damaged == {}
    remove("Tiny-Model", permanently=True)
    assert list(models_dir().iterdir()) == []
    assert verify(str(source)).checked == "headers"


def test_prepared_experts_go_with_their_model(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "tiny")
    one, other = import_model(source, "one").path, import_model(source, "other").path
    banks = [converted_path(folder, precision) for folder in (one, other) for precision in ("bf16", "fp32")]
    banks[0].parent.mkdir(parents=True)
    for file in (*banks, banks[1].with_name(banks[1].name + ".part")):
        file.write_bytes(bytes(1000))
    size = show("one").bytes_on_disk
    assert remove("one", permanently=True).bytes == size + 3000
    assert sorted(banks[0].parent.iterdir()) == sorted(banks[2:])


def test_import_takes_weights_by_link_and_the_rest_by_copy(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "tiny")
    copy = import_model(source).path
    assert os.path.samefile(source / "model.safetensors", copy / "model.safetensors")
    (source / "config.json").write_text("{}")
    assert verify("tiny").damaged == {}


def test_import_leaves_out_what_no_model_needs(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "tiny")
    for name in ("modeling_tiny.py", "pytorch_model.bin", ".hidden.json", "consolidated.safetensors", "weights.gguf"):
        (source / name).write_bytes(b"x")
    (source / "LICENSE").write_text("free")
    names = {file.name for file in import_model(source).path.iterdir()}
    assert names == {"config.json", "tokenizer_config.json", "model.safetensors", "LICENSE", MANIFEST_NAME}


def test_import_from_a_hub_cache_follows_links_and_finds_the_name(tmp_path: Path) -> None:
    blobs = write_tiny_checkpoint(tmp_path / "models--org--Tiny-MoE" / "blobs")
    snapshot = blobs.parent / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    entry = import_model(snapshot)
    assert entry.name == "org-Tiny-MoE"
    assert not any(file.is_symlink() for file in entry.path.iterdir())


def test_broken_checkpoints_are_not_imported(tmp_path: Path) -> None:
    cut = write_tiny_checkpoint(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    lost = write_tiny_checkpoint(tmp_path / "lost", shards=2)
    (lost / "model-00002-of-00002.safetensors").unlink()
    pickled = write_tiny_checkpoint(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    expected = {
        cut: ErrorCode.CHECKPOINT_DAMAGED,
        lost: ErrorCode.CHECKPOINT_DAMAGED,
        pickled: ErrorCode.CHECKPOINT_UNSAFE,
    }
    for folder, code in expected.items():
        with pytest.raises(EngineError) as caught:
            import_model(folder)
        assert caught.value.code is code
    assert list_models() == []


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "starter", "Starter", "con", "COM1.x", "x" * 101, "a b"])
def test_unusable_names(tmp_path: Path, name: str) -> None:
    source = write_tiny_checkpoint(tmp_path / "tiny")
    with refused(ErrorCode.INVALID_REQUEST):
        import_model(source, name)


def test_a_name_is_given_once_whatever_its_case(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "tiny")
    import_model(source, "mine")
    for name in ("mine", "MINE"):
        with refused(ErrorCode.INVALID_REQUEST):
            import_model(source, name)
    with pytest.raises(EngineError):
        import_model(resolve("mine"), "again")


def test_cancelled_import_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RequestCancelled):
        import_model(write_tiny_checkpoint(tmp_path / "tiny"), cancelled=lambda: True)
    assert list(models_dir().iterdir()) == []


def test_verify_names_the_damaged_files(tmp_path: Path) -> None:
    folder = import_model(write_tiny_checkpoint(tmp_path / "tiny", shards=2)).path
    first, second = sorted(folder.glob("*.safetensors"))
    first.unlink()
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.unlink()
    second.write_bytes(content)
    (folder / "config.json").write_bytes(b"")
    damaged = verify("tiny").damaged
    assert damaged[first.name] == "missing"
    assert damaged[second.name] == "contents changed"
    assert "instead of" in damaged["config.json"]
    (entry,) = list_models()
    assert entry.problem


def test_nothing_outside_the_library_is_removed(tmp_path: Path) -> None:
    outside = write_tiny_checkpoint(tmp_path / "outside")
    import_model(outside, "inside")
    (models_dir() / "linked").symlink_to(outside, target_is_directory=True)
    for name in (str(outside), "../outside", ".", "..", "", str(models_dir()), "inside/..", "./inside"):
        with pytest.raises(EngineError):
            remove(name, permanently=True)
    assert remove("linked", permanently=True).bytes == 0
    remove("inside", permanently=True)
    assert verify(str(outside)).damaged == {}
    assert list(models_dir().iterdir()) == []

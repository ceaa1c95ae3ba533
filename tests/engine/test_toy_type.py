"""A number format of GGUF files is an entry in Python, a native file with its line, and a struct for cards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.formats.ggml import GGML

ROOT = Path(__file__).parents[2]
FORMATS = Path("engine", "formats")
TYPES = "TYPES = (\n"
TOY = """
def _toy(blocks: Bytes) -> Groups:
    return Groups(_as(blocks[:, 4:], "i1")[:, None], _as(blocks[:, :4], "<f4"))


def _put_toy(blocks: Bytes, scales: Floats) -> None:
    blocks[:, :4] = scales.astype("<f4")[:, None].view("u1")


TYPES = (
    BlockType("TOY_8", "8-bit, for play", 99, 32, 36, _toy, put=_put_toy),
"""
SCRIPT = """
import json, sys
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.find_shape import find_shape
from engine.checkpoint.gguf.file import read_gguf
from engine.formats.ggml import GGML
from tests.engine.test_family_parity import decoded_logits, loaded
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

folder = Path(sys.argv[1])
made = tiny_checkpoint("qwen3_moe", folder / "made", moe_intermediate_size=32)
file = write_model(made, folder / "toy.gguf", "qwen3moe", quantised="TOY_8")
found = read_gguf(file).tensors
down = found["blk.1.ffn_down_exps.weight"]
raw = np.fromfile(file, np.uint8, down.nbytes, offset=down.offset).reshape(*down.shape[:-1], -1)
with loaded(file, "fp32") as exact, torch.no_grad():
    held = exact.bank.layers["model.layers.1.mlp.experts"].stacked["down_proj"]
    is_exact = torch.equal(held, torch.from_numpy(GGML["TOY_8"].dequantise(raw)))
    wanted = torch.cat(decoded_logits(exact.model)).flatten()
with loaded(file, "auto") as ours, torch.no_grad():
    logits = torch.cat(decoded_logits(ours.model)).float().flatten()
    json.dump(
        {
            "types": sorted({each.dtype for each in found.values()}),
            "exact": is_exact,
            "precision": ours.info.precision,
            "note": ours.info.device_note,
            "alike": torch.cosine_similarity(logits, wanted, 0).item(),
            "guessed": as_quantised(find_shape(str(made)), "model-TOY_8.gguf").stored.in_place.formats,
        },
        sys.stdout,
    )
"""


@pytest.mark.exhaustive
def test_a_type_is_read_planned_and_decoded_by_its_entry(tmp_path: Path) -> None:
    """In a tree that is this one but for the file with the entry."""
    tree = tmp_path / "tree"
    for folder in (Path(), Path("engine"), FORMATS):
        (tree / folder).mkdir()
        for each in (ROOT / folder).iterdir():
            if each.name[0] != "." and each.relative_to(ROOT) not in (Path("engine"), FORMATS, FORMATS / "ggml.py"):
                (tree / folder / each.name).symlink_to(each)
    entries = (ROOT / FORMATS / "ggml.py").read_text(encoding="utf-8")
    (tree / FORMATS / "ggml.py").write_text(entries.replace(TYPES, TOY.lstrip()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=tree,
        env=os.environ | {"SWITCHYARD_NATIVE": "0", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["types"] == ["F32", "TOY_8"]
    assert found["exact"]
    assert found["precision"] == "stored"
    assert "TOY_8 became 8-bit" in found["note"]
    assert found["alike"] > 0.99
    assert "TOY_8" in found["guessed"]


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_no_other_file_names_a_type(name: str) -> None:
    assert name in GGML
    named = re.compile(rf"\b{name}\b|\b{name.lower()}\.h\b")
    sources = (each for end in ("py", "h", "cpp", "cu") for each in (ROOT / "engine").rglob(f"*.{end}"))
    assert {str(each.relative_to(ROOT / "engine")) for each in sources if named.search(each.read_text("utf-8"))} == {
        "formats/ggml.py",
        f"kernels/native/src/types/{name.lower()}.h",
        "kernels/native/src/types/all.h",
        "kernels/cuda/src/blocks.h",
    }

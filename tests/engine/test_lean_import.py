"""The engine starts without torch's compiler, its distributed tensors and sympy, and all works as with them."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.paths import cache_dir
from engine.runtime.adapters import adapter_for
from engine.runtime.lean_import import _kept_structure
from engine.runtime.load import library_models
from engine.runtime.load.library_models import build_skeleton, model_class_for
from tests.combinations import some
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_checkpoint, tiny_config

_HEAVY = (
    "torch._decomp", "torch._dynamo", "torch._export", "torch._inductor", "torch._prims", "torch._refs",
    "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "pandas",
)  # fmt: skip
_PROGRAM = """
import json, sys
from engine.common.chat import ChatMessage
from engine.common.config import EngineConfig, SamplingParams
from engine.runtime.engine import Engine

engine = Engine()
engine.load(EngineConfig(sys.argv[1], precision="bf16"), on_progress=lambda *_: None, cancelled=lambda: False)
answer = engine.generate(
    [ChatMessage("user", "Hello")], SamplingParams(max_tokens=3, temperature=1.0, seed=1),
    on_progress=lambda *_: None, on_text=lambda *_: None, cancelled=lambda: False,
)
engine.unload()
heavy = [name for name in sys.argv[2:] if name in sys.modules]

# And what was left out is there for whoever asks for it.
import torch
from transformers import masking_utils, models

mask = masking_utils.sdpa_mask(
    1, 3, 3, mask_function=masking_utils.causal_mask_function, allow_is_causal_skip=False, use_vmap=True, device="cpu"
)
print(json.dumps({
    "heavy": heavy,
    "tokens": answer.generated_tokens,
    "mask": mask[0, 0].int().tolist(),
    "compiler": torch._dynamo.__name__,
    "mark": torch.compiler.disable.__module__,
    "llama": models.llama.LlamaConfig.__name__,
    "drawn": torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist(),
    "export": torch.export.Dim.__module__,
    "registered": callable(torch._meta_registrations.meta_fft_c2c),
    "drawn again": torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist(),
    "summed": list(torch.nn.functional.gelu(torch.ones(2, 3, device="meta")).sum(0).shape),
}))
"""


def test_the_first_token_needs_no_compiler(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    told = json.loads(
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(folder), *_HEAVY],
            env={**os.environ, "SWITCHYARD_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
    )
    drawn = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    assert told == {
        "heavy": [],
        "tokens": 3,
        "mask": [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        "compiler": "torch._dynamo",
        "mark": "torch.compiler",
        "llama": "LlamaConfig",
        "drawn": drawn,
        "export": "torch.export.dynamic_shapes",
        "registered": True,
        "drawn again": drawn,
        "summed": [3],
    }


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("family", some(sorted({*FAMILIES, *ADAPTED}), first=1))
def test_a_skeleton_is_the_one_that_the_library_builds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_for(family)
    model_class, part = model_class_for(tiny_config(family), adapter)
    ours = build_skeleton(model_class, deepcopy(part), torch.bfloat16, adapter)
    monkeypatch.setattr(library_models, "_without_compiler", lambda *_: None)
    theirs = build_skeleton(model_class, deepcopy(part), torch.bfloat16, adapter)
    assert _described(ours) == _described(theirs)


def _described(model: Any) -> dict[str, object]:
    told: dict[str, object] = {}
    for name, module in model.named_modules():
        told[name] = (type(module), sorted(module._non_persistent_buffers_set), module.training)
        for own in (module._parameters, module._buffers, module.__dict__):
            for key, value in own.items():
                if isinstance(value, torch.Tensor):
                    told[f"{name}.{key}"] = (type(value), value.shape, value.dtype, value.device, value.stride())
    return told


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b'{"key": 1}', b'{"key": [], "exports": []}', b"\xff"])
def test_the_list_of_exports_is_kept_and_built_again_if_it_cannot_be_read(
    tmp_path: Path, content: bytes | None
) -> None:
    exports = {
        "llama": {
            frozenset(): {"configuration_llama": {"LlamaConfig"}},
            frozenset({"torch"}): {"modeling": {"A", "B"}},
        },
        frozenset({"torch", "vision"}): {"somewhere": {"C"}},
    }
    built: list[str] = []

    def build(folder: str) -> Any:
        built.append(folder)
        return exports

    library = tmp_path / "library"
    library.mkdir()
    assert _kept_structure(str(library), build) == exports
    if content is not None:
        (cache_dir() / "transformers-exports.json").write_bytes(content)
    assert _kept_structure(str(library), build) == exports
    assert len(built) == (1 if content is None else 2)


_LATE = """
import importlib.machinery, sys
from pathlib import Path
from engine.runtime import later_modules

later_modules._LATER = ("late", "late_package", "late_broken")
sys.meta_path.insert(0, later_modules._LaterFinder())
import late, late_package, late_broken

assert late.__file__.endswith("late.py") and not hasattr(late, "__wrapped__") and not Path("late-ran").exists()
from late import value
assert value == 1 and Path("late-ran").read_text() == "once" and late.answer() == "late"
import late_package.inner
assert late_package.inner.of_package == 2 and late_package.named == "named"
for _ in range(2):
    try:
        late_broken.anything
    except ValueError as error:
        assert str(error) == "broken"
    else:
        raise AssertionError
try:
    late.missing
except AttributeError as error:
    assert "'late' has no attribute 'missing'" in str(error)
"""


def test_a_module_for_later_runs_once_when_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import late\nopen('late-ran', 'x').write('once')\nvalue = 1\ndef answer(): return __name__\n"
    )
    (tmp_path / "late_broken.py").write_text("raise ValueError('broken')\n")
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("ready = 2\ndef __getattr__(name): return name\n")
    (tmp_path / "late_package" / "inner.py").write_text("from late_package import ready as of_package\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _LATE],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr

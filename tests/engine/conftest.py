"""What tests of the engine share: the starter model and its dense parent, made once, tiny models and cards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.starter_parent import build_all_experts_active, build_dense_parent
from engine.devices.device import Device
from engine.devices.emulated import open_emulated
from engine.hardware.profiles import DeviceProfile
from engine.runtime.load import model as loading
from engine.runtime.load.plan import Plan
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import tiny_loaded
from tests.engine.on_devices import reference
from tests.starter import lasting_home, package_to_be_had, starter_for_tests


@pytest.fixture(scope="session")
def starter() -> Path:
    """Folder of the starter checkpoint (bf16).  Read-only."""
    return starter_for_tests()


@pytest.fixture(scope="session")
def dense_parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter's dense parent as a Llama checkpoint, float32."""
    with lasting_home(), package_to_be_had():
        return build_dense_parent(tmp_path_factory.mktemp("dense") / "parent")


@pytest.fixture(scope="session")
def all_experts_active(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent cut into experts, all active, float32: the same function as the parent."""
    with lasting_home(), package_to_be_had():
        return build_all_experts_active(tmp_path_factory.mktemp("moe") / "all-active")


@pytest.fixture(scope="module")
def mixtral() -> LoadedModel:
    return tiny_loaded("mixtral")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for those whose answers by transformers are kept."""
    yield tmp_path_factory.mktemp("checkpoints")
    reference.cache_clear()


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """A small card with a quick link."""
    with open_emulated(DeviceProfile("tiny", "for tests", 2**24, 20.0, 20.0, 1.0)) as device:
        yield device


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plan of every model that is loaded."""
    found, build = list[Plan](), loading.build

    def told(plan: Plan, *arguments: Any, **options: Any) -> LoadedModel:
        found.append(plan)
        return build(plan, *arguments, **options)

    monkeypatch.setattr(loading, "build", told)
    return found

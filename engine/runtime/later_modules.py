"""Modules of others whose code runs when something is first looked up in them, not when they are imported.

`import torch` imports two that inference never looks into, and they take a quarter of its time: how to export programs,
and what operators written in Python do on the meta device.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_LATER = ("torch._meta_registrations", "torch.export")
_META = "torch._meta_registrations"
_AFTER_META = ("_decomp", "_dynamo", "_inductor", "_prims", "_refs", "_subclasses.fake_impls", "utils._content_store")
"""Modules of torch that count on being imported after it: some import each other in circles."""


def import_later() -> None:
    """From now on; without effect once torch has been imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _LaterFinder())


def with_all_meta_operators() -> None:
    """Lets every operator work on the meta device: what has no kernel there until now is registered."""
    module = sys.modules.get(_META)
    if isinstance(module, _LaterModule):
        module.run()


def _complete_generators() -> None:
    """Gives torch's random generators their metaclass, which is set along with the operators of the meta device."""
    import torch

    with suppress(ImportError, AttributeError):  # other versions have none
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


class _LaterFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(parent, _LaterModule):
            parent.run()  # what is inside a package may rely on it
        if fullname.removeprefix("torch.") in _AFTER_META:
            with_all_meta_operators()
            if fullname in sys.modules:  # imported by that
                return _ThereLoader.spec_of(sys.modules[fullname])
        if fullname not in _LATER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LaterLoader(spec.loader)
        return spec


class _ThereLoader(Loader):
    """Gives a module that was imported while its finder was asked for it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    @classmethod
    def spec_of(cls, module: ModuleType) -> importlib.machinery.ModuleSpec:
        """Also the module's own until it is loaded: Python prefers that to what a finder returns."""
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, cls(module))
        return module.__spec__

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _LaterLoader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return _LaterModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, _LaterModule)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner  # which can be asked for sources
        module.wait_for_use(self._inner)
        if module.__name__ == _META:
            _complete_generators()


class _LaterModule(ModuleType):
    """What an import sets is there at once; anything else runs the module's code first."""

    def wait_for_use(self, loader: Loader) -> None:
        """`loader` is the one that will run the code."""
        self.__dict__.update(_later_loader=loader, _later_lock=threading.RLock(), _later_runs=False)

    def run(self) -> None:
        """Runs the code, once: other threads wait, and code that imports itself in a circle sees what is there."""
        own = self.__dict__
        lock = own.get("_later_lock")
        if lock is None:
            return
        with lock:
            if own.get("_later_lock") is None or own["_later_runs"]:
                return
            own["_later_runs"] = True
            try:
                own["_later_loader"].exec_module(self)
            except BaseException:
                own["_later_runs"] = False
                raise
            for name in ("_later_lock", "_later_loader", "_later_runs"):
                del own[name]

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" or not name.startswith("__"):  # inspection asks every module for the others
            self.run()
            if name in self.__dict__:
                return self.__dict__[name]
            own = self.__dict__.get("__getattr__")  # a module's own, which takes its place only if nothing else does
            if own is not None:
                return own(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

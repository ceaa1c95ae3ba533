"""transformers imported without what this engine never uses of it, which would cost more than torch's own import.

Four things, each put right while the module that it is about is imported, whoever imports it:

* torch's compiler: many functions of the library are marked for it, which is all that they want of it, and masks of a
  few models use one class of it, which they get when they make one.
* torch's distributed tensors, for models on many machines: the library is told that there is no `torch.distributed`,
  as is so with some builds of torch, and has its own way for that.
* The list of all that the library exports, for which it reads its 2,500 files, and that twice: we keep the list of the
  installed version in our cache folder, and read that.
* A thousand regular expressions for the names of all its models' tensors, and one more for each tensor: those that are
  looked for in something are compiled.

What was imported before, by a test say, stays as it is: it works the same and took longer.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from engine.common.files import write_private
from engine.common.paths import cache_dir

_LIBRARY = "transformers."
_COMPILER = "torch._dynamo"
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")


def import_lean() -> None:
    """From now on; again without effect."""
    if not any(isinstance(finder, _LeanFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LeanFinder())


class _LeanFinder(MetaPathFinder):
    """Finds the library's modules where they are, with a loader that does more."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_LIBRARY):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LeanLoader(spec.loader)
        return spec


class _LeanLoader(Loader):
    """Another loader, with something done before and after the module's own code."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # which can be asked for sources
        module.__loader__ = self._inner
        with _without_compiler(tracing=module.__name__ == "transformers.masking_utils"):
            self._inner.exec_module(module)
        change = _CHANGES.get(module.__name__)
        if change is not None:
            change(module)


@contextmanager
def _without_compiler(*, tracing: bool) -> Iterator[None]:
    """Its marks do nothing; with `tracing` the class of its own that masks need is imported when it is used."""
    import torch

    if _COMPILER in sys.modules:
        yield
        return
    outermost = "_dynamo" not in vars(torch)
    stand_in = _Compiler()
    marks = {name: getattr(torch.compiler, name) for name in _MARKS}
    if outermost:
        torch._dynamo = stand_in  # type: ignore[assignment]
        for name in _MARKS:
            setattr(torch.compiler, name, _unmarked)
    if tracing:
        sys.modules[_TRACING] = _Tracing(_TRACING)
    try:
        yield
    finally:
        if tracing and isinstance(sys.modules.get(_TRACING), _Tracing):
            del sys.modules[_TRACING]
        if outermost:
            for name, mark in marks.items():
                setattr(torch.compiler, name, mark)
            if vars(torch).get("_dynamo") is stand_in:  # not the real one, which somebody imported after all
                del torch._dynamo


def _unmarked(function: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    """A decorator, with options or without, that does nothing."""
    return function if function is not None else _unmarked


class _Compiler:
    """`torch._dynamo`: the real one as soon as it is asked for more than a mark."""

    def __getattr__(self, name: str) -> Any:
        return _unmarked if name in _MARKS else getattr(importlib.import_module(_COMPILER), name)


class _Tracing(ModuleType):
    """The module with the class that masks need: the real one as soon as it is asked for anything else."""

    def __getattr__(self, name: str) -> Any:
        if name == "TransformGetItemToIndex":
            return _index_tracing
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_TRACING) is self:
            del sys.modules[_TRACING]
        return getattr(importlib.import_module(_TRACING), name)


def _index_tracing() -> Any:
    return importlib.import_module(_TRACING).TransformGetItemToIndex()


def _change_import_utils(module: Any) -> None:
    whole = module.create_import_structure_from_path
    models = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "models")

    @lru_cache
    def of_folder(folder: str) -> Any:
        return whole(folder) if folder != models else _kept_structure(folder, whole)

    def create_import_structure_from_path(module_path: str | os.PathLike[str]) -> Any:
        path = os.fspath(module_path)
        return of_folder(os.path.dirname(path) if os.path.isfile(path) else path)

    module.create_import_structure_from_path = create_import_structure_from_path
    module.is_torch_distributed_available = lambda: False


def _kept_structure(folder: str, build: Callable[[str], Any]) -> Any:
    """What the library exports from this folder, from our cache; built and kept if it is not there."""
    key = [importlib.metadata.version(_LIBRARY.rstrip(".")), os.path.realpath(folder), os.stat(folder).st_mtime_ns]
    file = cache_dir() / "transformers-exports.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(file.read_bytes())
        if kept["key"] == key:
            return _unpacked(kept["exports"])
    structure = build(folder)
    with suppress(OSError):
        write_private(file, json.dumps({"key": key, "exports": _packed(structure)}, separators=(",", ":")))
    return structure


def _packed(structure: dict[Any, Any]) -> list[Any]:
    """As JSON: of each folder its own folders by name, and for each set of backends the names in each module."""
    folders = {name: _packed(inner) for name, inner in structure.items() if isinstance(name, str)}
    exports = [
        [sorted(backends), {name: sorted(names) for name, names in modules.items()}]
        for backends, modules in structure.items()
        if not isinstance(backends, str)
    ]
    return [folders, exports]


def _unpacked(packed: list[Any]) -> dict[Any, Any]:
    folders, exports = packed
    found: dict[Any, Any] = {name: _unpacked(inner) for name, inner in folders.items()}
    for backends, modules in exports:
        found[frozenset(backends)] = {name: set(names) for name, names in modules.items()}
    return found


def _change_core_model_loading(module: Any) -> None:
    module.re = _LaterExpressions(module.re)


_CHANGES: dict[str, Callable[[Any], None]] = {
    "transformers.utils.import_utils": _change_import_utils,
    "transformers.core_model_loading": _change_core_model_loading,
}


class _LaterExpressions:
    """The module `re`, but for regular expressions that are compiled when they are first used."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def compile(self, pattern: str, flags: int = 0) -> Any:
        return _LaterPattern(pattern, flags)


class _LaterPattern:
    """As a compiled regular expression."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(re.compile(self.pattern, self._flags), name)
        setattr(self, name, found)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> _LaterPattern:
        return self

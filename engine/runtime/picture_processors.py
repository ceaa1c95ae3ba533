"""The library's own image processors, also those that it has for torchvision alone: torch stands in for that."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import image_processing_backends
from transformers.image_utils import PILImageResampling

from engine.checkpoint.pictures import preprocessor_at
from engine.common.errors import EngineError, ErrorCode
from engine.families.pictures import Sizes
from engine.runtime.load.library_models import first_line

_SETTINGS = frozenset(
    (
        *("image_mean", "image_std", "rescale_factor", "resample"),
        *("do_resize", "do_rescale", "do_normalize", "norm_mean", "norm_std", "min_image_size"),
    )
)
"""Of a preprocessor's file, beside sizes; all else is the library's own business."""


def processor_of(directory: Path, sizes: Sizes) -> Any:
    """The library's image processor of a model.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`: the file with its settings makes no sense to the library.
    """
    package, _, name = sizes.sight.processor.partition(":")
    kind = getattr(_module(package, "_pil" if name.endswith("Pil") else ""), name)
    said = {key: value for key, value in preprocessor_at(directory).items() if key in _SETTINGS}
    try:
        return kind(**sizes.settings(), **said)
    except Exception as error:  # whatever the library stumbles over
        raise senseless(directory, error) from error


def senseless(directory: Path, error: Exception) -> EngineError:
    """Where the library stumbles over what a model says of its pictures."""
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"What {directory.name} says about preparing pictures makes no sense ({first_line(error)}): get its "
        "preprocessor_config.json again.",
    )


@functools.cache
def _module(package: str, kind: str) -> ModuleType:
    """The library's code for the pictures of a family, which is imported with the stand-in where it asks for it."""
    name = f"transformers.models.{package}.image_processing{kind}_{package}"
    if kind or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module(name)
    parts = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    try:
        for part in parts:
            sys.modules[part] = ModuleType(part)
        sys.modules[parts[-1]].functional = _Functional  # type: ignore[attr-defined]
        module = importlib.import_module(name)
    finally:
        for part in parts:
            sys.modules.pop(part, None)
    backends: Any = image_processing_backends
    backends.tvF = _Functional
    backends.pil_torch_interpolation_mapping = {each: each for each in PILImageResampling}
    backends.is_torchvision_greater_or_equal = lambda _version: True
    return module


class _Functional:
    """What the library calls of `torchvision.transforms.v2.functional`, which computes it by torch in the same way."""

    InterpolationMode = PILImageResampling

    @staticmethod
    def resize(
        image: torch.Tensor, size: Sequence[int], interpolation: PILImageResampling, antialias: bool = True
    ) -> torch.Tensor:
        """Of pixels [..., C, H, W]: bilinear, bicubic or of Lanczos."""
        if tuple(size) == tuple(image.shape[-2:]):
            return image
        stacked, mode = image.reshape(-1, *image.shape[-3:]), interpolation.name.lower()
        made = torch.nn.functional.interpolate(
            stacked, size=list(size), mode=mode, align_corners=False, antialias=antialias
        )
        return made.reshape(*image.shape[:-2], *size)

    @staticmethod
    def pil_to_tensor(image: Image.Image) -> torch.Tensor:
        """[C, H, W] of bytes."""
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    @staticmethod
    def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
        """Of [..., C, H, W], where C is 1."""
        return image.expand(*image.shape[:-3], 3, -1, -1) if image.shape[-3] == 1 else image

    @staticmethod
    def pad(image: torch.Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> torch.Tensor:
        """On the left, above, on the right and below."""
        left, above, right, below = padding
        value = fill[0] if isinstance(fill, Sequence) else fill or 0
        return torch.nn.functional.pad(image, (left, right, above, below), padding_mode, value)

    @staticmethod
    def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
        """By colour."""
        mean, std = (
            torch.as_tensor(each, dtype=image.dtype, device=image.device)[:, None, None] for each in (mean, std)
        )
        return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)

"""How families that see cut pictures into tokens: sizes and names only, no library.

A picture becomes a grid of patches of some pixels; the tower makes one token of each small square of them.  How large
the grid is follows from the picture's size and the family's rule, which a test holds to the library's own processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Rule = Literal["area", "frames", "square", "budget", "edge", "fit"]
_MOST_ELONGATED = 200
"""Times that a side may be as long as the other one, by the rules of an area."""


class Grid(NamedTuple):
    """A picture's tokens: rows of columns, and others that close rows or begin and end the picture."""

    rows: int
    columns: int
    others: int = 0

    @property
    def tokens(self) -> int:
        """All that a prompt grows by, more or less a line break."""
        return self.rows * self.columns + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a family sees.

    Attributes:
        rule: how large a picture's grid is. "area": as many pixels as it has, within two limits, both sides a multiple
            of a token's; "frames": the same for films, of which a picture is the first `frames` frames; "square":
            always the same; "budget": as many tokens as there may be; "edge": at most so many pixels long; "fit":
            made smaller to so many patches, and so many on a side, and then filled up with black.
        processor: the library's module and class that makes numbers of it, without torchvision.
        patch, merge, frames: pixels of a patch's side, patches of a token's side and how often a picture is repeated,
            where neither configuration says.
        least, most: pixels of the area, pixels of the edge, or tokens, where the preprocessor's file does not say.
        edge: pixels of a square's side, or patches on a side, where the tower's configuration does not say.
        mark: which control token the chat template writes for a picture: that of the placeholder, or `boi`.
        before, after: text round a picture's tokens, with names of control tokens in braces; `row_end` between rows.
        axes: whether tokens have positions of three axes (mrope).
        both_ways: the argument by which the library's model is told which tokens are a picture's, where these attend
            to each other whatever their order; empty where they do not.
        experts: the argument by which it is told which tokens have experts of their own: a picture's, and the two that
            begin and end it.
    """

    rule: Rule
    processor: str
    patch: int = 14
    merge: int = 2
    frames: int = 2
    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    edge: int = 224
    mark: Literal["image", "boi"] = "image"
    before: str = ""
    after: str = ""
    row_end: str = ""
    axes: bool = False
    both_ways: str = ""
    experts: str = ""

    def reading(self, vision: Mapping[str, Any], preprocessor: Mapping[str, Any], whole: Mapping[str, Any]) -> Sizes:
        """The numbers of one model, by its tower's part of its configuration, its preprocessor's file and the whole."""
        size = preprocessor.get("size")
        size = size if isinstance(size, dict) else {}

        def number(default: int, *found: Any) -> int:
            return next((each for each in found if type(each) is int and each > 0), default)

        patch = number(self.patch, preprocessor.get("patch_size"), vision.get("patch_size"))
        merge = number(
            self.merge,
            preprocessor.get("merge_size"),
            preprocessor.get("pooling_kernel_size"),
            vision.get("spatial_merge_size"),
            vision.get("pooling_kernel_size"),
            whole.get("spatial_merge_size"),
        )
        least = number(self.least, preprocessor.get("min_pixels"), size.get("shortest_edge"))
        most = number(
            self.most,
            preprocessor.get("max_pixels"),
            preprocessor.get("max_soft_tokens"),
            preprocessor.get("max_patches"),
            size.get("longest_edge"),
            whole.get("mm_tokens_per_image"),
        )
        frames = number(self.frames, preprocessor.get("temporal_patch_size"), vision.get("temporal_patch_size"))
        edge = number(self.edge, size.get("max_height"), vision.get("image_size"))
        return Sizes(self, patch, merge, frames, least, most, edge)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers by which one model cuts pictures; see `Sight`."""

    sight: Sight
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    edge: int

    def settings(self) -> dict[str, Any]:
        """Sizes as the library's processor takes them."""
        side, sized = self.patch * self.merge, {"shortest_edge": self.least, "longest_edge": self.most}
        match self.sight.rule:
            case "square":
                return {"size": {"height": self.edge, "width": self.edge}}
            case "budget":
                return {"patch_size": self.patch, "pooling_kernel_size": self.merge, "max_soft_tokens": self.most}
            case "edge":
                return {"patch_size": {"height": side, "width": side}, "size": {"longest_edge": self.most}}
        return {
            "patch_size": self.patch,
            "merge_size": self.merge,
            "temporal_patch_size": self.frames,
            "size": sized,
        }

    def grid(self, width: int, height: int) -> Grid:
        """That of a picture of so many pixels.

        Raises:
            ValueError: there is none, for a reason that completes a sentence about the picture.
        """
        if width < 1 or height < 1:
            raise ValueError("it has no pixels")
        side = self.patch * self.merge
        match self.sight.rule:
            case "square":
                edge = math.isqrt(self.most)
                return Grid(edge, edge, 2)
            case "area":
                return self._of_area(width, height, 1, side)
            case "frames":
                if height < side or width < side:
                    scale = max(side / height, side / width)
                    width, height = int(width * scale), int(height * scale)
                return self._of_area(width, height, self.frames, side)
            case "budget":
                return self._of_budget(width, height, side)
            case "edge":
                ratio = max(height / self.most, width / self.most)
                if ratio > 1:
                    width, height = math.floor(width / ratio), math.floor(height / ratio)
                rows, columns = max(1, math.ceil(height / side)), max(1, math.ceil(width / side))
                return Grid(rows, columns, rows)
            case "fit":
                wide, high = self.fitted(width, height)
                return Grid(math.ceil(high / side), math.ceil(wide / side), 2)

    def patches(self, grid: Grid) -> int:
        """That the tower attends to in a picture of so many tokens."""
        if self.sight.rule == "square":
            return (self.edge // self.patch) ** 2
        return grid.rows * grid.columns * self.merge**2

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """What a picture's sides are made by the rule "fit", before it is filled up."""
        patches = max(1.0, height // self.patch) * max(1.0, width // self.patch)
        most = self.edge * self.patch
        scale = min(1.0, math.sqrt(self.most / patches), most / height, most / width)
        return min(max(1, int(width * scale)), most), min(max(1, int(height * scale)), most)

    def _of_area(self, width: int, height: int, frames: int, side: int) -> Grid:
        if max(width, height) > _MOST_ELONGATED * min(width, height):
            raise ValueError(f"one of its sides is more than {_MOST_ELONGATED} times as long as the other")
        rows, columns = round(height / side), round(width / side)
        pixels, area = frames * rows * columns * side**2, frames * width * height
        if pixels > self.most:
            shrink = math.sqrt(area / self.most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif pixels < self.least:
            stretch = math.sqrt(self.least / area)
            rows, columns = math.ceil(height * stretch / side), math.ceil(width * stretch / side)
        return Grid(rows, columns, 2)

    def _of_budget(self, width: int, height: int, side: int) -> Grid:
        factor = math.sqrt(self.most * side**2 / (width * height))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return Grid(rows, columns, 2)


_QWEN = Sight(rule="area", processor="qwen2_vl:Qwen2VLImageProcessorPil", axes=True)
_GLM = Sight(rule="frames", processor="glm4v:Glm4vImageProcessorPil", axes=True, least=112 * 112, most=28 * 28 * 15000)
SIGHTS: dict[str, Sight] = {
    "ernie4_5_vl_moe": Sight(
        rule="area",
        processor="ernie4_5_vl_moe:Ernie4_5_VLMoeImageProcessorPil",
        frames=1,
        most=28 * 28 * 6177,
        axes=True,
        experts="moe_mm_token_type_ids",
    ),
    "gemma3": Sight(
        rule="square",
        processor="gemma3:Gemma3ImageProcessorPil",
        most=256,
        mark="boi",
        before="\n\n{boi}",
        after="{eoi}\n\n",
        both_ways="token_type_ids",
    ),
    "gemma4": Sight(
        rule="budget",
        processor="gemma4:Gemma4ImageProcessorPil",
        patch=16,
        merge=3,
        most=280,
        before="{boi}",
        after="{eoi}",
        both_ways="mm_token_type_ids",
    ),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": replace(_GLM, processor="glm46v:Glm46VImageProcessorPil"),
    "kimi_k25": Sight(rule="fit", processor="", most=16384, edge=512),
    "mistral3": Sight(
        rule="edge", processor="pixtral:PixtralImageProcessorPil", most=1540, row_end="[IMG_BREAK]", after="[IMG_END]"
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
}
"""Whole models by their `model_type`, whose pictures are read; a test compares each with the library."""

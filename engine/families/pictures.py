"""How families that see cut pictures into tokens: sizes and names only, no library.

A picture becomes a grid of patches of some pixels; the tower makes one token of each small square of them.  How large
the grid is follows from the picture's size and the family's rule, which a test holds to the library's own processors.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Rule = Literal[
    "area", "frames", "square", "budget", "edge", "fit", "tiles", "crops", "canvas", "closest", "padded", "patches",
    "cells", "mosaic",
]  # fmt: skip
_MOST_TILES = 256
_MOST_ELONGATED = 200
"""Times that a side may be as long as the other one, by the rules of an area."""


class Grid(NamedTuple):
    """A picture's tokens: rows of columns of tiles, then the picture as a whole, and others that separate them or
    begin and end the picture.

    Attributes:
        tile, whole: tokens of a tile, and of the whole.
    """

    rows: int
    columns: int
    others: int = 0
    tile: int = 1
    whole: int = 0

    @property
    def seen(self) -> int:
        """Those that the tower makes."""
        return self.rows * self.columns * self.tile + self.whole

    @property
    def tokens(self) -> int:
        """All that a prompt grows by, more or less a line break."""
        return self.seen + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a family sees.

    Attributes:
        rule: how large a picture's grid is. "area": as many pixels as it has, within two limits, both sides a multiple
            of a token's; "frames": the same for films, of which a picture is the first `frames` frames; "square":
            always the same; "budget": as many tokens as there may be; "edge": at most so many pixels long; "fit":
            made smaller to so many patches, and so many on a side, and then filled up with black; "tiles": cut into at
            most so many squares, with the whole made one more behind them; "crops": the same with windows of `crop`
            pixels that lie closer or wider as the picture is long; "canvas": as many tokens as it has, within two
            limits, and filled up with black; "closest": the same below a limit, but the sides' ratio is kept as well as
            can be; "padded": always the same, of a square that is filled up with black; "patches": as many patches as
            it has, within two limits; "cells": in squares of so many pixels, as it is, the last ones filled up;
            "mosaic": stretched to that of at most so many squares whose sides' ratio is the nearest, with the whole
            made one more behind them; if the squares are of `crop` pixels, a picture that fits into one has none.
        processor: the library's module and class that makes numbers of it.
        patch, merge, frames: pixels of a patch's side, patches of a token's side and how often a picture is repeated,
            where neither configuration says.
        row_token: whether the tower makes one more token at the end of each row; of "cells", only where a whole one
            ends it.
        least, most: pixels of the area, pixels of the edge, or tokens, where the preprocessor's file does not say.
        edge: pixels of a square's side, or patches on a side, where the tower's configuration does not say.
        crop: pixels of a crop's side, where the preprocessor's file does not say.
        mark: what the chat template writes for a picture: the placeholder, `boi`, or this token.
        before, after: text round a picture's tokens, with names of control tokens in braces; `row_end` between rows,
            `column_end` between a row's tiles, `tile_begin` and `tile_end` round each, `tiles_end` behind all of
            them, and `whole_begin` before the whole.
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
    row_token: bool = False
    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    edge: int = 224
    crop: int = 0
    mark: str = "image"
    before: str = ""
    after: str = ""
    row_end: str = ""
    column_end: str = ""
    tile_begin: str = ""
    tile_end: str = ""
    tiles_end: str = ""
    whole_begin: str = ""
    axes: bool = False
    both_ways: str = ""
    experts: str = ""

    def reading(self, vision: Mapping[str, Any], preprocessor: Mapping[str, Any], whole: Mapping[str, Any]) -> Sizes:
        """The numbers of one model, by its tower's part of its configuration, its preprocessor's file and the whole."""
        size = preprocessor.get("size")
        size = size if isinstance(size, dict) else {}

        def number(default: int, *found: Any) -> int:
            plain = (each[0] if isinstance(each, list) and each else each for each in found)
            return next((each for each in plain if type(each) is int and each > 0), default)

        shares = (each.get("downsample_ratio") for each in (preprocessor, whole))
        sides = [round(1 / each) for each in shares if type(each) is float and 0 < each <= 1]
        is_padded, stretch = self.rule == "padded", preprocessor.get("rescale_image_frac")
        is_mosaic, sam = self.rule == "mosaic", vision.get("sam_config")
        crop = number(self.crop, preprocessor.get("tile_size" if is_mosaic else "patch_size")) if self.crop else 0
        patch = number(
            self.patch,
            None if crop else preprocessor.get("patch_size"),
            vision.get("patch_size"),
            sam.get("patch_size") if isinstance(sam, dict) else None,
        )
        merge = number(
            self.merge,
            preprocessor.get("merge_size"),
            preprocessor.get("pooling_kernel_size"),
            vision.get("spatial_merge_size"),
            vision.get("pooling_kernel_size"),
            whole.get("spatial_merge_size"),
            *sides,
        )
        least = number(
            self.least,
            preprocessor.get("min_pixels"),
            preprocessor.get("min_image_tokens"),
            preprocessor.get("min_num_patches"),
            preprocessor.get("min_patches"),
            size.get("shortest_edge"),
        )
        edge = number(
            self.edge,
            size.get("max_height"),
            preprocessor.get("max_image_size") if is_padded else None,
            size.get("height"),
            vision.get("image_size"),
        )
        queries = whole.get("projector_patch_to_query_dict")
        most = number(
            self.most,
            queries.get(str((edge // patch) ** 2)) if isinstance(queries, dict) else None,
            preprocessor.get("max_pixels"),
            preprocessor.get("max_soft_tokens"),
            preprocessor.get("max_patches"),
            preprocessor.get("max_num_patches"),
            preprocessor.get("rescale_image_max_upscaled_long_edge"),
            None if is_padded else preprocessor.get("max_image_size"),
            preprocessor.get("max_image_tokens"),
            size.get("longest_edge"),
            whole.get("mm_tokens_per_image"),
        )
        frames = number(self.frames, preprocessor.get("temporal_patch_size"), vision.get("temporal_patch_size"))
        stretch = float(stretch) if isinstance(stretch, int | float) and 0 < stretch < 100 else 1.0
        largest = preprocessor.get("resize_to_max_canvas") is True
        return Sizes(self, patch, merge, frames, least, most, edge, crop, stretch, largest)

    def text(self, grid: Grid, names: Mapping[str, str]) -> str:
        """What stands for a picture in a prompt, of the text of the control tokens."""
        image = names["image"]
        tile = self.tile_begin + image * grid.tile + self.tile_end
        tiles = self.row_end.join([self.column_end.join([tile] * grid.columns)] * grid.rows)
        whole = self.whole_begin + image * grid.whole
        inner = f"{tiles}{self.tiles_end if tiles else ''}{whole}"
        return self.before.format(**names) + inner + self.after.format(**names)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers by which one model cuts pictures; see `Sight`.

    Attributes:
        stretch: factor by which "cells" are made of a larger picture, up to `most` pixels of its longer side.
        largest: whether "tiles" are as many as there may be, instead of as few as hold the picture.
    """

    sight: Sight
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    edge: int
    crop: int
    stretch: float = 1.0
    largest: bool = False

    def settings(self) -> dict[str, Any]:
        side, sized = self.patch * self.merge, {"shortest_edge": self.least, "longest_edge": self.most}
        match self.sight.rule:
            case "square":
                return {"size": {"height": self.edge, "width": self.edge}}
            case "tiles":
                own = {"max_patches": self.most, "resize_to_max_canvas": self.largest}
                return {"size": {"height": self.edge, "width": self.edge}, **own}
            case "mosaic":
                own = {"min_patches": self.least, "max_patches": self.most}
                own |= {"tile_size": self.crop} if self.crop else {}
                return {"size": {"height": self.edge, "width": self.edge}, "crop_to_patches": True, **own}
            case "padded":
                return {"max_image_size": self.edge}
            case "cells":
                stretched = {
                    "rescale_image_frac": self.stretch,
                    "rescale_image_max_upscaled_long_edge": self.most,
                }
                cell = {"size": {"height": self.edge, "width": self.edge}}
                return cell if self.stretch == 1 else cell | stretched
            case "patches":
                own = {"min_num_patches": self.least, "max_num_patches": self.most, "max_model_len": self.most}
                return {**own, "patch_size": self.patch, "downsample_ratio": 1 / self.merge}
            case "crops":
                own = {"patch_size": self.crop, "max_image_size": self.most}
                return {"size": {"height": self.edge, "width": self.edge}, **own}
            case "canvas":
                own = {"min_image_tokens": self.least, "max_image_tokens": self.most}
                return {**own, "patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": self.frames}
            case "closest":
                own = {"patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": self.frames}
                return {**own, "max_image_tokens": self.most}
            case "fit":
                sized = {"max_height": self.edge, "max_width": self.edge}
                return {"patch_size": self.patch, "merge_size": self.merge, "max_patches": self.most, "size": sized}
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
                patches = max(1.0, height // self.patch) * max(1.0, width // self.patch)
                most = self.edge * self.patch
                scale = min(1.0, math.sqrt(self.most / patches), most / height, most / width)
                wide, high = (min(max(1, int(each * scale)), most) for each in (width, height))
                return Grid(math.ceil(high / side), math.ceil(wide / side), 2)
            case "canvas":
                return self._of_canvas(width, height, side)
            case "closest":
                return self._closest(width, height, side)
            case "padded":
                return Grid(1, self.most)
            case "cells":
                return self._of_cells(width, height)
            case "patches":
                return self._of_patches(width, height)
            case "mosaic":
                return self._of_mosaic(width, height, side)
            case "tiles":
                return self._of_tiles(width, height, (self.edge // side) ** 2)
            case "crops":
                return self._of_crops(width, height, side)

    def patches(self, grid: Grid) -> int:
        """That the tower attends to in a picture of so many tokens."""
        if self.sight.rule in ("square", "padded"):
            return (self.edge // self.patch) ** 2
        return grid.seen * self.merge**2

    def _of_canvas(self, width: int, height: int, side: int) -> Grid:
        rows, columns = math.ceil(height / side), math.ceil(width / side)
        if rows * columns < self.least:
            scale = math.sqrt(self.least * side**2 / (height * width))
            rows, columns = (math.ceil(max(1, math.ceil(edge * scale)) / side) for edge in (height, width))
        if rows * columns > self.most:
            rows, columns, low, high = 1, 1, 1, height
            while low <= high:
                middle = (low + high) // 2
                wide = math.ceil(max(1, math.floor(width * middle / height)) / side)
                if math.ceil(middle / side) * wide <= self.most:
                    rows, columns, low = math.ceil(middle / side), wide, middle + 1
                else:
                    high = middle - 1
        return Grid(rows, columns, 2)

    def _closest(self, width: int, height: int, side: int) -> Grid:
        high, wide = height / side, width / side
        ratio = wide / high
        if high * wide > self.most:
            high = (self.most / ratio) ** 0.5
            wide = high * ratio
        around = itertools.product((math.floor(high), math.ceil(high)), (math.floor(wide), math.ceil(wide)))
        fitting = [each for each in {*around} if each[0] >= 1 and each[1] >= 1 and each[0] * each[1] <= self.most]
        fitting = fitting or [(max(1, round(high)), max(1, round(wide)))]
        return Grid(*min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width)), 2)

    def _of_cells(self, width: int, height: int) -> Grid:
        long = max(width, height)
        ratio = min(long * self.stretch, max(self.most, long)) / long
        if ratio != 1:
            width, height = math.floor(width * ratio + 0.5), math.floor(height * ratio + 0.5)
            if not (width and height):
                raise ValueError("one of its sides is much longer than the other")
        return Grid(math.ceil(height / self.edge), (width - 1 + self.sight.row_token) // self.edge + 1)

    def _of_patches(self, width: int, height: int) -> Grid:
        rows, columns = (round(edge / self.patch + 0.5) for edge in (height, width))
        shrink = min(math.sqrt(self.most / (rows * columns)), 1.0)
        rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
        if not (rows and columns):
            raise ValueError("one of its sides is much longer than the other")
        if self.most > self.least and rows * columns < self.least:
            stretch = math.sqrt(self.least / (rows * columns))
            rows, columns = math.ceil(stretch * rows), math.ceil(stretch * columns)

        def whole(side: int, other: int) -> int:
            less = side % self.merge
            more = side + self.merge - less
            return side if not less else more if more * other <= self.most else max(self.merge, side - less)

        rows = whole(rows, columns)
        return Grid(rows // self.merge, whole(columns, rows) // self.merge, 2)

    def _of_mosaic(self, width: int, height: int, side: int) -> Grid:
        square, ratio, area = self.crop or self.edge, width / height, width * height
        each, whole = (square // side) ** 2, (self.edge // side) ** 2 + bool(self.crop)  # which a separator ends
        ends = 0 if self.crop else 2
        if self.crop and max(width, height) <= square:
            return Grid(0, 0, ends, each, whole)
        most = min(self.most, _MOST_TILES)
        shapes = ((wide, high) for wide in range(1, most + 1) for high in range(1, most // wide + 1))
        best, least = (1, 1), math.inf
        for wide, high in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            away = abs(ratio - wide / high)
            if wide * high < self.least or away > least:
                continue
            if away < least or area > 0.5 * square**2 * wide * high:
                best, least = (wide, high), away
        columns, rows = best
        return Grid(rows, columns, ends, each, whole) if rows * columns > 1 else Grid(0, 0, ends, each, whole)

    def _of_tiles(self, width: int, height: int, each: int) -> Grid:
        def cost(tiles: tuple[int, int]) -> tuple[bool, float, int]:
            """The least stretch (or the most), or else the least shrinking, in the library's numbers of 32 bits."""
            rows, columns = tiles
            scale = min(rows * self.edge / height, columns * self.edge / width)
            (scale,) = struct.unpack("f", struct.pack("f", scale))
            return scale < 1, scale if scale >= 1 and not self.largest else -scale, rows * columns

        most = min(self.most, _MOST_TILES)
        fitting = ((one, other) for one in range(1, most + 1) for other in range(1, most // one + 1))
        rows, columns = min(fitting, key=cost)
        if rows * columns == 1:
            return Grid(0, 0, 3, each, each)
        return Grid(rows, columns, 3 + rows * columns, each, each)

    def _of_crops(self, width: int, height: int, side: int) -> Grid:
        long, short = max(width, height), min(width, height)
        if short < 32 and long > 4 * short:
            width = height = short = long
        if long > self.most:
            scale = self.most / long
            width, height = int(width * scale), int(height * scale)
            long, short = max(width, height), min(width, height)
            if not short:
                raise ValueError(f"one of its sides is more than {self.most:,} times as long as the other")
        window = self.crop if long <= 4 * short else min(short, self.crop)
        if long <= self.edge:
            window = short if long > 1.5 * short else 0
        each, whole = (self.crop // side) ** 2, (self.edge // side) ** 2
        if not window:
            return Grid(0, 0, 2, each, whole)
        rows, columns = (
            max(1, edge // window + (edge >= window and edge % window > 0.2 * window)) for edge in (height, width)
        )
        return Grid(rows, columns, 1 + rows + 2 * rows * columns, each, whole)

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
        return Grid(rows, columns + self.sight.row_token, 2)

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
_MISTRAL = Sight(
    rule="edge", processor="pixtral:PixtralImageProcessorPil", most=1540, row_end="[IMG_BREAK]", after="[IMG_END]"
)
_CELLS = Sight(rule="cells", processor="inkling2:Inkling2ImageProcessor", patch=20, edge=40, most=2048)
SIGHTS: dict[str, Sight] = {
    "aria": Sight(rule="padded", processor="aria:AriaImageProcessorPil", merge=1, most=256, edge=980),
    "deepseek_ocr2": Sight(
        rule="mosaic",
        processor="deepseek_ocr2:DeepseekOcr2ImageProcessorPil",
        patch=16,
        merge=4,
        least=2,
        most=6,
        edge=1024,
        crop=768,
    ),
    "dots3_note": replace(_QWEN, frames=1, axes=False),
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
    "glm5_next": Sight(rule="canvas", processor="glm5_next:Glm5NextImageProcessorPil", least=16, most=8000),
    "glm46v": replace(_GLM, processor="glm46v:Glm46VImageProcessorPil"),
    "hy_v4_vl": replace(
        _QWEN,
        processor="hy_v4_vl:HYV4VLImageProcessorPil",
        patch=16,
        frames=1,
        row_token=True,
        least=512 * 512,
        most=2048 * 2048,
    ),
    "inkling2": _CELLS,
    "inkling2_loop": _CELLS,
    "inkling_mm_model": replace(_CELLS, processor="inkling:InklingImageProcessor", patch=40, merge=1, row_token=True),
    "internvl": Sight(
        rule="mosaic",
        processor="got_ocr2:GotOcr2ImageProcessorPil",
        least=1,
        most=12,
        edge=448,
        before="<img>",
        after="</img>",
    ),
    "kimi_k25": Sight(rule="fit", processor="kimi_k25:Kimi_K25ImageProcessor", most=16384, edge=512),
    "llama4": Sight(
        rule="tiles",
        processor="llama4:Llama4ImageProcessor",
        most=16,
        edge=336,
        mark="<|image|>",
        before="<|image_start|>",
        column_end="<|tile_x_separator|>",
        row_end="<|tile_y_separator|>",
        tiles_end="<|tile_y_separator|>",
        whole_begin="<|image|>",
        after="<|image_end|>",
    ),
    "minimax_m3_vl": Sight(
        rule="area",
        processor="minimax_m3_vl:MiniMaxM3VLImageProcessor",
        least=4 * 28 * 28,
        most=451584,
        before="]<]start of image[>[",
        after="]<]end of image[>[",
    ),
    "mistral3": _MISTRAL,
    "mistral_large4": _MISTRAL,
    "muse_spark": Sight(
        rule="closest",
        processor="muse_glimmer:MuseGlimmerImageProcessor",
        most=4096,
        before="<|image_start|>",
        after="<|image_end|>",
    ),
    "nemotron_h_omni": Sight(
        rule="patches",
        processor="nemotron_h_omni:NemotronH_Omni_Reasoning_V3ImageProcessor",
        patch=16,
        least=1024,
        most=13312,
        before="<img>",
        after="</img>",
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_omni_moe_thinker": _QWEN,
    "qwen4_exp": _QWEN,
    "step3p7": Sight(
        rule="crops",
        processor="step3p7:Step3p7ImageProcessor",
        merge=4,
        most=3024,
        edge=728,
        crop=504,
        tile_begin="<patch_start>",
        tile_end="<patch_end>",
        row_end="<patch_newline>",
        whole_begin="<im_start>",
        after="<im_end>",
    ),
}
"""Whole models by their `model_type`, whose pictures are read; a test compares each with the library."""

"""A point in a prompt to which a cache can return although some of its layers forget.

Sliding windows and recurrent states cannot be cropped: once a token has gone by, the state before it is lost.  A copy
of those layers alone is small, whatever the length of the context; layers that keep every token are merely cropped.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from engine.runtime.cache_reuse import KEEPS_EVERY_TOKEN


class CacheSnapshot:
    """What `length` tokens left in a cache.

    Args:
        cache: a cache that holds exactly these tokens; `worth_taking` says whether this is of use for it.
    """

    def __init__(self, cache: Cache, length: int) -> None:
        self.length = length
        self._forgetful: dict[int, Any] = {
            index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if not _keeps_all(layer)
        }

    @staticmethod
    def worth_taking(cache: Cache) -> bool:
        """Whether the cache has layers that forget, all of them inside its list of layers."""
        return type(cache) is DynamicCache and not all(_keeps_all(layer) for layer in cache.layers)

    def restore(self, cache: Cache, tokens: int) -> None:
        """Takes a cache that now holds `tokens` tokens, the first `length` of them the same, back to those."""
        for index, layer in enumerate(cache.layers):
            if index in self._forgetful:
                cache.layers[index] = copy.deepcopy(self._forgetful[index])
            else:
                layer.crop(self.length - tokens)


def _keeps_all(layer: Any) -> bool:
    return type(layer) in KEEPS_EVERY_TOKEN

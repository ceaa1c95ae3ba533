"""What a model's sessions teach about its experts: who is wanted next, and who is wanted most."""

from __future__ import annotations

from engine.experts.prediction.prefetcher import Prefetcher
from engine.runtime.popularity import Popularity, UseCounts, save_popularity


class Foresight:
    """Belongs to a loaded model.

    Args:
        learns_always: not only if predicting has proved to pay here.

    Attributes:
        prefetcher: brings experts before they are wanted, if anybody can predict them.
    """

    def __init__(self, *, learns_always: bool = False) -> None:
        self._learns_always = learns_always
        self.prefetcher: Prefetcher | None = None
        self._uses: tuple[str, UseCounts, Popularity | None] | None = None

    def keep_uses(self, model_key: str, uses: UseCounts, earlier: Popularity | None) -> None:
        """Lets the counts of this session be kept when the model is closed."""
        self._uses = model_key, uses, earlier

    def learn_while_idle(self) -> None:
        """After an answer: begins to train in the background, if predicting pays here and there is news to learn."""
        prefetcher = self.prefetcher
        if prefetcher is not None and (self._learns_always or prefetcher.adopted is not None):
            prefetcher.learn_while_idle()

    def close(self) -> None:
        """Ends training, and keeps what has been counted.  Harmless if repeated."""
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = None
        if self._uses is not None:
            model_key, uses, earlier = self._uses
            self._uses = None
            merged = uses.added_to(earlier)
            if merged is not None:
                save_popularity(model_key, merged)

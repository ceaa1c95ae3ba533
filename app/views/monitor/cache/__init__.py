"""Cards about the expert cache: hit rate and size, policies, predictors."""

from app.views.monitor.cache.cache_card import CacheCard
from app.views.monitor.cache.prediction_card import PoliciesCard, PredictionCard

__all__ = ["CacheCard", "PoliciesCard", "PredictionCard"]

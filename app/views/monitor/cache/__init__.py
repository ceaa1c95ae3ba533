"""The expert cache in cards: what it hits and its size, the policies, the predictors."""

from app.views.monitor.cache.cache_card import CacheCard
from app.views.monitor.cache.policies_card import PoliciesCard
from app.views.monitor.cache.prediction_card import PredictionCard

__all__ = ["CacheCard", "PoliciesCard", "PredictionCard"]

"""GLM-5.3-Flash without what reads pictures, of which the library has only the whole."""

from __future__ import annotations

from transformers import AutoModelForCausalLM
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

from engine.runtime.own.parts import OwnForCausalLM, alone


class Glm5NextTextForCausalLM(OwnForCausalLM):
    config_class = Glm5NextTextConfig
    layers = alone(Glm5NextTextModel)


AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextTextForCausalLM, exist_ok=True)

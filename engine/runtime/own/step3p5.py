"""Step 3.5 (StepFun 2026): the layers of Step 3.7, of which the library has only the whole that also sees."""

from __future__ import annotations

from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config, Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from engine.runtime.own.parts import OwnForCausalLM, alone


class Step3p5ForCausalLM(OwnForCausalLM):
    config_class = Step3p7TextConfig
    layers = alone(Step3p7TextModel)


AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
# By its class: the same kind of configuration is a part of Step 3.7's, which has conversions of its own.
register_checkpoint_conversion_mapping(
    Step3p5ForCausalLM.__name__,
    [
        each
        for each in get_checkpoint_conversion_mapping(Step3p7Config.model_type)
        if not any(pattern.startswith("^") for pattern in each.source_patterns)
    ],
)

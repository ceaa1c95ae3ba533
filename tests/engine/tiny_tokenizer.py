"""A small real tokenizer: byte-level BPE over a few sentences, with control tokens and a chat template."""

import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 320
PAD, BOS, EOS = 0, 1, 2

TEXT = (
    "The router chooses a few experts for each token, and the answer is the weighted sum of what they say.",
    "A question from the user, an answer from the assistant; what is the capital of France? It is Paris.",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> None:
    """Writes the tokenizer's files beside a model: 320 ids at most, 0 is padding, 1 begins, 2 ends a turn."""
    for name, content in _files(template).items():
        (directory / name).write_bytes(content)


@cache
def _files(template: str | None) -> dict[str, bytes]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = template
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}

"""A well-formed checkpoint of a few hundred bytes: enough for everything that does not compute with it."""

import json
from pathlib import Path

import numpy as np

from engine.checkpoint.packed import write_safetensors

CONFIG = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def write_tiny_checkpoint(folder: Path, shards: int = 1) -> Path:
    """`folder` with a configuration, a tokenizer file and 48 parameters, in one file or in `shards` with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    tensors = {f"layer.{index}.weight": np.full((3, 4), index, np.uint16) for index in range(4)}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = {key: tensor for at, (key, tensor) in enumerate(tensors.items()) if at % shards == number}
        write_safetensors(folder / name, own)
        weight_map.update(dict.fromkeys(own, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder

"""Pictures at llama.cpp's server: one whose projector has tiny random weights reads them, one without refuses them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from engine.common.chat import ChatMessage, Picture, parts_with
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import endpoint_at
from engine.remote.failures import RemoteError
from tests.real_servers import gguf_of, llama_server
from tests.starter import starter_for_tests

SIDE, PATCH, WIDTH = 56, 14, 32


def write_projector(path: Path, width: int) -> Path:
    """A vision tower of two layers (LLaVA's form) and its projector into a model of this width."""
    random = np.random.default_rng(21)
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "block_count": 2,
        "projection_dim": width,
        "attention.head_count": 2,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.05, shape).astype(np.float32))

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    add("v.class_embd", WIDTH)
    add("v.position_embd.weight", (SIDE // PATCH) ** 2 + 1, WIDTH)
    for layer in range(2):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"v.blk.{layer}.{part}.weight", WIDTH, WIDTH)
            add(f"v.blk.{layer}.{part}.bias", WIDTH)
        for part in ("ln1", "ln2"):
            add(f"v.blk.{layer}.{part}.weight", WIDTH)
            add(f"v.blk.{layer}.{part}.bias", WIDTH)
        for part, rows, columns in (("ffn_up", 2 * WIDTH, WIDTH), ("ffn_down", WIDTH, 2 * WIDTH)):
            add(f"v.blk.{layer}.{part}.weight", rows, columns)
            add(f"v.blk.{layer}.{part}.bias", rows)
    for number, columns in ((0, WIDTH), (2, width)):
        add(f"mm.{number}.weight", width, columns)
        add(f"mm.{number}.bias", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pictured(shade: int) -> ChatMessage:
    rows = zlib.compress(b"".join(b"\0" + bytes([shade, 255 - shade, 90]) * 64 for _ in range(64)))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    picture = Picture("image/png", base64.b64encode(file).decode("ascii"))
    return ChatMessage("user", "What is it?", parts=parts_with("What is it?", (picture,)))


@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_a_model_that_sees_and_one_that_does_not(tmp_path: Path) -> None:
    model = gguf_of(starter_for_tests(), tmp_path)
    width = json.loads((starter_for_tests() / "config.json").read_text("utf-8"))["hidden_size"]
    projector = write_projector(tmp_path / "mmproj.gguf", width)
    few = SamplingParams(max_tokens=4, temperature=0.0)
    plain = ChatMessage("user", "What is it?")
    with llama_server(tmp_path, model, "--mmproj", str(projector)) as (url, _), Client(endpoint_at(url)) as client:
        assert about(client).found.blind == ()
        read = [client.ask(RemoteRequest((message,), few)).prompt_tokens or 0 for message in (plain, pictured(30))]
        assert read[1] >= read[0] + (SIDE // PATCH) ** 2  # a token for each patch
    with llama_server(tmp_path, model) as (url, _), Client(endpoint_at(url)) as client:
        assert about(client).found.blind == ("starter",)
        with pytest.raises(RemoteError) as failed:
            client.ask(RemoteRequest((pictured(30),), few))
        assert failed.value.code is ErrorCode.PICTURES_NOT_READ
        assert client.ask(RemoteRequest((plain,), few)).finish_reason in ("stop", "length")

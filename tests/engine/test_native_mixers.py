"""Native steps of an index and of delta nets against a few lines of torch in float64."""

import ctypes
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from engine.kernels.native.build import library_path
from engine.kernels.native.library import NativeKernels, load_kernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.paged_attention import Piece, Pieces, StatePages
from engine.kernels.native.structs import (
    AttentionStruct,
    BlockIndexStruct,
    DeltaStruct,
    IndexStruct,
    LatentAttentionStruct,
    MatrixStruct,
    PagesStruct,
    PieceStruct,
)

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

_FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_EPSILON = 1e-6


@pytest.fixture(scope="module")
def kernels() -> Iterator[NativeKernels]:
    with closing(load_kernels(2)) as loaded:
        yield loaded


def _linear(rows: int, columns: int, scale: float = 0.25) -> torch.nn.Linear:
    linear = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    linear.weight.data = (torch.randn(rows, columns) * scale).to(torch.bfloat16)
    return linear.requires_grad_(requires_grad=False)


def _by(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ linear.weight.double().t()


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON) * weight.double()


def _delta(
    mixed: torch.Tensor, taps: torch.Tensor, decays: torch.Tensor, betas: torch.Tensor, shape: tuple[int, int, int, int]
) -> torch.Tensor:
    """[T, channels], [channels, kernel], [T, value heads, key dim], [T, value heads] -> [T, value heads, value dim]."""
    key_heads, value_heads, key_dim, value_dim = shape
    kernel = taps.shape[1]
    padded = functional.pad(mixed.t(), (kernel - 1, 0))
    convolved = functional.silu((padded.unfold(1, kernel, 1) * taps[:, None]).sum(-1)).t()
    keys = key_heads * key_dim
    q, k = (part.view(-1, key_heads, key_dim) for part in (convolved[:, :keys], convolved[:, keys : 2 * keys]))
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // key_heads, 1) for x in (q * key_dim**-0.5, k))
    v = convolved[:, 2 * keys :].view(-1, value_heads, value_dim)
    state, out = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64), []
    for at in range(len(mixed)):
        state = state * decays[at][..., None]
        change = (v[at] - (state * k[at][..., None]).sum(1)) * betas[at][:, None]
        state = state + k[at][..., None] * change[:, None]
        out.append((state * q[at][..., None]).sum(1))
    return torch.stack(out)


@_FEW
@given(
    key_heads=st.integers(1, 3),
    per_key=st.integers(1, 3),
    key_dim=st.integers(1, 40),
    value_dim=st.integers(1, 70),
    kernel=st.integers(1, 5),
    tokens=st.integers(1, 400),
    of_keys=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_delta_net_is_its_recurrence(
    kernels: NativeKernels,
    key_heads: int,
    per_key: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    tokens: int,
    of_keys: bool,
    seed: int,
) -> None:
    """Prompts, and steps of two sequences: those of gated delta nets, and those whose states decay key by key."""
    torch.manual_seed(seed)
    per_key = 1 if of_keys else per_key
    heads, hidden, inner = key_heads * per_key, 24, 10
    keys, values = key_heads * key_dim, heads * value_dim
    channels = 2 * keys + values
    x = torch.randn(tokens, hidden)
    norm, out_norm = (torch.rand(size).add(0.5).to(torch.bfloat16) for size in (hidden, value_dim))
    taps, rate, bias = torch.randn(channels, kernel), -torch.rand(heads), torch.randn(keys if of_keys else heads)
    b, o = _linear(heads, hidden), _linear(hidden, values)
    none = MatrixStruct()
    normed = _rms(x.double(), norm)
    if of_keys:
        inputs = [_linear(size, hidden) for size in (keys, keys, values)]
        firsts, later_z, later_a = (
            [_linear(inner, hidden) for _ in range(2)],
            _linear(values, inner),
            _linear(keys, inner),
        )
        mixed = torch.cat([_by(each, normed) for each in inputs], -1)
        z, a = _by(later_z, _by(firsts[0], normed)), _by(later_a, _by(firsts[1], normed))
        matrices = [*inputs, later_z, b, later_a, o, *firsts]
        decays = torch.exp(rate.double()[:, None] * functional.softplus(a + bias).view(tokens, heads, key_dim))
        gates = torch.sigmoid(z)
        parts = [*mixed.split([keys, keys, values], -1), z, _by(b, normed), a]
    else:
        of_all, of_z, of_a = _linear(channels, hidden), _linear(values, hidden), _linear(heads, hidden)
        mixed, z, a = _by(of_all, normed), _by(of_z, normed), _by(of_a, normed)
        matrices = [of_all, None, None, of_z, b, of_a, o, None, None]
        decays = torch.exp(rate.double() * functional.softplus(a + bias))[..., None].expand(-1, -1, key_dim)
        gates = functional.silu(z)
        parts = [mixed, None, None, z, _by(b, normed), a]
    answered = _delta(
        mixed, taps.double(), decays, torch.sigmoid(_by(b, normed)), (key_heads, heads, key_dim, value_dim)
    )
    wanted = (_rms(answered, out_norm) * gates.view(tokens, heads, value_dim)).flatten(1)

    turned = taps.t().contiguous()
    struct = DeltaStruct(
        *(norm.data_ptr(), turned.data_ptr(), rate.data_ptr(), bias.data_ptr(), out_norm.data_ptr()),
        *(none if each is None else linear_struct(each) for each in matrices[:7]),
        None,
        *(none if each is None else linear_struct(each) for each in matrices[7:]),
        *(_EPSILON, _EPSILON, 0.0, hidden, key_heads, heads, key_dim, value_dim, kernel, of_keys, of_keys),
    )

    pages = StatePages(channels, kernel, (heads, key_dim, value_dim), 4)
    pages.clear(3)
    of_pages = pages.held()

    def going_on(tokens: int, *to: int) -> Pieces:
        return Pieces([Piece(torch.empty(0, dtype=torch.int32), 0, tokens, 3, page) for page in to])

    given_floats = [None if each is None else each.float().contiguous() for each in parts]
    places = (ctypes.c_void_p * 6)(*(None if each is None else each.data_ptr() for each in given_floats))
    out = torch.empty(tokens, values)
    layer = kernels.pool, ctypes.addressof(struct), ctypes.addressof(of_pages)
    all_of_it = going_on(tokens, 1)
    assert not kernels.delta_rows(*layer, all_of_it.address_for(of_pages), ctypes.addressof(places), out.data_ptr())
    assert float((out - wanted).norm()) <= 1e-3 * float(wanted.norm()) + 1e-6

    few = min(tokens, 4)
    twice, both = x[:few].repeat(2, 1), going_on(few, 0, 2)
    stepped = torch.empty(2 * few, hidden)
    assert not kernels.delta_step(*layer, both.address_for(of_pages), 2, twice.data_ptr(), stepped.data_ptr())
    added = _by(o, wanted[:few])
    assert float((stepped[:few] - x[:few] - added).norm()) <= 2e-2 * float(added.norm()) + 1e-6
    assert torch.equal(stepped[:few], stepped[few:])
    assert torch.equal(pages.states[0], pages.states[2])
    assert not pages.states[3].any()


@_FEW
@given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    key_dim=st.integers(1, 70),
    value_dim=st.integers(1, 20),
    kernel=st.integers(1, 5),
    tokens=st.integers(1, 400),
    sums=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_state_space_and_a_convolution_are_their_recurrences(
    kernels: NativeKernels,
    groups: int,
    per_group: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    tokens: int,
    sums: bool,
    has_bias: bool,
    seed: int,
) -> None:
    """Prompts, and steps of two sequences: Mamba 2, and LFM2's convolution, which keeps no state."""
    torch.manual_seed(seed)
    hidden, heads = 24, groups * per_group
    key_dim = key_dim if sums else 0
    keys, values = groups * key_dim, heads * value_dim
    channels = 2 * keys + values
    x, norm = torch.randn(tokens, hidden), torch.rand(hidden).add(0.5).to(torch.bfloat16)
    out_norm = torch.rand(values).add(0.5).to(torch.bfloat16)
    taps, taps_bias = torch.randn(channels, kernel), torch.randn(channels)
    rate, rate_bias, skip = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    mixed, o = _linear(values + channels + heads if sums else 3 * values, hidden), _linear(hidden, values)
    given_floats = _by(mixed, _rms(x.double(), norm)).float().contiguous()
    parts = given_floats.double()
    bias = taps_bias.double() if has_bias else 0.0

    def convolved(of: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(of.t(), (kernel - 1, 0))
        return (padded.unfold(1, kernel, 1) * taps.double()[:, None]).sum(-1).t() + bias

    if sums:
        z, inner, a = parts.split([values, channels, heads], -1)
        v, k, q = functional.silu(convolved(inner)).split([values, keys, keys], -1)
        v = v.view(tokens, heads, value_dim)
        k, q = (part.view(tokens, groups, key_dim).repeat_interleave(per_group, 1) for part in (k, q))
        steps = functional.softplus(a + rate_bias)
        state, answers = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64), []
        for at in range(tokens):
            taken = (steps[at][:, None] * v[at])[..., None] * k[at][:, None]
            state = state * torch.exp(rate * steps[at])[:, None, None] + taken
            answers.append((state * q[at][:, None]).sum(-1) + skip[:, None] * v[at])
        gated = (torch.stack(answers).flatten(1) * functional.silu(z)).view(tokens, groups, -1)
        wanted = _rms(gated, out_norm.view(groups, -1)).flatten(1)
    else:
        before, after, v = parts.split(values, -1)
        wanted = after * convolved(before * v)

    turned, none = taps.t().contiguous(), MatrixStruct()
    struct = DeltaStruct(
        *(norm.data_ptr(), turned.data_ptr(), rate.data_ptr(), rate_bias.data_ptr(), out_norm.data_ptr()),
        *(linear_struct(mixed), *(none,) * 5, linear_struct(o), None, none, none),
        *(_EPSILON, _EPSILON, 0.0, hidden, groups if sums else heads, heads, key_dim, value_dim, kernel, 0, 0),
        *(1 if sums else 2, 0.5, taps_bias.data_ptr() if has_bias else None, skip.data_ptr()),
    )
    pages = StatePages(channels, kernel, (heads, value_dim, key_dim) if sums else (0,), 4)
    pages.clear(3)
    of_pages = pages.held()

    def going_on(tokens: int, *to: int) -> Pieces:
        return Pieces([Piece(torch.empty(0, dtype=torch.int32), 0, tokens, 3, page) for page in to])

    places, out = (ctypes.c_void_p * 6)(given_floats.data_ptr()), torch.empty(tokens, values)
    layer = kernels.pool, ctypes.addressof(struct), ctypes.addressof(of_pages)
    alone = going_on(tokens, 1)
    assert not kernels.delta_rows(*layer, alone.address_for(of_pages), ctypes.addressof(places), out.data_ptr())
    assert float((out - wanted).norm()) <= 1e-3 * float(wanted.norm()) + 1e-6

    few = min(tokens, 4)
    twice, both = x[:few].repeat(2, 1), going_on(few, 0, 2)
    stepped = torch.empty(2 * few, hidden)
    assert not kernels.delta_step(*layer, both.address_for(of_pages), 2, twice.data_ptr(), stepped.data_ptr())
    added = 0.5 * _by(o, wanted[:few])
    assert float((stepped[:few] - x[:few] - added).norm()) <= 2e-2 * float(added.norm()) + 1e-6
    assert torch.equal(stepped[:few], stepped[few:])
    assert torch.equal(pages.states[0], pages.states[2])
    assert not pages.recent[3].any()


@_FEW
@given(
    heads=st.integers(1, 5),
    index_heads=st.integers(1, 20),
    half=st.integers(1, 8),
    rest=st.integers(0, 40),
    most=st.integers(1, 70),
    held=st.integers(0, 700),
    tokens=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_latent_attention_sees_what_its_index_scores_highest(
    kernels: NativeKernels,
    heads: int,
    index_heads: int,
    half: int,
    rest: int,
    most: int,
    held: int,
    tokens: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden, rank, latent, nope, value_dim, rope = 32, 24, 40, 12, 20, 2 * half
    dim = rope + rest
    q_a, q, kv_a = _linear(latent, hidden), _linear(heads * (nope + rope), latent), _linear(rank + rope, hidden)
    kv_b, o = _linear(heads * (nope + value_dim), rank), _linear(hidden, heads * value_dim)
    index_q, index_k, weights = _linear(index_heads * dim, latent), _linear(dim, hidden), _linear(index_heads, hidden)
    norm, q_norm, kv_norm = (torch.rand(size).add(0.5).to(torch.bfloat16) for size in (hidden, latent, rank))
    k_norm, k_bias = (torch.randn(dim).to(torch.bfloat16) for _ in range(2))
    room = held + tokens
    latents, keys, looked_up = (torch.randn(room, size).to(torch.bfloat16) for size in (rank, rope, dim))
    x, angles = torch.randn(tokens, hidden), torch.rand(tokens, half)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    scale = (nope + rope) ** -0.5

    chosen = torch.full((8, most), -1, dtype=torch.int32)
    none = MatrixStruct()
    index = IndexStruct(
        *(linear_struct(index_q), linear_struct(index_k), linear_struct(weights)),
        *(k_norm.data_ptr(), k_bias.data_ptr(), chosen.data_ptr(), _EPSILON, (index_heads * dim) ** -0.5),
        *(index_heads, dim, most, 0),
    )
    struct = LatentAttentionStruct(
        *(norm.data_ptr(), q_norm.data_ptr(), kv_norm.data_ptr(), None, None, None),
        *(linear_struct(q_a), linear_struct(q), linear_struct(kv_a), linear_struct(kv_b), none, none, linear_struct(o)),
        *(_EPSILON, _EPSILON, _EPSILON, scale, hidden, heads, nope, rope, rank, value_dim, 0, ctypes.addressof(index)),
    )
    pages = PagesStruct(latents.data_ptr(), keys.data_ptr(), None, None, room, 0, 0, 0, looked_up.data_ptr())
    piece, out = PieceStruct(None, held, tokens, 0), torch.empty_like(x)
    assert not kernels.latent_step(
        *(kernels.pool, ctypes.addressof(struct), ctypes.addressof(pages), ctypes.addressof(piece), 1, x.data_ptr()),
        *(cos.data_ptr(), sin.data_ptr(), 1, half, out.data_ptr()),
    )

    def turned(part: torch.Tensor) -> torch.Tensor:
        """[T, heads, rope and more]."""
        low, high, others = part[..., :half], part[..., half:rope], part[..., rope:]
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat([low * c - high * s, high * c + low * s, others], -1)

    normed = _rms(x.double(), norm)
    q_latent = _rms(_by(q_a, normed), q_norm)
    queries = _by(q, q_latent).view(tokens, heads, nope + rope)
    asked = turned(_by(index_q, q_latent).view(tokens, index_heads, dim))
    k = functional.layer_norm(_by(index_k, normed), (dim,), k_norm.double(), k_bias.double(), _EPSILON)
    assert torch.allclose(looked_up[held:].double(), turned(k[:, None])[:, 0], atol=0.05, rtol=0.02)
    products = torch.einsum("thd,kd->thk", asked, looked_up.double()).relu()
    scores = torch.einsum("thk,th->tk", products, _by(weights, normed)) * (index_heads * dim) ** -0.5
    expanded = _by(kv_b, latents.double()).view(room, heads, nope + value_dim)
    rotated = turned(queries[..., nope:])
    for token in range(tokens):
        seen = torch.arange(held + token + 1)
        if len(seen) > most:
            its = chosen[token].long()
            assert its.tolist() == sorted(set(its.tolist()))
            assert 0 <= int(its[0]) <= int(its[-1]) < len(seen)
            mine = scores[token, : len(seen)]
            spread = float(mine.abs().max()) + 1e-9
            # What was chosen has the highest scores, but for those that are nearly alike.
            assert float(mine[its].min()) >= float(mine.topk(most)[0][-1]) - 0.01 * spread
            seen = its
        found = torch.einsum("hd,khd->hk", queries[token, :, :nope], expanded[seen, :, :nope])
        found = (found + torch.einsum("hd,kd->hk", rotated[token], keys[seen].double())) * scale
        mixed = torch.einsum("hk,khd->hd", found.softmax(-1), expanded[seen, :, nope:]).flatten()
        added = _by(o, mixed)
        assert float((out[token] - x[token] - added).norm()) <= 0.03 * float(added.norm()) + 1e-3


@_FEW
@given(
    groups=st.integers(1, 3),
    together=st.integers(1, 4),
    half=st.integers(1, 8),
    rest=st.integers(0, 20),
    block=st.sampled_from([32, 64, 96]),
    most=st.integers(1, 4),
    held=st.integers(0, 700),
    tokens=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_grouped_attention_sees_the_blocks_that_its_index_meets_best(
    kernels: NativeKernels,
    groups: int,
    together: int,
    half: int,
    rest: int,
    block: int,
    most: int,
    held: int,
    tokens: int,
    seed: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(seed)
    local = data.draw(st.integers(1, most))
    hidden, heads, rotated = 32, groups * together, 2 * half
    dim, index_dim = rotated + 8, rotated + rest
    q, k, v = (_linear(count * dim, hidden) for count in (heads, groups, groups))
    o, index_q, index_k = _linear(hidden, heads * dim), _linear(groups * index_dim, hidden), _linear(index_dim, hidden)
    norm, q_norm, k_norm = (torch.rand(size).add(0.5).to(torch.bfloat16) for size in (hidden, index_dim, index_dim))
    room = -(-(held + tokens) // 32) * 32
    keys, values = (torch.randn(groups, room, dim).to(torch.bfloat16) for _ in range(2))
    looked_up = torch.randn(room, index_dim).to(torch.bfloat16)
    x, angles = torch.randn(tokens, hidden), torch.rand(tokens, half)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    index = BlockIndexStruct(
        *(linear_struct(index_q), linear_struct(index_k), q_norm.data_ptr(), k_norm.data_ptr()),
        *(index_dim, block, most, local),
    )
    struct = AttentionStruct(
        norm.data_ptr(),
        *([None] * 8),
        *(linear_struct(p) for p in (q, k, v, o)),
        *(_EPSILON, dim**-0.5, hidden, heads, groups, dim, False, False, rotated, 0, 0.0, False),
        ctypes.addressof(index),
    )
    pages = PagesStruct(keys.data_ptr(), values.data_ptr(), None, None, room, 0, 0, 0, looked_up.data_ptr())
    piece, out = PieceStruct(None, held, tokens, 0), torch.empty_like(x)
    assert not kernels.attention_step(
        *(kernels.pool, ctypes.addressof(struct), ctypes.addressof(pages), ctypes.addressof(piece), 1, x.data_ptr()),
        *(cos.data_ptr(), sin.data_ptr(), 1, half, out.data_ptr()),
    )

    def turned(part: torch.Tensor) -> torch.Tensor:
        """[T, heads, rotated and more]."""
        low, high, others = part[..., :half], part[..., half:rotated], part[..., rotated:]
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat([low * c - high * s, high * c + low * s, others], -1)

    normed = _rms(x.double(), norm)
    asked = turned(_rms(_by(index_q, normed).view(tokens, groups, index_dim), q_norm))
    wanted = turned(_rms(_by(index_k, normed), k_norm)[:, None])[:, 0]
    assert torch.allclose(looked_up[held : held + tokens].double(), wanted, atol=0.05, rtol=0.02)
    queries = turned(_by(q, normed).view(tokens, heads, dim))
    for token in range(tokens):
        seen = held + token + 1
        blocks = -(-seen // block)
        mixed = []
        for group in range(groups):
            products = looked_up[:seen].double() @ asked[token, group]
            best = functional.pad(products, (0, blocks * block - seen), value=-torch.inf).view(blocks, block).amax(-1)
            best[max(0, blocks - local) :] = torch.inf
            order = best.sort(descending=True)
            if blocks > most and float(order[0][most - 1] - order[0][most]) < 0.02 * float(products.abs().max()):
                return  # a near tie, which may fall either way
            its = torch.cat([torch.arange(b * block, min(seen, b * block + block)) for b in order[1][:most].tolist()])
            mine = queries[token, group * together : group * together + together]
            shares = (mine @ keys[group, its].double().t() * dim**-0.5).softmax(-1)
            mixed.append((shares @ values[group, its].double()).flatten())
        added = _by(o, torch.cat(mixed))
        assert float((out[token] - x[token] - added).norm()) <= 0.03 * float(added.norm()) + 1e-3

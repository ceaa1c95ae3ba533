"""What the engine will hold in each tier: sizes estimated from a model's shape, placed by `placement`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.checkpoint.model_shape import ModelShape
from engine.common import footprint
from engine.common.config import EngineConfig, Misses
from engine.common.costs import Cost, picture_on_card
from engine.formats import BF16, STORED, as_stored, careful, format_of, head_format
from engine.hardware.machine import GpuProfile
from engine.planner.costs import Cards, Costs
from engine.planner.placement import (
    Budgets,
    DeviceBudget,
    Experts,
    Made,
    NotEnoughRamError,
    Placement,
    Sizes,
    Tables,
    Weights,
    converted_bytes,
    resolve,
)
from engine.planner.plan_parts import Limits, MemoryRule, PicturePlan, TierBytes


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes by tier.

    Attributes:
        card: None if everything is on the CPU.
        ram: weights and caches in RAM.
        disk: experts that do not fit into RAM.
        streamed: weights of whole layers that come from disk for each pass.
        tables: embeddings whose rows are looked up on disk.
        written: what loading has to write of them to disk: those that are no ranges of the model's files.
        slots: experts on the card, without staging.
        all_experts: whether all experts stay on the card.
        pictures: what reading them takes; None for a model that reads text only.
    """

    card: TierBytes | None
    ram: TierBytes
    disk: int = 0
    streamed: int = 0
    slots: int = 0
    all_experts: bool = False
    written: int = 0
    tables: Tables = field(default=Tables())
    pictures: PicturePlan | None = None

    @property
    def disk_share(self) -> float:
        """Of the experts' bytes, what every sweep over all of them reads there."""
        return max(0.0, 1 - self.ram.experts / self.disk) if self.disk else 0.0


def records_nbytes(model: ModelShape, precision: str) -> tuple[int, ...]:
    """Bytes of one expert's record in each MoE layer, including scales and padding."""
    up, width = (model.expert_matrices - 1) * model.expert_width, as_stored(precision).width
    biases = [width * up, width * model.hidden] if model.expert_biases else []
    sizes = [
        footprint.record_bytes(
            [
                *(part for each in first for part in each.part_bytes(up // len(first), model.hidden)),
                *down.part_bytes(model.hidden, model.expert_width),
                *biases,
            ]
        )
        for *first, down in model.expert_formats(precision)
    ]
    return tuple(sizes) if len(sizes) == model.moe_layers else (max(sizes),) * model.moe_layers


def all_records_nbytes(model: ModelShape, precision: str) -> int:
    """Bytes of all routed experts' records."""
    return model.experts * sum(records_nbytes(model, precision))


def dense_in_ram(model: ModelShape, precision: str) -> int:
    """Bytes of all weights but the routed experts, quantised like them.

    Embeddings, routers and norms are never quantised, and the head has a format of its own.  A head that is tied to the
    embedding takes memory of its own once it is quantised.
    """
    if precision == STORED and model.stored is not None:
        return model.stored.dense_bytes
    if not format_of(precision).is_tiled:
        return as_stored(precision).width * model.non_expert_weights
    routers, head = model.moe_layers * model.hidden * model.experts, model.vocabulary * model.hidden
    return quantised_linears(model, precision) + 2 * (routers + head + model.table_weights)


def quantised_linears(model: ModelShape, precision: str) -> int:
    """Bytes of the linear layers that are quantised with the experts; 0 if the files have them so, or none are."""
    if precision == STORED and model.stored is not None:
        return 0 if model.stored.is_in_place else sum(model.stored.layers)
    if not format_of(precision).is_tiled:
        return 0
    layers, of_head = format_of(careful(precision, model.total_weights)), format_of(head_format(precision))
    linear = model.matrix_weights - model.moe_layers * model.hidden * model.experts
    return sum(layers.part_bytes(1 + linear // model.hidden, model.hidden)) + sum(
        of_head.part_bytes(model.vocabulary, model.hidden)
    )


def _made(model: ModelShape, precision: str) -> Made:
    """Whether experts are made; those of plain numbers are taken to lie in the files as the library has them."""
    if precision == STORED and model.stored is not None:
        return Made.NEVER if model.stored.is_in_place else Made.ONCE
    if format_of(precision).is_tiled:
        return Made.ONCE
    return Made.NEVER if precision == BF16.name and model.stored is None else Made.FOR_DISK


def dense_on_card(costs: Costs) -> int:
    """Bytes of `dense_in_ram`'s weights on a card: quantised on a real one, 16-bit on an emulated one."""
    gpu, model, precision = costs.machine.gpu, costs.model, costs.precision
    if gpu is not None and _is_emulated(gpu):
        return dense_in_ram(model, as_stored(precision).name)
    return dense_in_ram(model, precision)


def _held_on_card(costs: Costs, limits: Limits) -> int:
    """The same less tables that a card has no room for."""
    dense = dense_on_card(costs)
    tables = _tables(costs.model, costs.precision, costs.model.layers)
    return dense - tables.elsewhere if dense > card_usable(costs, limits) else dense


def memory_rule(costs: Costs, limits: Limits) -> MemoryRule:
    """What the engine may use of the card and of the RAM."""
    chunk, working = activations(costs, limits)
    usable, weights, model = card_usable(costs, limits), _held_on_card(costs, limits), costs.model
    record, every = max(records_nbytes(model, costs.precision), default=0), model.moe_layers * model.experts
    room = max(0, usable - weights - working)
    staging = footprint.staging_slots(room, record, every, "mixed", None) * record if record else 0
    return MemoryRule(
        usable,
        working,
        ram_usable(costs, limits),
        weights=weights,
        record=record,
        chunk=chunk,
        staging=staging,
    )


def card_usable(costs: Costs, limits: Limits) -> int:
    """Bytes of all cards together, less what other programs hold and the headroom."""
    gpu = costs.machine.gpu
    if gpu is None or not limits.use_card:
        return 0
    usable = max(0, costs.machine.vram_bytes - limits.vram_of_others - headroom_bytes(gpu))
    return usable if limits.vram_bytes is None else min(usable, limits.vram_bytes * gpu.count)


def headroom_bytes(gpu: GpuProfile) -> int:
    """Headroom of all cards together; an emulated one has neither driver nor desktop."""
    return 0 if _is_emulated(gpu) else footprint.CARD_HEADROOM_BYTES * gpu.count


def _is_emulated(gpu: GpuProfile) -> bool:
    return gpu.name.startswith("emulated")


def ram_usable(costs: Costs, limits: Limits) -> int:
    """Bytes of RAM, less what other programs hold and the headroom."""
    free = max(0, costs.machine.cpu.ram_bytes - limits.ram_of_others)
    usable = footprint.without_headroom(free)
    return usable if limits.ram_bytes is None else min(usable, limits.ram_bytes)


def activations(costs: Costs, limits: Limits) -> tuple[int, int]:
    """(tokens of a prompt chunk on the card, bytes of its activations)."""
    model = costs.model
    each = activation_token_bytes(model, costs.precision)
    room = card_usable(costs, limits) - _held_on_card(costs, limits)
    piece = footprint.chunk_tokens(room, each, context_tokens(model, limits))
    return piece, piece * each


def activation_token_bytes(model: ModelShape, precision: str) -> int:
    return footprint.activation_token_bytes(model.hidden, model.experts_per_token, as_stored(precision).width)


def context_tokens(model: ModelShape, limits: Limits) -> int:
    return min(model.context_tokens, limits.context_tokens or model.context_tokens)


def sizes_of(costs: Costs, limits: Limits, precisions: Sequence[str]) -> Sizes:
    """The model's sizes in these precisions, estimated from its shape."""
    model = costs.model
    plain = as_stored(precisions[0])
    in_files = _spread(model, plain.width * model.non_expert_weights, plain.name)
    experts = plain.width * model.experts * model.expert_weights
    return Sizes(
        name=model.name,
        weights=tuple(_weights(replace(costs, precision=precision)) for precision in precisions),
        layers=tuple(
            nbytes + (experts if layer >= model.dense_layers else 0) for layer, nbytes in enumerate(in_files[0])
        ),
        elsewhere=in_files[1],
        kv_per_token=round(model.kv_bytes_per_token()) * plain.width // 2,
        fixed_kv=model.fixed_bytes(plain.width),
        activations_per_token=activation_token_bytes(model, precisions[0]),
        context_tokens=context_tokens(model, limits),
        experts_per_token=model.experts_per_token,
        tower=replace(costs, precision=precisions[0]).tower_bytes,
    )


def budgets_of(costs: Costs, limits: Limits, *, on_card: bool) -> Budgets:
    """Memory that the machine leaves to the engine; all cards count as equal."""
    gpu = costs.machine.gpu
    devices: tuple[DeviceBudget, ...] = ()
    if on_card and gpu is not None and (usable := card_usable(costs, limits) // gpu.count):
        devices = (DeviceBudget(gpu.name, usable, usable),) * gpu.count
    return Budgets(max(0, costs.machine.cpu.ram_bytes - limits.ram_of_others), limits.ram_bytes, devices)


def engine_memory(
    costs: Costs,
    limits: Limits,
    *,
    on_card: bool,
    misses: Misses = "mixed",
    cache_slots: int | None = None,
    ways: int | None = None,
) -> EngineMemory | None:
    """What is held after loading a model and starting its first conversation.

    Args:
        on_card: the dense weights and as many experts as fit are on the card.
        misses, cache_slots, ways: as in `EngineConfig`.

    Returns:
        None if the model does not fit.
    """
    config = EngineConfig(
        costs.model.name,
        precision=costs.precision,
        context_tokens=limits.context_tokens,
        misses=misses,
        cache_slots=cache_slots,
        cache_ways=ways,
        sharing="experts" if costs.cards is Cards.EXPERTS else "layers",
    )
    try:
        placement = resolve(
            config, budgets_of(costs, limits, on_card=on_card), sizes_of(costs, limits, [costs.precision])
        )
    except NotEnoughRamError:
        return None
    if on_card and not placement.devices:
        return None
    return memory_of(placement, costs, limits)


def from_disk(costs: Costs, memory: EngineMemory | None) -> Costs:
    """Costs of passes that read on disk what has no room in this memory; a model that has none at all reads nothing."""
    if memory is None:
        return costs
    tables = memory.tables if memory.tables.on_disk else Tables()
    return replace(costs, streamed_bytes=float(memory.streamed), rows=tables.rows, row_bytes=tables.row_bytes)


def written_bytes(costs: Costs, *, from_disk: bool) -> int:
    """Room on disk without which a model whose experts are, or are not, read from there cannot be loaded."""
    nbytes, must = converted_bytes(_weights(costs), from_disk=from_disk)
    return nbytes if must else 0


def memory_of(placement: Placement, costs: Costs, limits: Limits) -> EngineMemory:
    """What a placement holds, by tier and purpose.

    Args:
        costs: in the placement's precision.
    """
    ram = placement.ram
    if not placement.devices:
        streamed, tables = placement.streamed, placement.tables
        less = tables.in_ram - tables.kept + streamed.nbytes - streamed.window
        whole = _ram(costs, limits, ram.experts, dense=True, less=less)
        return EngineMemory(
            None,
            whole,
            placement.on_disk,
            streamed.nbytes,
            written=placement.written,
            tables=placement.tables,
            pictures=picture_plan(costs, None),
        )
    devices, gpu = placement.devices, costs.machine.gpu
    assert gpu is not None
    card = TierBytes(
        total=costs.machine.vram_bytes,
        weights=sum(device.dense for device in devices),
        experts=sum(device.experts for device in devices),
        staging=sum(device.staging for device in devices),
        kv=sum(device.kv for device in devices),
        activations=sum(device.activations for device in devices),
        headroom=headroom_bytes(gpu),
        other_programs=limits.vram_of_others,
    )
    return EngineMemory(
        card,
        _ram(costs, limits, ram.experts),
        placement.on_disk,
        slots=placement.slots,
        all_experts=placement.all_experts,
        written=placement.written,
        tables=placement.tables,
        pictures=picture_plan(costs, card),
    )


def picture_plan(costs: Costs, card: TierBytes | None) -> PicturePlan | None:
    """Where a picture is read and how long that takes; None for a model that reads text only.

    Args:
        card: what it holds, of which experts can give way; None if the model is not on it.
    """
    model, nbytes = costs.model, costs.tower_bytes
    if not model.picture_gflops:
        return None
    has_room = card is not None and card.free + card.experts >= nbytes
    on_card = has_room and picture_on_card(costs.by_kind, model.picture_gflops)
    kind = Cost.CARD_PICTURE if on_card else Cost.CPU_PICTURE
    return PicturePlan(costs.predict(kind, model.picture_gflops), nbytes, on_card)


def _weights(costs: Costs) -> Weights:
    model, precision = costs.model, costs.precision
    gpu = costs.machine.gpu
    plain = as_stored(precision).name
    is_quantised = format_of(precision).is_tiled and gpu is not None and not _is_emulated(gpu)
    held_as = STORED if _is_in_place(model, precision) else plain
    in_ram = dense_in_ram(model, held_as)
    layers, elsewhere = _spread(model, dense_on_card(costs), precision)
    records, tables = records_nbytes(model, precision), _tables(model, precision, len(layers))
    in_transit, of_tables = _in_transit(model, precision, in_ram, tables)
    lie_in_files = _is_in_place(model, precision) or (precision == BF16.name and model.stored is None)
    return Weights(
        precision,
        layers,
        elsewhere,
        in_ram,
        tuple(
            Experts(
                record,
                model.experts,
                layer,
                records.index(record),
                made=_made(model, precision),
            )
            for layer, record in enumerate(records, model.dense_layers)
        )
        if model.experts > 1  # one stands for a dense model's none
        else (),
        _working_bytes(model, precision),
        in_transit + of_tables if is_quantised else 0,
        quantised_linears(model, precision),
        _spread(model, in_ram, held_as)[0] if lie_in_files else (),
        replace(tables, in_transit=of_tables if is_quantised else 0),
    )


def _in_transit(model: ModelShape, precision: str, in_ram: int, tables: Tables) -> tuple[int, int]:
    """RAM for dense weights on their way to cards: (of all but tables, more because of these)."""
    if not _is_in_place(model, precision):
        return in_ram - tables.in_ram, tables.in_ram
    head = round(model.head_bytes_per_weight(precision) * model.vocabulary * model.hidden)
    passing, with_tables = (footprint.PASSING_MATRICES * each for each in (head, max(head, tables.in_ram)))
    return passing, with_tables - passing


def _tables(model: ModelShape, precision: str, layers: int) -> Tables:
    """The large ones; they are never quantised here, and count as outside the decoder layers."""
    embedding = 0 if model.tied_embeddings else model.vocabulary * model.hidden
    kept = model.stored if precision == STORED else None
    width = as_stored(precision).width
    nbytes = kept.tables if kept is not None else width * (model.table_weights + embedding)
    each = nbytes / max(model.table_weights + embedding, 1)
    own, tokens = round(each * model.table_weights), round(each * embedding)
    own, tokens = (size if size >= footprint.LARGE_TABLE_BYTES else 0 for size in (own, tokens))
    rows, row = (model.table_rows if own else 0), round(each * model.table_columns)
    numbers = (model.table_weights if own else 0) + (embedding if tokens else 0)
    return Tables(
        (0,) * layers,
        own + tokens,
        own + tokens if _is_in_place(model, precision) else width * numbers,
        own + tokens,
        sum(min(size, footprint.KEPT_ROWS_BYTES) for size in (own, tokens)),
        rows + bool(tokens),
        rows * row + (round(each * model.hidden) if tokens else 0),
    )


def _is_in_place(model: ModelShape, precision: str) -> bool:
    return precision == STORED and model.stored is not None and model.stored.is_in_place


def _spread(model: ModelShape, dense: int, precision: str) -> tuple[tuple[int, ...], int]:
    """(bytes of each layer, of the embedding and of the head) for `dense` bytes in all.

    What is stored is known layer by layer, unless it is unpacked; else all layers count as equal.
    """
    if precision == STORED and model.stored is not None and dense == model.stored.dense_bytes:
        return model.stored.layers, dense - sum(model.stored.layers)
    elsewhere = min(dense, as_stored(precision).width * model.embedding_weights)
    each, rest = divmod(dense - elsewhere, max(model.layers, 1))
    return (each,) * model.layers, elsewhere + rest


def _working_bytes(model: ModelShape, precision: str) -> int:
    """RAM that loading needs in addition: an expert's largest tensor several times, and a layer's experts before they
    are quantised."""
    if not model.experts:
        return 0
    plain = as_stored(precision)
    converting = 6 * plain.width * (model.expert_matrices - 1) * model.expert_width * model.hidden
    if precision == STORED and model.stored is not None and model.stored.is_repacked:
        return max(converting, 2 * footprint.REPACKED_BYTES)
    return converting + (model.experts * max(records_nbytes(model, plain.name)) if format_of(precision).is_tiled else 0)


def _ram(costs: Costs, limits: Limits, experts: int, *, dense: bool = False, less: int = 0) -> TierBytes:
    """The RAM by purpose.

    Args:
        experts: bytes of experts.
        dense: whether the dense weights are in RAM too, `less` these bytes, and keys and values with them.
    """
    model, total = costs.model, costs.machine.cpu.ram_bytes
    free = max(0, total - limits.ram_of_others)
    weights = kv = 0
    if dense:
        weights = dense_in_ram(model, costs.precision) - less
        tokens = min(context_tokens(model, limits), footprint.FEWEST_KV_TOKENS)
        kv = round(model.context_bytes(tokens, in_pages=True)) * as_stored(costs.precision).width // 2
    return TierBytes(
        total,
        weights,
        experts,
        kv=kv,
        pictures=costs.tower_bytes,
        headroom=max(0, free - footprint.without_headroom(free) - kv),
        other_programs=limits.ram_of_others,
    )

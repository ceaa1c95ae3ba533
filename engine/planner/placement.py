"""Where the parts of a model go, and what of them is converted: decided in one place, for planning and loading alike.

A plan estimates the sizes from a model's shape, and loading reads them from the checkpoint's headers.  Both pass them
to `resolve`, so a plan and the loaded model cannot drift apart.  Nothing here allocates memory, queries the machine or
modifies its arguments.

Decoder layers are cut into runs, one per device.  A device holds its dense weights, room for one chunk of a prompt and
for a first context; the rest of its memory takes all experts, or as many slots as fit.  What is not on a device is in
RAM; experts that do not fit there are read from disk into slots in RAM.  Where even that is not enough, so are whole
layers, one after the other for each pass: those that have no room, since what is used in turn no cache would hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from engine.common import footprint
from engine.common.config import CacheSettings, EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import rounded_down, rounded_up
from engine.planner.plan_parts import Reach, best_in_reach

_KEPT_FREE = 10
"""1/10 of the free RAM stays unused, for demands not yet known, if the user set no budget and experts are read from
disk."""


_MUCH_OF_A_CARD = 4
"""1/n of the cards, for which tables leave them if experts are read from disk."""

WORTH_KEEPING = 64 * 2**20
"""Bytes below which converting takes no time to speak of, and is done anew each time."""


# Sizes of a model


class Made(StrEnum):
    """Whether the records of experts have to be made of what a checkpoint's files hold."""

    NEVER = "never"
    """They are ranges of those files."""
    FOR_DISK = "for_disk"
    """While the model is loaded, unless they are to be read from disk as they are needed: then once, into a file."""
    ONCE = "once"
    """Making them takes time, so a file keeps them."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer.

    Attributes:
        record: bytes of one expert, including padding.
        count: number of experts.
        layer: index of the decoder layer; None for experts outside the decoder layers.
        layout: equal for experts whose records have the same layout, which can share slots.
        is_on_demand: whether experts can be loaded one by one when needed; else all of them stay in memory.
        made: whether, and when, a file of converted weights holds them.
    """

    record: int
    count: int
    layer: int | None = None
    layout: int = 0
    is_on_demand: bool = True
    made: Made = Made.NEVER

    @property
    def nbytes(self) -> int:
        return self.record * self.count


@dataclass(frozen=True, slots=True)
class Tables:
    """Embeddings that may stay on disk, where their rows are looked up: a row costs far less than an expert.

    Attributes:
        layers, elsewhere: bytes of them in each decoder layer and outside, as a device holds them.
        in_ram: as RAM does.
        on_disk: as the files do.
        kept: bytes of rows that stay in RAM in their place.
        rows, row_bytes: that a token looks up, and bytes of these together.
        in_transit: RAM that they take while dense weights go to devices.
    """

    layers: tuple[int, ...] = ()
    elsewhere: int = 0
    in_ram: int = 0
    on_disk: int = 0
    kept: int = 0
    rows: int = 0
    row_bytes: int = 0
    in_transit: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in one precision, in bytes.

    Attributes:
        precision: its name.
        dense_layers: everything but the experts of each decoder layer, as a device holds it.
        dense_elsewhere: likewise for weights outside the decoder layers.
        dense_in_ram: all dense weights as RAM holds them while the model is loaded.
        experts: experts of each layer that has any.
        working: additional RAM needed while experts are loaded.
        working_for_devices: more of it, needed when the dense weights go to devices.
        linears: those of linear layers that are quantised, which a file keeps if it keeps anything.
        in_files: of `dense_in_ram`, what of each decoder layer is used as files have it, tables apart: it can be read
            from there for each pass instead of being held.
        tables: those of the dense weights that may stay on disk.
        row_cache: RAM for rows of tables that do.
    """

    precision: str
    dense_layers: tuple[int, ...]
    dense_elsewhere: int
    dense_in_ram: int
    experts: tuple[Experts, ...] = ()
    working: int = 0
    working_for_devices: int = 0
    linears: int = 0
    in_files: tuple[int, ...] = ()
    tables: Tables = Tables()
    row_cache: int = 0

    @property
    def without_tables(self) -> Weights:
        tables, layers = self.tables, self.tables.layers or (0,) * len(self.dense_layers)
        return replace(
            self,
            dense_layers=tuple(nbytes - less for nbytes, less in zip(self.dense_layers, layers, strict=True)),
            dense_elsewhere=self.dense_elsewhere - tables.elsewhere,
            dense_in_ram=self.dense_in_ram - tables.in_ram + tables.kept,
            working_for_devices=self.working_for_devices - tables.in_transit,
            tables=Tables(),
            row_cache=tables.kept,
        )

    @property
    def experts_nbytes(self) -> int:
        return sum(each.nbytes for each in self.experts)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's memory requirements.

    Attributes:
        name: used in messages.
        weights: one entry per precision to choose from, best quality first.
        layers: bytes of each decoder layer in the checkpoint, experts included; layers are split between devices by
            these.
        elsewhere: likewise for weights outside the decoder layers.
        kv_per_token: bytes per token of context, all layers together.
        activations_per_token: bytes per prompt token while it is processed.
        context_tokens: the longest context requested.
        experts_per_token: experts that a token uses in one layer.
        tower: of what sees, which is read with the first picture: RAM that is left free for it, where there is as much.
        fixed_kv: of what a sequence holds however long it is: states, or windows behind which layers compress.
    """

    name: str
    weights: tuple[Weights, ...]
    layers: tuple[int, ...]
    elsewhere: int
    kv_per_token: int
    activations_per_token: int
    context_tokens: int
    experts_per_token: int
    tower: int = 0
    fixed_kv: int = 0


# Available memory


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A device's memory in bytes.

    Attributes:
        name: used in messages.
        total: usable bytes.
        free: bytes of `total` that are not in use.
        is_unified: whether it is the host's memory: all experts of the device's layers lie in place, or it is not used.
    """

    name: str
    total: int
    free: int
    is_unified: bool = False


@dataclass(frozen=True, slots=True)
class Budgets:
    """Available memory, in bytes.

    Attributes:
        ram_free: RAM that the machine and its control groups leave free.
        ram_allowed: RAM that the user allows; None for all.
        devices: devices other than the CPU.
        keeps: whether a file may keep what is converted, though it need not.
    """

    ram_free: int
    ram_allowed: int | None = None
    devices: tuple[DeviceBudget, ...] = ()
    keeps: bool = True

    def without(self, nbytes: int) -> Budgets:
        allowed = None if self.ram_allowed is None else max(0, self.ram_allowed - nbytes)
        return replace(self, ram_free=max(0, self.ram_free - nbytes), ram_allowed=allowed)

    @property
    def ram_usable(self) -> int:
        """RAM for weights, including the working memory of loading."""
        usable = footprint.without_headroom(self.ram_free)
        return usable if self.ram_allowed is None else min(usable, self.ram_allowed)


class NotEnoughRamError(EngineError):
    """`NOT_ENOUGH_MEMORY`, with the required size.

    Attributes:
        needed: bytes that would be enough.
    """

    def __init__(self, name: str, needed: int, budgets: Budgets, *, even: str = "") -> None:
        usable = footprint.without_headroom(budgets.ram_free)
        if needed > usable or budgets.ram_allowed is None:
            in_all = needed + budgets.ram_free - usable
            sentence = (
                f"{name} needs {rounded_up(in_all)} of RAM{even}, but only {rounded_down(budgets.ram_free)} are free: "
                "close other programs or choose a smaller model."
            )
        else:
            sentence = (
                f"{name} needs {rounded_up(needed)} of RAM{even}, more than the {rounded_down(budgets.ram_allowed)} "
                "that the RAM budget allows: raise the budget or choose a smaller model."
            )
        super().__init__(ErrorCode.NOT_ENOUGH_MEMORY, sentence)
        self.needed = needed


def require_ram(name: str, needed: int, budgets: Budgets) -> None:
    """Checks that a model fits into RAM.

    Args:
        name: of the model, for the message.
        needed: bytes of weights and working memory.

    Raises:
        NotEnoughRamError: it does not; the message states both sizes.
    """
    if needed > budgets.ram_usable:
        raise NotEnoughRamError(name, needed, budgets)


# The result


class NoteCode(StrEnum):
    """Which part of the request could not be met."""

    ON_CPU = "on_cpu"
    """The minimum of a device, `needed` bytes, exceeds its `room`."""
    NO_SLOTS = "no_slots"
    """A device that keeps all experts or none would have to hold `needed` bytes, more than its `room`."""
    SHARED_BY_LAYERS = "shared_by_layers"
    """Cards were to share each layer's experts, but of these `needed` bytes have to be in RAM, which has `room`."""
    COARSER_FOR_RAM = "coarser_for_ram"
    """`auto` did not choose `instead_of`, which needs `needed` bytes of RAM; only `room` may be used."""
    COARSER_FOR_DEVICE = "coarser_for_device"
    """`auto` did not choose `instead_of`, which needs `needed` bytes of `device` without any experts; it has `room`."""


@dataclass(frozen=True, slots=True)
class Note:
    """A finding as figures; the caller puts it into words."""

    code: NoteCode
    needed: int
    room: int
    device: str = ""
    precision: str = ""
    instead_of: str = ""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What one device holds, in bytes.

    Attributes:
        dense: weights other than experts.
        experts: slots, or all experts.
        staging: slots that experts pass through, or two whole layers when whole layers are fetched.
        kv: keys and values of the context that has room from the start.
        activations: room for one chunk of a prompt.
        slots: number of experts that stay.
    """

    dense: int
    experts: int
    staging: int
    kv: int
    activations: int
    slots: int

    @property
    def held(self) -> int:
        return self.dense + self.experts + self.staging + self.kv + self.activations


@dataclass(frozen=True, slots=True)
class InRam:
    """What RAM holds, in bytes.

    Attributes:
        dense: weights other than experts, while the model is loaded; of those that are streamed, the window.
        experts: experts that are all held, and slots.
        slots: the part of `experts` that is slots for experts read from disk; 0 if none are.
        working: working memory while the model is loaded.
        at_least: experts of one layer that are guaranteed a slot.
    """

    dense: int
    experts: int
    slots: int
    working: int
    at_least: int = 1

    @property
    def held(self) -> int:
        return self.dense + self.experts + self.working


@dataclass(frozen=True, slots=True)
class Streamed:
    """Decoder layers whose dense weights come from disk for each pass, as the files have them.

    Attributes:
        layers: which.
        nbytes: of these.
        window: RAM for as many of the largest as are there at once.
    """

    layers: tuple[int, ...] = ()
    nbytes: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a model go.

    Attributes:
        devices: contents of each device; empty if the CPU computes everything.
        of_layer: device index of each decoder layer; empty if nothing is split.
        shares: each device's part of every layer's experts, if they share these and the first has all else.
        all_experts: whether each device has all experts of its layers, and none are in RAM.
        chunk_tokens: prompt tokens that the devices have room to process at once.
        context_tokens: context that fits on the devices if experts make room, at most the one requested.
        ram: contents of the RAM.
        on_disk: bytes of experts that are read from disk when needed.
        streamed: what else is read there, for each pass.
        converted: bytes that a file keeps of what was converted, whether it is there yet or not.
        must_be_kept: whether experts are read from it: without room for it on the disk the model cannot be loaded.
        tables: embeddings whose rows are looked up on disk; none if all are in memory.
        notes: parts of the request that could not be met.
    """

    precision: str
    devices: tuple[OnDevice, ...]
    of_layer: tuple[int, ...]
    all_experts: bool
    chunk_tokens: int
    context_tokens: int
    ram: InRam
    on_disk: int = 0
    streamed: Streamed = Streamed()
    converted: int = 0
    must_be_kept: bool = False
    tables: Tables = Tables()
    notes: tuple[Note, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def written(self) -> int:
        """Bytes for which the disk needs room, for the model to be loaded at all."""
        return self.converted if self.must_be_kept else 0

    @property
    def slots(self) -> int:
        """Experts that stay on the devices."""
        return sum(device.slots for device in self.devices)

    @property
    def waits_for_disk(self) -> bool:
        """Whether tokens wait for more than rows of tables there."""
        return bool(self.on_disk or self.streamed.layers)

    @property
    def reach(self) -> Reach:
        """The slowest memory that a token may have to wait for."""
        if self.waits_for_disk:
            return Reach.DISK
        return Reach.DEVICE if self.devices else Reach.RAM


# The decision


def resolve(config: EngineConfig, machine: Budgets, file: Sizes) -> Placement:
    """Places a model's parts.

    Args:
        config: settings of the experts' cache, and the context if one was requested.
        file: the model, in one precision or in all that `auto` may choose from.

    Raises:
        NotEnoughRamError: no precision fits; the message is about the one that needs least, the coarsest of several.
    """
    if file.tower:
        with suppress(NotEnoughRamError):
            return resolve(config, machine.without(file.tower), replace(file, tower=0))
    roomy = file.context_tokens if config.context_tokens else min(file.context_tokens, footprint.ROOMY_KV_TOKENS)
    sizes, budgets = file, machine
    found, refused = _in_each_precision(sizes, budgets, config.cache, roomy)
    if not found:
        raise min(reversed(refused), key=lambda each: each.needed)
    chosen = best_in_reach({each.precision: each.reach for each in found}) if len(sizes.weights) > 1 else None
    taken = next((each for each in found if each.precision == chosen), found[0])
    best = sizes.weights[0]
    if taken.precision == best.precision:
        return taken
    return replace(taken, notes=(_why_coarser(best, taken, sizes, budgets), *taken.notes))


def split_layers(layers: Sequence[int], elsewhere: int, capacities: Sequence[int]) -> tuple[int, ...]:
    """Cuts the decoder layers into consecutive runs, in proportion to the devices' memory.

    Args:
        layers: bytes of each layer, experts included, because experts should be on their layer's device.
        elsewhere: bytes of all other weights, which go to the first device.
        capacities: bytes of each device.

    Returns:
        Each layer's device index; empty if there is nothing to split.
    """
    if len(capacities) < 2 or not layers:
        return ()
    total, room = sum(layers) + elsewhere, sum(capacities)
    of_layer, device, before, limit = [], 0, elsewhere, capacities[0] / room * total
    for nbytes in layers:
        # A layer goes to the device that covers most of its bytes.
        while before + nbytes / 2 > limit and device < len(capacities) - 1:
            device += 1
            limit += capacities[device] / room * total
        of_layer.append(device)
        before += nbytes
    return tuple(of_layer)


def expert_ranges(count: int, shares: Sequence[int]) -> tuple[range, ...]:
    """Which of a layer's experts each device has: runs in proportion to its share, of one expert at least."""
    whole, before, cuts = max(sum(shares), 1), 0, [0]
    for number, share in enumerate(shares, 1):
        before += share
        others = len(shares) - number
        cuts.append(max(cuts[-1] + 1, min(round(count * before / whole), count - others)))
    cuts[-1] = count
    return tuple(range(first, behind) for first, behind in pairwise(cuts))


def least_ram(sizes: Sizes) -> int:
    """RAM needed at least to run the model on the CPU in its last precision, with experts and layers read from disk."""
    weights = sizes.weights[-1].without_tables
    on_demand = [each for each in weights.experts if each.is_on_demand]
    kept = weights.experts_nbytes - sum(each.nbytes for each in on_demand)
    fixed = weights.dense_in_ram - _saved(_streamed(weights.in_files, weights.dense_in_ram))
    fixed += kept + weights.working if kept or not on_demand else 0
    return fixed + _fewest_slot_bytes(on_demand, max(sizes.experts_per_token, 1))


def cache_slots(budget: int, record: int, every: int, share: float, cache: CacheSettings) -> tuple[int, int, int]:
    """(slots of an expert cache, slots that experts pass through, slots requested).

    Args:
        budget: bytes for both kinds of slots.
        record: bytes of a slot.
        every: number of experts; more slots are useless.
        share: this cache's share of the slots that were requested.
    """
    staging = footprint.staging_slots(budget, record, every, cache.misses, cache.slots)
    most = max(0, budget // record - staging) if cache.misses != "layer" else 0
    wanted = every if cache.slots is None else min(round(cache.slots * share), every)
    return min(wanted, most), staging, wanted


def _in_each_precision(
    sizes: Sizes, budgets: Budgets, cache: CacheSettings, roomy: int
) -> tuple[list[Placement], list[NotEnoughRamError]]:
    found, refused = [], []
    for weights in sizes.weights:
        try:
            placed = _place(sizes, weights, budgets, cache, roomy)
        except NotEnoughRamError as error:
            refused.append(error)
            continue
        nbytes, must = converted_bytes(weights, from_disk=placed.on_disk > 0)
        found.append(replace(placed, converted=nbytes if must or budgets.keeps else 0, must_be_kept=must))
    return found, refused


def converted_bytes(weights: Weights, *, from_disk: bool) -> tuple[int, bool]:
    """(bytes that are converted into a file, whether there is no doing without it)."""
    kinds = (Made.ONCE, Made.FOR_DISK) if from_disk else (Made.ONCE,)
    experts = sum(each.nbytes for each in weights.experts if each.is_on_demand and each.made in kinds)
    must = from_disk and experts > 0
    nbytes = experts + weights.linears
    return (nbytes if must or nbytes >= max(WORTH_KEEPING, 1) else 0), must


def _place(sizes: Sizes, weights: Weights, budgets: Budgets, cache: CacheSettings, roomy: int) -> Placement:
    """The placement in one precision: tables stay on disk before anything else has to, or a card cannot be used."""
    if not weights.tables.on_disk:
        return _placed(sizes, weights, budgets, cache, roomy)
    try:
        held = _placed(sizes, weights, budgets, cache, roomy)
    except NotEnoughRamError:
        held = None
    tables = weights.tables
    on_devices, free = sum(tables.layers) + tables.elsewhere, sum(device.free for device in budgets.devices)
    # A card's table takes no RAM, and lets whole steps run there: it leaves the card if it takes much of it.
    stays = held is not None and (not held.waits_for_disk or (held.devices and _MUCH_OF_A_CARD * on_devices < free))
    if held is not None and stays and not held.notes:
        return held
    layers = tuple(max(all_of - less, 0) for all_of, less in zip(sizes.layers, tables.layers, strict=False))
    fewer = replace(sizes, layers=layers or sizes.layers, elsewhere=max(sizes.elsewhere - tables.elsewhere, 0))
    apart = replace(_placed(fewer, weights.without_tables, budgets, cache, roomy), tables=tables)
    return held if held is not None and not held.waits_for_disk and apart.notes else apart


def _placed(sizes: Sizes, weights: Weights, budgets: Budgets, cache: CacheSettings, roomy: int) -> Placement:
    is_shared = _shares_experts(weights, budgets, cache)
    capacities = [device.total for device in budgets.devices]
    of_layer = () if is_shared else split_layers(sizes.layers, sizes.elsewhere, capacities)
    needs = [_need(sizes, weights, of_layer, index, device) for index, device in enumerate(budgets.devices)]
    short = next((need for need in needs if need.least > need.device.free), None)
    if short is not None and is_shared:
        return _by_layers(sizes, weights, budgets, cache, roomy, short.least, short.device.free)
    if short is not None or not needs:
        notes = (Note(NoteCode.ON_CPU, short.least, short.device.free, short.device.name),) if short else ()
        return _on_cpu(sizes, weights, budgets, notes)
    room = min(need.activations for need in needs)  # every device processes the same chunk
    needs = [replace(need, activations=room) for need in needs]
    shares = tuple(_room_for_experts(need) for need in needs) if is_shared else ()
    all_experts = not weights.experts or (
        not is_shared
        and (_is_default(cache) or any(need.device.is_unified for need in needs))
        and all(
            need.with_experts(sum(each.nbytes for each in _experts_on(index, weights, of_layer)), roomy)
            <= need.device.free
            for index, need in enumerate(needs)
        )
    )
    unified = next((need for need in needs if need.device.is_unified), None)
    if unified is not None and not all_experts:
        needed = unified.with_experts(weights.experts_nbytes, roomy)
        return _on_cpu(
            sizes, weights, budgets, (Note(NoteCode.NO_SLOTS, needed, unified.device.free, unified.device.name),)
        )
    experts = () if all_experts else weights.experts
    more = weights.working_for_devices
    ram, on_disk, _ = _in_ram(sizes, weights, budgets, dense=weights.row_cache, experts=experts, more=more)
    return Placement(
        precision=weights.precision,
        devices=tuple(
            _on_device(weights, of_layer, index, need, cache, shares, all_experts=all_experts)
            for index, need in enumerate(needs)
        ),
        of_layer=of_layer,
        shares=shares,
        all_experts=all_experts,
        chunk_tokens=min(need.piece for need in needs),
        context_tokens=min(need.context_room(sizes.context_tokens) for need in needs),
        ram=ram,
        on_disk=on_disk,
    )


def _shares_experts(weights: Weights, budgets: Budgets, cache: CacheSettings) -> bool:
    """Whether several cards are to share each layer's experts, and can: those that come one by one, into slots."""
    devices = budgets.devices
    return (
        cache.sharing == "experts"
        and len(devices) > 1
        and bool(weights.experts)
        and cache.misses != "layer"
        and not any(device.is_unified for device in devices)
        and all(each.is_on_demand and each.count >= len(devices) for each in weights.experts)
    )


def _by_layers(
    sizes: Sizes, weights: Weights, budgets: Budgets, cache: CacheSettings, roomy: int, needed: int, room: int
) -> Placement:
    """The next best: the cards share layers, and it is said why."""
    placed = _placed(sizes, weights, budgets, replace(cache, sharing="layers"), roomy)
    note = Note(NoteCode.SHARED_BY_LAYERS, needed, room)
    return replace(placed, notes=(note, *placed.notes)) if placed.devices else placed


def _room_for_experts(need: _Need) -> int:
    return max(0, need.device.free - need.dense - need.activations - need.kv(need.first_context))


def _on_cpu(sizes: Sizes, weights: Weights, budgets: Budgets, notes: tuple[Note, ...]) -> Placement:
    dense, in_files = weights.dense_in_ram, weights.in_files
    ram, on_disk, streamed = _in_ram(sizes, weights, budgets, dense=dense, experts=weights.experts, in_files=in_files)
    return Placement(
        weights.precision,
        devices=(),
        of_layer=(),
        all_experts=False,
        chunk_tokens=footprint.SHORT_TOKENS,
        context_tokens=sizes.context_tokens,
        ram=ram,
        on_disk=on_disk,
        streamed=streamed,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """The minimum that one device has to hold, in bytes and tokens."""

    device: DeviceBudget
    dense: int
    piece: int
    activations: int
    kv_per_token: int
    fixed_kv: int
    first_context: int
    fewest_context: int

    def kv(self, tokens: int) -> int:
        return self.fixed_kv + tokens * self.kv_per_token

    @property
    def least(self) -> int:
        return self.dense + self.activations + self.kv(self.fewest_context)

    def with_experts(self, experts: int, context_tokens: int) -> int:
        """With these bytes of experts, and a context that they never have to make room for."""
        return self.dense + experts + self.activations + self.kv(context_tokens)

    def context_room(self, wanted: int) -> int:
        if not self.kv_per_token:
            return wanted
        return min(wanted, (self.device.free - self.dense - self.activations - self.fixed_kv) // self.kv_per_token)


def _need(sizes: Sizes, weights: Weights, of_layer: Sequence[int], index: int, device: DeviceBudget) -> _Need:
    if of_layer:
        mine = [layer for layer, at in enumerate(of_layer) if at == index]
        dense = sum(weights.dense_layers[layer] for layer in mine) + (weights.dense_elsewhere if index == 0 else 0)
        kv, states = (-(-each * len(mine) // len(of_layer)) for each in (sizes.kv_per_token, sizes.fixed_kv))
    else:
        dense = sum(weights.dense_layers) + weights.dense_elsewhere if index == 0 else 0
        kv, states = (sizes.kv_per_token, sizes.fixed_kv) if index == 0 else (0, 0)
    each, context = sizes.activations_per_token, sizes.context_tokens
    room = device.free - dense
    return _Need(
        device,
        dense,
        footprint.chunk_tokens(room, each, context),
        footprint.piece_room(room, each, context),
        kv,
        states,
        min(context, footprint.KV_TOKENS),
        min(context, footprint.FEWEST_KV_TOKENS),
    )


def _is_default(cache: CacheSettings) -> bool:
    return cache.slots is None and cache.misses == "mixed"


def _experts_on(index: int, weights: Weights, of_layer: Sequence[int], shares: Sequence[int] = ()) -> list[Experts]:
    if shares:
        parts = ((each, len(expert_ranges(each.count, shares)[index])) for each in weights.experts)
        return [replace(each, count=count) for each, count in parts if count]
    return [each for each in weights.experts if _device_of(each.layer, of_layer) == index]


def _on_device(
    weights: Weights,
    of_layer: Sequence[int],
    index: int,
    need: _Need,
    cache: CacheSettings,
    shares: Sequence[int],
    *,
    all_experts: bool,
) -> OnDevice:
    kv = need.kv(need.first_context)
    if all_experts:
        whole = _experts_on(index, weights, of_layer)
        nbytes, count = sum(each.nbytes for each in whole), sum(each.count for each in whole)
        return OnDevice(need.dense, nbytes, 0, kv, need.activations, count)
    mine = [each for each in _experts_on(index, weights, of_layer, shares) if each.is_on_demand]
    budget = _room_for_experts(need)
    held, staged, slots = 0, 0, 0
    total = sum(each.nbytes for each in mine)
    for layout in dict.fromkeys(each.layout for each in mine):
        group = [each for each in mine if each.layout == layout]
        share = sum(each.nbytes for each in group) / total
        count, staging = _slots_of(group, int(budget * share), share, cache)
        slots += count
        held += count * group[0].record
        staged += staging * group[0].record
    return OnDevice(need.dense, held, staged, kv, need.activations, slots)


def _slots_of(group: Sequence[Experts], budget: int, share: float, cache: CacheSettings) -> tuple[int, int]:
    """(slots that stay, slots that experts pass through) for layers that share them, in whole segments of the pool."""
    record, most, layers = group[0].record, max(each.count for each in group), len(group)
    every = layers * most
    wanted, staging, _ = cache_slots(budget, record, every, share, cache)
    piece = footprint.pool_segment_slots(wanted, every, cache.ways)
    slots = piece * footprint.pool_segments(wanted, piece, layers, every, cache.ways)
    return slots, min(2 * most, budget // record) if cache.misses == "layer" else staging


def _device_of(layer: int | None, of_layer: Sequence[int]) -> int:
    return of_layer[layer] if layer is not None and of_layer else 0


def _in_ram(
    sizes: Sizes,
    weights: Weights,
    budgets: Budgets,
    *,
    dense: int,
    experts: Sequence[Experts],
    in_files: Sequence[int] = (),
    more: int = 0,
) -> tuple[InRam, int, Streamed]:
    """(contents of the RAM, bytes of experts that are read from disk, layers that are).

    Args:
        experts: those that are not on a device.
        in_files: of `dense`, what each layer could leave on disk.
        more: additional working memory.

    Raises:
        NotEnoughRamError: with the smallest size that would be enough.
    """
    working = weights.working + more
    everything = sum(each.nbytes for each in experts)
    on_demand = [each for each in experts if each.is_on_demand]
    usable, needed = budgets.ram_usable, dense + everything + working
    if needed <= usable:
        return InRam(dense, everything, 0, working), 0, Streamed()
    on_disk = sum(each.nbytes for each in on_demand)
    kept = everything - on_disk
    if on_demand and not kept:  # experts on disk are prepared beforehand, layer by layer
        working = 0
    at_least = max(sizes.experts_per_token, 1)
    least = _fewest_slot_bytes(on_demand, at_least)
    spare = usable // _KEPT_FREE if budgets.ram_allowed is None else 0
    streamed = Streamed()
    missing = dense + kept + working + least - usable
    if missing > 0:  # experts come first: a layer is needed for every token
        streamed = _streamed(in_files, missing + spare)
        if _saved(streamed) < missing:
            even = " even with its experts read from disk" if on_demand else ""
            even = even or (" even with its layers read from disk" if streamed.layers else "")
            raise NotEnoughRamError(sizes.name, usable + missing - _saved(streamed), budgets, even=even)
        dense -= _saved(streamed)
    slots = min(on_disk, max(least, usable - dense - kept - working - spare))
    return InRam(dense, kept + slots, slots, working, at_least), on_disk, streamed


def _streamed(in_files: Sequence[int], missing: int) -> Streamed:
    """As few layers, far from one another, as make room for so many bytes; else all that make any."""
    able = [layer for layer, nbytes in enumerate(in_files) if nbytes >= footprint.LARGE_LAYER_BYTES]
    found = Streamed()
    for count in range(footprint.LAYERS_AT_ONCE + 1, len(able) + 1):
        layers = tuple(able[(2 * place + 1) * len(able) // (2 * count)] for place in range(count))
        largest = sorted((in_files[layer] for layer in layers), reverse=True)
        found = Streamed(layers, sum(largest), sum(largest[: footprint.LAYERS_AT_ONCE]))
        if _saved(found) >= missing:
            break
    return found


def _saved(streamed: Streamed) -> int:
    return streamed.nbytes - streamed.window


def _fewest_slot_bytes(experts: Iterable[Experts], at_least: int) -> int:
    """Bytes of the minimum of slots of each layout, below which no layer can be computed."""
    fewest: dict[int, int] = {}
    for each in experts:
        fewest[each.layout] = max(fewest.get(each.layout, 0), min(at_least, each.count) * each.record)
    return sum(fewest.values())


def _why_coarser(best: Weights, taken: Placement, sizes: Sizes, budgets: Budgets) -> Note:
    """What ruled out the best quality: the device on which it does not fit, else the RAM."""
    of_layer = split_layers(sizes.layers, sizes.elsewhere, [device.total for device in budgets.devices])
    for index, device in enumerate(budgets.devices if taken.devices else ()):
        least = _need(sizes, best, of_layer, index, device).least
        if least > device.free:
            return Note(NoteCode.COARSER_FOR_DEVICE, least, device.free, device.name, taken.precision, best.precision)
    on_device = bool(taken.devices)
    dense = 0 if on_device else best.dense_in_ram
    experts = 0 if taken.all_experts else best.experts_nbytes
    working = best.working + (best.working_for_devices if on_device else 0)
    return Note(
        NoteCode.COARSER_FOR_RAM,
        dense + experts + working,
        max(budgets.ram_usable, 0),
        precision=taken.precision,
        instead_of=best.precision,
    )

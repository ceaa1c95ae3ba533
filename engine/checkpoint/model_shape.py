"""The shape of a Mixture-of-Experts model: everything that determines its speed and size.

Shapes of published models are shipped with the program: JSON in `resources/models`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from engine.checkpoint.stored import StoredWeights
from engine.common.footprint import PAGE_TOKENS, pages_for, window_pages
from engine.common.json_fields import ProfileFile, find_profile, profile_names, refused
from engine.common.paths import resources_dir
from engine.formats import BF16, LADDER, STORED, WeightFormat, careful, format_of, head_format, measured_as


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        kv_heads: of keys and values; unused by latent attention.
        latent: width of the compressed keys and values of multi-head latent attention, including the rotary part;
            otherwise 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    query_latent: int = 0

    def weights(self, hidden: int) -> int:
        if not self.latent:
            return hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        rotary = 64
        query_in = self.query_latent or hidden
        queries = query_in * self.heads * (self.head_dim + rotary) + hidden * self.query_latent
        keys_values = hidden * self.latent + (self.latent - rotary) * self.heads * 2 * self.head_dim
        return queries + keys_values + self.heads * self.head_dim * hidden

    @property
    def kv_elements(self) -> int:
        return self.latent or 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model.

    Attributes:
        name: the profile's file name without `.json`.
        full_attention_layers: layers whose cache grows with the context; the others have a window or a state.
        shared_width, dense_width: of all shared experts together, and of a dense layer's feed-forward block.
        parameters: as published, to be compared with `total_weights`.
        expert_matrices: of a routed expert: gate, up and down, or up and down alone.
        other_weights: parameters outside the routed experts, counted from the files' headers; 0 to derive them.
        table_weights: parameters in tables of n-grams or of layers, of which a token reads a few rows.
        table_rows, table_columns: how many rows, and parameters of each.
        kv_numbers: cache elements per token over all layers, counted; 0 to derive them.
        window_numbers, window_tokens: those of layers with a sliding window, and what these see; 0 without any.
        state_bytes: of what layers sum up of a sequence, however long it is.
        compresses: see `engine.checkpoint.profile.KvOfModel`.
        left_out_weights: the part of `parameters` that is never run here: for images or sound, or for multi-token
            prediction.
        stored: what a checkpoint that is quantised already becomes if it runs as it is stored.
        tower_weights: parameters of what sees, which is read with the first picture.
        picture_gflops: billions of operations that this does for a picture of 1024 x 1024 pixels.
    """

    name: str
    hub_id: str
    licence: str
    source: str
    layers: int
    dense_layers: int
    full_attention_layers: int
    hidden: int
    vocabulary: int
    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    dense_width: int
    attention: AttentionShape
    context_tokens: int
    parameters: float
    tied_embeddings: bool = False
    expert_matrices: int = 3
    expert_biases: bool = False
    other_weights: int = 0
    kv_numbers: int = 0
    window_numbers: int = 0
    window_tokens: int = 0
    state_bytes: int = 0
    compresses: bool = False
    left_out_weights: int = 0
    table_weights: int = 0
    table_rows: int = 0
    table_columns: int = 0
    stored: StoredWeights | None = None
    sees: bool = False
    tower_weights: int = 0
    picture_gflops: int = 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert_weights(self) -> int:
        return self.expert_matrices * self.hidden * self.expert_width

    @property
    def layer_weights(self) -> int:
        """Parameters of one MoE layer without its routed experts: attention, router, shared experts."""
        if self.other_weights:
            return self._mean_layer_weights
        shared = 3 * self.hidden * self.shared_width
        return self.attention.weights(self.hidden) + self.hidden * self.experts + shared

    @property
    def dense_layer_weights(self) -> int:
        if self.other_weights:
            return self._mean_layer_weights
        return self.attention.weights(self.hidden) + 3 * self.hidden * self.dense_width

    @property
    def _mean_layer_weights(self) -> int:
        """If only the total was counted, all layers are assumed equal."""
        return max(self.other_weights - self.embedding_weights - self.table_weights, 0) // self.layers

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def non_expert_weights(self) -> int:
        return self.other_weights or (
            self.moe_layers * self.layer_weights
            + self.dense_layers * self.dense_layer_weights
            + self.embedding_weights
            + self.table_weights
        )

    @property
    def matrix_weights(self) -> int:
        """What every token reads beside experts and the head: neither embeddings nor tables."""
        return self.non_expert_weights - self.embedding_weights - self.table_weights

    @property
    def all_expert_weights(self) -> int:
        return self.moe_layers * self.experts * self.expert_weights

    @property
    def total_weights(self) -> int:
        return self.non_expert_weights + self.all_expert_weights

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that `auto` chooses from, best quality first."""
        return self.stored.precisions if self.stored is not None else LADDER

    def run_as(self, precision: str) -> str:
        """The precision that this one comes to: what is not quantised is stored in 16 bits."""
        return BF16.name if precision == STORED and self.stored is None else precision

    def measured_as(self, precision: str) -> str:
        """The precision whose measured speeds hold for this one: see `engine.formats.measured_as`."""
        return measured_as(precision, 8 * self.expert_bytes(precision) / self.expert_weights if self.stored else 0.0)

    def words(self, precision: str) -> str:
        """A precision for people: its name, or what is stored."""
        return self.stored.words if self.stored is not None and precision == STORED else precision

    def expert_formats(self, precision: str) -> list[tuple[WeightFormat, ...]]:
        """Formats of an expert's gate and up matrices, and of its down matrix: of each MoE layer, or one for all.

        See `StoredWeights.experts`.
        """
        if precision == STORED and self.stored is not None:
            return [tuple(map(format_of, names)) for names in self.stored.experts]
        return [(format_of(precision), format_of(careful(precision, self.total_weights)))]

    def expert_bytes(self, precision: str) -> float:
        """Bytes of one routed expert's matrices, on average over the layers."""
        formats, down = self.expert_formats(precision), self.expert_weights / self.expert_matrices
        up = self.expert_weights - down
        return sum(
            down * last.bytes_per_weight + sum(up / len(first) * each.bytes_per_weight for each in first)
            for *first, last in formats
        ) / len(formats)

    def layer_bytes_per_weight(self, precision: str) -> float:
        kept = self.stored if precision == STORED else None
        return kept.layer_bytes_per_weight if kept is not None else format_of(precision).bytes_per_weight

    def head_bytes_per_weight(self, precision: str) -> float:
        kept = self.stored if precision == STORED else None
        return kept.head_bytes_per_weight if kept is not None else format_of(head_format(precision)).bytes_per_weight

    def all_expert_bytes(self, precision: str) -> float:
        return self.moe_layers * self.experts * self.expert_bytes(precision)

    def non_expert_bytes(self) -> float:
        return 2.0 * self.non_expert_weights

    def in_place(self) -> ModelShape:
        """The same with what is stored used as it lies in its files, where that can be."""
        stored = self.stored and self.stored.in_place
        return self if stored is None else replace(self, stored=replace(stored, is_in_place=True))

    def holding(self, kv_precision: str) -> ModelShape:
        """The same with keys and values held so: latents, and what is compressed, stay in 16 bits, others have a scale
        for each head."""
        if kv_precision != "int8" or self.attention.latent or self.compresses:
            return self
        width = self.attention.head_dim
        narrower = (width + 4) / (2 * width)
        return replace(
            self,
            kv_numbers=round(self.kv_bytes_per_token() / 2 * narrower),
            window_numbers=round(self.window_numbers * narrower),
        )

    def kv_bytes_per_token(self) -> float:
        """Bytes of cache per token, all layers: two for each number."""
        return 2.0 * (self.kv_numbers or self.full_attention_layers * self.attention.kv_elements)

    def fixed_bytes(self, width: int) -> int:
        """What a sequence holds however long it is, with numbers of so many bytes."""
        if not self.compresses:
            return self.state_bytes
        return width * self.window_numbers * window_pages(self.window_tokens) * PAGE_TOKENS

    def context_bytes(self, tokens: float, *, in_pages: bool = False) -> float:
        """Bytes that a sequence of so many tokens holds: keys, values and states.

        Args:
            in_pages: whether in pages in RAM, where those that a window has passed are freed, and a step writes its
                state beside the one that it reads.
        """
        each = self.kv_bytes_per_token()
        if not (in_pages or self.compresses):
            return each * tokens + self.state_bytes
        pages, of_windows = pages_for(tokens), 2.0 * self.window_numbers
        of_all = each if self.compresses else each - of_windows
        slides = of_windows and of_all and not self.state_bytes
        windows = min(pages, window_pages(self.window_tokens)) if slides else pages
        return PAGE_TOKENS * (of_all * pages + of_windows * windows) + 2 * self.state_bytes


_OPTIONAL_COUNTS = ("dense_layers", "shared_width", "dense_width")
_COUNTS = [each for each in fields(ModelShape) if each.type == "int"]
_WITH_DEFAULT = {each.name: each.default for each in _COUNTS if each.default is not MISSING}


def model_names() -> list[str]:
    return profile_names(resources_dir() / "models")


def read_model(name: str) -> ModelShape:
    """The model of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or its file has invalid values.
    """
    path = find_profile(name, resources_dir() / "models", "model")
    return shape_in(ProfileFile(path), path.stem)


def shape_in(file: ProfileFile, name: str) -> ModelShape:
    """The model that a JSON object describes.

    Raises:
        EngineError: `INVALID_REQUEST` if it has invalid values.
    """
    attention = file.part("attention")
    values: dict[str, Any] = {
        field.name: file.whole(field.name, 0 if field.name in _OPTIONAL_COUNTS else 1, 10**9)
        for field in _COUNTS
        if field.name not in _WITH_DEFAULT
    }
    values |= {name: file.whole(name, 0, 10**13, default=usual) for name, usual in _WITH_DEFAULT.items()}
    if values["experts_per_token"] > values["experts"] or values["dense_layers"] >= values["layers"]:
        raise refused(file.path, "uses more experts per token, or has more dense layers, than the model has")
    return ModelShape(
        name=name,
        hub_id=file.text("hub_id"),
        licence=file.text("licence"),
        source=file.text("source"),
        attention=AttentionShape(
            heads=attention.whole("heads", 1, 10**4),
            kv_heads=attention.whole("kv_heads", 1, 10**4),
            head_dim=attention.whole("head_dim", 1, 10**4),
            latent=attention.whole("latent", 0, 10**5, default=0),
            query_latent=attention.whole("query_latent", 0, 10**5, default=0),
        ),
        parameters=file.number("parameters", 1e6, 1e14),
        tied_embeddings=bool(file.content.get("tied_embeddings", False)),
        expert_biases=bool(file.content.get("expert_biases", False)),
        compresses=bool(file.content.get("compresses", False)),
        **values,
    )

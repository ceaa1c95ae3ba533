"""The engine's settings: where and how a model runs, and how its tokens are sampled.

Plain frozen dataclasses: they travel over the protocol, so their fields are JSON-like values only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.common.errors import EngineError, ErrorCode

Misses = Literal["mixed", "cpu", "fetch", "off", "layer"]
MISSES: tuple[Misses, ...] = ("mixed", "cpu", "fetch", "off", "layer")
Prefetch = Literal["auto", "off", "previous", "gate", "correlation", "mlp"]
PREFETCHES: tuple[Prefetch, ...] = ("auto", "off", "previous", "gate", "correlation", "mlp")
CachePolicy = Literal["auto", "lru", "fifo", "lfu", "lfru", "random", "static"]
CACHE_POLICIES: tuple[CachePolicy, ...] = ("auto", "lru", "fifo", "lfu", "lfru", "random", "static")
Guesses = Literal["auto", "heads", "off"]
GUESSES: tuple[Guesses, ...] = ("auto", "heads", "off")
KvPrecision = Literal["auto", "bf16", "fp16", "int8"]
KV_PRECISIONS: tuple[KvPrecision, ...] = ("auto", "bf16", "fp16", "int8")
Graphs = Literal["auto", "on", "off"]
GRAPHS: tuple[Graphs, ...] = ("auto", "on", "off")
Sharing = Literal["auto", "layers", "experts"]
SHARINGS: tuple[Sharing, ...] = ("auto", "layers", "experts")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model and the resources it may use.  `None` means: let the engine decide.

    Attributes:
        model: `starter`, a library name, or the path of a checkpoint directory.
        device: `auto`, `cpu`, `cuda` (every card), `cuda:N`, `xpu` likewise for Intel's,
            several with commas, `emulated:NAME` or `emulated:NAMExN` for N of them.
        precision: of the weights in memory: `auto`, or the name of one of `engine.formats.PRECISIONS`.
        vram_bytes, ram_bytes: budgets in bytes.
        threads: CPU threads that compute; `None` is one per fast physical core.
        context_tokens: longest context to allow; `None` is the model's own limit.
        cache_slots: experts kept in the memory of each device; `None` is as many as fit, 0 keeps none.
        cache_ways: slots of each layer (N indexes of M ways); `None` lets all layers share one pool.
        cache_policy: the eviction policy; `auto` picks one while running.
        misses: how a miss (an expert that is not on the device) is served: `mixed` computes it on the CPU or fetches
            it, whichever finishes first; the others are for measurements: `cpu`, `fetch`, `off` (as mixed, without a
            cache) and `layer` (every layer is fetched whole, one ahead).
        prefetch: predictor of the experts of coming layers; `auto` uses the best one, if any pays off.
        graphs: whether decode steps are captured and replayed as graphs; `auto` captures on graphics cards, not on
            emulated ones, where it gains nothing.
        sharing: how several cards share a model: `layers` gives each a run of layers, `experts` each a part of every
            layer's experts, the rest to the first; `auto` is as a plan says, and layers without one.
        speculation: `auto` guesses the next tokens of an answer that quotes, and tries them together where that is
            measured to pay; answers are the same.  `heads` also loads the layer that guesses tokens, where a checkpoint
            has one and the CPU computes the model.
        kv_precision: how keys and values are held: `auto` is the model's own type; `int8` takes half of that, with a
            scale for each head and token.  A model that cannot use it keeps its own, and its note says so.
    """

    model: str
    device: str = "auto"
    precision: str = "auto"
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    threads: int | None = None
    context_tokens: int | None = None
    cache_slots: int | None = None
    cache_ways: int | None = None
    cache_policy: CachePolicy = "auto"
    misses: Misses = "mixed"
    prefetch: Prefetch = "auto"
    graphs: Graphs = "auto"
    sharing: Sharing = "auto"
    speculation: Guesses = "auto"
    kv_precision: KvPrecision = "auto"

    @property
    def asked(self) -> str:
        """All of it but the model, as a text."""
        return repr(replace(self, model=""))

    @property
    def cache(self) -> CacheSettings:
        """Its part about experts on devices."""
        return CacheSettings(
            self.cache_slots, self.cache_ways, self.cache_policy, self.misses, self.prefetch, self.sharing
        )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How experts are kept on devices; the fields of `EngineConfig`."""

    slots: int | None = None
    ways: int | None = None
    policy: CachePolicy = "auto"
    misses: Misses = "mixed"
    prefetch: Prefetch = "auto"
    sharing: Sharing = "auto"


CACHE_FIELDS = ("cache_slots", "cache_ways", "cache_policy", "misses", "prefetch")
"""Those fields' names."""

Thinking = Literal["auto", "off", "on", "low", "medium", "high"]
THINKINGS: tuple[Thinking, ...] = ("auto", "off", "on", "low", "medium", "high")

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's and KoboldCpp's: they keep the turns of a chat template and the punctuation of lists unpunished."""
MOST_BREAKERS = 100


_LEAST = 1e-37
"""Less than this is 0 in fp32, or has lost digits, and nothing may be divided by it."""
_GREEDY_BELOW = 1e-5
"""At such a temperature a logit that is higher by a ten-thousandth is 20,000 times as likely."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and whether the model thinks before it answers.

    What is on is applied in llama.cpp's order: bias, penalties, DRY, what the answer must satisfy, top-k, top-p,
    min-p, temperature, and then one draw.  Tokens that end an answer are never penalised.

    Attributes:
        temperature: below 1e-5 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest; 0 keeps all.
        repetition_penalty: divides (multiplies, if negative) logits of tokens already in the context; 1 is off.
        seed: same seed, same prompt, same machine: same tokens (docs/command-line.md says where).  `None` draws a fresh
            one.
        stop: strings that end the answer, excluded from it.
        max_tokens: most tokens to generate.
        beams: width of beam search; 1 is none.  Beam search ignores temperature and its filters.
        dry_multiplier: strength of DRY ("don't repeat yourself"), which ends loops; 0 is off.  A token that would
            prolong a repetition of n tokens loses dry_multiplier * dry_base^(n - dry_allowed_length).
        dry_base: by how much the penalty grows with each repeated token.
        dry_allowed_length: repetitions shorter than this are free.
        dry_range: how many of the last tokens are searched for repetitions, prompts and earlier answers included; -1 is
            the answer itself, 0 turns DRY off.
        dry_breakers: texts that no repetition extends across.
        presence_penalty, frequency_penalty: subtracted from the logit of a token that the answer contains: once, and
            once for each time (OpenAI's); 0 is off.
        logit_bias: (token id, added to its logit), for any number of tokens.
        thinking: whether, and how much, the model reasons before its answer, where its chat template can tell it;
            `auto` is as the model does, or not at all if the answer must satisfy a schema.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = 512
    beams: int = 1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = -1
    dry_breakers: tuple[str, ...] = DRY_BREAKERS
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    thinking: Thinking = "auto"

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature <= 10, "between 0 and 10"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", _LEAST <= self.top_p <= 1, f"above 0 and at most 1 (below {_LEAST} counts as 0)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            (
                "repetition_penalty",
                _LEAST <= self.repetition_penalty <= 10,
                f"above 0 and at most 10 (below {_LEAST} counts as 0)",
            ),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("beams", 1 <= self.beams <= 64, "between 1 and 64"),
            ("dry_multiplier", 0 <= self.dry_multiplier <= 100, "between 0 (off) and 100"),
            ("dry_base", 1 <= self.dry_base <= 10, "between 1 and 10"),
            ("dry_allowed_length", self.dry_allowed_length >= 0, "0 or more"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("dry_range", self.dry_range >= -1, "-1 (the answer), 0 (off) or more"),
        )
        for name, holds, allowed in checks:
            value = getattr(self, name)
            if not holds or not math.isfinite(value):
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} is {value}, but must be {allowed}.")
        if self.thinking not in THINKINGS:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"thinking is {self.thinking!r}, but must be one of {', '.join(THINKINGS)}."
            )
        for token, bias in self.logit_bias:
            if token < 0 or not -100 <= bias <= 100:
                raise EngineError(
                    ErrorCode.INVALID_REQUEST,
                    f"logit_bias gives token {token} {bias}, but takes token ids and numbers between -100 and 100.",
                )
        if not all(self.dry_breakers) or len(self.dry_breakers) > MOST_BREAKERS:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"dry_breakers must be at most {MOST_BREAKERS} texts, none of them empty."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, so that another try gives the same answer."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def uses_dry(self) -> bool:
        """Whether DRY can change anything."""
        return self.dry_multiplier > 0 and self.dry_range != 0


BatchStart = Literal["new", "resume", "restart", "retry_failed", "redo_cut_off"]


HERE = "this-pc"
"""This machine's own engine, among endpoints."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A file of rows, and the file that takes their answers.

    Attributes:
        input, output: paths; the input may be a folder.
        template: the prompt, with `{{column}}` placeholders; empty: the obvious column, or OpenAI requests.
        image_column: whose cells are pictures for the model: paths (relative to the input's folder), `file:` or `data:`
            addresses, files' bytes, or lists of them; none if empty.
        system: prompt of every conversation; none if empty.
        sampling: of every answer; OpenAI requests may override it.
        schema: a JSON schema, as JSON text, that answers satisfy; `choices`: the texts an answer must be one of.
        tries: attempts per row when a sampled answer is cut off before it satisfies the schema.
        kv_precision: how keys and values are held: `auto` is as the model's chats hold them.
        attention_window: if not 0, tokens attend to the last so many and the first four (StreamingLLM): long rows take
            less memory and time, and answers differ slightly.
        encoding, separator, whole_files, sheet: how it is read; see `engine.batch_files.opening.InputForm`.
        start: `new` refuses rows that a job has already answered, `resume` continues, `restart` discards,
            `retry_failed` continues and retries failed rows, `redo_cut_off` continues and answers rows that ended at
            their limit of tokens again, with more; see `Journal.redo_cut_off`.
        more_tokens: their new limit; 0: twice what each had.
        raw_text: see `engine.batch_files.result_file.write_result`.
        endpoints: where rows are answered: names of endpoints, or their addresses, and `HERE`; empty: here alone.
        ask_twice: the last rows may be asked of a second endpoint if the first one is slow, which costs tokens.
        mix_models: the job may go on with other models than those that gave its answers so far.
        name_endpoints: the result has a column that says who answered.
        ray: address of a Ray cluster whose nodes answer the rows, as `ray.init` takes it; empty for none.
    """

    input: str
    output: str
    template: str = ""
    system: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    schema: str = ""
    choices: tuple[str, ...] = ()
    tries: int = 3
    kv_precision: KvPrecision = "auto"
    attention_window: int = 0
    encoding: str | None = None
    separator: str | None = None
    whole_files: bool | None = None
    sheet: str | None = None
    start: BatchStart = "new"
    endpoints: tuple[str, ...] = ()
    ask_twice: bool = False
    mix_models: bool = False
    name_endpoints: bool = False
    ray: str = ""
    more_tokens: int = 0
    raw_text: bool = False
    image_column: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether answers of an earlier run are kept."""
        return self.start not in ("new", "restart")

    @property
    def is_remote(self) -> bool:
        """Whether text of its rows leaves this program, to be answered elsewhere."""
        return bool(self.ray) or any(name != HERE for name in self.endpoints)

    def __post_init__(self) -> None:
        if self.schema and self.choices:
            raise EngineError(ErrorCode.INVALID_REQUEST, "Give either a schema or choices, not both.")
        if not 1 <= self.tries <= 100:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"tries is {self.tries}, but must be between 1 and 100.")
        if self.ray and self.endpoints:
            raise EngineError(ErrorCode.INVALID_REQUEST, "Give either endpoints or a Ray cluster, not both.")
        if self.more_tokens < 0:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"more_tokens is {self.more_tokens}, but must be 0 or more.")
        if self.attention_window < 0:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"attention_window is {self.attention_window}, but must be 0 (off) or more."
            )
        if not all(self.choices):
            raise EngineError(ErrorCode.INVALID_REQUEST, "A choice is empty: leave it out.")

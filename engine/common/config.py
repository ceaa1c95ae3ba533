"""The engine's settings: where and how a model runs, and how its tokens are sampled.

Plain frozen dataclasses: they travel over the protocol, so their fields are JSON-like values only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from engine.common.errors import EngineError, ErrorCode
from engine.common.schema import Choice, Kind, Number, Size, Texts, V, entry, settings_of

Misses = Literal["mixed", "cpu", "fetch", "off", "layer"]
MISSES: tuple[Misses, ...] = get_args(Misses)
Prefetch = Literal["auto", "off", "previous", "gate", "correlation", "mlp"]
PREFETCHES: tuple[Prefetch, ...] = get_args(Prefetch)
CachePolicy = Literal["auto", "lru", "fifo", "lfu", "lfru", "random", "static"]
CACHE_POLICIES: tuple[CachePolicy, ...] = get_args(CachePolicy)
Guesses = Literal["auto", "heads", "off"]
KvPrecision = Literal["auto", "bf16", "fp16", "int8"]
Graphs = Literal["auto", "on", "off"]
Sharing = Literal["auto", "layers", "experts"]

PRECISIONS = ("auto", "fp32", "bf16", "int8", "int4", "lut4", "stored")
"""Of weights in memory: formats of `engine.formats` that a user may choose."""

MODEL_CARD, COMPUTING_CARD, EXPERTS_CARD = "Model", "Speed and memory", "For experts"
_AUTOMATIC = {"auto": "Automatic"}
LEAST_BUDGET = 2**28
"""Bytes: less holds no model, and was not meant."""
LEAST_CONTEXT = 512
"""Tokens: less holds no conversation."""
_EMULATED = r"emulated:[\w.-]+(\?host=(fixed|only))?"
_DEVICE = re.compile(rf"(cuda|xpu):\d+(,\1:\d+)*|{_EMULATED}(,{_EMULATED})*", re.ASCII)


def is_device(text: str) -> bool:
    """Whether a device can be called so; whether it exists is checked when a model is loaded."""
    return text in ("auto", "cpu", "cuda", "xpu", "mps") or _DEVICE.fullmatch(text) is not None


def _of_run(default: V, kind: Kind, **words: Any) -> V:
    return entry(default, kind, applies="load", group="where and how the model runs", **words)


def _of_cache(default: V, kind: Kind, **words: Any) -> V:
    group = "the expert cache, for models bigger than the graphics card"
    return entry(default, kind, applies="load", group=group, **words)


def _of_drawing(default: V, kind: Kind, **words: Any) -> V:
    return entry(default, kind, group="how tokens are chosen", **words)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model and the resources it may use.  `None` means: let the engine decide.

    A field that is a setting is all that an option of every verb that runs a model, a value in the settings file and a
    row of the Settings page need.

    Attributes:
        model: `starter`, a library name, or the path of a checkpoint directory.
        device: `auto`, `cpu`, `cuda` (every card), `cuda:N`, `xpu` likewise for Intel's,
            several with commas, `emulated:NAME` or `emulated:NAMExN` for N of them.
        threads: `None` is one per fast physical core.
        context_tokens: `None` is the model's own limit.
        cache_slots: `None` is as many as fit, 0 keeps none.
        cache_ways: slots of each layer (N indexes of M ways); `None` lets all layers share one pool.
        misses: how a miss (an expert that is not on the device) is served: `mixed` computes it on the CPU or fetches
            it, whichever finishes first; the others are for measurements: `cpu`, `fetch`, `off` (as mixed, without a
            cache) and `layer` (every layer is fetched whole, one ahead).
        sharing: `auto` is as a plan says, and layers without one.
        speculation: `heads` also loads the layer that guesses tokens, where a checkpoint has one and the CPU computes
            the model.
        kv_precision: `auto` is the model's own type; `int8` takes half of that, with a scale for each head and token.
            A model that cannot use it keeps its own, and its note says so.
    """

    model: str
    device: str = _of_run(
        "auto",
        Choice(("auto", "cpu"), {**_AUTOMATIC, "cpu": "Processor only"}, others=is_device),
        name="Runs on",
        help="Automatic takes the graphics card, if there is one, and the processor for what does not fit.",
        card=COMPUTING_CARD,
        option="--device",
        words="auto, cpu, cuda, xpu or emulated:NAME",
        metavar="D",
    )
    precision: str = _of_run(
        "auto",
        Choice(PRECISIONS, _AUTOMATIC),
        name="Precision",
        help="Automatic keeps the best that fits. Lower precision takes less memory and is faster.",
        card=COMPUTING_CARD,
        option="--precision",
        words="of the weights in memory; auto keeps the best that fits, stored keeps those of the file",
    )
    vram_bytes: int | None = _of_run(
        None,
        Size(LEAST_BUDGET),
        name="Graphics memory to use",
        help="For experts that are used often; the rest is left to other programs.",
        card=COMPUTING_CARD,
        option="--vram",
        words="limit of video memory, such as 8GB",
        metavar="SIZE",
    )
    ram_bytes: int | None = _of_run(
        None,
        Size(LEAST_BUDGET),
        name="RAM to use",
        help="For the model; what does not fit is read from the disk again and again.",
        card=COMPUTING_CARD,
        option="--ram",
        words="limit of RAM, such as 512MiB",
        metavar="SIZE",
    )
    threads: int | None = _of_run(
        None,
        Number(1, 1024),
        name="CPU threads",
        help="Automatic uses one per core. Fewer leave room for other programs.",
        card=COMPUTING_CARD,
        option="--threads",
        words="number of CPU threads",
        metavar="N",
    )
    context_tokens: int | None = _of_run(
        None,
        Number(1),
        option="--context",
        words="longest context, in tokens (default: the model's own)",
        metavar="N",
    )
    cache_slots: int | None = _of_cache(
        None,
        Number(0, 10**7),
        name="Experts on each card",
        help="Automatic keeps as many as fit; 0 keeps none.",
        card=EXPERTS_CARD,
        option="--cache-slots",
        words="experts cached on each device (default: as many as fit)",
        metavar="N",
    )
    cache_ways: int | None = _of_cache(
        None,
        Number(1, 10**6),
        name="Slots for each layer",
        help="Automatic lets all layers share the slots; a number gives each layer that many of its own.",
        card=EXPERTS_CARD,
        option="--cache-ways",
        words="slots per layer (default: one pool for all layers)",
        metavar="M",
    )
    cache_policy: CachePolicy = _of_cache(
        "auto",
        Choice(
            CACHE_POLICIES,
            {
                **_AUTOMATIC,
                "lru": "Recently used ones",
                "fifo": "Newest ones",
                "lfu": "Often used ones",
                "lfru": "Recently and often used ones",
                "random": "Random ones",
                "static": "Popular ones, fixed",
            },
        ),
        name="Which experts stay on the card",
        help="Automatic watches which rule would have kept the right ones, and takes that one.",
        card=COMPUTING_CARD,
        option="--cache-policy",
        words="eviction policy of the expert cache",
    )
    misses: Misses = _of_cache(
        "mixed",
        Choice(
            MISSES,
            {
                "mixed": "Whichever is faster",
                "cpu": "Processor computes",
                "fetch": "Card fetches",
                "off": "Nothing is kept",
                "layer": "Whole layers",
            },
        ),
        name="Experts that are not on the card",
        help="All but the first are for comparisons.",
        card=EXPERTS_CARD,
        option="--misses",
        words="how cache misses are served; all but mixed are for measurements",
    )
    prefetch: Prefetch = _of_cache(
        "auto",
        Choice(
            PREFETCHES,
            {
                **_AUTOMATIC,
                "off": "Off",
                "previous": "Those of the last token",
                "gate": "The next layer’s router",
                "correlation": "What usually follows",
                "mlp": "A trained predictor",
            },
        ),
        name="Guessing which experts come next",
        help="Guessed experts are copied to the card in advance. Automatic uses what pays off, if anything does.",
        card=EXPERTS_CARD,
        option="--prefetch",
        words="predictor of later layers' experts; auto uses the best one, if any pays off",
    )
    graphs: Graphs = _of_run(
        "auto",
        Choice(get_args(Graphs), {**_AUTOMATIC, "on": "On", "off": "Off"}),
        name="Replay steps on the card",
        help="The card replays a recorded step (a CUDA graph) instead of being told each operation.",
        card=EXPERTS_CARD,
        option="--graphs",
        words="whether a card replays decode steps as graphs; auto does on real cards",
    )
    sharing: Sharing = _of_run(
        "auto",
        Choice(get_args(Sharing), {**_AUTOMATIC, "layers": "By layers", "experts": "By experts"}),
        name="Several graphics cards",
        help="By layers, each card has a run of layers; by experts, each has a part of every layer’s experts.",
        card=EXPERTS_CARD,
        option="--sharing",
        words="several cards: layers gives each a run of layers, experts each a part of every layer's experts",
    )
    speculation: Guesses = _of_run(
        "auto",
        Choice(get_args(Guesses), {"auto": "Where it pays", "heads": "With the model’s own layer", "off": "Off"}),
        name="Speculative decoding",
        help="Answers that quote, such as edits of a text, come faster: likely next words are tried together, only as "
        "long as that pays. Answers stay the same.",
        card=MODEL_CARD,
        option="--speculation",
        words="speculative decoding: answers that quote are drafted and checked together where that is faster; answers "
        "stay the same. heads: also loads a model's own layer for drafting (DeepSeek-V3, GLM-4.5, Qwen3-Next, "
        "Qwen3.5)",
    )
    kv_precision: KvPrecision = _of_run(
        "auto",
        Choice(get_args(KvPrecision), {"auto": "As in the model"}),
        name="Keys and values",
        help="What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly "
        "(with the starter, perplexity rose by 0.08%).",
        card=MODEL_CARD,
        option="--kv-precision",
        words="of keys and values: int8 takes about half the memory, so that longer contexts and more rows fit",
    )

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
THINKINGS: tuple[Thinking, ...] = get_args(Thinking)
_THINKING_NAMES = {
    "auto": "As the model does", "off": "Off", "on": "On", "low": "Low", "medium": "Medium", "high": "High"
}  # fmt: skip

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
        top_p: keep the smallest set whose probability reaches p; 1 keeps all.
        repetition_penalty: divides (multiplies, if negative) logits of tokens already in the context; 1 is off.
        seed: same seed, same prompt, same machine: same tokens (docs/command-line.md says where).  `None` draws a fresh
            one.
        stop: strings that end the answer, excluded from it.
        beams: 1 is none.  Beam search ignores temperature and its filters.
        dry_multiplier: a token that would prolong a repetition of n tokens loses
            dry_multiplier * dry_base^(n - dry_allowed_length).
        dry_range: how many of the last tokens are searched for repetitions, prompts and earlier answers included.
        presence_penalty, frequency_penalty: subtracted from the logit of a token that the answer contains: once, and
            once for each time (OpenAI's); 0 is off.
        logit_bias: (token id, added to its logit), for any number of tokens.
        thinking: whether, and how much, the model reasons before its answer, where its chat template can tell it;
            `auto` is as the model does, or not at all if the answer must satisfy a schema.
    """

    temperature: float = _of_drawing(
        0.0,
        Number(0, 10, whole=False, step=0.1),
        option="--temperature",
        words="0 always takes the most likely token",
        metavar="X",
        name="Temperature",
        help="0 always takes the likeliest token; higher is more varied",
    )
    top_k: int = _of_drawing(
        0,
        Number(0, allowed="0 (off) or more", special="off"),
        option="--top-k",
        words="sample from the K most likely tokens; 0 is all",
        metavar="K",
        name="Top-k",
        help="Sample from the k likeliest tokens",
    )
    top_p: float = _of_drawing(
        1.0,
        Number(_LEAST, 1, f"above 0 and at most 1 (below {_LEAST} counts as 0)", whole=False, step=0.05),
        option="--top-p",
        words="sample from the most likely tokens with total probability P; 1 is all",
        metavar="P",
        name="Top-p",
        help="Sample from the likeliest tokens with a total probability of p; 1 is off",
    )
    min_p: float = _of_drawing(
        0.0,
        Number(0, 1, "at least 0 and below 1", below=True, whole=False, step=0.01),
        option="--min-p",
        words="drop tokens less likely than P times the most likely one",
        metavar="P",
        name="Min-p",
        help="Drop tokens below this share of the likeliest one's probability; 0 is off",
    )
    repetition_penalty: float = _of_drawing(
        1.0,
        Number(_LEAST, 10, f"above 0 and at most 10 (below {_LEAST} counts as 0)", whole=False, step=0.05),
        option="--repetition-penalty",
        words="above 1 makes repetition less likely",
        metavar="X",
        name="Repetition penalty",
        help="Above 1, tokens already used become less likely; 1 is off",
    )
    seed: int | None = _of_drawing(
        None,
        Number(0, 2**63 - 1, "a whole number from 0 to 9223372036854775807", special="random"),
        option="--seed",
        words="the same seed gives the same answer on the same machine",
        metavar="S",
        name="Seed",
        help="The same seed gives the same answer to the same chat",
    )
    stop: tuple[str, ...] = _of_drawing(
        (),
        Texts(),
        option="--stop",
        words="end an answer before S; may be repeated",
        metavar="S",
        name="Stop strings",
        help="An answer ends before the first of these",
    )
    max_tokens: int = _of_drawing(
        512,
        Number(1),
        option="--max-tokens",
        words="longest answer (default 512)",
        metavar="N",
        name="Max tokens",
        help="Answers stop at this length",
    )
    beams: int = _of_drawing(
        1,
        Number(1, 64),
        option="--beams",
        words="beam search with width B",
        metavar="B",
        name="Beams",
        help="Beam search if above 1; ignores temperature, top-k, top-p and min-p",
    )
    dry_multiplier: float = _of_drawing(
        0.0,
        Number(0, 100, "between 0 (off) and 100", whole=False, step=0.1),
        option="--dry-multiplier",
        words='strength of DRY ("don\'t repeat yourself"), which ends loops; 0 is off, 0.8 is usual',
        metavar="X",
        name="Loop guard",
        help="Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual",
    )
    dry_base: float = _of_drawing(
        1.75,
        Number(1, 10, whole=False, step=0.05),
        option="--dry-base",
        words="how fast DRY grows with each repeated token (default 1.75)",
        metavar="X",
        name="Guard: growth",
        help="How much stronger the loop guard gets with each repeated token",
    )
    dry_allowed_length: int = _of_drawing(
        2,
        Number(0),
        option="--dry-allowed-length",
        words="repetitions shorter than N tokens are free of DRY (default 2)",
        metavar="N",
        name="Guard: length",
        help="Repetitions shorter than this many tokens are free",
    )
    dry_range: int = _of_drawing(
        -1,
        Number(-1, allowed="-1 (the answer), 0 (off) or more", special="answer"),
        option="--dry-range",
        words="DRY searches the last N tokens; -1 is the answer itself (default), 0 is off",
        metavar="N",
        name="Guard: range",
        help="How many of the last tokens, earlier messages included, are searched; by default only the answer",
    )
    dry_breakers: tuple[str, ...] = _of_drawing(
        DRY_BREAKERS,
        Texts(escapes=True),
        option="--dry-breaker",
        words="DRY counts no repetition across S; may be repeated; none for no breakers (default: line break, "
        "colon, double quote, asterisk)",
        metavar="S",
        name="Guard: ends at",
        help="Repetitions are not followed across these texts; \\n is a line break",
    )
    presence_penalty: float = _of_drawing(
        0.0,
        Number(-2, 2, whole=False, step=0.1),
        name="Presence penalty",
        help="Makes every token that the answer has already less likely, once; 0 is off",
    )
    frequency_penalty: float = _of_drawing(
        0.0,
        Number(-2, 2, whole=False, step=0.1),
        name="Frequency penalty",
        help="Makes tokens less likely with each time that the answer has them already; 0 is off",
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    thinking: Thinking = _of_drawing(
        "auto",
        Choice(THINKINGS, _THINKING_NAMES),
        option="--thinking",
        words="whether, and how much, the model thinks before it answers, if its chat template can tell it "
        "(default: auto, as the model does)",
        name="Thinking",
        help="Whether the model reasons before it answers; its thoughts count as tokens of the answer",
    )

    def __post_init__(self) -> None:
        for setting in settings_of(SamplingParams):
            value, kind = getattr(self, setting.key), setting.kind
            if isinstance(kind, Number) and setting.key != "seed" and not kind.holds(value):
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{setting.key} is {value}, but must be {kind.words}.")
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
        policy: how a card runs the rows, by hand: JSON, as `plan --json` prints it; empty: the planner's.
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
    policy: str = ""
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

"""What one training run is: toggles, sizes, training constants, and what each toggle runs as in a tier.

A row of config/variants.tsv, a tier (config/<tier>.yaml) and a preset make one frozen `Config`. Every toggle is an
enum, so that no code branches on a variant's name, and a new row is a new variant. Anything unknown is a ValueError
of one line.
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import yaml

from gem.sizes import ALL_SIZES, PRESETS, SIZES, EventSize, ModelConfig, positive

__all__ = ["ALL_SIZES", "PRESETS", "SIZES", "EventSize", "ModelConfig"]

ROOT = Path(__file__).resolve().parent.parent


class Layout(StrEnum):
    """Padded: every event tensor is [batch, longest, width] with a mask. Jagged: packed rows, no padding anywhere."""

    PADDED = "padded"
    JAGGED = "jagged"


class AttentionImpl(StrEnum):
    PADDED = "padded"
    VARLEN = "varlen"
    V1 = "v1"
    V2 = "v2"
    V3 = "v3"
    V4 = "v4"


class GdpaImpl(StrEnum):
    EAGER = "eager"
    TRITON = "triton"
    TLX = "tlx"


class SelfAttention(StrEnum):
    FULL = "full"
    WINDOW = "window"
    BLOCK = "block"


class RotaryMode(StrEnum):
    SEPARATE = "separate"
    FUSED = "fused"


class NormMode(StrEnum):
    SEPARATE = "separate"
    FUSED = "fused"


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


class Pooling(StrEnum):
    PMA = "pma"
    HSP = "hsp"


class Precision(StrEnum):
    BF16 = "bf16"
    MX_ATTENTION = "mx_attention"
    MX_MLP = "mx_mlp"
    MX_FULL = "mx_full"


class MxRecipe(StrEnum):
    NONE = "none"
    NAIVE = "naive"
    RCEIL = "rceil"
    HADAMARD = "hadamard"
    STOCHASTIC = "stochastic"
    WGRAD_HIGH = "wgrad_high"
    LATE_BF16 = "late_bf16"
    FULL = "full"


class Checkpointing(StrEnum):
    NONE = "none"
    UNIFORM = "uniform"
    REGION = "region"


class SavedActivations(StrEnum):
    """Format in which a layer's saved tensors wait for the backward."""

    FULL = "full"
    FP8 = "fp8"
    MX4 = "mx4"


class Launch(StrEnum):
    """How kernels of a training step reach a GPU: one by one, or forward and backward as one CUDA graph."""

    EAGER = "eager"
    GRAPH = "graph"


class Balance(StrEnum):
    NONE = "none"
    LOCAL = "local"
    BBS = "bbs"


class OptimizerMode(StrEnum):
    FOREACH = "foreach"
    FUSED = "fused"


@dataclass(frozen=True)
class Toggles:
    """The columns of variants.tsv that change what runs. Field names are column names."""

    layout: Layout = Layout.JAGGED
    attention_impl: AttentionImpl = AttentionImpl.VARLEN
    gdpa_impl: GdpaImpl = GdpaImpl.EAGER
    self_attention: SelfAttention = SelfAttention.FULL
    rotary: RotaryMode = RotaryMode.SEPARATE
    norm: NormMode = NormMode.SEPARATE
    compskip: Switch = Switch.OFF
    pooling: Pooling = Pooling.PMA
    sequence: Switch = Switch.ON
    precision: Precision = Precision.BF16
    mx_recipe: MxRecipe = MxRecipe.NONE
    checkpointing: Checkpointing = Checkpointing.NONE
    saved_activations: SavedActivations = SavedActivations.FULL
    balance: Balance = Balance.NONE
    compile: Switch = Switch.OFF
    optimizer: OptimizerMode = OptimizerMode.FOREACH
    launch: Launch = Launch.EAGER

    def __post_init__(self):
        if self.layout is Layout.PADDED:
            if self.attention_impl is not AttentionImpl.PADDED:
                raise ValueError(
                    f"layout: padded runs on attention_impl padded only, got {self.attention_impl.value!r}; "
                    "allowed: padded, or layout jagged"
                )
            if self.gdpa_impl is not GdpaImpl.EAGER:
                raise ValueError(f"layout: padded runs on gdpa_impl eager only, got {self.gdpa_impl.value!r}")
            for name in ("rotary", "norm"):
                if getattr(self, name).value == "fused":
                    raise ValueError(
                        f"layout: padded runs on {name} separate only, got 'fused'; the fused ops are jagged"
                    )
        if self.launch is Launch.GRAPH:
            self._check_graph()
        if (self.precision is Precision.BF16) != (self.mx_recipe is MxRecipe.NONE):
            raise ValueError(
                f"mx_recipe: {self.mx_recipe.value!r} does not go with precision {self.precision.value!r}; "
                "precision bf16 takes mx_recipe none, every other precision a recipe"
            )

    def _check_graph(self) -> None:
        """What a CUDA graph cannot hold: an op that looks at lengths on the host, or leaves rows past the end alone."""
        refused = {
            "layout": self.layout is Layout.PADDED,
            "attention_impl": self.attention_impl in (AttentionImpl.PADDED, AttentionImpl.VARLEN),
            "gdpa_impl": self.gdpa_impl is GdpaImpl.EAGER,
        }
        for name, bad in refused.items():
            if bad and self.sequence is Switch.ON:
                raise ValueError(
                    f"launch: graph does not go with {name} {getattr(self, name).value!r}; allowed: layout jagged, "
                    "attention_impl v1 to v4, gdpa_impl triton or tlx"
                )


TOGGLE_TYPES: dict[str, type[StrEnum]] = {
    "layout": Layout,
    "attention_impl": AttentionImpl,
    "gdpa_impl": GdpaImpl,
    "self_attention": SelfAttention,
    "rotary": RotaryMode,
    "norm": NormMode,
    "compskip": Switch,
    "pooling": Pooling,
    "sequence": Switch,
    "precision": Precision,
    "mx_recipe": MxRecipe,
    "checkpointing": Checkpointing,
    "saved_activations": SavedActivations,
    "balance": Balance,
    "compile": Switch,
    "optimizer": OptimizerMode,
    "launch": Launch,
}
DESCRIPTIVE_COLUMNS = ("variant", "group", "base", "note")


@dataclass(frozen=True)
class TrainConfig:
    """Constants of the training loop. Rates are per optimiser, warm-up is linear in steps, clipping is by global
    norm. decay_share: the last share of the steps over which the dense rate falls linearly to 0."""

    batch_size: int = 128
    epochs: int = 1
    dense_lr: float = 2e-3
    table_lr: float = 5e-2
    weight_decay: float = 1e-2
    clip_norm: float = 1.0
    warmup_share: float = 0.1
    decay_share: float = 0.0
    seeds: tuple[int, ...] = (0, 1, 2)
    eval_batch_size: int = 512
    steps: int | None = None  # overrides epochs
    max_steps: int | None = None  # a cap on epochs, so that a log of any size trains in bounded time
    checkpoint_budget: float = 0.5  # share of the activations kept where column checkpointing is not "none"

    def __post_init__(self):
        if not 0 <= self.checkpoint_budget <= 1:
            raise ValueError(f"train checkpoint_budget: {self.checkpoint_budget!r}; must be in [0, 1]")
        for name in ("batch_size", "epochs", "eval_batch_size"):
            positive(f"train {name}", getattr(self, name))
        for name in ("steps", "max_steps"):
            if getattr(self, name) is not None:
                positive(f"train {name}", getattr(self, name))
        for name in ("dense_lr", "table_lr", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"train {name}: {getattr(self, name)!r}; must be > 0")
        for name in ("warmup_share", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train {name}: {getattr(self, name)!r}; must be in [0, 1]")
        if not self.seeds:
            raise ValueError("train seeds: empty; at least one seed is needed")
        for seed in self.seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
                raise ValueError(f"train seeds: {seed!r} is not an integer >= 0")


@dataclass(frozen=True)
class Implementations:
    """What the toggles run as in this tier: names known to `kernels`, or "varlen_attn" (torch's own).

    precision: the format of rows in 8 bits, "mx" (emulated) or "hopper" (real on an H100 or H200).
    """

    attention: str = "eager"
    gdpa: str = "eager"
    block_attention: str = "eager"
    norm: str = "eager"
    compile: str = "eager"
    optimizer: str = "foreach"
    launch: str = "eager"
    precision: str = "mx"


@dataclass(frozen=True)
class Config:
    """One variant in one tier at one size."""

    variant: str
    toggles: Toggles
    model: ModelConfig
    train: TrainConfig
    implementations: Implementations
    preset: str
    tier: str
    device: str = "cpu"
    dtype: str = "float32"
    row: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_variant(row: dict, tier: dict, preset: str | None = None) -> Config:
        """Config of a row of variants.tsv in a tier.

        row: column -> value, all strings. tier: the parsed <tier>.yaml. preset None: the tier's own. ValueError names
        the variant, the column and what is allowed.
        """
        variant = row.get("variant")
        if not variant:
            raise ValueError("variants: a row without an id in column 'variant'")
        unknown = [name for name in row if name not in TOGGLE_TYPES and name not in DESCRIPTIVE_COLUMNS]
        if unknown:
            allowed = ", ".join((*DESCRIPTIVE_COLUMNS, *TOGGLE_TYPES))
            raise ValueError(f"variant {variant}: unknown column {unknown[0]!r}; allowed: {allowed}")
        missing = [name for name in TOGGLE_TYPES if name not in row]
        if missing:
            raise ValueError(f"variant {variant}: column {missing[0]!r} is missing; needed: {', '.join(TOGGLE_TYPES)}")
        values = {}
        for name, kind in TOGGLE_TYPES.items():
            try:
                values[name] = kind(row[name])
            except ValueError:
                allowed = ", ".join(member.value for member in kind)
                raise ValueError(
                    f"variant {variant}: column {name!r} has unknown value {row[name]!r}; allowed: {allowed}"
                ) from None
        try:
            toggles = Toggles(**values)
        except ValueError as error:
            raise ValueError(f"variant {variant}: {error}") from None
        preset = preset or tier.get("preset")
        if preset not in ALL_SIZES:
            raise ValueError(f"unknown preset {preset!r}; allowed: {', '.join(ALL_SIZES)}")
        device = tier.get("device", "cpu")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"tier {tier.get('tier')}: unknown device {device!r}; allowed: cpu, cuda")
        dtype = tier.get("dtype", "float32")
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"tier {tier.get('tier')}: unknown dtype {dtype!r}; allowed: float32, bfloat16")
        return Config(
            variant=variant,
            toggles=toggles,
            model=ALL_SIZES[preset],
            train=_train_config(tier),
            implementations=_implementations(toggles, tier),
            preset=preset,
            tier=str(tier.get("tier", "")),
            device=device,
            dtype=dtype,
            row=dict(row),
        )

    def to_dict(self) -> dict:
        """Plain dictionary for records and summaries."""
        plain = dataclasses.asdict(self)
        plain["toggles"] = {name: value.value for name, value in plain["toggles"].items()}
        return plain

    def event_size(self, index: int) -> EventSize:
        """Size of the index-th event type of the data."""
        return self.model.events[index % len(self.model.events)]


REPLACED_BY_TRAINING = ("preset", "implementations", "data")
TRAIN_KEYS_OF_OTHERS = ("variants", *REPLACED_BY_TRAINING)


def of_training(tier: dict) -> dict:
    """The tier as its training jobs see it: section train may replace the preset, what a toggle runs as (table by
    table) and keys of section data. Steps, layers and kernels are measured at the tier's own."""
    train = tier.get("train") or {}
    merged = dict(tier)
    if "preset" in train:
        merged["preset"] = train["preset"]
    for key in ("implementations", "data"):
        if key in train:
            merged[key] = {**(tier.get(key) or {}), **train[key]}
    return merged


def _train_config(tier: dict) -> TrainConfig:
    given = dict(tier.get("train") or {})
    known = {item.name for item in dataclasses.fields(TrainConfig)}
    for name in given:
        if name not in known and name not in TRAIN_KEYS_OF_OTHERS:
            raise ValueError(f"tier {tier.get('tier')}: unknown key train.{name}; allowed: {', '.join(sorted(known))}")
    values = {name: value for name, value in given.items() if name in known}
    if "seeds" in values:
        seeds = values["seeds"]
        values["seeds"] = tuple(seeds) if isinstance(seeds, (list, tuple)) else (seeds,)
    return TrainConfig(**values)


def _implementations(toggles: Toggles, tier: dict) -> Implementations:
    table = tier.get("implementations")
    if not isinstance(table, dict):
        raise ValueError(f"tier {tier.get('tier')}: key 'implementations' is missing; it says what a toggle runs as")
    # name in the tier -> the toggle that keys it. The generation of the softmax kernels also picks the block attention.
    keys = {
        "attention": toggles.attention_impl,
        "gdpa": toggles.gdpa_impl,
        "block_attention": toggles.attention_impl,
        "norm": toggles.norm,
        "compile": toggles.compile,
        "optimizer": toggles.optimizer,
        "launch": toggles.launch,
    }
    values = {}
    for name, toggle in keys.items():
        choices = table.get(name)
        if not isinstance(choices, dict) or toggle.value not in choices:
            raise ValueError(f"tier {tier.get('tier')}: implementations.{name} has no entry for {toggle.value!r}")
        values[name] = str(choices[toggle.value])
    # Block formats of 8-bit rows: emulated MX unless the tier says "hopper".
    choices = table.get("precision") or {}
    values["precision"] = str(choices.get(toggles.precision.value, "mx"))
    if toggles.precision is not Precision.BF16 and values["precision"] == "mx":
        values["launch"] = "eager"  # emulated numerics look at lengths on the host
    return Implementations(**values)


def load_tier(name: str, root: Path = ROOT) -> dict:
    """The parsed config/<name>.yaml. ValueError names the tiers that exist."""
    path = root / "config" / f"{name}.yaml"
    if not path.is_file():
        allowed = sorted(item.stem for item in (root / "config").glob("*.yaml"))
        raise ValueError(f"unknown tier {name!r}; allowed: {', '.join(allowed)}")
    with path.open() as handle:
        tier = yaml.safe_load(handle)
    if not isinstance(tier, dict):
        raise ValueError(f"tier {name}: {path} holds no mapping")
    tier.setdefault("tier", name)
    return tier


def load_variants(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """config/variants.tsv as id -> row."""
    path = root / "config" / "variants.tsv"
    if not path.is_file():
        raise ValueError(f"variants: {path} does not exist")
    with path.open(newline="") as handle:
        rows = [
            row
            for row in csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
            if not (row.get("variant") or "").startswith("#")
        ]
    table = {}
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"variants: row {row.get('variant')!r} has another number of columns than the header")
        if row["variant"] in table:
            raise ValueError(f"variants: id {row['variant']!r} occurs twice")
        table[row["variant"]] = row
    return table


def load(variant: str, tier: str, preset: str | None = None, root: Path = ROOT, *, training: bool = False) -> Config:
    """Config by names. Unknown variant, tier or preset is a ValueError that lists what exists.

    training: as the tier's training jobs run it (`of_training`), not as its steps are timed.
    """
    parsed = load_tier(tier, root)
    parsed = of_training(parsed) if training else parsed
    variants = load_variants(root)
    if variant not in variants:
        raise ValueError(f"unknown variant {variant!r}; allowed: {', '.join(variants)}")
    return Config.from_variant(variants[variant], parsed, preset)

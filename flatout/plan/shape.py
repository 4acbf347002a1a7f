"""A model's sizes from its config.json: plain arithmetic, no weights, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flatout.errors import UsageError
from flatout.plan.families import FAMILIES, Family, family_named


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer inside a block: name below the block, input and output width, bias or not."""

    name: str
    num_in: int
    num_out: int
    bias: bool

    @property
    def num_params(self) -> int:
        return self.num_in * self.num_out + (self.num_out if self.bias else 0)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); `query_rank` 0: a full q_proj."""

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer's text part.

    `head_dim` is the width of a query or key, `value_head_dim` of a value. `moe_layers` are the layers with experts
    (each `expert_size` wide), the others have an MLP of `intermediate_size`. `sliding_window` tokens are seen by
    `num_window_layers` layers, the rest see all. `known` is False when `model_type` has no row in families.py and was
    counted as Llama-like.
    """

    model_type: str
    known: bool
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    vocab_size: int
    tied: bool
    sliding_window: int | None
    num_window_layers: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    moe_layers: tuple[int, ...]
    latent: LatentAttention | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool

    @property
    def family(self) -> Family:
        return family_named(self.model_type)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, origin: str = "config.json") -> ModelShape:
        """Read the dict of a transformers config.json; a nested `text_config` is used when there is one.

        Raises UsageError naming the key that is missing or wrong.
        """
        read = _Reader.of(config, origin)
        family = read.family
        num_layers, hidden_size = read.size("num_hidden_layers"), read.size("hidden_size")
        num_heads = read.size("num_attention_heads")
        latent = _latent(read)
        num_experts = read.first_size(("num_experts", "num_local_experts", "n_routed_experts"), 0)
        expert_size = read.first_size(("moe_intermediate_size", "intermediate_size")) if num_experts else 0
        num_window_layers = _num_window_layers(read, num_layers)
        return cls(
            model_type=read.model_type,
            known=read.model_type in FAMILIES,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=read.size("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=read.first_size(("num_key_value_heads",), num_heads),
            head_dim=latent.nope_dim + latent.rope_dim if latent else _head_dim(read, hidden_size, num_heads),
            value_head_dim=read.size("v_head_dim") if latent else _head_dim(read, hidden_size, num_heads),
            vocab_size=read.size("vocab_size"),
            tied=read.flag("tie_word_embeddings"),
            sliding_window=read.size("sliding_window") if num_window_layers else None,
            num_window_layers=num_window_layers,
            num_experts=num_experts,
            experts_per_token=read.size("num_experts_per_tok") if num_experts else 0,
            expert_size=expert_size,
            shared_expert_size=_shared_expert_size(read, expert_size),
            moe_layers=_moe_layers(read, num_layers) if num_experts else (),
            latent=latent,
            qkv_bias=read.flag(family.qkv_bias),
            out_bias=read.flag(family.out_bias),
            mlp_bias=read.flag(family.mlp_bias),
        )

    def layer_linears(self, layer: int) -> tuple[Linear, ...]:
        """Linear layers of one block by name, without the experts, which transformers keeps in one 3-d tensor."""
        return _layer_linears(self, layer)


@lru_cache(maxsize=4096)
def _layer_linears(shape: ModelShape, layer: int) -> tuple[Linear, ...]:
    attention = _latent_linears(shape, shape.latent) if shape.latent else _attention_linears(shape)
    if layer not in shape.moe_layers:
        return attention + _mlp_linears(shape, "mlp", shape.intermediate_size)
    if not shape.shared_expert_size:
        return attention
    name = "shared_expert" if shape.family.shared_expert_gate else "shared_experts"
    shared = _mlp_linears(shape, f"mlp.{name}", shape.shared_expert_size)
    gate = (Linear("mlp.shared_expert_gate", shape.hidden_size, 1, False),) if shape.family.shared_expert_gate else ()
    return attention + shared + gate


@lru_cache(maxsize=64)
def num_params(shape: ModelShape) -> int:
    """Parameters of the text model, a tied embedding counted once.

    Exact for the families of families.py (proved against transformers), but for the buffers that some MoE routers keep.
    """
    family = shape.family
    norm = shape.hidden_size * (2 if family.norm_bias else 1)
    total = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2) + norm
    total += shape.vocab_size if family.head_bias else 0
    total += shape.num_layers * (norm * family.num_layer_norms + _num_inner_norm_params(shape))
    total += shape.num_layers * (shape.num_heads if family.attention_sinks else 0)
    total += sum(linear.num_params for layer in range(shape.num_layers) for linear in shape.layer_linears(layer))
    return total + len(shape.moe_layers) * _num_expert_layer_params(shape)


def num_active_matrix_params(shape: ModelShape) -> int:
    """Entries of the blocks' weight matrices that one token meets: all linear layers, its experts and the router."""
    dense = sum(
        linear.num_in * linear.num_out for layer in range(shape.num_layers) for linear in shape.layer_linears(layer)
    )
    expert = (3 if shape.family.gated else 2) * shape.hidden_size * shape.expert_size
    return dense + len(shape.moe_layers) * (shape.experts_per_token * expert + shape.num_experts * shape.hidden_size)


def num_lora_params(shape: ModelShape, rank: int, is_target: Callable[[str], bool]) -> int:
    """Parameters of LoRA matrices A (rank x in) and B (out x rank) on the linear layers whose full name is a target."""
    return sum(
        rank * (linear.num_in + linear.num_out)
        for layer in range(shape.num_layers)
        for linear in shape.layer_linears(layer)
        if is_target(f"{shape.family.layers_path}.{layer}.{linear.name}")
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Looks a key up in the config, then in the family's defaults; errors name the key."""

    config: Mapping[str, Any]
    model_type: str
    origin: str

    @classmethod
    def of(cls, config: Mapping[str, Any], origin: str) -> _Reader:
        nested = config.get("text_config")
        if isinstance(nested, Mapping):
            # a key such as tie_word_embeddings may stand beside the nested part only
            outer = {key: config[key] for key in ("tie_word_embeddings", "vocab_size") if key in config}
            config, origin = {**outer, **nested}, f"{origin}, text_config"
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise UsageError(f"{origin}: model_type is missing; give the config.json of a transformers model")
        return cls(config, model_type, origin)

    @property
    def family(self) -> Family:
        return family_named(self.model_type)

    def get(self, key: str) -> Any:
        value = self.config.get(key)
        return self.family.defaults.get(key) if value is None else value

    def size(self, key: str) -> int:
        return self.first_size((key,))

    def first_size(self, keys: tuple[str, ...], default: int | None = None) -> int:
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"{self.origin}: {key} is {value!r}; expected a whole number")
            return value
        if default is None:
            raise UsageError(
                f"{self.origin}: {' or '.join(keys)} is missing, so a {self.model_type} model cannot be planned; "
                "give the config.json that transformers wrote"
            )
        return default

    def flag(self, key: bool | str) -> bool:
        return key if isinstance(key, bool) else bool(self.get(key))


def _head_dim(read: _Reader, hidden_size: int, num_heads: int) -> int:
    return read.first_size(("head_dim",), hidden_size // max(1, num_heads))


def _latent(read: _Reader) -> LatentAttention | None:
    if read.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        query_rank=read.first_size(("q_lora_rank",), 0),
        kv_rank=read.size("kv_lora_rank"),
        nope_dim=read.size("qk_nope_head_dim"),
        rope_dim=read.size("qk_rope_head_dim"),
    )


def _num_window_layers(read: _Reader, num_layers: int) -> int:
    kinds = read.get("layer_types") or ()
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UsageError(
            f"{read.origin}: layer_types has {unknown[0]!r}; flatout plans full_attention and sliding_attention only"
        )
    if not read.get("sliding_window") or read.get("use_sliding_window") is False:
        return 0
    if kinds:
        return list(kinds).count("sliding_attention")
    full_every = read.first_size(("sliding_window_pattern", "_sliding_window_pattern"), read.family.full_every)
    if full_every:
        return sum(1 for layer in range(num_layers) if (layer + 1) % full_every)
    first = read.first_size(("max_window_layers",), 0) if read.get("use_sliding_window") else 0
    return max(0, num_layers - first)


def _moe_layers(read: _Reader, num_layers: int) -> tuple[int, ...]:
    kinds = read.get("mlp_layer_types")
    if kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    first = read.first_size(("first_k_dense_replace",), 0)
    every = max(1, read.first_size(("decoder_sparse_step",), 1))
    dense = set(read.get("mlp_only_layers") or ())
    return tuple(
        layer for layer in range(num_layers) if layer >= first and (layer + 1) % every == 0 and layer not in dense
    )


def _shared_expert_size(read: _Reader, expert_size: int) -> int:
    return read.first_size(
        ("shared_expert_intermediate_size",), read.first_size(("n_shared_experts",), 0) * expert_size
    )


def _attention_linears(shape: ModelShape) -> tuple[Linear, ...]:
    module, names, hidden = shape.family.attention_module, shape.family.attention, shape.hidden_size
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    widths = (query, key_value, key_value) if len(names) == 4 else (query + 2 * key_value,)
    inputs = tuple(
        Linear(f"{module}.{name}", hidden, width, shape.qkv_bias)
        for name, width in zip(names[:-1], widths, strict=True)
    )
    return (*inputs, Linear(f"{module}.{names[-1]}", query, hidden, shape.out_bias))


def _latent_linears(shape: ModelShape, latent: LatentAttention) -> tuple[Linear, ...]:
    hidden, heads, bias = shape.hidden_size, shape.num_heads, shape.qkv_bias
    query = heads * shape.head_dim
    if latent.query_rank:
        queries: tuple[Linear, ...] = (
            Linear("self_attn.q_a_proj", hidden, latent.query_rank, bias),
            Linear("self_attn.q_b_proj", latent.query_rank, query, False),
        )
    else:
        queries = (Linear("self_attn.q_proj", hidden, query, False),)
    return (
        *queries,
        Linear("self_attn.kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope_dim, bias),
        Linear("self_attn.kv_b_proj", latent.kv_rank, heads * (latent.nope_dim + shape.value_head_dim), False),
        Linear("self_attn.o_proj", heads * shape.value_head_dim, hidden, shape.out_bias),
    )


def _mlp_linears(shape: ModelShape, module: str, width: int) -> tuple[Linear, ...]:
    names, hidden, bias = shape.family.mlp, shape.hidden_size, shape.mlp_bias
    up_width = 2 * width if shape.family.gated and len(names) == 2 else width
    ups = tuple(Linear(f"{module}.{name}", hidden, up_width, bias) for name in names[:-1])
    return (*ups, Linear(f"{module}.{names[-1]}", width, hidden, bias))


def _num_expert_layer_params(shape: ModelShape) -> int:
    """The router and all experts of one layer; shared experts are linear layers and counted there."""
    matrices = (3 if shape.family.gated else 2) * shape.hidden_size * shape.expert_size
    biases = 2 * shape.expert_size + shape.hidden_size + 1 if shape.family.expert_bias else 0
    return shape.num_experts * (matrices + biases + shape.hidden_size)


def _num_inner_norm_params(shape: ModelShape) -> int:
    """Norms inside attention: on queries and keys, or on the latents."""
    if shape.latent:
        return shape.latent.query_rank + shape.latent.kv_rank
    if shape.family.qk_norm == "head":
        return 2 * shape.head_dim
    if shape.family.qk_norm == "full":
        return (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 0

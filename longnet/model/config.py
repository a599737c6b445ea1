"""The shape of a LongNet decoder, as a transformers config."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longnet.attention import BLOCKS, DilationPattern

NORMS = ("rmsnorm", "layernorm")
POSITION_EMBEDDINGS = ("rope", "xpos")
INITIALIZATIONS = ("normal", "magneto")
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)


class LongNetConfig(PretrainedConfig):
    """A decoder of Llama's shape whose attention block is chosen layer by layer.

    The defaults follow Llama. The LongNet paper's own form is ``norm="layernorm"``, ``sub_layernorm=True``,
    ``initialization="magneto"``, ``position_embedding="xpos"``, ``gated_mlp=False``, ``hidden_act="gelu"``.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads, a divisor of the query heads; as many as those by default.
        head_dim: width of a head; ``hidden_size / num_attention_heads`` by default.
        hidden_act: the MLP's activation, a name of transformers' ``ACT2FN``.
        gated_mlp: ``down(act(gate(x)) * up(x))`` (SwiGLU with silu) instead of ``down(act(up(x)))``.
        norm: "rmsnorm" or "layernorm".
        norm_eps: epsilon of every norm.
        sub_layernorm: MAGNETO's further norm before the attention's and the MLP's output projection.
        position_embedding: "rope" or "xpos" (RoPE with a decay that grows with the distance).
        rope_parameters: RoPE as transformers stores it, with any of its scaling types. ``rope_theta=...`` alone is
            accepted too and lands here.
        xpos_scale_base: the distance, in positions, over which xPos decays by one power; by default 512 as in the
            paper up to 32768 positions, and a 64th of the context beyond, where 512 would overflow.
        max_position_embeddings: the context the model is made for.
        attention: the blocks, cycled over the depth; each a mapping for ``longnet.attention.build_block``, or just
            its name. By default one dilated block with a geometric pattern for ``max_position_embeddings``.
        attention_bias: biases in the attention's query, key and value projections.
        attention_output_bias: bias in the attention's output projection; as ``attention_bias`` by default.
        query_key_norm: a norm over each head's queries and keys before they are turned, as in Qwen 3.
        no_rope_layers: for each layer 1, or 0 where nothing is turned, as in SmolLM 3; by default all are.
        mlp_bias: biases in the MLP.
        dropout: on what attention and MLP add to the residual stream, in training only.
        initialization: "normal", or "magneto" (Xavier, with a depth-dependent gain on all but queries and keys).
        initializer_range: standard deviation of the normal initialization, and of the embeddings in both.
        use_cache: whether ``generate`` keeps a cache; ``forward`` does only where it is asked to.
        origin: the config of the checkpoint that was imported, as transformers stores it, for export.
    """

    model_type = "longnet"

    vocab_size: int = 384
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    gated_mlp: bool = True
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    sub_layernorm: bool = False
    position_embedding: str = "rope"
    rope_parameters: dict[str, Any] | None = None
    xpos_scale_base: float | None = None
    max_position_embeddings: int = 2048
    attention: list[Any] | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    query_key_norm: bool = False
    no_rope_layers: list[int] | None = None
    mlp_bias: bool = False
    dropout: float = 0.0
    initialization: str = "normal"
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    origin: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_numbers()
        self._check_names()
        self._resolve_heads()
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if self.position_embedding == "xpos":
            self._resolve_xpos()
        self.attention = _resolve_attention(self.attention, self.max_position_embeddings)
        if self.rope_parameters is not None:
            # transformers completes the mapping in place; the caller's own must not change.
            self.rope_parameters = dict(self.rope_parameters)
        super().__post_init__(**kwargs)
        assert self.rope_parameters is not None
        _check_name("rope_parameters['rope_type']", self.rope_parameters["rope_type"], ROPE_TYPES)

    def block_spec(self, layer: int) -> dict[str, Any]:
        """The attention block of a layer: the list is cycled over the depth."""
        assert self.attention is not None
        spec: dict[str, Any] = self.attention[layer % len(self.attention)]
        return spec

    def _check_numbers(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "vocab_size", "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                hint = "; give the tokenizer's size" if name == "vocab_size" else "; the nearest is 1"
                raise ValueError(f"{name}={value!r}: expected an integer >= 1{hint}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout!r}: expected 0 <= dropout < 1; 0.0 turns it off")
        for name in ("norm_eps", "initializer_range", "xpos_scale_base"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: expected a number above 0")
        if self.no_rope_layers is not None and len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries: expected one a layer, {self.num_hidden_layers}"
            )

    def _check_names(self) -> None:
        _check_name("hidden_act", self.hidden_act, ACT2FN)
        _check_name("norm", self.norm, NORMS)
        _check_name("position_embedding", self.position_embedding, POSITION_EMBEDDINGS)
        _check_name("initialization", self.initialization, INITIALIZATIONS)

    def _resolve_heads(self) -> None:
        heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}: expected a divisor; "
                    f"the nearest is {_nearest_divisor(self.hidden_size, heads)}, or give head_dim"
                )
            self.head_dim = self.hidden_size // heads
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}: expected an even number, since positions rotate pairs; "
                f"the nearest is {max(2, self.head_dim + 1)}"
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if self.num_key_value_heads < 1 or heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: expected a divisor of num_attention_heads={heads}; "
                f"the nearest is {_nearest_divisor(heads, self.num_key_value_heads)}"
            )

    def _resolve_xpos(self) -> None:
        # A base of context / 64 keeps every factor within 2**58 of 1, which leaves float32 and bfloat16 room to spare.
        least = self.max_position_embeddings / 64
        if self.xpos_scale_base is None:
            self.xpos_scale_base = max(512.0, least)
        if self.xpos_scale_base < least:
            raise ValueError(
                f"xpos_scale_base={self.xpos_scale_base} would overflow at max_position_embeddings="
                f"{self.max_position_embeddings}: expected at least a 64th of it; the nearest is {least}"
            )


def _resolve_attention(attention: Any, max_position_embeddings: int) -> list[dict[str, Any]]:
    if attention is None:
        pattern = DilationPattern.geometric(max_position_embeddings)
        return [{"name": "dilated", **pattern.to_config()}]
    if isinstance(attention, (str, Mapping)):
        attention = [attention]
    specs = [{"name": spec} if isinstance(spec, str) else dict(spec) for spec in attention]
    if not specs:
        raise ValueError("attention=[]: expected at least one block, for example ['dense']")
    for number, spec in enumerate(specs):
        _check_name(f"attention[{number}]['name']", spec.get("name"), BLOCKS)
    return specs


def _check_name(argument: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise ValueError(f"{argument}={value!r}: expected one of {sorted(choices)}; did you mean {nearest!r}?")


def _nearest_divisor(number: int, near: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - near))

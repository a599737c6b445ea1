"""LongNet as a transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from longnet.attention.incremental import Past, Turn

from .cache import LongNetCache
from .config import LongNetConfig
from .layers import LongNetDecoderLayer, Projection, build_norm
from .padding import find_packing, find_padding
from .reading import read
from .rope import LongNetRotaryEmbedding, document_positions

# What transformers' models may be asked for or be given, and this one does not know.
UNSUPPORTED = ("output_hidden_states", "output_attentions", "inputs_embeds")


class LongNetPreTrainedModel(PreTrainedModel):
    """What LongNet models share: the config, and how weights begin."""

    config_class = LongNetConfig
    config: LongNetConfig
    base_model_prefix = "model"
    _no_split_modules = ["LongNetDecoderLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Embeddings, the head, norms and rotary buffers begin as in every transformers model.
        super()._init_weights(module)
        if self.config.initialization == "magneto" and isinstance(module, Projection):
            init.xavier_normal_(module.weight, gain=module.magneto_gain)


class LongNetModel(LongNetPreTrainedModel):
    """The decoder without its head: token ids to hidden states.

    ``residual_dtype`` is the residual stream's, the embedding's own by default; autocast leaves that alone. ``tiles``,
    called as ``tiles(module, x, residual_dtype)``, applies the embedding and the last norm to parts of the sequence.
    """

    residual_dtype: torch.dtype | None = None
    tiles: Callable[..., Tensor] | None = None

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LongNetDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = build_norm(config, config.hidden_size)
        self.rotary_emb = LongNetRotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: LongNetCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, N, hidden) after the last norm.

        Args:
            input_ids: (B, N).
            position_ids: (B or 1, N); by default counted from a row's first token, restarting at each document.
            cu_seqlens: borders (documents + 1,) of the documents packed into a single row, from 0 to N.
            past_key_values: what was read before; the new tokens follow it, and are added to it.
            attention_mask: (B, N), with zeros where a row is padded; with a cache, (B, columns read so far + N) too.
        """
        if past_key_values is None and (padding := find_padding(attention_mask)):
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens is given with a padded attention_mask: expected one of the two")
            positions = None if position_ids is None else padding.pack(position_ids.expand_as(input_ids))
            return padding.unpack(self(padding.pack(input_ids), positions, padding.cu_seqlens))
        turn = None
        if past_key_values is not None:
            assert cu_seqlens is None, "a cache holds one document a row"
            turn = past_key_values.begin(input_ids, attention_mask)
        seq_len = input_ids.shape[1]
        if self.config.position_embedding == "xpos":
            begin = max(turn.begins) if turn else 0
            self._check_length(begin + seq_len if cu_seqlens is None else int(cu_seqlens.diff().max()))
        if position_ids is None:
            position_ids = self._positions(input_ids, cu_seqlens, turn)
        hidden = self._each_position(self.embed_tokens, input_ids)
        rotation = self.rotary_emb(hidden, position_ids)
        turned = self.config.no_rope_layers or [1] * len(self.layers)
        for number, layer in enumerate(self.layers):
            past = None if past_key_values is None or turn is None else Past(past_key_values.states[number], turn)
            hidden = layer(hidden, rotation if turned[number] else None, cu_seqlens, past)
        if past_key_values is not None and turn is not None:
            past_key_values.finish(turn, seq_len)
        return self._each_position(self.norm, hidden)

    def _each_position(self, module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = module(x) if self.tiles is None else self.tiles(module, x, self.residual_dtype)
        return out if self.residual_dtype is None else out.to(self.residual_dtype)

    def _check_length(self, seq_len: int) -> None:
        context = self.config.max_position_embeddings
        if seq_len > context:
            raise ValueError(
                f"input_ids has {seq_len} positions: xPos is scaled for max_position_embeddings={context}; "
                f"give at most that many, or set max_position_embeddings={seq_len} before the model is built"
            )

    def _positions(self, input_ids: Tensor, cu_seqlens: Tensor | None, turn: Turn | None) -> Tensor:
        seq_len = input_ids.shape[1]
        if cu_seqlens is not None:
            return document_positions(cu_seqlens.to(input_ids.device), seq_len)
        positions = torch.arange(seq_len, device=input_ids.device)[None]
        if turn is None:
            return positions
        positions = positions + turn.positions[:, None]
        if any(turn.skips):
            positions = (positions - torch.tensor(turn.skips, device=input_ids.device)[:, None]).clamp(min=0)
        return positions


class LongNetForCausalLM(LongNetPreTrainedModel, GenerationMixin):
    """The decoder with its language-model head, for training, ``generate``, and loading by the Auto classes."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__(config)
        self.model = LongNetModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """What the head is applied to, for a loss that never holds all logits. Sharded weights are whole by then."""
        hidden: Tensor = self.model(input_ids, position_ids, cu_seqlens)
        return hidden

    @classmethod
    def from_hf(
        cls,
        path_or_model: str | os.PathLike[str] | PreTrainedModel,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        **options: Any,
    ) -> LongNetForCausalLM:
        """A dense checkpoint as a LongNet; see ``longnet.model.hf.import_checkpoint`` for the options."""
        from .hf import import_checkpoint

        return import_checkpoint(path_or_model, segment_lengths, dilation_rates, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss where labels are given, as transformers' causal models have them.

        Training on long rows goes through ``model`` and ``longnet.training.loss`` instead, which never hold all logits.

        Args:
            input_ids: (B, N).
            attention_mask: as in ``LongNetModel.forward``: rows may be padded, each is as if alone.
            position_ids: as in ``LongNetModel.forward``; those of a single row that begin anew, as transformers'
                padding-free collators give them, are documents packed into it.
            labels: (B, N), not shifted: position n is scored against label n + 1. -100 is left out.
            cu_seqlens: as in ``LongNetModel.forward``.
            logits_to_keep: only the last so many positions (0: all), or the positions themselves.
            past_key_values: what was read before. Long inputs are read in pieces, in bounded memory.
            use_cache: give back a cache with what was read.
            kwargs: ``cu_seq_lens_q`` of such a collator, and what transformers' loss takes, such as
                ``num_items_in_batch``.
        """
        for name in UNSUPPORTED:
            given = kwargs.pop(name, None)
            if given is not None and given is not False:
                raise ValueError(f"{name} is given: expected none; model.model(input_ids) has the last hidden states")
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None and input_ids.shape[0] == 1 and attention_mask is None and past_key_values is None:
            cu_seqlens = find_packing(position_ids)
        if past_key_values is None and use_cache:
            past_key_values = LongNetCache(self.config)
        if past_key_values is not None and not isinstance(past_key_values, LongNetCache):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}: expected a LongNetCache(model.config), which "
                "keeps what the pattern can still see"
            )
        if past_key_values is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens is given with past_key_values: expected one document a row")
        if past_key_values is None:
            hidden = self.model(input_ids, position_ids, cu_seqlens, None, attention_mask)
        else:
            wanted = logits_to_keep if isinstance(logits_to_keep, int) else 0
            hidden = read(self.model, input_ids, past_key_values, wanted, attention_mask, position_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: expected None, since LongNet has a "
                "cache of its own, bounded by its pattern"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = LongNetCache(self.config)
        # By now a mask of ones is gone. Both are as wide as the text.
        text = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        length = next((given.shape[1] for given in text if given is not None), None)
        if isinstance(cache, LongNetCache) and length is not None and cache.columns >= length:
            raise ValueError(
                f"input_ids has {length} tokens, and past_key_values holds {cache.columns}: generate expects those and "
                "at least one more; longnet.model.generation.stream reads on with new ones alone"
            )

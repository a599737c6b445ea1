"""LongNet as a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import can_return_tuple

from .config import LongNetConfig
from .layers import LongNetDecoderLayer, Projection, build_norm
from .rope import LongNetRotaryEmbedding, document_positions


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
        self, input_ids: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Hidden states (B, N, hidden) after the last norm.

        Args:
            input_ids: (B, N).
            position_ids: (B or 1, N); by default counted from 0, restarting at each document.
            cu_seqlens: borders (documents + 1,) of the documents packed into a single row, from 0 to N.
        """
        seq_len = input_ids.shape[1]
        context = self.config.max_position_embeddings
        xpos = self.config.position_embedding == "xpos"
        if xpos and (longest := seq_len if cu_seqlens is None else int(cu_seqlens.diff().max())) > context:
            raise ValueError(
                f"input_ids has {longest} positions: xPos is scaled for max_position_embeddings={context}; "
                f"give at most that many, or set max_position_embeddings={longest} before the model is built"
            )
        if position_ids is None:
            if cu_seqlens is None:
                position_ids = torch.arange(seq_len, device=input_ids.device)[None]
            else:
                position_ids = document_positions(cu_seqlens.to(input_ids.device), seq_len)
        hidden = self._each_position(self.embed_tokens, input_ids)
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation, cu_seqlens)
        return self._each_position(self.norm, hidden)

    def _each_position(self, module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = module(x) if self.tiles is None else self.tiles(module, x, self.residual_dtype)
        return out if self.residual_dtype is None else out.to(self.residual_dtype)


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
    ) -> CausalLMOutput:
        """Logits, and the loss where labels are given, as transformers' causal models have them.

        Training on long rows goes through ``model`` and ``longnet.training.loss`` instead, which never hold all logits.

        Args:
            input_ids: (B, N).
            attention_mask: only ones; rows of different lengths are packed with ``cu_seqlens`` instead of padded.
            position_ids: as in ``LongNetModel.forward``.
            labels: (B, N), not shifted: position n is scored against label n + 1. -100 is left out.
            cu_seqlens: as in ``LongNetModel.forward``.
            logits_to_keep: only the last so many positions (0: all), or the positions themselves.
            past_key_values: must be None, since there is no key-value cache.
            use_cache: must not be True, for the same reason.
            kwargs: for transformers' loss, such as ``num_items_in_batch``.
        """
        if past_key_values is not None or use_cache:
            raise ValueError("use_cache=True: LongNet has no key-value cache; call generate with use_cache=False")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(
                "attention_mask has zeros: expected only ones, since padding is not supported; give rows of one "
                "length, one row at a time, or pack them into one row with cu_seqlens"
            )
        hidden = self.model(input_ids, position_ids, cu_seqlens)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)

"""Training steps on random tokens, without a trainer: what they take is what a real one will."""

from __future__ import annotations

import torch
from torch import Tensor

from longnet.model import LongNetForCausalLM

from .loss import linear_cross_entropy
from .optim import build_optimizer


class Rehearsal:
    """Forward, loss, backward, clipping and AdamW.

    Args:
        model: as it is to be trained, with its checkpointing and its operators.
        rows: sequences of a step.
        length: positions of each.
        dtype: of the products, by autocast; float32 for none.
        positions: (1, length) places in a longer sequence, of which these are a part.
    """

    def __init__(
        self,
        model: LongNetForCausalLM,
        rows: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        positions: Tensor | None = None,
    ) -> None:
        self.model, self.dtype, self.positions = model.train(), dtype, positions
        self.tokens = torch.randint(model.config.vocab_size, (rows, length), device=model.device)
        self.optimizer = build_optimizer(model, 1e-4, (0.9, 0.95), 1e-8, 0.1)

    def step(self) -> None:
        model, tokens = self.model, self.tokens
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = model.hidden_states(tokens, self.positions).flatten(0, 1)
            loss = linear_cross_entropy(hidden, model.lm_head.weight, tokens.flatten()).loss / tokens.numel()
        # The loss has its gradient already; one tensor of full length less in backward.
        del hidden
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

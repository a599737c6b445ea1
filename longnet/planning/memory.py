"""The memory of a training step, by part.

Counted are the tensors that the code makes, in the order in which it makes them; the allocator's rounding, the
libraries' own buffers and what torch.compile leaves out are not. C hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

from .workload import MemoryPlan, Workload

# As the loss and the offloaded activations are cut; tests hold these to be the same.
LOSS_CHUNK_ELEMENTS = 2**26
LOSS_MIN_CHUNKS = 8
HOST_BLOCK_BYTES = 2**28
# Positions of which the folded levels are held at a time, unless a segment is longer.
ATTENTION_CHUNK = 65536


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part; those of the device are not all needed at once, see ``device``.

    Attributes:
        weights: in fp32.
        gradients: in fp32.
        optimizer: AdamW's two averages.
        positions: token ids, labels and the rotation's tables.
        kept: what the layers keep between forward and backward.
        working: the most that the backward pass of one layer needs beside that.
        loss: what the last norm and the loss need between forward and backward.
        workspace: what the attention's kernels hold at a time, part of ``working``.
        host: activations in host memory.
        device: the peak.
    """

    weights: int
    gradients: int
    optimizer: int
    positions: int
    kept: int
    working: int
    loss: int
    workspace: int
    host: int
    device: int


def count_parameters(workload: Workload) -> tuple[int, int]:
    """Parameters of the whole model, and of one layer."""
    model, query, key = workload.model, workload.query_width, workload.key_width
    hidden, inner = model.hidden_size, model.intermediate_size
    per_norm = 2 if model.norm == "layernorm" else 1
    attention = hidden * (2 * query + 2 * key) + model.attention_bias * (query + 2 * key + hidden)
    maps = 3 if model.gated_mlp else 2
    mlp = maps * hidden * inner + model.mlp_bias * ((maps - 1) * inner + hidden)
    norms = per_norm * (2 * hidden + model.sub_layernorm * (query + inner))
    layer = attention + mlp + norms
    ends = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2) + per_norm * hidden
    return model.num_hidden_layers * layer + ends, layer


def predict_memory(workload: Workload, plan: MemoryPlan, kernels: bool = True) -> MemoryEstimate:
    """What a training step takes.

    Args:
        workload: what is trained.
        plan: what is kept for backward, and where.
        kernels: whether to count what the attention's kernels hold on a GPU.
    """
    total, layer = count_parameters(workload)
    layers = workload.model.num_hidden_layers
    part = _Layer(workload)
    tokens, tiled = workload.tokens, plan.tile is not None or plan.kind == "offload"
    checkpointed = -(-layers // plan.every)
    offloaded = checkpointed if plan.kind == "offload" else 0

    everything = part.attention_kept if plan.tile else part.everything
    own = {
        "none": everything,
        "selective": part.hidden + part.attended,
        "full": part.hidden,
        "offload": 0,
    }[plan.kind]
    # Weights in the number format of the products wait for backward where the layer's graph does.
    casts = layer * workload.compute_bytes if workload.precision != "fp32" else 0
    cast_layers = 0 if plan.tile else (layers if plan.kind == "none" else layers - checkpointed)
    kept = tokens * (checkpointed * own + (layers - checkpointed) * everything) + cast_layers * casts
    if tiled:
        working = tokens * part.tiled_backward(plan) + 2 * 4 * layer + casts
        working += workload.batch_size * min(plan.tile or workload.context_length, workload.context_length) * part.tile
    else:
        again = part.everything - own if plan.kind != "none" else 0
        working = tokens * (again + part.backward) + (casts if plan.kind != "none" else 0)
    workspace = _attention_workspace(workload) if kernels else 0
    working += workspace

    loss = _loss(workload) + (tokens * part.hidden if offloaded else 0)
    head = 4 * workload.model.vocab_size * workload.model.hidden_size
    weights = gradients = 4 * total
    optimizer = 8 * total
    positions = _positions(workload)
    # Backward frees a layer's activations and adds its gradients: the peak is at the last or at the first layer.
    first = kept // layers + gradients + working
    peak = max(kept + loss, kept + head + working, first, gradients)
    blocks = -(-tokens * part.hidden // HOST_BLOCK_BYTES)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        positions=positions,
        kept=kept,
        working=working,
        loss=loss,
        workspace=workspace,
        host=offloaded * blocks * HOST_BLOCK_BYTES,
        device=weights + optimizer + positions + peak,
    )


class _Layer:
    """Bytes per token of what a layer makes."""

    def __init__(self, workload: Workload) -> None:
        model, size = workload.model, workload.compute_bytes
        residual, inner, hidden = workload.residual_bytes, model.intermediate_size, model.hidden_size
        mixed = workload.precision != "fp32"
        self.hidden = residual * hidden
        self.queries_keys_values = size * (workload.query_width + 2 * workload.key_width)
        self.attended = size * workload.query_width + 4 * model.num_attention_heads
        self.attention_kept = self.hidden + self.queries_keys_values + self.attended

        # Autocast makes a copy for each product of a normed input that is not yet in the products' number format.
        copies = mixed and residual == 4
        maps = 2 if model.gated_mlp else 1
        norms = _norm(workload, hidden, residual) * 2 + size * hidden * ((3 + maps) if copies else 2)
        mlp = size * inner * 2 * maps
        if model.sub_layernorm:
            widths = workload.query_width, inner
            norms += sum(_norm(workload, width, size) + size * width for width in widths)
            norms -= sum(size * width for width in widths) if not workload.fused_norm else 0
        dropped = 2 * hidden if model.dropout > 0 else 0
        self.everything = norms + self.queries_keys_values + self.attended + mlp + dropped
        self.backward = self.hidden + 2 * size * inner
        # Within a tile there is all of what follows attention, and its gradients.
        self.tile = norms + mlp + dropped + self.backward + self.hidden

    def tiled_backward(self, plan: MemoryPlan) -> int:
        """Beside what is kept: gradients of the layer's output, input, attention; what the plan computes again."""
        gradients = 2 * self.hidden + self.attended + self.queries_keys_values
        again = {
            "none": 0,
            "selective": self.queries_keys_values,
            "full": self.queries_keys_values + self.attended,
            # The layer's own input, and the next one's on its way.
            "offload": self.queries_keys_values + self.attended + 2 * self.hidden,
        }[plan.kind]
        return gradients + again


def _norm(workload: Workload, width: int, size: int) -> int:
    """What a norm keeps per token: its input, or where it is not one kernel, what stands between its steps."""
    if workload.model.norm == "layernorm":
        return size * width + 8
    if workload.fused_norm:
        return size * width + 4
    return 2 * 4 * width + 4


def _loss(workload: Workload) -> int:
    model, size = workload.model, workload.compute_bytes
    rows = max(1, min(LOSS_CHUNK_ELEMENTS // model.vocab_size, -(-workload.tokens // LOSS_MIN_CHUNKS)))
    head = model.vocab_size * model.hidden_size
    # The last norm's input and output, the output as the products take it, and its gradient.
    copy = size if workload.precision != "fp32" and workload.residual_bytes == 4 else 0
    per_token = _norm(workload, model.hidden_size, workload.residual_bytes)
    per_token += model.hidden_size * (workload.residual_bytes + copy + size)
    logits = rows * model.vocab_size * (4 + 2 * size)
    return workload.tokens * per_token + logits + head * (4 + (size if size < 4 else 0))


def _positions(workload: Workload) -> int:
    model = workload.model
    # cos and sin of each pair in float32, twice for xPos; and the ids of tokens and labels.
    tables = 4 if model.position_embedding == "xpos" else 2
    return workload.context_length * tables * model.head_dim // 2 * 4 + workload.tokens * 2 * 8


def _attention_workspace(workload: Workload) -> int:
    """Gradients of queries, keys and values by level, held until they are added up."""
    width = workload.compute_bytes * (workload.query_width + 2 * workload.key_width)
    most = 0.0
    for spec in workload.model.attention:
        if spec["name"] == "dilated":
            longest = min(max(spec["segment_lengths"]), workload.context_length)
            positions = min(max(ATTENTION_CHUNK, longest), workload.tokens)
            shares = sum(1 / rate for rate in spec["dilation_rates"]) if spec.get("heads", "all") == "all" else 1
            most = max(most, positions * shares)
    return int(most * width)

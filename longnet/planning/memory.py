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
        workspace: what the attention's kernels and its exchange with other ranks hold at a time, part of ``working``.
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
    part, tokens = _Layer(workload), workload.tokens
    workspace = _attention_workspace(workload) if kernels else 0
    workspace += workload.share.held if workload.share else 0
    positions, loss = _positions(workload), _loss(workload, plan)
    head = 4 * workload.model.vocab_size * workload.model.hidden_size
    weights = gradients = 4 * total
    optimizer = 8 * total

    # The plan of each layer, then what it keeps and needs.
    plans = [
        plan if number % plan.every == 0 else MemoryPlan("none", tile=plan.tile)
        for number in range(workload.model.num_hidden_layers)
    ]
    kept = [tokens * part.kept(each) + _kept_casts(workload, each, layer) for each in plans]
    working = [_working(workload, part, each, layer, workspace) for each in plans]
    # The newest of the offloaded inputs has not left yet when the loss is computed.
    peaks = [sum(kept) + loss + (tokens * part.hidden if plans[-1].kind == "offload" else 0), gradients]
    # Going back through the layers frees what they kept and adds their gradients.
    for number, needed in enumerate(working):
        later = head + 4 * layer * (len(plans) - 1 - number)
        peaks.append(sum(kept[: number + 1]) + later + needed)
    offloaded = sum(each.kind == "offload" for each in plans)
    blocks = -(-tokens * part.hidden // HOST_BLOCK_BYTES)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        positions=positions,
        kept=sum(kept),
        working=max(working),
        loss=loss,
        workspace=workspace,
        host=offloaded * blocks * HOST_BLOCK_BYTES,
        device=weights + optimizer + positions + max(peaks),
    )


def bytes_made(workload: Workload) -> int:
    """What a layer makes of a token, forward."""
    return _Layer(workload).everything


def _working(workload: Workload, part: _Layer, plan: MemoryPlan, layer: int, workspace: int) -> int:
    """What going back through one layer takes beside what it kept; ``layer`` is its number of parameters."""
    casts = layer * workload.compute_bytes if workload.precision != "fp32" else 0
    if plan.tile is None and plan.kind != "offload":
        again = part.everything - part.kept(plan)
        # When attention's kernels run, the MLP's activations are gone.
        mlp = workload.tokens * (again + part.backward)
        attention = workload.tokens * (again - part.after + part.attention_backward) + workspace
        return max(mlp, attention) + (0 if plan.kind == "none" else casts)
    share = min(1.0, (plan.tile or workload.context_length) / workload.context_length)
    # Beside the activations, the sums of the weights' gradients.
    return workload.tokens * part.tiled_backward(plan, share) + 4 * layer + casts + workspace


def _kept_casts(workload: Workload, plan: MemoryPlan, layer: int) -> int:
    """Weights in the products' number format wait for backward where a layer's whole graph does."""
    whole = plan.kind == "none" and plan.tile is None and workload.precision != "fp32"
    return layer * workload.compute_bytes if whole else 0


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
        norm = _norm(workload, hidden, residual)
        before = norm + size * hidden * (3 if copies else 1)
        after = norm + size * hidden * (maps if copies else 1) + size * inner * 2 * maps
        if model.sub_layernorm:
            after += sum(_norm(workload, width, size) for width in (workload.query_width, inner))
        if model.dropout > 0:
            after += 2 * hidden
        self.everything = before + self.queries_keys_values + self.attended + after
        self.after = after
        # The gradients of the layer's output and, at the widest point, of the MLP's inner results. Compiled, the
        # activation's gradient takes the place of one of them.
        self.backward = self.hidden + (maps - workload.compiled) * size * inner
        # Those of the layer's output, of the attention's, and of queries, keys and values.
        self.attention_backward = self.hidden + self.attended + self.queries_keys_values
        # What other ranks' keys add is summed in float32, in copies of those rows beside the kernels' result.
        touched = workload.share.touched if workload.share else 0.0
        self.summed = int(touched * 4 * (workload.query_width + 2 * workload.key_width))
        self.attention_backward += self.summed
        # What a tile's output and gradients add to what its graph keeps.
        self.tile = after + self.backward

    def kept(self, plan: MemoryPlan) -> int:
        """Between forward and backward, on the device."""
        everything = self.attention_kept if plan.tile else self.everything
        kinds = {"none": everything, "selective": self.hidden + self.attended, "full": self.hidden, "offload": 0}
        return kinds[plan.kind]

    def tiled_backward(self, plan: MemoryPlan, share: float) -> int:
        """Beside what is kept: gradients of the layer's output and input, what the plan computes again, and the larger
        of a tile (this share of the tokens) and of the attention's backward pass."""
        again = {
            "none": 0,
            "selective": self.queries_keys_values,
            "full": self.queries_keys_values + self.attended,
            # The layer's own input, and the next one's on its way.
            "offload": self.queries_keys_values + self.attended + 2 * self.hidden,
        }[plan.kind]
        # A single tile is not copied into anything of full length.
        gradients = 2 * self.hidden + self.attended if share < 1 else self.hidden
        return gradients + again + max(self.queries_keys_values + self.summed, int(share * self.tile))


def _norm(workload: Workload, width: int, size: int) -> int:
    """What a norm keeps per token: its input, or where it is not one kernel, what stands between its steps."""
    if workload.model.norm == "layernorm":
        return size * width + 8
    if workload.fused_norm:
        return size * width + 4
    return 2 * 4 * width + 4


def _loss(workload: Workload, plan: MemoryPlan) -> int:
    model, size = workload.model, workload.compute_bytes
    rows = max(1, min(LOSS_CHUNK_ELEMENTS // model.vocab_size, -(-workload.tokens // LOSS_MIN_CHUNKS)))
    head = model.vocab_size * model.hidden_size
    # The last norm's input and output, the output as the products take it, and its gradient.
    copy = size if workload.precision != "fp32" and workload.residual_bytes == 4 else 0
    whole = workload.residual_bytes * model.hidden_size
    per_token = whole if plan.tile else _norm(workload, model.hidden_size, workload.residual_bytes)
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

"""The small kernels of a training step, forward and backward: eager torch, torch.compile and liger-kernel.

    pip install liger-kernel; python scripts/benchmark_kernels.py            # the shapes of 125m and 1b, on a GPU

Norm, RoPE and SwiGLU; the loss by each backend; projections apart and joined into one product. Times in ms, medians of
interleaved runs. liger-kernel's are left out where it is not installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longnet.model.rope import rotate
from longnet.training.loss import linear_cross_entropy

# Hidden size, intermediate size of a gated MLP with as many weights, heads, vocabulary.
SHAPES = {"125m": (768, 2048, 12, 50304), "1b": (2048, 8192, 32, 128256)}
HEAD_DIM = 64

Work = Callable[[], object]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def differentiated(function: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor) -> Work:
    out = function(*inputs)
    grads = [torch.randn_like(x) for x in ([out] if isinstance(out, Tensor) else out)]

    def work() -> object:
        out = function(*inputs)
        return torch.autograd.grad([out] if isinstance(out, Tensor) else list(out), inputs, grads)

    return work


def contenders(tokens: int, hidden_size: int, inner: int, heads: int, vocab_size: int) -> dict[str, dict[str, Work]]:
    x, scale = draw(1, tokens, hidden_size), draw(hidden_size, dtype=torch.float32)
    gate, up = draw(1, tokens, inner), draw(1, tokens, inner)
    q, k = draw(1, tokens, heads, HEAD_DIM), draw(1, tokens, heads, HEAD_DIM)
    cos, sin = (torch.randn(1, tokens, 1, HEAD_DIM // 2, device="cuda") for _ in range(2))
    qkv = [draw(hidden_size, hidden_size, dtype=torch.float32) for _ in range(3)]
    gate_up = [draw(inner, hidden_size, dtype=torch.float32) for _ in range(2)]
    head = draw(vocab_size, hidden_size, dtype=torch.float32)
    labels = torch.randint(vocab_size, (tokens,), device="cuda")

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, (hidden_size,), scale.to(x.dtype), 1e-5)

    def rope(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def apart(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [F.linear(x, weight.to(x.dtype)) for weight in weights]

    def joined(x: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        return F.linear(x, torch.cat(weights).to(x.dtype)).split([len(weight) for weight in weights], -1)

    def loss(backend: str) -> Callable[..., Tensor]:
        return lambda x, head: linear_cross_entropy(x[0], head, labels, backend=backend).loss

    found = {
        name: {"eager": differentiated(function, *inputs), "compiled": differentiated(torch.compile(function), *inputs)}
        for name, function, inputs in (
            ("norm", norm, (x, scale)),
            ("rope", rope, (q, k)),
            ("swiglu", swiglu, (gate, up)),
        )
    }
    found["loss"] = {backend: differentiated(loss(backend), x, head) for backend in ("chunked", "fused")}
    for name, weights in (("q, k, v", qkv), ("gate, up", gate_up)):
        found[name] = {
            "apart": differentiated(torch.compile(apart), x, *weights),
            "joined": differentiated(torch.compile(joined), x, *weights),
        }
    if find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import functional as liger

        def liger_rope(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            tables = (torch.cat((table, table), -1)[:, :, 0] for table in (cos, sin))
            turned: Sequence[Tensor] = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), *tables)
            return turned

        def liger_loss(x: Tensor, head: Tensor) -> Tensor:
            result: Tensor = liger.liger_fused_linear_cross_entropy(
                x[0], head.to(x.dtype), labels, reduction="sum", accum_dtype=torch.float32
            )
            return result

        found["norm"]["liger"] = differentiated(lambda x, s: liger.liger_rms_norm(x, s.to(x.dtype), 1e-5), x, scale)
        found["rope"]["liger"] = differentiated(liger_rope, q, k)
        found["swiglu"]["liger"] = differentiated(liger.liger_swiglu, gate, up)
        found["loss"]["liger"] = differentiated(liger_loss, x, head)
    return found


def measure(works: dict[str, Work], repeats: int) -> dict[str, float]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for _ in range(repeats + 2):
        for name, work in works.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    # The first two runs compile and warm up.
    return {name: median(begin.elapsed_time(end) for begin, end in series[2:]) for name, series in events.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these are kernels of a GPU, and torch sees none")
    table = Table("shape", "part", "ms", box=box.SIMPLE)
    for shape, sizes in SHAPES.items():
        for part, works in contenders(options.tokens, *sizes).items():
            times = measure(works, options.repeats)
            table.add_row(shape, part, ", ".join(f"{name} {time:.2f}" for name, time in times.items()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

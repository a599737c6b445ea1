"""What a job takes, in memory and FLOPs, by every plan that it could train by; before anything is built.

    python scripts/plan.py model=125m data.context_length=1048576 data.batch_size=1 trainer.residual=bf16
    python scripts/plan.py model=1b data.context_length=131072 data.batch_size=1 --device-gib 80 --host-gib 200
    python scripts/plan.py model=125m data.context_length=65536 data.batch_size=1 --measure    # the plans that fit

Takes the keys of train.py. The memory is this machine's unless it is given. --measure trains two steps by each plan
that fits, on random tokens, and shows the peak beside the prediction, and the second step's tokens per second.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from rich import box
from rich.console import Console
from rich.table import Table

from longnet.config import JobConfig, load, resolve_attention
from longnet.data.tokenizer import ByteTokenizer
from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.planning import MemoryPlan, Workload, candidate_plans, choose_plan, count_flops, predict_memory
from longnet.planning.flops import recomputed_flops
from longnet.training import activation_checkpointing
from longnet.training.loss import linear_cross_entropy
from longnet.training.memory import device_bytes, host_bytes
from longnet.training.optim import build_optimizer
from longnet.training.placement import Placement, place
from longnet.training.pretrained import FROM_CHECKPOINT, pretrained_config
from longnet.training.throughput import synchronize

CONF = Path(__file__).resolve().parents[1] / "conf"
GIB = 2**30


def main() -> None:
    arguments = parse_arguments()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", arguments.overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        job = load(cfg)
    placement = place(job.trainer)
    device = torch.device(placement.accelerator)
    workload = build_workload(job, placement)
    room = arguments.device_gib * GIB if arguments.device_gib else device_bytes(device)
    host = arguments.host_gib * GIB if arguments.host_gib else host_bytes()
    plans = candidate_plans(workload, host)
    chosen = choose_plan(workload, plans, room)

    console = Console()
    show_workload(console, workload)
    table = Table(box=box.SIMPLE_HEAD)
    parts = ("device", "kept", "working", "loss", "host")
    table.add_column("kind, GiB:")
    for column in ("tile", *parts, "again", *(["peak", "tokens/s"] if arguments.measure else [])):
        table.add_column(column, justify="right")
    for plan in plans:
        estimate = predict_memory(workload, plan)
        row = [plan.kind, f"{plan.tile or ''}", *(f"{getattr(estimate, part) / GIB:.4g}" for part in parts)]
        row.append(f"{recomputed_flops(workload, plan) / count_flops(workload).training:.0%}")
        if arguments.measure:
            row += measure(workload, plan, placement, device) if estimate.device <= room else ["", ""]
        table.add_row(*row, style="bold" if plan == chosen else None)
    console.print(table)
    console.print(
        f"memory=auto takes {chosen}" if chosen else f"nothing fits into {room / GIB:.3g} GiB", highlight=False
    )


def show_workload(console: Console, workload: Workload) -> None:
    flops, estimate = count_flops(workload), predict_memory(workload, MemoryPlan())
    projections = flops.attention_inputs + flops.attention_output
    shares = {"attention": flops.attention, "its projections": projections, "MLP": flops.mlp, "head": flops.head}
    spread = ", ".join(f"{name} {part / flops.forward:.0%}" for name, part in shares.items())
    console.print(f"GFLOP a token, forward and backward: {flops.training / 1e9:.3g} ({spread})", highlight=False)
    fixed = ", ".join(f"{part} {getattr(estimate, part) / GIB:.3g}" for part in ("weights", "gradients", "optimizer"))
    console.print(f"GiB whatever the plan: {fixed}", highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="keys of train.py, as key=value")
    parser.add_argument("--device-gib", type=float, help="memory of the device")
    parser.add_argument("--host-gib", type=float, help="memory of the host")
    parser.add_argument("--measure", action="store_true", help="train two steps by each plan that fits")
    return parser.parse_intermixed_args()


def build_workload(job: JobConfig, placement: Placement) -> Workload:
    context = job.data.context_length
    if job.model.pretrained:
        config = pretrained_config(job)
    else:
        shape = {name: value for name, value in asdict(job.model).items() if name not in FROM_CHECKPOINT}
        shape["vocab_size"] = job.model.vocab_size or ByteTokenizer.vocab_size
        config = LongNetConfig(**shape, attention=resolve_attention(job), max_position_embeddings=context)
    on_gpu, residual = placement.accelerator == "cuda", job.trainer.residual
    fused_norm = on_gpu and (residual == "fp32" or placement.compile)
    return Workload(config, context, job.data.batch_size, placement.precision_name, residual, fused_norm)


def measure(workload: Workload, plan: MemoryPlan, placement: Placement, device: torch.device) -> list[str]:
    """The peak on the device in GiB, and tokens per second; nothing where memory ran out or is not counted."""
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with device:
        model = LongNetForCausalLM(workload.model).train()
        tokens = torch.randint(workload.model.vocab_size, (workload.batch_size, workload.context_length))
    if workload.residual_bytes == 2:
        model.model.residual_dtype = torch.bfloat16
    activation_checkpointing.apply(model, plan.kind, plan.every, plan.tile, placement.compile)
    optimizer = build_optimizer(model, 1e-4, (0.9, 0.95), 1e-8, 0.1)
    seconds = 0.0
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[workload.precision]
    try:
        for _ in range(2):
            start = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                hidden = model.model(tokens).flatten(0, 1)
                loss = linear_cross_entropy(hidden, model.lm_head.weight, tokens.flatten()).loss / tokens.numel()
            del hidden
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError:
        return ["out of memory", ""]
    peak = f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if on_gpu else ""
    return [peak, f"{workload.tokens / seconds:,.0f}"]


if __name__ == "__main__":
    main()

"""The time of a training step, from what it computes and moves and from how fast a device does each."""

from __future__ import annotations

from dataclasses import dataclass

from .flops import count_flops, recomputed_flops
from .memory import bytes_made, count_parameters
from .workload import MemoryPlan, Workload

# Of the attention's forward products, backward takes so many: it computes the scores again.
ATTENTION_BACKWARD = 2.5
# Every tensor of a layer is written and read forward, and read and answered by a gradient backward.
PASSES = 3
# AdamW reads and writes weights and both averages and reads gradients, which the step before wrote and clipping read.
OPTIMIZER_BYTES = 9 * 4


@dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
        name: of the device.
        matmul: FLOP/s of large matrix products, in the number format that is trained in.
        attention: FLOP/s of the attention's kernels, over the pairs that are seen.
        bandwidth: bytes a second that kernels without products read and write.
        link: bytes a second that a rank receives from others; None where it is not known.
        copies: bytes a second of long copies, as the optimiser's; None where they are as fast as the other kernels.
    """

    name: str
    matmul: float
    attention: float
    bandwidth: float
    link: float | None = None
    copies: float | None = None


# matmul is measured; attention and bandwidth are fitted to the nine steps of docs/planning.md, which says how well.
H200 = Rates("H200", matmul=795e12, attention=200e12, bandwidth=2.44e12)
KNOWN = {"h200": H200}


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of a step, by part."""

    products: float
    attention: float
    memory: float
    optimizer: float
    communication: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.optimizer + self.communication


def predict_time(workload: Workload, plan: MemoryPlan, rates: Rates, received: int = 0) -> TimeEstimate:
    """The parts of a step one after the other; offloaded activations travel beside them and take no time.

    Args:
        workload: what one rank computes.
        plan: what is computed twice.
        rates: of the device.
        received: bytes from other ranks, if any; they are taken not to overlap with anything.
    """
    flops, again = count_flops(workload), recomputed_flops(workload, plan)
    attention_again = flops.attention if plan.kind in ("full", "offload") else 0.0
    attention = (1 + ATTENTION_BACKWARD) * flops.attention + attention_again
    products = 3 * (flops.forward - flops.attention) + again - attention_again
    passes = PASSES + (plan.kind != "none" or plan.tile is not None)
    moved = passes * bytes_made(workload) * workload.model.num_hidden_layers
    if received and rates.link is None:
        raise ValueError("rates.link=None: expected the bytes a second that a rank receives, since ranks exchange keys")
    return TimeEstimate(
        products=workload.tokens * products / rates.matmul,
        attention=workload.tokens * attention / rates.attention,
        memory=workload.tokens * moved / rates.bandwidth,
        optimizer=OPTIMIZER_BYTES * count_parameters(workload)[0] / (rates.copies or rates.bandwidth),
        communication=received / rates.link if received and rates.link else 0.0,
    )

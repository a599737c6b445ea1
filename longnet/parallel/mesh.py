"""The ("data", "sequence") mesh. Ranks that share a sequence are neighbours, on one node where it is large enough."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("data", "sequence")


class MeshShape(NamedTuple):
    """How many ranks read different samples, and how many share each sample. Pure; no process is needed."""

    data: int
    sequence: int

    @classmethod
    def of(cls, world: int, sequence: int) -> MeshShape:
        """The shape for so many processes."""
        if sequence < 1 or world % sequence:
            nearest = min((n for n in range(1, world + 1) if world % n == 0), key=lambda n: abs(n - sequence))
            raise ValueError(f"sequence={sequence}: expected a divisor of the {world} processes; nearest: {nearest}")
        return cls(world // sequence, sequence)

    @property
    def world(self) -> int:
        return self.data * self.sequence

    def data_rank(self, rank: int) -> int:
        return rank // self.sequence

    def sequence_rank(self, rank: int) -> int:
        return rank % self.sequence

    def build(self, device_type: str) -> DeviceMesh:
        """The mesh itself, on a running process group; every process calls this."""
        return init_device_mesh(device_type, tuple(self), mesh_dim_names=DIMENSIONS)

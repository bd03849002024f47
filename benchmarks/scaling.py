"""The cost of sharing statistics on W ranks: alpha-beta models, in microseconds and bytes.

docs/scaling.md explains the formulas, and names the source of each constant.
"""

from dataclasses import dataclass
from math import ceil, log2

from multibn import wire

# Channels of ResNet-50's 53 batch norms.
RESNET50 = [64] + [
    channels
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3))
    for channels in [width, width, 4 * width] * depth + [4 * width]
]
WORLDS = [2**i for i in range(3, 14)]


def allreduce_bytes(C: int) -> int:
    """Bytes of the one message of multibn's forward pass: float64."""
    return 8 * wire.length(C)


def all_gather_bytes(C: int) -> int:
    """Bytes that each rank gives to torch.nn.SyncBatchNorm's all_gather: float32."""
    return 4 * (2 * C + 1)


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes, and NCCL's own latencies of its low-latency protocol (us, bytes/us).

    Methods return microseconds for W ranks, a power of two, and a message of n bytes: in
    `all_gather` each rank's part, in the other methods the whole message.
    """

    per_node: int = 8
    tree_base: float = 6.8
    ring_base: float = 6.6
    intra: float = 0.6  # a hop over NVLink
    tree_inter: float = 5.0  # a hop over the network
    ring_inter: float = 2.7
    bandwidth: float = 40e3  # of a GPU's share of the network
    mpi_latency: float = 1.5  # of a message between machines over InfiniBand

    def tree_allreduce(self, W: int, n: float) -> float:
        """Up a tree and down again: along each node, by halves over the nodes."""
        nodes, per_node = self._nodes(W)
        hops = (per_node - 1) * self.intra + log2(nodes) * self.tree_inter
        return self.tree_base + 2 * hops + 2 * n / self.bandwidth

    def ring_allreduce(self, W: int, n: float) -> float:
        """Twice around the ring, W-th parts of the message at a time."""
        return self.ring_base + 2 * self._round(W) + 2 * (W - 1) / W * n / self.bandwidth

    def allreduce(self, W: int, n: float) -> float:
        """The faster of tree and ring, as NCCL chooses."""
        return min(self.tree_allreduce(W, n), self.ring_allreduce(W, n))

    def all_gather(self, W: int, n: float) -> float:
        """Once around the ring, one rank's part at each hop; NCCL has no all_gather by a tree."""
        return self.ring_base + self._round(W) + (W - 1) * n / self.bandwidth

    def grouped(self, W: int, n: float) -> float:
        """An allreduce inside every node."""
        return self.allreduce(min(W, self.per_node), n)

    def hierarchical(self, W: int, n: float) -> float:
        """Three collectives: to one rank of each node, over these ranks, and back."""
        nodes, per_node = self._nodes(W)
        inside = self.tree_base + (per_node - 1) * self.intra + n / self.bandwidth
        over = self.tree_base + 2 * log2(nodes) * self.tree_inter + 2 * n / self.bandwidth
        return 2 * inside + (over if nodes > 1 else 0.0)

    def mpi_allreduce(self, W: int, n: float) -> float:
        """Recursive doubling over MPI, between machines."""
        return log2(W) * (self.mpi_latency + n / self.bandwidth)

    def _nodes(self, W: int) -> tuple[int, int]:
        nodes = ceil(W / self.per_node)
        return nodes, W // nodes

    def _round(self, W: int) -> float:
        nodes, _ = self._nodes(W)
        crossings = nodes - 1
        return (W - 1 - crossings) * self.intra + crossings * self.ring_inter


def table(cluster: Cluster, channels: list[int]) -> list[dict[str, float]]:
    """One row for each W of `WORLDS`: microseconds of the forward messages of these layers."""
    rows = []
    for W in WORLDS:
        row: dict[str, float] = {"ranks": W}
        for way in (
            "tree_allreduce", "ring_allreduce", "grouped", "hierarchical", "mpi_allreduce",
        ):  # fmt: skip
            row[way] = sum(getattr(cluster, way)(W, allreduce_bytes(C)) for C in channels)
        row["all_gather"] = sum(cluster.all_gather(W, all_gather_bytes(C)) for C in channels)
        rows.append(row)
    return rows

"""A small network with a stage of equal blocks and a heavy linear layer: used by the tests of suffix sharing."""

from __future__ import annotations

from torch import Tensor, nn

from tests.merger.tiny import SIZE

FACTORY = "tests.merger.deep:deep_net"


class DeepNet(nn.Module):
    """A stem, `blocks` equal residual blocks, a linear layer that holds most bytes, a head."""

    def __init__(self, num_classes: int, blocks: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stage = nn.ModuleList(nn.ModuleDict({"conv1": _conv(width), "norm": nn.BatchNorm2d(width)})
                                   for _ in range(blocks))  # fmt: skip
        self.pool = nn.AvgPool2d(2)
        self.wide = nn.Linear(width * (SIZE // 4) ** 2, 128)
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, C)."""
        x = self.stem(x)
        for block in self.stage:
            x = (x + block["norm"](block["conv1"](x))).relu()  # type: ignore[index]
        return self.head(self.wide(self.pool(x).flatten(1)).relu())


def _conv(width: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, padding=1, bias=False)


def deep_net(num_classes: int, blocks: int = 2) -> nn.Module:
    """The factory that workloads of the tests name."""
    return DeepNet(num_classes, blocks)

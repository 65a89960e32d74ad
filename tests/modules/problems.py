"""Initial value problems whose solutions are known; every row of the batch is another one."""

import math
from dataclasses import dataclass, replace

import torch


@dataclass
class Linear:
    """y' = -rate y, y = y0 exp(-rate t)."""

    rate: torch.Tensor  # (batch, 1)
    calls: int = 0

    def __call__(self, t, y):
        self.calls += 1
        return -self.rate * y

    def select(self, rows):
        return replace(self, rate=self.rate[rows])

    def exact(self, t, y0):
        return y0 * torch.exp(-self.rate * t)


@dataclass
class Forced:
    """y' = -y + sin(w t): a non-autonomous problem."""

    w: torch.Tensor  # (batch, 1)

    def __call__(self, t, y):
        return -y + torch.sin(self.w * t.unsqueeze(-1))

    def select(self, rows):
        return Forced(self.w[rows])

    def exact(self, t, y0):
        w = self.w
        particular = (torch.sin(w * t) - w * torch.cos(w * t)) / (1 + w**2)
        return (y0 + w / (1 + w**2)) * math.exp(-t) + particular


class Circle:
    """A rotation, y' = 2 pi J y: at t = 1 back at the start."""

    def __call__(self, t, y):
        return 2 * math.pi * torch.stack([-y[:, 1], y[:, 0]], dim=-1)

    def exact(self, t, y0):
        c, s = math.cos(2 * math.pi * t), math.sin(2 * math.pi * t)
        return torch.stack([c * y0[:, 0] - s * y0[:, 1], s * y0[:, 0] + c * y0[:, 1]], dim=-1)

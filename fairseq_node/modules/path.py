"""Functionals of a trajectory: arclength and kinetic energy.

Both are integrals of a function of the derivative alone, so the solver's own quadrature carries them
along (``integrand`` of :func:`fairseq_node.modules.solver.solve`); they are no part of its error norm.

* arclength, ``∫ |dx/dt| dt`` (N-ODE Transformer, arXiv 2010.11358);
* kinetic energy, ``∫ |dx/dt|² dt`` (OT-Transformer, arXiv 2501.18793).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

NORMS = ("token", "sentence")


@dataclass(frozen=True)
class PathConfig:
    """What a block integrates along its path.

    Attributes:
        norm: "token" for the path of each token, "sentence" for that of a sentence's whole state.
        gradient: whether the result can be differentiated; statistics need not be.
    """

    norm: str = "token"
    gradient: bool = False

    def integrand(self, derivative: Tensor) -> Tensor:
        """Speed and squared speed, the integrands of arclength and kinetic energy.

        Args:
            derivative: ``(batch, seq_len, embed_dim)``, zero for padding.

        Returns:
            ``(batch, seq_len, 2)``, or ``(batch, 1, 2)`` for the norm of the sentence. The gradient at
            rest is zero, not NaN: that of ``vector_norm``, and not of the square root of a sum.
        """
        if not self.gradient:
            derivative = derivative.detach()
        if self.norm == "sentence":
            derivative = derivative.flatten(1).unsqueeze(1)
        speed = torch.linalg.vector_norm(derivative, dim=-1)
        return torch.stack([speed, speed.square()], dim=-1)

    def mean(self, integral: Tensor, valid: Optional[Tensor]) -> Tensor:
        """Arclength and kinetic energy of each sentence: means over its valid tokens.

        Args:
            integral: what the integrand gave, integrated.
            valid: bool ``(batch, seq_len)``, or None if all tokens are valid.

        Returns:
            ``(batch, 2)``; 0 for a sentence without tokens.
        """
        if valid is None or self.norm == "sentence":
            return integral.mean(1)
        return integral.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)

"""One block of a continuous-depth Transformer: a vector field, a solver, its path and statistics.

Here fairseq's ``(seq_len, batch, embed_dim)`` and the solvers' ``(batch, seq_len, embed_dim)`` meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor, nn

from fairseq_node.modules import cache, path, solver
from fairseq_node.modules.vector_field import BoundField, DecoderField, EncoderField, FieldConfig


class SolveError(ArithmeticError):
    """A block could not be integrated (``--node-on-failure error``)."""


@dataclass
class SolveRecord:
    """What one block did for each sentence; every tensor is ``(batch,)``.

    Attributes:
        nfe: evaluations of the vector field in forward.
        nfe_backward: evaluations in backward; counted up while backward runs.
        accepted, rejected: steps.
        unfinished: whether the interval was completed by one last fixed step.
        arclength, kinetic: arclength and kinetic energy, means over the valid tokens.
    """

    nfe: Tensor
    nfe_backward: Tensor
    accepted: Tensor
    rejected: Tensor
    unfinished: Tensor
    arclength: Tensor
    kinetic: Tensor


def _solve_dtype(x: Tensor) -> torch.dtype:
    """State, time and error are float32 around a field in half precision."""
    return torch.promote_types(x.dtype, torch.float32)


class _Block:
    """What encoder and decoder blocks share; a mixin over the vector fields."""

    #: Where in the model the block is, for messages.
    title = "block"
    #: What to integrate along the path; a criterion that penalises it asks for its gradient.
    path_config = path.PathConfig()

    def _init_block(self, solver_config: solver.SolverConfig, dim: int) -> None:
        self.solver_config = solver_config
        if self.config.augment_dim:
            # "Projected away" by a learned projection that starts as dropping the extra channels.
            self.augment_projection = nn.Linear(dim + self.config.augment_dim, dim, bias=False)
            nn.init.eye_(self.augment_projection.weight)

    def _lift(self, x: Tensor) -> Tensor:
        """``(seq_len, batch, embed_dim)`` to the initial state, with its extra channels."""
        x = x.transpose(0, 1).contiguous()
        if self.config.augment_dim:
            x = torch.cat([x, x.new_zeros(*x.shape[:2], self.config.augment_dim)], dim=-1)
        return x

    def _integrate(
        self, x: Tensor, field: BoundField, save_at: Optional[Tensor] = None
    ) -> Tuple[Tensor, SolveRecord, Optional[Tensor]]:
        """Solves for one block.

        Args:
            x: initial state in the model's dtype, ``(batch, seq_len, embed_dim)``.
            field: the vector field, bound for this solve.
            save_at: times at which the state is wanted too, ``(times,)``.

        Returns:
            the state at the end, ``(seq_len, batch, embed_dim)``, the record, and the states at
            ``save_at``, ``(times, batch, seq_len, embed_dim)``.
        """
        valid = None if field.padding is None else ~field.padding
        solution = solver.solve(
            field,
            x.to(_solve_dtype(x)),
            self.solver_config,
            valid=valid,
            integrand=self.path_config.integrand,
            save_at=save_at,
        )
        if self.solver_config.on_failure == "error":
            self._raise_on_failure(solution, valid, x.size(1))
        y = solution.y.to(x.dtype)
        if self.config.augment_dim:
            y = self.augment_projection(y)
        length = self.path_config.mean(solution.integral, valid)
        record = SolveRecord(
            nfe=solution.nfe,
            nfe_backward=solution.nfe_backward,
            accepted=solution.accepted,
            rejected=solution.rejected,
            unfinished=solution.status != solver.ARRIVED,
            arclength=length[:, 0],
            kinetic=length[:, 1],
        )
        return y.transpose(0, 1), record, solution.saved

    def _raise_on_failure(self, solution, valid: Optional[Tensor], tokens: int) -> None:
        failed = (solution.status != solver.ARRIVED).nonzero()
        if len(failed) == 0:
            return
        row = int(failed[0])
        if valid is not None:
            tokens = int(valid[row].sum())
        status = int(solution.status[row])
        advice = "raise --node-max-nfe, or loosen --node-rtol and --node-atol"
        if status == solver.NOT_FINITE:
            advice = "lower --lr, or use --clip-norm"
        if self.solver_config.adaptive:
            advice += "; --node-on-failure finish goes on"
        raise SolveError(
            f"{self.title}: a sentence of {tokens} tokens stopped at t = {float(solution.t[row]):.4g} of "
            f"{self.solver_config.time:g} with step size {float(solution.dt[row]):.3g} after "
            f"{int(solution.nfe[row])} evaluations, because {solver.REASONS[status]}; {advice}"
        )


class NodeEncoderLayer(_Block, EncoderField):
    """An encoder block: integrates ``dx/dt = F(x, t)`` where a stock layer computes ``x + F(x)``."""

    def __init__(self, cfg, field_config: FieldConfig, solver_config: solver.SolverConfig):
        super().__init__(cfg, field_config)
        self._init_block(solver_config, cfg.encoder.embed_dim)

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Optional[Tensor],
        attn_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, SolveRecord]:
        """
        Args:
            x: ``(src_len, batch, embed_dim)``.
            encoder_padding_mask: bool ``(batch, src_len)``, True for padding, or None.
            attn_mask: ``(src_len, src_len)``, non-zero where attention is forbidden, or None.

        Returns:
            ``(src_len, batch, embed_dim)`` and what the block did.
        """
        x = self._lift(x)
        y, record, _ = self._integrate(x, self.bind(x, encoder_padding_mask, attn_mask))
        return y, record


@with_incremental_state
class NodeDecoderLayer(_Block, DecoderField):
    """A decoder block: integrates ``dx/dt = F(x, t)`` where a stock layer computes ``x + F(x)``."""

    def __init__(
        self,
        cfg,
        field_config: FieldConfig,
        solver_config: solver.SolverConfig,
        no_encoder_attn: bool = False,
        decode_config: Optional[cache.DecodeConfig] = None,
    ):
        super().__init__(cfg, field_config, no_encoder_attn)
        self._init_block(solver_config, cfg.decoder.embed_dim)
        self.decode_config = decode_config or cache.DecodeConfig()

    def forward(
        self,
        x: Tensor,
        encoder_out: Optional[Tensor] = None,
        encoder_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        self_attn_mask: Optional[Tensor] = None,
        self_attn_padding_mask: Optional[Tensor] = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        source_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
    ) -> Tuple[Tensor, Optional[Tensor], SolveRecord]:
        """
        Args:
            x: ``(tgt_len, batch, embed_dim)``; with ``incremental_state`` the new position only.
            encoder_out: ``(src_len, batch, encoder_embed_dim)``.
            encoder_padding_mask: bool ``(batch, src_len)``, True for padding, or None.
            incremental_state: fairseq's.
            self_attn_mask: the causal mask, or None for attention to all positions.
            self_attn_padding_mask: bool ``(batch, tgt_len)``, True for padding, or None.
            need_attn, need_head_weights: return cross-attention weights: those of the last evaluation
                of the field.
            source_state: fairseq's incremental state when ``x`` is nevertheless the whole prefix
                (``--node-decode exact``): it keeps the encoder's keys and values, and nothing else.

        Returns:
            ``(tgt_len, batch, embed_dim)``, attention weights ``(heads, batch, tgt_len, src_len)``
            (their mean over heads without ``need_head_weights``) or None, and what the block did.
        """
        saved_in = source_state if incremental_state is None else incremental_state
        state = keep = nodes = None
        if saved_in is not None:
            state = self.get_incremental_state(saved_in, "node") or {}
        x = self._lift(x)
        if incremental_state is not None and self.solver_config.adaptive:
            time, dtype = self.solver_config.time, _solve_dtype(x)
            nodes = cache.chebyshev_nodes(self.decode_config.decode_nodes, time, dtype, x.device)
            keep = cache.DepthCache(state, nodes)
        elif incremental_state is not None:
            keep = cache.EvaluationCache(state)
        field = self.bind(
            x,
            self_attn_padding_mask,
            encoder_out,
            encoder_padding_mask,
            causal=self_attn_mask is not None,
            cache=keep,
            source=state,
            need_attention=need_attn or need_head_weights,
            stock_softmax=x.dtype == torch.float64 and self.solver_config.is_stock_layer,
        )
        y, record, saved = self._integrate(x, field, save_at=nodes)
        if nodes is not None:
            keep.store(*self.keys_values(nodes, saved, x.dtype), field.padding)
        if state is not None:
            self.set_incremental_state(saved_in, "node", state)
        attention = None if field.attention is None else field.attention["weights"]
        if attention is not None:
            attention = attention.transpose(0, 1)
            if not need_head_weights:
                attention = attention.mean(0)
        return y, attention, record

    def reorder_incremental_state(
        self,
        incremental_state: Dict[str, Dict[str, Optional[Tensor]]],
        new_order: Tensor,
    ):
        """Moves every cache of the block with the beam."""
        state = self.get_incremental_state(incremental_state, "node")
        if state is not None:
            state = cache.reorder(state, new_order)
            self.set_incremental_state(incremental_state, "node", state)
        return incremental_state

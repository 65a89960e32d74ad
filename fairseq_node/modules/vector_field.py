"""fairseq's Transformer layers as vector fields.

``EncoderField`` and ``DecoderField`` own the weights of one fairseq layer under fairseq's parameter
names. ``bind`` fixes everything that one solve holds constant (padding, masks, the encoder's keys and
values, dropout) and gives a :class:`BoundField`, the function ``F(t, x)`` that a solver integrates.
Solvers see the batch dimension first: here ``x`` is ``(batch, seq_len, embed_dim)``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Dict, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_node import compat
from fairseq_node.modules.cache import DepthCache, EvaluationCache

FIELDS = ("increment", "composed")
TIME_DEPENDENCES = ("none", "additive", "concat")
#: Frequencies of the Fourier features of t, in half turns over the interval.
TIME_FREQUENCIES = 8


@dataclass(frozen=True)
class FieldConfig:
    """What the vector field is.

    Attributes:
        form: ``increment``, what the stock layer adds to x, or ``composed``, the feed-forward network
            of the attention with its skip, as arXiv 2505.13499 (appendix A) reports it for the N-ODE
            Transformer.
        time_dependence: ``none``; ``additive``, Fourier features of t through a linear layer, added to
            the input; ``concat``, t as one more input of the projections of attention and FFN.
        no_layer_norm: leave out the layer norms inside the field.
        augment_dim: extra channels during the solve (Dupont et al. 2019, arXiv 1904.01681).
        time: length of the interval, the unit of the Fourier features.
    """

    form: str = "increment"
    time_dependence: str = "none"
    no_layer_norm: bool = False
    augment_dim: int = 0
    time: float = 1.0


@dataclass
class BoundField:
    """The function ``F(t, x)`` of one solve.

    ``F`` runs in ``dtype`` and returns the dtype of the state; padding tokens have derivative zero.
    Dropout was sampled when the field was bound: two evaluations at one point are identical.
    """

    layer: nn.Module
    dtype: torch.dtype
    padding: Optional[Tensor] = None  # (batch, seq_len), True for padding
    self_mask: Optional[Tensor] = None  # (batch or 1, 1, queries, keys), True where attended
    causal: bool = False
    cross_key: Optional[Tensor] = None  # (batch / beam, heads, src_len, head_dim)
    cross_value: Optional[Tensor] = None
    cross_mask: Optional[Tensor] = None  # (batch / beam, 1, 1, src_len)
    beam: int = 1  # rows that share one source
    dropout: Dict[str, Tensor] = field(default_factory=dict)  # site -> 0 or 1 / (1 - p)
    cache: Union[EvaluationCache, DepthCache, None] = None
    stock_softmax: bool = False  # see _attend
    rows: Optional[Tensor] = None  # which sentences of the batch these are; None for all
    attention: Optional[Dict[str, Tensor]] = None  # where to leave the cross-attention weights

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        derivative = self.layer.derivative(t, y, self)
        if self.padding is not None:
            derivative = derivative.masked_fill(self.padding.unsqueeze(-1), 0.0)
        return derivative

    def select(self, rows: Tensor) -> BoundField:
        """The same field for some sentences of the batch."""

        def pick(tensor: Optional[Tensor]) -> Optional[Tensor]:
            return None if tensor is None else tensor.index_select(0, rows)

        def pick_source(tensor: Optional[Tensor]) -> Optional[Tensor]:
            return None if tensor is None else tensor.index_select(0, rows // self.beam)

        mask = self.self_mask
        return replace(
            self,
            padding=pick(self.padding),
            self_mask=mask if mask is None or mask.size(0) == 1 else pick(mask),
            cross_key=pick_source(self.cross_key),
            cross_value=pick_source(self.cross_value),
            cross_mask=pick_source(self.cross_mask),
            beam=1,
            cache=None if self.cache is None else self.cache.select(rows),
            rows=rows if self.rows is None else self.rows.index_select(0, rows),
            dropout={site: pick(mask) for site, mask in self.dropout.items()},
        )

    def ahead(self, times: Tensor) -> BoundField:
        """The same field for evaluations at these times, ``(batch, times)``, in this order."""
        return (
            self if not isinstance(self.cache, DepthCache) else replace(self, cache=self.cache.ahead(times))
        )

    def tensors(self) -> Tuple[Tensor, ...]:
        """All that the field sees and that needs a gradient.

        The encoder's keys and values stand for the weights that projected them: with both, the
        adjoint would count those weights twice.
        """
        seen = dict(self.layer.named_parameters())
        if self.cross_key is not None:
            for projection in ("k_proj", "v_proj"):
                for name in ("weight", "bias"):
                    seen.pop(f"encoder_attn.{projection}.{name}", None)
        tensors = [*seen.values(), self.cross_key, self.cross_value]
        return tuple(tensor for tensor in tensors if tensor is not None and tensor.requires_grad)

    def keep_attention(self, weights: Tensor) -> None:
        """Remembers the weights of each sentence's last evaluation."""
        if self.rows is not None:
            weights = self.attention["weights"].index_copy(0, self.rows, weights)
        self.attention["weights"] = weights

    def drop(self, site: str, x: Tensor) -> Tensor:
        mask = self.dropout.get(site)
        return x if mask is None else x * mask


class TimeFeatures(nn.Module):
    """Fourier features of t through a linear layer that starts at zero, so that training starts from
    the autonomous field."""

    def __init__(self, embed_dim: int, time: float):
        super().__init__()
        self.time = time
        self.projection = nn.Linear(2 * TIME_FREQUENCIES, embed_dim, bias=False)
        nn.init.zeros_(self.projection.weight)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """``(batch,)`` to ``(batch, 1, embed_dim)``."""
        turns = torch.arange(1, TIME_FREQUENCIES + 1, device=t.device, dtype=t.dtype)
        angles = torch.pi / self.time * t.unsqueeze(-1) * turns
        features = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.projection(features.to(dtype)).unsqueeze(1)


class _Field:
    """What encoder and decoder layers share; a mixin over fairseq's layer classes."""

    def _init_field(self, config: FieldConfig, side_dim: int) -> None:
        self.config = config
        dim = side_dim + config.augment_dim
        if config.no_layer_norm:
            for name in list(self._modules):
                if name.endswith("layer_norm"):
                    setattr(self, name, nn.Identity())
        if config.time_dependence == "additive":
            self.time_features = TimeFeatures(dim, config.time)
        elif config.time_dependence == "concat":
            # The column of each projection's weight that multiplies t. Keys and values of the encoder
            # have none: they are projected once per solve.
            columns = {
                "self_query": dim,
                "self_key": dim,
                "self_value": dim,
                "ffn": self.fc1.out_features,
            }
            if getattr(self, "encoder_attn", None) is not None:
                columns["cross_query"] = dim
            self.time_columns = nn.ParameterDict(
                {name: nn.Parameter(torch.zeros(size)) for name, size in columns.items()}
            )

    def sublayers(self, bound: BoundField):
        """Pairs of a layer norm and the function that it belongs to, in order."""
        yield self.self_attn_layer_norm, self._self_attention
        if bound.cross_key is not None:
            yield self.encoder_attn_layer_norm, self._cross_attention
        yield self.final_layer_norm, self._feed_forward

    def derivative(self, t: Tensor, y: Tensor, bound: BoundField) -> Tensor:
        """``F(t, y)`` for ``t`` ``(batch,)`` and ``y`` ``(batch, seq_len, embed_dim)``."""
        x = y.to(bound.dtype)
        if self.config.time_dependence == "additive":
            shift = self.time_features(t, x.dtype)
            x, y = x + shift, y + shift.to(y.dtype)
        sublayers = list(self.sublayers(bound))
        composed = self.config.form == "composed"
        if composed:
            last_norm, feed_forward = sublayers.pop()
        if self.normalize_before:
            # The increments are summed on their own: (x + a + b) - x would lose their last digits.
            increment = None
            for norm, sublayer in sublayers:
                here = x if increment is None else x + increment
                delta = sublayer(norm(here), t, bound)
                increment = delta if increment is None else increment + delta
            if composed:
                increment = feed_forward(last_norm(x + increment), t, bound)
            return increment.to(y.dtype)
        for norm, sublayer in sublayers:
            x = norm(x + sublayer(x, t, bound))
        if composed:
            return last_norm(feed_forward(x, t, bound)).to(y.dtype)
        return x.to(y.dtype) - y

    def _project(self, linear: nn.Module, x: Tensor, t: Tensor, column: str) -> Tensor:
        out = linear(x)
        if self.config.time_dependence == "concat":
            out = out + t.to(out.dtype).view(-1, 1, 1) * self.time_columns[column].to(out.dtype)
        return out

    def _self_keys_values(self, x: Tensor, t: Tensor) -> Tuple[Tensor, Tensor]:
        attn = self.self_attn
        key = _heads(self._project(attn.k_proj, x, t, "self_key"), attn.num_heads)
        value = _heads(self._project(attn.v_proj, x, t, "self_value"), attn.num_heads)
        return key, value

    def _self_attention(self, x: Tensor, t: Tensor, bound: BoundField) -> Tensor:
        attn = self.self_attn
        query = _heads(self._project(attn.q_proj, x, t, "self_query"), attn.num_heads)
        key, value = self._self_keys_values(x, t)
        mask = bound.self_mask
        if bound.cache is not None:
            key, value, padding = bound.cache.extended(t, key, value, bound.padding)
            if padding is not None:
                mask = _key_mask(padding)
        out, _ = _attend(query, key, value, mask, bound.causal, bound.dropout.get("self_weights"))
        return bound.drop("self_attention", attn.out_proj(_merge(out)))

    def _cross_attention(self, x: Tensor, t: Tensor, bound: BoundField) -> Tensor:
        attn = self.encoder_attn
        query = _heads(self._project(attn.q_proj, x, t, "cross_query"), attn.num_heads)
        dropout = bound.dropout.get("cross_weights")
        out, weights = _attend(
            _fold(query, bound.beam),
            bound.cross_key,
            bound.cross_value,
            bound.cross_mask,
            False,
            dropout if dropout is None else _fold(dropout, bound.beam),
            need_weights=bound.attention is not None,
            stock_softmax=bound.stock_softmax,
        )
        out = _unfold(out, bound.beam)
        if bound.attention is not None:
            bound.keep_attention(_unfold(weights, bound.beam))
        return bound.drop("cross_attention", attn.out_proj(_merge(out)))

    def _feed_forward(self, x: Tensor, t: Tensor, bound: BoundField) -> Tensor:
        hidden = self.activation_fn(self._project(self.fc1, x, t, "ffn"))
        return bound.drop("ffn", self.fc2(bound.drop("ffn_hidden", hidden)))

    def _hold_dropout(self, x: Tensor, src_len: Optional[int], past: int = 0) -> Dict[str, Tensor]:
        """Samples the dropout of every site of the layer for one solve.

        Args:
            x: the initial state in the field's dtype, ``(batch, seq_len, embed_dim)``.
            src_len: length of the source for a layer with cross-attention.
            past: number of earlier positions in the cache.
        """
        batch, length, dim = x.shape
        heads = self.self_attn.num_heads
        sites = [
            ("self_attention", self.dropout_module, (batch, length, dim)),
            ("self_weights", self.self_attn.dropout_module, (batch, heads, length, past + length)),
            (
                "ffn_hidden",
                self.activation_dropout_module,
                (batch, length, self.fc1.out_features),
            ),
            ("ffn", self.dropout_module, (batch, length, dim)),
        ]
        if src_len is not None:
            cross = self.encoder_attn.dropout_module
            sites += [
                ("cross_attention", self.dropout_module, (batch, length, dim)),
                ("cross_weights", cross, (batch, heads, length, src_len)),
            ]
        held = {}
        for site, module, shape in sites:
            if module.p > 0 and (module.training or module.apply_during_inference):
                keep = 1.0 - module.p
                held[site] = x.new_empty(shape).bernoulli_(keep).div_(keep) if keep else x.new_zeros(shape)
        return held


class EncoderField(_Field, TransformerEncoderLayerBase):
    """The vector field of an encoder block."""

    def __init__(self, cfg, config: FieldConfig):
        wide = copy.deepcopy(cfg)
        wide.encoder.embed_dim = cfg.encoder.embed_dim + config.augment_dim
        super().__init__(wide)
        compat.remove_fast_path(self)
        self._init_field(config, cfg.encoder.embed_dim)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in compat.FAST_PATH_COPIES:
            state_dict.pop(prefix + name, None)
        # Past fairseq 0.12.2's own, which fills in the copies.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)

    def bind(self, x: Tensor, padding: Optional[Tensor], attn_mask: Optional[Tensor] = None) -> BoundField:
        """Fixes what one solve holds constant.

        Args:
            x: initial state in the dtype that the field computes in, ``(batch, seq_len, embed_dim)``.
            padding: bool ``(batch, src_len)``, True for padding, or None.
            attn_mask: ``(src_len, src_len)``, non-zero where attention is forbidden, or None.
        """
        mask = None if padding is None else _key_mask(padding)
        if attn_mask is not None:
            allowed = ~attn_mask.to(torch.bool)[None, None]
            mask = allowed if mask is None else mask & allowed
        return BoundField(self, x.dtype, padding=padding, self_mask=mask, dropout=self._hold_dropout(x, None))


class DecoderField(_Field, TransformerDecoderLayerBase):
    """The vector field of a decoder block."""

    def __init__(self, cfg, config: FieldConfig, no_encoder_attn: bool = False):
        wide = copy.deepcopy(cfg)
        wide.decoder.embed_dim = cfg.decoder.embed_dim + config.augment_dim
        super().__init__(wide, no_encoder_attn)
        self._init_field(config, cfg.decoder.embed_dim)

    def bind(
        self,
        x: Tensor,
        padding: Optional[Tensor],
        encoder_out: Optional[Tensor],
        encoder_padding: Optional[Tensor],
        causal: bool,
        cache: Union[EvaluationCache, DepthCache, None] = None,
        source: Optional[Dict[str, Tensor]] = None,
        need_attention: bool = False,
        stock_softmax: bool = False,
    ) -> BoundField:
        """Fixes what one solve holds constant.

        Args:
            x: initial state in the dtype that the field computes in, ``(batch, tgt_len, embed_dim)``.
            padding: bool ``(batch, tgt_len)``, True for padding, or None.
            encoder_out: ``(src_len, batch, encoder_embed_dim)``, or None.
            encoder_padding: bool ``(batch, src_len)``, or None.
            causal: whether a position sees earlier ones only.
            cache: keys and values of earlier positions; ``x`` is then the new position.
            source: where the encoder's keys and values are kept from one solve to the next, or None.
            need_attention: keep the cross-attention weights of the last evaluation.
            stock_softmax: compute cross-attention in fairseq's precision.
        """
        bound = BoundField(self, x.dtype, padding=padding, stock_softmax=stock_softmax, cache=cache)
        if cache is not None:
            pass  # all that is in the cache is seen
        elif padding is None or (causal and _right_padded(padding)):
            # No valid query sees the padding behind it: the plain causal kernel will do.
            bound.causal = causal
        else:
            bound.self_mask = _key_mask(padding)
            if causal:
                ones = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device)
                # Every query sees itself: a softmax over nothing is NaN, in backward too.
                diagonal = torch.eye(x.size(1), dtype=torch.bool, device=x.device)
                bound.self_mask = bound.self_mask & ones.tril() | diagonal
        src_len = None
        if self.encoder_attn is not None and encoder_out is not None:
            kept = {} if source is None else source
            if "cross_key" not in kept:
                states = encoder_out.transpose(0, 1)
                attn = self.encoder_attn
                if source is not None:
                    states = _without_copies(states, getattr(attn, "beam_size", 1))
                    kept["beam"] = len(x) // max(len(states), 1)
                kept["cross_key"] = _heads(attn.k_proj(states), attn.num_heads)
                kept["cross_value"] = _heads(attn.v_proj(states), attn.num_heads)
            bound.cross_key, bound.cross_value = kept["cross_key"], kept["cross_value"]
            bound.beam = kept.get("beam", 1)
            src_len = bound.cross_key.size(2)
            if encoder_padding is not None:
                bound.cross_mask = _key_mask(encoder_padding[:: bound.beam])
            if need_attention:
                bound.attention = {}
        bound.dropout = self._hold_dropout(x, src_len, 0 if cache is None else cache.length)
        return bound

    def keys_values(self, times: Tensor, states: Tensor, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
        """Keys and values of self-attention along a trajectory.

        Args:
            times: ``(times,)``.
            states: at these times, ``(times, batch, 1, embed_dim)``.
            dtype: what the field computes in.

        Returns:
            two tensors ``(batch, times, heads, 1, head_dim)``.
        """
        shape = states.shape[:2]
        t = times.repeat_interleave(shape[1])
        x = states.flatten(0, 1).to(dtype)
        if self.config.time_dependence == "additive":
            x = x + self.time_features(t, dtype)
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        return tuple(
            projected.unflatten(0, shape).transpose(0, 1) for projected in self._self_keys_values(x, t)
        )


def _without_copies(states: Tensor, beam: int) -> Tensor:
    """One of the ``beam`` rows that belong to each sentence, if they are equal; ``(batch, ...)``."""
    if beam > 1 and len(states) % beam == 0:
        groups = states.unflatten(0, (-1, beam))
        if (groups == groups[:, :1]).all():
            return groups[:, 0]
    return states


def _fold(x: Tensor, beam: int) -> Tensor:
    """``(batch, heads, queries, ...)`` to ``(batch / beam, heads, beam * queries, ...)``."""
    return x if beam == 1 else x.unflatten(0, (-1, beam)).transpose(1, 2).flatten(2, 3)


def _unfold(x: Tensor, beam: int) -> Tensor:
    """The inverse of :func:`_fold`."""
    return x if beam == 1 else x.unflatten(2, (beam, -1)).transpose(1, 2).flatten(0, 1)


def _right_padded(padding: Tensor) -> bool:
    return bool((padding.cummax(1).values == padding).all())


def _key_mask(padding: Tensor) -> Tensor:
    """``(batch, 1, 1, keys)``, True where attended. A sentence without any token attends to its
    padding: its output counts nowhere, but a softmax over nothing would be NaN."""
    return (~padding | padding.all(1, keepdim=True))[:, None, None, :]


def _heads(x: Tensor, heads: int) -> Tensor:
    """``(batch, seq_len, embed_dim)`` to ``(batch, heads, seq_len, head_dim)``."""
    batch, length, dim = x.shape
    return x.view(batch, length, heads, dim // heads).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """The inverse of :func:`_heads`."""
    return x.transpose(1, 2).flatten(2)


def _attend(query, key, value, mask, causal, dropout, need_weights=False, stock_softmax=False):
    """Scaled dot-product attention.

    PyTorch's kernel, unless the weights are asked for or the dropout on them must be a held one.
    With ``stock_softmax`` it is fairseq's own softmax, which is in float32 even for a float64 model:
    one Euler step is the stock layer in every digit, any other solve as exact as its state.

    Returns:
        ``(batch, heads, queries, head_dim)``, and the weights before dropout
        ``(batch, heads, queries, keys)`` or None.
    """
    if dropout is None and not need_weights and not stock_softmax:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return out, None
    scores = query * query.size(-1) ** -0.5 @ key.transpose(-1, -2)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if stock_softmax or scores.dtype in (torch.float16, torch.bfloat16):
        weights = utils.softmax(scores, dim=-1).to(scores.dtype)
    else:
        weights = scores.softmax(-1)
    dropped = weights if dropout is None else weights * dropout
    return dropped @ value, weights

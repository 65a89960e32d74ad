"""The N-ODE Transformer as a fairseq model: options, encoder, decoder, architectures."""

import argparse
import contextlib
import logging
from dataclasses import dataclass, field, fields, replace
from typing import Dict, Iterator, List, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
    transformer_legacy,
)
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fairseq_node import distributed
from fairseq_node.distributed import OptionError
from fairseq_node.modules import cache, solver, vector_field
from fairseq_node.modules.cache import DecodeConfig
from fairseq_node.modules.node_layer import NodeDecoderLayer, NodeEncoderLayer, SolveRecord
from fairseq_node.modules.path import PathConfig
from fairseq_node.modules.solver import InvalidOption, SolverConfig
from fairseq_node.modules.vector_field import FieldConfig

logger = logging.getLogger(__name__)

_DEFAULT = SolverConfig()
_ADDITIVE_NODES = DecodeConfig.decode_nodes + 2 * vector_field.TIME_FREQUENCIES


# No postponed annotations in this module: fairseq reads the types of these fields.
@dataclass
class NodeOptions(FairseqDataclass):
    """The options of a continuous-depth block; see ``SolverConfig`` and ``FieldConfig``."""

    node_solver: ChoiceEnum(solver.FIXED + solver.ADAPTIVE) = field(
        default=_DEFAULT.solver,
        metadata={
            "help": "ODE solver: a fixed grid (euler, midpoint, heun, rk4; see --node-steps) or an "
            "adaptive embedded pair (heun_euler, bosh3, dopri5; see --node-rtol and --node-atol). "
            f"Default: {_DEFAULT.solver}"
        },
    )
    node_steps: Optional[int] = field(
        default=None,
        metadata={
            "help": "steps of a fixed-grid solver per block. One euler step is exactly the stock "
            "fairseq layer. Default: 1"
        },
    )
    node_rtol: float = field(
        default=_DEFAULT.rtol,
        metadata={"help": f"relative tolerance of an adaptive solver. Default: {_DEFAULT.rtol:g}"},
    )
    node_atol: float = field(
        default=_DEFAULT.atol,
        metadata={"help": f"absolute tolerance of an adaptive solver. Default: {_DEFAULT.atol:g}"},
    )
    node_step_control: ChoiceEnum(solver.STEP_CONTROLS) = field(
        default=_DEFAULT.step_control,
        metadata={
            "help": "whose error decides on a step of an adaptive solver: each sentence's own, or that "
            f"of the whole batch (torchdiffeq). Default: {_DEFAULT.step_control}"
        },
    )
    node_gradient: ChoiceEnum(solver.GRADIENTS) = field(
        default=_DEFAULT.gradient,
        metadata={
            "help": "backprop through the accepted steps; checkpoint: the same gradient with the memory "
            "of one step; adjoint: the continuous adjoint, approximate, with --node-step-control batch. "
            f"Default: {_DEFAULT.gradient}"
        },
    )
    node_max_nfe: int = field(
        default=_DEFAULT.max_nfe,
        metadata={
            "help": "evaluations of the vector field that an adaptive solver may spend per block and "
            f"sentence. Default: {_DEFAULT.max_nfe}"
        },
    )
    node_on_failure: ChoiceEnum(solver.ON_FAILURE) = field(
        default=_DEFAULT.on_failure,
        metadata={
            "help": "when the budget is spent, the step size underflows or the field is not finite: "
            "stop with an error, or finish the interval with one last step and count the sentence as "
            f"node_unfinished. Default: {_DEFAULT.on_failure}"
        },
    )
    node_time: float = field(
        default=_DEFAULT.time,
        metadata={"help": f"each block integrates over [0, TIME]. Default: {_DEFAULT.time:g}"},
    )
    node_field: ChoiceEnum(vector_field.FIELDS) = field(
        default="increment",
        metadata={
            "help": "vector field: what the stock layer adds to x, or FFN(x + Attn(x)). Default: increment"
        },
    )
    node_time_dependence: ChoiceEnum(vector_field.TIME_DEPENDENCES) = field(
        default="none",
        metadata={
            "help": "how the field depends on t inside a block: not at all, by learned features of t "
            "added to its input, or by t as an extra input of its projections. Default: none"
        },
    )
    node_no_layer_norm: bool = field(
        default=False, metadata={"help": "no layer norms inside the vector field"}
    )
    node_augment_dim: int = field(
        default=0,
        metadata={"help": "extra channels during the solve (augmented neural ODEs). Default: 0"},
    )
    node_decode: ChoiceEnum(cache.DECODE) = field(
        default=DecodeConfig.decode,
        metadata={
            "help": "translating with an adaptive solver: solve the new position alone, between keys and "
            "values of earlier positions that are interpolated in t, or solve the whole prefix again for "
            "every token (exact, slow). Fixed grids are exact and fast anyway. "
            f"Default: {DecodeConfig.decode}"
        },
    )
    node_decode_nodes: Optional[int] = field(
        default=None,
        metadata={
            "help": "Chebyshev nodes in t between which --node-decode cached interpolates; each costs the "
            f"memory of one key/value cache. Default: {DecodeConfig.decode_nodes}, and "
            f"{_ADDITIVE_NODES} with --node-time-dependence additive, whose features of t are fast"
        },
    )


@dataclass
class NodeTransformerConfig(NodeOptions, TransformerConfig):
    """All of fairseq's options of a Transformer, and those of its continuous depth."""

    @classmethod
    def from_namespace(cls, args):
        """Accepts what fairseq hands to a model: a Namespace, or hydra's (nested or flat) config."""
        return args if isinstance(args, cls) else super().from_namespace(_flat(args))


def solver_config(cfg) -> SolverConfig:
    """The solver's part of a model's options.

    Raises:
        OptionError: naming the option and what to use.
    """
    return _part(cfg, SolverConfig)


def decode_config(cfg) -> DecodeConfig:
    """The decoding's part of a model's options.

    Raises:
        OptionError: naming the option and what to use.
    """
    config = _part(cfg, DecodeConfig)
    if cfg.node_decode_nodes is None and cfg.node_time_dependence == "additive":
        config = replace(config, decode_nodes=_ADDITIVE_NODES)
    return config


def _part(cfg, config):
    """The options of one dataclass among all of them; None stands for its own default."""
    given = {item.name: getattr(cfg, f"node_{item.name}") for item in fields(config)}
    try:
        return config(**{name: value for name, value in given.items() if value is not None})
    except InvalidOption as error:
        option = "--node-" + error.name.replace("_", "-")
        raise OptionError(f"{option} {error.message}") from None


def field_config(cfg) -> FieldConfig:
    """The vector field's part of a model's options.

    Raises:
        OptionError: naming the option and what to use.
    """
    if cfg.node_augment_dim < 0:
        raise OptionError(f"--node-augment-dim is {cfg.node_augment_dim}; use 0 or more")
    for side in ("encoder", "decoder"):
        heads, dim = getattr(cfg, f"{side}_attention_heads"), getattr(cfg, f"{side}_embed_dim")
        if (dim + cfg.node_augment_dim) % heads:
            raise OptionError(
                f"--node-augment-dim is {cfg.node_augment_dim}, but --{side}-embed-dim {dim} and it must "
                f"be divisible by --{side}-attention-heads {heads} together; use a multiple of {heads}"
            )
    return FieldConfig(
        form=cfg.node_field,
        time_dependence=cfg.node_time_dependence,
        no_layer_norm=cfg.node_no_layer_norm,
        augment_dim=cfg.node_augment_dim,
        time=cfg.node_time,
    )


def _check(cfg) -> None:
    """Refuses what cannot work, before any data is read."""
    solver_config(cfg)
    field_config(cfg)
    decode_config(cfg)
    unsupported = {
        "--cross-self-attention": cfg.cross_self_attention,
        "--checkpoint-activations": cfg.checkpoint_activations,
        "--offload-activations": cfg.offload_activations,
        "--quant-noise-pq": cfg.quant_noise_pq > 0,
        "--quant-noise-scalar": cfg.quant_noise_scalar > 0,
        "--base-layers": getattr(cfg, "base_layers", 0),
        "--encoder-xformers-att-config": getattr(cfg, "encoder_xformers_att_config", None),
        "--decoder-xformers-att-config": getattr(cfg, "decoder_xformers_att_config", None),
    }
    for option, used in unsupported.items():
        if used:
            instead = (
                "use --node-gradient checkpoint instead"
                if "activations" in option
                else "leave it out, or use --arch transformer"
            )
            raise OptionError(f"{option} does not work with a continuous-depth model; {instead}")


def _flat(args) -> argparse.Namespace:
    """Options as fairseq's command line has them: ``encoder_layers``, not ``encoder.layers``."""
    if isinstance(args, DictConfig):
        options = OmegaConf.to_container(args, resolve=True, enum_to_str=True)
    else:
        options = dict(vars(args))
    for group in ("encoder", "decoder", "quant_noise"):
        if isinstance(options.get(group), dict):
            for name, value in options.pop(group).items():
                options.setdefault(f"{group}_{name}", value)
    return argparse.Namespace(**options)


def _complete(args, preset) -> None:
    """Fills in, in place, every option that was not given; refuses bad ones.

    fairseq calls this when the command line has been parsed, before data is read, and again whenever a
    model is built: a checkpoint that is older than an option gets its default.
    """
    options = _flat(args)
    fresh = not hasattr(options, _COMPLETE)
    preset(options)
    for item in fields(NodeOptions):
        if not item.name.startswith("_") and not hasattr(options, item.name):
            setattr(options, item.name, item.default)
    if options.node_solver in solver.ADAPTIVE and options.node_steps is not None:
        if fresh:
            raise OptionError(
                f"--node-steps {options.node_steps} is for fixed grids, but --node-solver "
                f"{options.node_solver} chooses its own steps; leave --node-steps out, or use one of "
                f"{', '.join(solver.FIXED)}"
            )
        # A model override from a fixed grid to an adaptive solver: the grid is simply not used.
        logger.info("--node-steps is not used by --node-solver %s", options.node_solver)
    setattr(options, _COMPLETE, True)
    _check(options)
    if fresh:
        distributed.check(options)
    for name, value in vars(options).items():
        if isinstance(args, argparse.Namespace):
            setattr(args, name, value)
        elif name not in args:
            args[name] = value


#: Marks options that have been completed: those of a checkpoint, not of a fresh command line.
_COMPLETE = "node_options_complete"


@contextlib.contextmanager
def _observed(layers: nn.ModuleList, **more) -> Iterator[List[SolveRecord]]:
    """Collects the records that the blocks return while fairseq's loop over the layers runs, and hands
    ``more`` arguments to the blocks, of which that loop does not know."""
    records: List[SolveRecord] = []

    def collect(module, inputs, outputs):
        records.append(outputs[-1])

    def add(module, inputs, keywords):
        return inputs, {**keywords, **more}

    # children(): iterating a LayerDropModuleList draws which layers to drop.
    handles = [layer.register_forward_hook(collect) for layer in layers.children()]
    if more:
        handles += [layer.register_forward_pre_hook(add, with_kwargs=True) for layer in layers.children()]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _name_blocks(layers: nn.ModuleList, side: str) -> None:
    for number, layer in enumerate(layers.children(), start=1):
        getattr(layer, "module", layer).title = f"{side} block {number}"


class NodeEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder over continuous-depth blocks.

    ``forward`` returns fairseq's dict with one more entry, ``node``: a list of the blocks'
    :class:`SolveRecord`.
    """

    def __init__(self, cfg, dictionary, embed_tokens, return_fc=False):
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)
        _name_blocks(self.layers, "encoder")

    def build_encoder_layer(self, cfg):
        layer = NodeEncoderLayer(cfg, field_config(cfg), solver_config(cfg))
        return fsdp_wrap(layer, min_num_params=cfg.min_params_to_wrap)

    def forward_scriptable(self, *args, **kwargs):
        with _observed(self.layers) as records:
            encoder_out = super().forward_scriptable(*args, **kwargs)
        encoder_out["node"] = records
        encoder_out["fc_results"] = []  # fairseq takes the blocks' second output for these
        return encoder_out


class NodeDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder over continuous-depth blocks.

    ``forward`` returns fairseq's pair; its dict has one more entry, ``node``, with the lists of
    :class:`SolveRecord` of ``encoder`` and ``decoder``.
    """

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn=False, output_projection=None):
        super().__init__(
            cfg,
            dictionary,
            embed_tokens,
            no_encoder_attn=no_encoder_attn,
            output_projection=output_projection,
        )
        # Incremental decoding solves the prefix again and returns its last position.
        self.resolves_prefix = solver_config(cfg).adaptive and decode_config(cfg).decode == "exact"
        _name_blocks(self.layers, "decoder")

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        layer = NodeDecoderLayer(
            cfg, field_config(cfg), solver_config(cfg), no_encoder_attn, decode_config(cfg)
        )
        return fsdp_wrap(layer, min_num_params=cfg.min_params_to_wrap)

    def extract_features_scriptable(
        self,
        prev_output_tokens,
        encoder_out: Optional[Dict],
        incremental_state=None,
        full_context_alignment: bool = False,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
    ):
        resolve = incremental_state is not None and self.resolves_prefix
        if self.training and alignment_layer is None:
            alignment_layer = -1  # no layer: the weights would be computed for nobody
        with _observed(self.layers, **({"source_state": incremental_state} if resolve else {})) as records:
            x, extra = super().extract_features_scriptable(
                prev_output_tokens,
                encoder_out,
                None if resolve else incremental_state,
                full_context_alignment,
                alignment_layer,
                alignment_heads,
            )
        if resolve:
            x = x[:, -1:]
            extra["attn"] = [a if a is None else a[:, -1:] for a in extra["attn"]]
        encoder_records = [] if encoder_out is None else encoder_out.get("node", [])
        extra["node"] = {"encoder": encoder_records, "decoder": records}
        return x, extra


@register_model("node_transformer")
class NodeTransformerModel(TransformerModelBase):
    """N-ODE Transformer (arXiv 2010.11358): a Transformer whose layers are vector fields that an ODE
    solver integrates. With ``--node-solver euler --node-steps 1`` it is fairseq's ``transformer``,
    parameter names included."""

    #: How many updates have been made; fairseq's trainer keeps it up to date.
    num_updates = 0

    def set_num_updates(self, num_updates):
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def integrate_path(self, config: PathConfig) -> None:
        """Has every block integrate this along its path from now on."""
        for module in self.modules():
            if isinstance(module, (NodeEncoderLayer, NodeDecoderLayer)):
                module.path_config = config

    @classmethod
    def add_args(cls, parser):
        """Add model-specific arguments to the parser."""
        # Without defaults, so that those of the architecture apply.
        gen_parser_from_dataclass(parser, NodeTransformerConfig(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, cfg, task):
        """Build a new model instance."""
        return super().build_model(NodeTransformerConfig.from_namespace(cfg), task)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return NodeEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return NodeDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


def parity_architecture(args) -> None:
    """A small model for the parity task: one block a side, pre-norm, no dropout."""
    for side in ("encoder", "decoder"):
        for name, value in (("embed_dim", 64), ("ffn_embed_dim", 128), ("attention_heads", 4), ("layers", 1)):
            setattr(args, f"{side}_{name}", getattr(args, f"{side}_{name}", value))
        name = f"{side}_normalize_before"
        setattr(args, name, getattr(args, name, True))
    args.dropout = getattr(args, "dropout", 0.0)
    transformer_legacy.base_architecture(args)


#: Architectures are fairseq's, under the same names with ``node_`` before them.
ARCHITECTURES = {
    "node_transformer": transformer_legacy.base_architecture,
    "node_transformer_parity": parity_architecture,
    "node_transformer_tiny": transformer_legacy.tiny_architecture,
    "node_transformer_iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    "node_transformer_wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "node_transformer_wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
    "node_transformer_wmt_en_de_big_t2t": transformer_legacy.transformer_wmt_en_de_big_t2t,
    "node_transformer_vaswani_wmt_en_de_big": transformer_legacy.transformer_vaswani_wmt_en_de_big,
    "node_transformer_vaswani_wmt_en_fr_big": transformer_legacy.transformer_vaswani_wmt_en_fr_big,
}


def _register(name, preset):
    @register_model_architecture("node_transformer", name)
    def complete(args):
        _complete(args, preset)


for _name, _preset in ARCHITECTURES.items():
    _register(_name, _preset)

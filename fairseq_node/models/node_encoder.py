"""Encoder-only classifier over continuous-depth blocks, for the parity task."""

import argparse
from dataclasses import dataclass, field
from typing import Any, Dict, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import FairseqDecoder, register_model, register_model_architecture
from torch import Tensor, nn

from fairseq_node.models import node_transformer
from fairseq_node.models.node_transformer import NodeTransformerConfig, NodeTransformerModel, OptionError

READ_OUTS = ("last", "mean")


# No postponed annotations in this module: fairseq reads the types of these fields.
@dataclass
class NodeEncoderConfig(NodeTransformerConfig):
    """The options of ``node_transformer`` and the read-out; those of a decoder are not used."""

    read_out: ChoiceEnum(READ_OUTS) = field(
        default="last",
        metadata={
            "help": "what the answer is read off: the last token, </s>, which marks the end, or the mean of "
            "all tokens. Default: last"
        },
    )


class ReadOut(FairseqDecoder):
    """Answers from the encoder's output, in the place of a decoder.

    Every position of the target gets the same logits, whatever came before it: those who ask for one
    token, as fairseq's criteria and commands do for the parity task, get one.
    """

    def __init__(self, dictionary, embed_dim: int, read_out: str):
        super().__init__(dictionary)
        self.read_out = read_out
        self.output_projection = nn.Linear(embed_dim, len(dictionary))

    def forward(self, prev_output_tokens: Tensor, encoder_out: Optional[Dict] = None, **unused):
        """
        Args:
            prev_output_tokens: ``(batch, tgt_len)``; only the shape counts.
            encoder_out: what :class:`NodeEncoder` returned.

        Returns:
            logits ``(batch, tgt_len, vocabulary)``, and fairseq's dict with ``node``, the lists of
            :class:`SolveRecord` of ``encoder`` and ``decoder`` (empty).
        """
        x = encoder_out["encoder_out"][0].transpose(0, 1)  # (batch, src_len, embed_dim)
        valid = ~encoder_out["encoder_padding_mask"][0]
        if self.read_out == "mean":
            features = (x * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        else:
            places = torch.arange(x.size(1), device=x.device)
            last = (places * valid).argmax(1)
            features = x[torch.arange(x.size(0), device=x.device), last]
        logits = self.output_projection(features).unsqueeze(1)
        extra: Dict[str, Any] = {
            "attn": [None],
            "inner_states": [],
            "node": {"encoder": encoder_out.get("node", []), "decoder": []},
        }
        return logits.expand(-1, prev_output_tokens.size(1), -1), extra


@register_model("node_encoder")
class NodeEncoderModel(NodeTransformerModel):
    """Continuous-depth encoder with a classification read-out: of the N-ODE Transformer's original
    (arXiv 2010.11358) a later paper (arXiv 2505.13499, appendix A) reports that it is encoder-only."""

    @classmethod
    def add_args(cls, parser):
        """Add model-specific arguments to the parser."""
        gen_parser_from_dataclass(parser, NodeEncoderConfig(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, cfg, task):
        """Build a new model instance."""
        cfg = NodeEncoderConfig.from_namespace(cfg)
        for name in ("share_all_embeddings", "share_decoder_input_output_embed"):
            if getattr(cfg, name):
                option = name.replace("_", "-")
                raise OptionError(f"--{option} needs a decoder; leave it out, or use --arch node_transformer")
        return super().build_model(cfg, task)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return ReadOut(tgt_dict, cfg.encoder.embed_dim, cfg.read_out)


def parity_architecture(args: argparse.Namespace, composed: bool, layer_norm: bool) -> None:
    """One small block, as narrow as parity needs.

    Without layer norm there is none around the field either (post-norm has no final one).
    """
    args.node_field = getattr(args, "node_field", "composed" if composed else "increment")
    if not layer_norm:
        args.node_no_layer_norm = True
    args.encoder_normalize_before = getattr(args, "encoder_normalize_before", layer_norm)
    args.encoder_layers = getattr(args, "encoder_layers", 1)
    node_transformer.parity_architecture(args)


#: ``node_encoder_parity`` is what the original is reported to be: FFN(x + Attn(x)) without layer norm.
ARCHITECTURES = {
    "node_encoder_parity": dict(composed=True, layer_norm=False),
    "node_encoder_parity_layer_norm": dict(composed=True, layer_norm=True),
    "node_encoder_parity_increment": dict(composed=False, layer_norm=False),
    "node_encoder_parity_increment_layer_norm": dict(composed=False, layer_norm=True),
}


def _register(name, options):
    @register_model_architecture("node_encoder", name)
    def complete(args):
        node_transformer._complete(args, lambda args: parity_architecture(args, **options))


for _name, _options in ARCHITECTURES.items():
    _register(_name, _options)

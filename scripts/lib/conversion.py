"""Checkpoints of fairseq's ``transformer`` as ``node_transformer``, and back.

The parameters have the same names and shapes, so what changes is what the checkpoint says of itself: the
architecture, the solver's options, the criterion. What has no counterpart is refused, and every conversion
is verified on random sentences, on which both models must agree.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass, fields
from typing import Any, Dict, List, Union

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from omegaconf import OmegaConf

import fairseq_node  # noqa: F401 (has fairseq load data only; registers the architectures)
from fairseq_node.models.node_transformer import ARCHITECTURES, NodeOptions, NodeTransformerModel, OptionError
from fairseq_node.modules.solver import SolverConfig

#: fairseq's criteria that ours (``NAME_with_path``) are with a weight of 0: the class names of both.
CRITERIA = {
    "label_smoothed_cross_entropy": (
        "LabelSmoothedCrossEntropyCriterion",
        "LabelSmoothedCrossEntropyWithPath",
    ),
    "cross_entropy": ("CrossEntropyCriterion", "CrossEntropyWithPath"),
}
#: The solver whose solve is the stock layer.
STOCK_SOLVER = {"node_solver": "euler", "node_steps": 1, "node_time": 1.0}
#: Options that change what the parameters are, and the value that a stock layer has.
STOCK_FIELD = {
    "node_field": "increment",
    "node_time_dependence": "none",
    "node_no_layer_norm": False,
    "node_augment_dim": 0,
}
#: Agreement of logits, relative to the largest: float32 sums in another order differ by much less.
AGREEMENT = 1e-4

Options = Union[argparse.Namespace, Dict[str, Any]]


class ConversionError(ValueError):
    """A checkpoint that has no counterpart, and what to do."""


@dataclass
class Conversion:
    """A converted checkpoint.

    Attributes:
        state: what to save.
        direction: ``node`` or ``stock``, what it is now.
        difference: largest difference of a logit between both models (one Euler step) on random sentences.
        notes: what the user should know, sentences.
    """

    state: Dict[str, Any]
    direction: str
    difference: float
    notes: List[str]


def load(path: str) -> Dict[str, Any]:
    """A checkpoint of any age as fairseq of today writes it, with plain containers.

    Raises:
        ConversionError: it is no checkpoint of a model.
        fairseq_node.compat.CheckpointError, OSError: it cannot be loaded, or not safely.
    """
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(path)
    except (KeyError, TypeError, AttributeError):
        # fairseq's upgrade of old checkpoints expects its own entries.
        raise ConversionError("it is not a checkpoint that fairseq-train wrote; give one") from None
    if not state.get("model") or state.get("cfg") is None:
        raise ConversionError("it holds no model with its options; give one that fairseq-train wrote")
    state["cfg"] = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    state["args"] = None
    return state


def convert(state: Dict[str, Any], to: str = "auto") -> Conversion:
    """Converts a checkpoint that :func:`load` gave.

    Args:
        state: the checkpoint; it is not changed.
        to: ``node``, ``stock``, or ``auto`` for the other one.

    Raises:
        ConversionError: it has no counterpart; naming the option and what to do.
    """
    before = state["cfg"]["model"]
    kind = kind_of(before)
    direction = {"node": "stock", "stock": "node"}[kind] if to == "auto" else to
    if direction == kind:
        raise ConversionError(
            f"it is a {kind} checkpoint already; use --to {'stock' if kind == 'node' else 'node'}"
        )
    notes: List[str] = []
    after = copy.deepcopy(before)
    (_to_node if direction == "node" else _to_stock)(after, notes)

    source, target = _build(before, state["model"]), _build(after, state["model"])
    _load(source, state["model"], before)
    _load(target, state["model"], after)
    difference = _compare(source, target)

    converted = dict(state)
    converted["cfg"] = {**state["cfg"], "model": after}
    # As they were saved, in half precision or not; those of very old checkpoints have other names now.
    converted["model"] = {
        name: state["model"].get(name, value) for name, value in target.state_dict().items()
    }
    _convert_criterion(converted, direction)
    if [name for name, _ in source.named_parameters()] != [name for name, _ in target.named_parameters()]:
        # fairseq 0.12.2 keeps copies of encoder layers as parameters, and the optimizer counts them.
        converted["last_optimizer_state"] = None
        notes.append(
            "the optimizer's state has no counterpart and was left out: go on with --finetune-from-model"
        )
    return Conversion(converted, direction, difference, notes)


def _get(options: Options, name: str, default: Any = None) -> Any:
    if isinstance(options, dict):
        return options.get(name, default)
    return getattr(options, name, default)


def _set(options: Options, values: Dict[str, Any]) -> None:
    if isinstance(options, dict):
        options.update(values)
    else:
        vars(options).update(values)


def _remove(options: Options, prefix: str) -> None:
    entries = options if isinstance(options, dict) else vars(options)
    for name in [name for name in entries if name.startswith(prefix)]:
        del entries[name]


def kind_of(options: Options) -> str:
    """``node`` or ``stock``.

    Raises:
        ConversionError: it is neither.
    """
    arch = _get(options, "_name") or _get(options, "arch")
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model is NodeTransformerModel:
        return "node"
    if model is TransformerModel:  # not its subclasses, which add parameters or losses
        return "stock"
    raise ConversionError(
        f"its architecture is {arch}, which is neither fairseq's transformer nor node_transformer (or a "
        "preset of these); no other has a counterpart"
    )


def _rename(options: Options, arch: str) -> None:
    for name in ("_name", "arch"):
        if _get(options, name) is not None:
            _set(options, {name: arch})


def _flatten(options: Options) -> None:
    """Hydra's nested groups as the command line has them. Where a stock model was given both, the group
    counts, with the defaults of its dataclass for what it does not have."""
    for group, config in (
        ("encoder", EncDecBaseConfig),
        ("decoder", DecoderConfig),
        ("quant_noise", QuantNoiseConfig),
    ):
        nested = _get(options, group)
        if isinstance(nested, dict):
            del options[group]
            whole = config(**nested)
            _set(options, {f"{group}_{item.name}": getattr(whole, item.name) for item in fields(config)})


def _to_node(options: Options, notes: List[str]) -> None:
    _flatten(options)
    arch = "node_" + (_get(options, "_name") or _get(options, "arch"))
    # A user's own preset has no name here; its options are all in the checkpoint.
    _rename(options, arch if arch in ARCHITECTURES else "node_transformer")
    defaults = {item.name: item.default for item in fields(NodeOptions) if not item.name.startswith("_")}
    _set(options, {**defaults, "node_solver": "euler"})  # one step is the default
    memory = ("checkpoint_activations", "offload_activations")
    if any(_get(options, name) for name in memory):
        _set(options, {**dict.fromkeys(memory, False), "node_gradient": "checkpoint"})
        notes.append("--checkpoint-activations became --node-gradient checkpoint")


def _to_stock(options: Options, notes: List[str]) -> None:
    for name, value in STOCK_FIELD.items():
        given = _get(options, name, value)
        if given != value:
            option = "--" + name.replace("_", "-") + ("" if given is True else f" {given}")
            raise ConversionError(
                f"it was trained with {option}, which has no counterpart in a stock layer; only the default "
                f"({value}) goes back"
            )
    solver = {name: _get(options, name) for name in STOCK_SOLVER}
    solver["node_steps"] = solver["node_steps"] or 1
    if solver != STOCK_SOLVER:
        notes.append(
            f"its solver was {solver['node_solver']}; the stock model is one Euler step of the same field, "
            "so its numbers are not those of this checkpoint: fine-tune it, or evaluate the node model"
        )
    _rename(options, (_get(options, "_name") or _get(options, "arch"))[len("node_") :])
    if _get(options, "node_gradient") == "checkpoint":
        _set(options, {"checkpoint_activations": True})
        notes.append("--node-gradient checkpoint became --checkpoint-activations")
    _remove(options, "node_")


def _convert_criterion(state: Dict[str, Any], direction: str) -> None:
    """The criterion's name, where both sides have it: training goes on with that of the checkpoint only."""
    criterion = copy.deepcopy(state["cfg"].get("criterion"))
    for stock, (stock_class, our_class) in CRITERIA.items():
        old, new, new_class = stock, f"{stock}_with_path", our_class
        if direction == "stock":
            old, new, new_class = new, old, stock_class
        if criterion is not None and _get(criterion, "_name") == old:
            _remove(criterion, "path_")
            _set(criterion, {"_name": new})
            state["cfg"]["criterion"] = criterion
            history = copy.deepcopy(state["optimizer_history"])
            history[-1]["criterion_name"] = new_class
            state["optimizer_history"] = history


def _words(size: int) -> Dictionary:
    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"word{number}")
    return words


def _build(options: Options, weights: Dict[str, torch.Tensor]) -> torch.nn.Module:
    """The model, with dictionaries of the right sizes in place of the real ones."""
    embeddings = [weights.get(f"{side}.embed_tokens.weight") for side in ("encoder", "decoder")]
    if any(each is None for each in embeddings):
        raise ConversionError("its weights are not those of a Transformer for translation")

    class Task:
        source_dictionary, target_dictionary = (_words(len(each)) for each in embeddings)

    options = copy.deepcopy(options)
    # Files of initial embeddings: the checkpoint has what became of them.
    for side in ("encoder", "decoder"):
        if isinstance(_get(options, side), dict):
            _get(options, side)["embed_path"] = None
        _set(options, {f"{side}_embed_path": None})
    if isinstance(options, dict):
        options = OmegaConf.create(options)
    try:
        return build_model(options, Task)
    except OptionError as error:
        raise ConversionError(f"it was trained with an option that has no counterpart: {error}") from None


def _load(model: torch.nn.Module, weights: Dict[str, torch.Tensor], options: Options) -> None:
    if isinstance(options, dict):
        options = OmegaConf.create(options)
    try:
        model.load_state_dict(dict(weights), strict=True, model_cfg=copy.deepcopy(options))
    except (RuntimeError, KeyError) as error:  # fairseq 0.12.2 looks for some of them itself
        raise ConversionError(f"its weights are not those of its own options: {error}") from None
    model.eval()
    for module in model.modules():
        if hasattr(module, "ever_training"):
            module.ever_training = True  # keeps fairseq 0.12.2 from a kernel that fails on recent torch


@torch.no_grad()
def _compare(source: torch.nn.Module, target: torch.nn.Module) -> float:
    """The largest difference of a logit, both by one Euler step, on random sentences of several lengths.

    Raises:
        ConversionError: it is more than rounding.
    """
    for model in (source, target):
        for module in model.modules():
            if hasattr(module, "solver_config"):
                module.solver_config = SolverConfig(solver="euler")
    sentences = _sentences(source)
    valid = sentences["prev_output_tokens"] != target.decoder.dictionary.pad()
    logits = [model(**sentences)[0][valid].float() for model in (source, target)]
    difference = float((logits[0] - logits[1]).abs().max())
    if not difference <= AGREEMENT * float(logits[0].abs().max().clamp(min=1.0)):
        raise ConversionError(
            f"the converted model differs by {difference:.3g} in a logit on random sentences, so it was not "
            "written; please report this with the architecture and its options"
        )
    return difference


def _sentences(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """Random sentences, padded as fairseq pads them."""
    generator = torch.Generator().manual_seed(0)
    source, target = model.encoder.dictionary, model.decoder.dictionary
    lengths = (9, 6, 2)

    def words(dictionary: Dictionary, count: int) -> torch.Tensor:
        first = min(dictionary.nspecial, len(dictionary) - 1)
        return torch.randint(first, len(dictionary), (count,), generator=generator)

    src = torch.full((len(lengths), max(lengths)), source.pad())
    previous = torch.full((len(lengths), max(lengths)), target.pad())
    for row, length in enumerate(lengths):
        src[row, -length:] = torch.cat([words(source, length - 1), torch.tensor([source.eos()])])
        previous[row, :length] = torch.cat([torch.tensor([target.eos()]), words(target, length - 1)])
    return {"src_tokens": src, "src_lengths": torch.tensor(lengths), "prev_output_tokens": previous}

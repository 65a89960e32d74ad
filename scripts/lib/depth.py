"""What the solver does on a test set: evaluations, arclength, steps, trajectories, BLEU."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import sacrebleu
import torch
from fairseq import checkpoint_utils, utils
from torch import Tensor

from fairseq_node.modules import runge_kutta, solver
from lib import conversion

SIDES = ("encoder", "decoder")


class ReportError(ValueError):
    """A checkpoint or test set that cannot be reported on, and what to do."""


@dataclass
class Loaded:
    """A continuous-depth model with its task.

    Attributes:
        model: in evaluation mode, on ``device``.
        task: of fairseq, with its dictionaries.
        converted: whether the checkpoint was a stock model.
    """

    model: torch.nn.Module
    task: Any
    device: torch.device
    converted: bool

    @property
    def config(self) -> solver.SolverConfig:
        return self.model.encoder.layers[0].solver_config

    def with_tolerance(self, tolerance: float) -> None:
        """Sets both tolerances of every block."""
        for module in self.model.modules():
            if hasattr(module, "solver_config"):
                module.solver_config = replace(module.solver_config, rtol=tolerance, atol=tolerance)


def load(path: str, data: str, cpu: bool = False, **options: Any) -> Loaded:
    """Loads a checkpoint; one of fairseq's ``transformer`` as the node model that it is by one Euler step.

    Args:
        path: the checkpoint.
        data: fairseq's binary data.
        cpu: use no GPU.
        options: of the model, such as ``node_solver``, that replace those of the checkpoint.

    Raises:
        ReportError: it is neither a node model nor a stock Transformer.
        fairseq_node.compat.CheckpointError, OSError: it cannot be loaded.
    """
    with contextlib.ExitStack() as stack:
        try:
            state = conversion.load(path)
            converted = conversion.kind_of(state["cfg"]["model"]) == "stock"
            if converted:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                path = os.path.join(folder, "node.pt")
                torch.save(conversion.convert(state, "node").state, path)
        except conversion.ConversionError as error:
            raise ReportError(f"{path}: {error}") from None
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([path], {"data": data, **options})
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
    return Loaded(models[0].to(device).eval(), task, device, converted)


@dataclass(frozen=True)
class Sentence:
    """What one sentence took, with its reference as target; sums over the blocks of a side.

    Attributes:
        id: its number in the test set.
        source_length, target_length: pieces, with the end of the sentence.
        loss: bits per target piece.
        nfe_encoder, nfe_decoder: evaluations of the vector field.
        arclength_encoder, arclength_decoder: means over its pieces.
        rejected: steps that were tried and not taken.
        unfinished: solves that were cut short.
    """

    id: int
    source_length: int
    target_length: int
    loss: float
    nfe_encoder: int
    nfe_decoder: int
    arclength_encoder: float
    arclength_decoder: float
    rejected: int
    unfinished: int

    @property
    def nfe(self) -> int:
        return self.nfe_encoder + self.nfe_decoder


@dataclass(frozen=True)
class Step:
    """An accepted step: of which block, from ``t`` over ``dt``."""

    side: str
    block: int
    t: float
    dt: float


@dataclass
class Solve:
    """One block's solve for a batch, with the solution in between."""

    side: str
    block: int
    time: float
    dense: runge_kutta.DenseOutput

    def steps(self) -> Iterator[Step]:
        for _, t, dt, _ in self.dense.segments:
            for start, length in zip(t.tolist(), dt.tolist()):
                yield Step(self.side, self.block, start, length)


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[List[Solve]]:
    """Solves a second time, densely, whatever the model's adaptive blocks solve while this is on."""
    solves: List[Solve] = []
    places = {
        id(layer): (side, number)
        for side in SIDES
        for number, layer in enumerate(getattr(model, side).layers, start=1)
    }
    original = solver.solve

    def solve(f, y, config, **options):
        dense = runge_kutta.adaptive(
            *(f, y, config.time, config.tableau),
            **dict(rtol=config.rtol, atol=config.atol, max_nfe=config.max_nfe),
            valid=options.get("valid"),
            dense=True,
        ).dense
        solves.append(Solve(*places[id(f.layer)], config.time, dense))
        return original(f, y, config, **options)

    solver.solve = solve
    try:
        yield solves
    finally:
        solver.solve = original


def batches(loaded: Loaded, subset: str, max_tokens: int, sentences: Optional[int]) -> List[Dict[str, Any]]:
    """Batches of a test set: all of it, or ``sentences`` evenly spread over it.

    Raises:
        ReportError: there is no such set.
    """
    try:
        loaded.task.load_dataset(subset)
    except FileNotFoundError as error:
        raise ReportError(f"there is no set {subset}: {error}; see --gen-subset") from None
    dataset = loaded.task.dataset(subset)
    chosen = range(len(dataset))
    if sentences is not None and sentences < len(dataset):
        chosen = [number * len(dataset) // sentences for number in range(sentences)]
    by_length = sorted(chosen, key=lambda number: (dataset.num_tokens(number), number))
    result: List[List[int]] = [[]]
    for number in by_length:
        if result[-1] and (len(result[-1]) + 1) * dataset.num_tokens(number) > max_tokens:
            result.append([])
        result[-1].append(number)
    move = utils.move_to_cuda if loaded.device.type == "cuda" else lambda batch: batch
    return [move(dataset.collater([dataset[number] for number in numbers])) for numbers in result if numbers]


@torch.no_grad()
def measure(loaded: Loaded, batch: Dict[str, Any]) -> List[Sentence]:
    """Statistics of a batch's sentences."""
    output = loaded.model(**batch["net_input"])
    target = batch["target"]
    valid = target != loaded.task.target_dictionary.pad()
    log_probability = loaded.model.get_normalized_probs(output, log_probs=True).float()
    nll = -log_probability.gather(-1, target.unsqueeze(-1)).squeeze(-1).masked_fill(~valid, 0.0)
    lengths = valid.sum(1)
    records = output[1]["node"]

    def total(name: str, *sides: str) -> Tensor:
        return sum(getattr(record, name) for side in sides for record in records[side])

    columns = {
        "id": batch["id"],
        "source_length": batch["net_input"]["src_lengths"],
        "target_length": lengths,
        "loss": nll.sum(1) / lengths / math.log(2),
        **{f"nfe_{side}": total("nfe", side) for side in SIDES},
        **{f"arclength_{side}": total("arclength", side) for side in SIDES},
        "rejected": total("rejected", *SIDES),
        "unfinished": total("unfinished", *SIDES).long(),
    }
    values = {name: column.tolist() for name, column in columns.items()}
    return [Sentence(**dict(zip(values, row))) for row in zip(*values.values())]


@torch.no_grad()
def steps(loaded: Loaded, batch: Dict[str, Any]) -> List[Step]:
    """Every accepted step of a batch's sentences."""
    with recorded(loaded.model) as solves:
        loaded.model(**batch["net_input"])
    return [step for solve in solves for step in solve.steps()]


@dataclass
class Trajectories:
    """The paths of one sentence's pieces through one side of the model, in two dimensions.

    Attributes:
        pieces: the sentence.
        paths: ``(pieces, times, 2)``; the plane is that of the largest variance (PCA).
        ends: which of the times are where a block begins or ends.
        explained: share of the variance that the plane shows.
    """

    pieces: List[str]
    paths: List[List[List[float]]]
    ends: List[int]
    explained: float


def project(states: Tensor) -> Tuple[Tensor, float]:
    """Principal components: ``(..., dim)`` to ``(..., 2)``, and the share of the variance in these two."""
    flat = states.reshape(-1, states.size(-1)).double()
    centred = flat - flat.mean(0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    variance = values.square()
    share = float(variance[:2].sum() / variance.sum().clamp(min=1e-300))
    plane = (centred @ directions[:2].t()).reshape(*states.shape[:-1], -1)
    return plane, share


@torch.no_grad()
def trajectories(loaded: Loaded, subset: str, number: int, times: int = 33) -> Dict[str, Trajectories]:
    """The paths of sentence ``number`` of a set, at ``times`` points in every block.

    Raises:
        ReportError: there is no such sentence.
    """
    dataset = loaded.task.dataset(subset)
    if not 0 <= number < len(dataset):
        raise ReportError(
            f"--sentence is {number}, but the last of the set is {len(dataset) - 1}; use 0 to that"
        )
    batch = dataset.collater([dataset[number]])
    if loaded.device.type == "cuda":
        batch = utils.move_to_cuda(batch)
    with recorded(loaded.model) as solves:
        loaded.model(**batch["net_input"])
    inputs = {
        "encoder": (batch["net_input"]["src_tokens"], loaded.task.source_dictionary),
        "decoder": (batch["net_input"]["prev_output_tokens"], loaded.task.target_dictionary),
    }
    result = {}
    for side in SIDES:
        states, ends = [], [0]
        for solve in solves:
            if solve.side == side:
                grid = torch.linspace(0.0, solve.time, times)
                states += [solve.dense(float(t))[0] for t in grid]
                ends.append(len(states) - 1)
        tokens, dictionary = inputs[side]
        plane, explained = project(torch.stack(states, dim=1).cpu())
        pieces = [dictionary[token] for token in tokens[0].tolist()]
        result[side] = Trajectories(pieces, plane.tolist(), ends, explained)
    return result


@dataclass(frozen=True)
class Point:
    """A point of the curve of quality over cost.

    Attributes:
        label: the tolerance, or the solver.
        bleu: of the translations.
        nfe: evaluations per sentence, mean, with the references as targets.
        loss: bits per target piece.
        signature: of the BLEU, by sacrebleu.
    """

    label: str
    bleu: float
    nfe: float
    loss: float
    signature: str


@torch.no_grad()
def translate(
    loaded: Loaded, batch: Dict[str, Any], generator: Any, bpe: Optional[str]
) -> List[Tuple[str, str]]:
    """Pairs of a translation and its reference."""
    words = loaded.task.target_dictionary
    skip = {words.pad()}
    pairs = []
    found = loaded.task.inference_step(generator, [loaded.model], batch)
    for row, hypotheses in enumerate(found):
        reference = utils.strip_pad(batch["target"][row], words.pad()).int().cpu()
        hypothesis = hypotheses[0]["tokens"].int().cpu()
        pairs.append(
            tuple(words.string(each, bpe, extra_symbols_to_ignore=skip) for each in (hypothesis, reference))
        )
    return pairs


def point(
    loaded: Loaded,
    label: str,
    all_batches: Sequence[Dict[str, Any]],
    search: Dict[str, Any],
    bpe: Optional[str],
    progress: Callable = iter,
) -> Point:
    """Translates and measures with the solver as it is set.

    Args:
        label: the point's name.
        all_batches: what to translate.
        search: options of fairseq's generator, such as ``beam``.
        bpe: how pieces are put together, ``--remove-bpe`` of fairseq.
        progress: wraps the batches as tqdm does.
    """
    generator = loaded.task.build_generator([loaded.model], argparse.Namespace(**search))
    pairs, sentences = [], []
    for batch in progress(all_batches):
        pairs += translate(loaded, batch, generator, bpe)
        sentences += measure(loaded, batch)
    hypotheses, references = zip(*pairs)
    metric = sacrebleu.BLEU()
    bleu = metric.corpus_score(list(hypotheses), [list(references)]).score
    pieces = sum(each.target_length for each in sentences)
    return Point(
        label,
        bleu,
        sum(each.nfe for each in sentences) / len(sentences),
        sum(each.loss * each.target_length for each in sentences) / pieces,
        str(metric.get_signature()),
    )

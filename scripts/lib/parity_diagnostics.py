"""What a model does with strings of one length: accuracy, loss, cost, path and sensitivity."""

import hashlib
import math
from dataclasses import dataclass
from typing import Dict, List

import torch
from torch import Tensor

from fairseq_node.tasks.parity import CLASSES, ParityTask


@dataclass(frozen=True)
class Diagnosis:
    """Of a model on strings of ``length`` bits. What a model has not (a path, say) is NaN.

    Attributes:
        strings: how many were seen; none of training, if longer than the task's ``SHARED_LENGTH``.
        accuracy: of the most probable answer, in per cent.
        loss: cross-entropy in bits per string.
        nfe, nfe_std: evaluations of the vector field per string, all blocks of both sides together: mean
            and standard deviation over the strings.
        arclength: mean over the strings, sum over the blocks of both sides.
        unfinished: share of the strings with a block cut short by ``--node-max-nfe`` and the like.
        sensitivity: mean absolute change of the log-odds of ``odd`` when one bit is flipped. Hahn (2020,
            arXiv 1906.06755) bounds it for soft attention by a constant over the length.
        sensitivity_probability: the same of the probability of ``odd``.
    """

    length: int
    strings: int
    accuracy: float
    loss: float
    nfe: float
    nfe_std: float
    arclength: float
    unfinished: float
    sensitivity: float
    sensitivity_probability: float


def diagnose(task: ParityTask, model, length: int, strings: int = 200, batch: int = 100) -> Diagnosis:
    """Looks at a model on held-out strings of one length.

    Args:
        task: of the model.
        model: any of fairseq's that the task trained.
        length: bits, 1 or more.
        strings: how many at most; the first of the subset ``test@length``.
        batch: strings at a time.
    """
    task.load_dataset(f"test@{length}")
    data = task.dataset(f"test@{length}")
    chosen = range(min(strings, len(data)))
    seen: Dict[str, List[Tensor]] = {}
    model.eval()
    with torch.no_grad():
        for start in range(0, len(chosen), batch):
            samples = [data[index] for index in chosen[start : start + batch]]
            for name, values in _of_batch(task, model, data.collater(samples)).items():
                seen.setdefault(name, []).append(values.double())
    values = {name: torch.cat(parts) for name, parts in seen.items()}

    def mean(name: str) -> float:
        return float(values[name].mean()) if name in values else math.nan

    return Diagnosis(
        length=length,
        strings=len(chosen),
        accuracy=100 * mean("correct"),
        loss=mean("loss"),
        nfe=mean("nfe"),
        nfe_std=float(values["nfe"].std(unbiased=False)) if "nfe" in values else math.nan,
        arclength=mean("arclength"),
        unfinished=mean("unfinished"),
        sensitivity=mean("log_odds"),
        sensitivity_probability=mean("probability"),
    )


def _of_batch(task: ParityTask, model, sample) -> Dict[str, Tensor]:
    """The quantities of each string of a batch, ``(batch,)``."""
    even, odd = map(task.dictionary.index, CLASSES)
    output = model(**sample["net_input"])
    lprobs = model.get_normalized_probs(output, log_probs=True)[:, 0]
    target = sample["target"]
    values = {
        "correct": lprobs.argmax(-1) == target[:, 0],
        "loss": -lprobs.gather(1, target)[:, 0] / math.log(2),
    }
    node = output[1].get("node") if isinstance(output[1], dict) else None
    records = [record for side in node.values() for record in side] if node else []
    if records:
        values["nfe"] = sum(record.nfe for record in records)
        values["arclength"] = sum(record.arclength for record in records)
        values["unfinished"] = torch.stack([record.unfinished for record in records]).any(0)

    flipped = model.get_normalized_probs(model(**_flipped(task, sample)["net_input"]), log_probs=True)[:, 0]
    log_odds = [answers[:, odd] - answers[:, even] for answers in (lprobs, flipped)]
    values["log_odds"] = (log_odds[0] - log_odds[1]).abs()
    values["probability"] = (lprobs[:, odd].exp() - flipped[:, odd].exp()).abs()
    return values


def _flipped(task: ParityTask, sample):
    """The strings of a batch (all of one length) with one bit of each flipped, at any of their places."""
    tokens = sample["net_input"]["src_tokens"].clone()
    bits = tokens.size(1) - 1
    drawn = [hashlib.shake_128(f"flip {row}".encode()).digest(8) for row in tokens.tolist()]
    places = torch.tensor([int.from_bytes(number, "big") % bits for number in drawn]).unsqueeze(1)
    zero, one = (task.dictionary.index(bit) for bit in "01")
    tokens.scatter_(1, places, zero + one - tokens.gather(1, places))
    return {"net_input": {**sample["net_input"], "src_tokens": tokens}}

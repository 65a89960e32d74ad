"""fairseq's translation task, with what every translated sentence cost in depth."""

import json
import logging
import math
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
import torch
from fairseq.data import data_utils
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II

from fairseq_node.models.node_transformer import NodeTransformerModel

logger = logging.getLogger(__name__)

#: What a summary tells of.
NAMES = ("nfe_encoder", "nfe_decoder", "arclength_encoder", "arclength_decoder")


@dataclass
class NodeTranslationConfig(TranslationConfig):
    """Options of fairseq's translation; the two more are those of ``fairseq-generate``."""

    results_path: Optional[str] = II("common_eval.results_path")
    gen_subset: str = II("dataset.gen_subset")


@dataclass
class DepthStatistics:
    """Collects statistics of translated sentences, writes them and sums them up.

    Attributes:
        path: where each sentence becomes a line of JSON at once, or None.
    """

    path: Optional[Path] = None
    sentences: List[dict] = field(default_factory=list)
    decoded: float = 0.0
    evaluations: float = 0.0

    def __post_init__(self):
        self.file = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # fairseq-generate writes its own file anew, too.
            self.file = self.path.open("w", encoding="utf-8", buffering=1)

    def add(self, sentence: dict) -> None:
        self.sentences.append({name: sentence[name] for name in NAMES})
        if self.file is not None:
            print(json.dumps(sentence), file=self.file)

    def count(self, nfe: torch.Tensor) -> None:
        """Counts the evaluations of a block for one position, ``(hypotheses,)``."""
        self.decoded += len(nfe)
        self.evaluations += nfe.sum()

    def close(self) -> None:
        """Logs the summary."""
        if self.sentences:
            logger.info("Depth of %s", self.summary())
        if self.file is not None:
            self.file.close()

    def summary(self) -> str:
        parts = [f"{len(self.sentences):,} sentences (mean, median, 95th percentile)"]
        for name in NAMES:
            values = [sentence[name] for sentence in self.sentences]
            middle, high = np.percentile(values, (50, 95))
            parts.append(f"{name} {np.mean(values):.1f} {middle:.1f} {high:.1f}")
        if self.decoded:
            parts.append(f"search: {float(self.evaluations) / self.decoded:.1f} NFE per block and position")
        return " | ".join(parts)


@register_task("node_translation", dataclass=NodeTranslationConfig)
class NodeTranslationTask(TranslationTask):
    """fairseq's ``translation`` with the same options. Translating, it also tells NFE and arclength:

    * with ``--results-path DIR``, ``DIR/generate-SUBSET.jsonl`` has one line of JSON per sentence, in the
      order of fairseq's own output;
    * at the end a line of the log has mean, median and 95th percentile.

    They are those of the hypothesis under teacher forcing (with ``--nbest`` of each), as in training and
    validation: a solve of the whole sentence, which costs one more forward. Of an ensemble it is the sum.
    """

    _statistics: Optional[DepthStatistics] = None
    _nbest = 1

    def build_generator(self, models, args, *more, **options):
        self._nbest = getattr(args, "nbest", 1)
        return super().build_generator(models, args, *more, **options)

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
        """See fairseq's; the statistics of the hypotheses are collected on the way."""
        nodes = [model for model in models if isinstance(model, NodeTransformerModel)]
        validating = generator is getattr(self, "sequence_generator", None)
        if validating or not nodes:
            return super().inference_step(generator, models, sample, prefix_tokens, constraints)
        statistics = self._collector()
        blocks = [block for model in nodes for block in model.decoder.layers.children()]
        handles = [
            block.register_forward_hook(lambda _, __, out: statistics.count(out[-1].nfe)) for block in blocks
        ]
        try:
            hypotheses = super().inference_step(generator, models, sample, prefix_tokens, constraints)
        finally:
            for handle in handles:
                handle.remove()
        for sentence in depth_of(
            nodes, sample, [h[: self._nbest] for h in hypotheses], self.target_dictionary
        ):
            statistics.add(sentence)
        return hypotheses

    def _collector(self) -> DepthStatistics:
        if self._statistics is None:
            path, subset = self.cfg.results_path, self.cfg.gen_subset
            known = path is not None and not path.startswith("$")  # without fairseq-generate it stays open
            path = Path(path) / f"generate-{subset}.jsonl" if known else None
            self._statistics = DepthStatistics(path)
            # Nothing tells a task that the last sentence was translated, but its own end.
            weakref.finalize(self, self._statistics.close)
        return self._statistics


@torch.no_grad()
def depth_of(models, sample: Dict, hypotheses: List[List[Dict]], dictionary) -> List[dict]:
    """What translating a batch costs in depth.

    Args:
        models: continuous-depth models.
        sample: fairseq's batch; only ``net_input`` and, if it is there, ``id`` are used.
        hypotheses: of each sentence, best first, as a generator returns them: with ``tokens`` and ``score``.
        dictionary: of the target.

    Returns:
        for each sentence ``id``, ``source_length``, ``nfe_encoder``, ``arclength_encoder``, and those of
        its best hypothesis: ``score`` (base 2), ``target_length``, ``nfe_decoder``, ``arclength_decoder``,
        ``steps_rejected`` and ``node_unfinished`` (both with the encoder's). If a sentence has more
        hypotheses, they are listed in ``hypotheses``. Lengths are in tokens, end of sentence included;
        the others are sums over blocks.
    """
    net_input = sample["net_input"]
    counts = [len(candidates) for candidates in hypotheses]
    flat = [candidate["tokens"] for candidates in hypotheses for candidate in candidates]
    order = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(flat[0].device)
    previous = data_utils.collate_tokens(
        flat, dictionary.pad(), dictionary.eos(), left_pad=False, move_eos_to_beginning=True
    )
    encoder: List[Dict] = [dict() for _ in counts]
    decoder: List[Dict] = [dict() for _ in flat]
    for model in models:
        encoder_out = model.encoder(net_input["src_tokens"], src_lengths=net_input["src_lengths"])
        _accumulate(encoder, encoder_out["node"])
        _, extra = model.decoder(previous, encoder_out=model.encoder.reorder_encoder_out(encoder_out, order))
        _accumulate(decoder, extra["node"]["decoder"])

    ids = sample["id"].tolist() if "id" in sample else [None] * len(counts)
    source_lengths = net_input["src_lengths"].tolist()
    result, start = [], 0
    for row, candidates in enumerate(hypotheses):
        described = []
        for candidate, depth in zip(candidates, decoder[start : start + len(candidates)]):
            described.append(
                {
                    "score": float(candidate["score"]) / math.log(2),
                    "target_length": len(candidate["tokens"]),
                    "nfe_decoder": depth["nfe"],
                    "arclength_decoder": depth["arclength"],
                    "steps_rejected": encoder[row]["rejected"] + depth["rejected"],
                    "node_unfinished": encoder[row]["unfinished"] + depth["unfinished"],
                }
            )
        start += len(candidates)
        sentence = {
            "id": ids[row],
            "source_length": source_lengths[row],
            "nfe_encoder": encoder[row]["nfe"],
            "arclength_encoder": encoder[row]["arclength"],
            **described[0],
        }
        if len(described) > 1:
            sentence["hypotheses"] = described
        result.append(sentence)
    return result


def _accumulate(rows: List[Dict], records) -> None:
    """Adds a side's blocks to what is known of each sentence."""
    for name in ("nfe", "rejected", "unfinished", "arclength"):
        values = sum(
            getattr(record, name).long() if name == "unfinished" else getattr(record, name)
            for record in records
        )
        for row, value in zip(rows, values.tolist()):
            row[name] = row.get(name, 0) + value

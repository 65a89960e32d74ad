"""fairseq's criteria with a penalty on the path through depth, and the statistics of the solves."""

import logging
from dataclasses import dataclass, field

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics

from fairseq_node import compat
from fairseq_node.models.node_transformer import OptionError
from fairseq_node.modules import path

logger = logging.getLogger(__name__)

PENALTIES = ("none", "arclength", "kinetic")
SCOPES = ("encoder", "decoder", "both")
SIDES = ("encoder", "decoder")


@dataclass
class PathPenaltyConfig(FairseqDataclass):
    """The penalty's options."""

    path_penalty: ChoiceEnum(PENALTIES) = field(
        default="none",
        metadata={
            "help": "penalise the arclength of the trajectories through depth (arXiv 2010.11358), or "
            "their kinetic energy (arXiv 2501.18793). Default: none"
        },
    )
    path_weight: float = field(
        default=0.0,
        metadata={
            "help": "weight of the penalty against the loss per target token; the penalty is a mean "
            "per valid token, summed over blocks, whatever the batch. Default: 0"
        },
    )
    path_scope: ChoiceEnum(SCOPES) = field(
        default="both", metadata={"help": "whose trajectories are penalised. Default: both"}
    )
    path_norm: ChoiceEnum(path.NORMS) = field(
        default="token",
        metadata={"help": "the path of each token, or of a sentence's whole state. Default: token"},
    )
    path_warmup_updates: int = field(
        default=0,
        metadata={"help": "raise the weight linearly from 0 over this many updates. Default: 0"},
    )


class _Observed:
    """A model that remembers the extra output of its forward, for the length of one call."""

    def __init__(self, model):
        self.model = model
        self.extra = None

    def __call__(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        self.extra = output[1]
        return output

    def __getattr__(self, name):
        return getattr(self.model, name)


class _LoggingOutput(dict):
    """A logging output whose callable values are computed when they are read: backward, which does
    some of the counting, runs between the criterion and that moment. What is read is always a tensor,
    so that all workers reduce the same things, those with a dummy batch too."""

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return value() if callable(value) else value

    def get(self, key, default=None):
        return self[key] if key in self else default

    def keys(self):
        """Without histograms where there is nothing to reduce: fairseq-validate prints all there is."""
        reduced = torch.distributed.is_available() and torch.distributed.is_initialized()
        return [key for key in super().keys() if reduced or not key.startswith("_")]

    def items(self):
        return [(key, self[key]) for key in super().keys()]

    def __reduce__(self):
        return dict, (self.items(),)


#: NFE up to here have a bin each; above, a bin is 1/64 of an octave wide (1 %), up to 2^17.
EXACT_BINS, BINS_PER_OCTAVE, OCTAVES = 128, 64, 10


def histogram(nfe: torch.Tensor) -> torch.Tensor:
    """Sentences by their NFE: counts that can be added up over batches and workers.

    Args:
        nfe: evaluations of each sentence, ``(batch,)``, >= 0.
    """
    octaves = (nfe.clamp(min=EXACT_BINS).double() / EXACT_BINS).log2()
    above = EXACT_BINS + (octaves * BINS_PER_OCTAVE).long().clamp(max=OCTAVES * BINS_PER_OCTAVE - 1)
    bins = torch.where(nfe < EXACT_BINS, nfe.long(), above)
    counts = torch.zeros(EXACT_BINS + OCTAVES * BINS_PER_OCTAVE, dtype=torch.double, device=nfe.device)
    # Not bincount, which would wait for the device.
    return counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.double))


def percentile(counts: torch.Tensor, percent: float) -> float:
    """The smallest NFE that at least so many percent of the sentences do not exceed (nearest rank);
    above ``EXACT_BINS`` to 1 %.

    Args:
        counts: sums of :func:`histogram`.
        percent: in (0, 100].
    """
    total = counts.cumsum(0)
    bin_ = int(torch.searchsorted(total, total[-1:] * percent / 100))
    if bin_ < EXACT_BINS:
        return bin_
    return round(EXACT_BINS * 2 ** ((bin_ - EXACT_BINS) / BINS_PER_OCTAVE))


class _WithPath:
    """Adds the penalty and the statistics to a criterion of fairseq; a mixin.

    The penalty of a sentence counts once per target token (once per sentence with
    ``--sentence-avg``), as its loss does, so that the objective does not depend on how sentences are
    put into batches, on ``--update-freq``, or on the number of workers.
    """

    def _init_path(self, penalty, weight, scope, norm, warmup_updates):
        if weight < 0:
            raise OptionError(f"--path-weight is {weight}; use 0 or a positive number such as 0.01")
        if warmup_updates < 0:
            raise OptionError(f"--path-warmup-updates is {warmup_updates}; use 0 or more")
        if weight > 0 and penalty == "none":
            logger.warning(
                "--path-weight %g weighs nothing without a penalty; use --path-penalty arclength", weight
            )
        self.path_penalty = str(penalty)  # fairseq's commands bring a member of the enum
        self.path_weight = weight if penalty != "none" else 0.0
        self.path_sides = SIDES if scope == "both" else (str(scope),)
        self.path_warmup_updates = warmup_updates
        self.path_config = path.PathConfig(norm=norm, gradient=self.path_weight > 0)

    @classmethod
    def build_criterion(cls, cfg, task):
        """Construct a criterion from command-line args; fairseq has built the model before."""
        model_class = compat.built_model_class(task)
        if model_class is not None:
            _refuse_without_path(model_class)
        return super().build_criterion(cfg, task)

    def forward(self, model, sample, reduce=True):
        """See fairseq's criterion; the loss includes the penalty, ``logging_output`` the statistics."""
        _refuse_without_path(model)
        model.integrate_path(self.path_config)
        observed = _Observed(model)
        loss, sample_size, logging_output = super().forward(observed, sample, reduce=reduce)
        records = observed.extra["node"]
        weight = self.path_weight
        if self.path_warmup_updates > 0:
            weight = weight * min(1.0, model.num_updates / self.path_warmup_updates)
        if self.path_weight > 0 and reduce:
            per_sentence = _total(
                [getattr(record, self.path_penalty) for side in self.path_sides for record in records[side]],
                logging_output,
            )
            penalty = (per_sentence * self._weights(sample).to(per_sentence)).sum()
            logging_output["path_loss"] = penalty.data
            if weight > 0:
                loss = loss + weight * penalty.to(loss.dtype)
                logging_output["loss"] = loss.data
        with torch.no_grad():
            logging_output.update(_statistics(records, logging_output, distribution=not self.training))
        return loss, sample_size, _LoggingOutput(logging_output)

    def _weights(self, sample):
        """How often a sentence's loss counts in the sample size, ``(batch,)``."""
        if self.sentence_avg:
            return torch.ones_like(sample["target"][:, 0])
        return sample["target"].ne(self.padding_idx).sum(1)

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        """Aggregate logging outputs from data parallel training."""
        super().reduce_metrics(logging_outputs)

        def total(name):
            return sum(log.get(name, 0) for log in logging_outputs)

        sentences = total("nsentences")
        if any("path_loss" in log for log in logging_outputs):
            sample_size = total("sample_size")
            metrics.log_scalar("path_loss", total("path_loss") / sample_size, sample_size, round=4)
        for name in STATISTICS:
            if any(name in log for log in logging_outputs):
                metrics.log_scalar(name, total(name) / sentences, sentences, round=3)
        for side in SIDES:
            if any(_counts_of(side) in log for log in logging_outputs):
                metrics.log_scalar_sum(_counts_of(side), total(_counts_of(side)).cpu())
                for percent in PERCENTILES:
                    metrics.log_derived(f"nfe_{side}_p{percent}", _percentile_of(side, percent))


def _refuse_without_path(model) -> None:
    if not hasattr(model, "integrate_path"):
        raise OptionError(
            "--criterion ..._with_path needs a model with a path through depth; use "
            "--arch node_transformer, or fairseq's own criterion for this model"
        )


STATISTICS = (
    *(f"nfe_{side}" for side in SIDES),
    "nfe_backward",
    "steps_rejected",
    *(f"arclength_{side}" for side in SIDES),
    "node_unfinished",
)
PERCENTILES = (50, 95)


def _counts_of(side):
    return f"_nfe_{side}_counts"  # fairseq does not show what starts with an underscore


def _percentile_of(side, percent):
    def derive(meters):
        return percentile(meters[_counts_of(side)].sum, percent)

    return derive


def _total(of_blocks, logging_output):
    """Sum over blocks, ``(batch,)``; zeros where LayerDrop has left none."""
    zeros = torch.zeros(logging_output["nsentences"], device=logging_output["loss"].device)
    return sum(of_blocks, zeros)


def _statistics(records, logging_output, distribution):
    """Sums over the sentences of the batch, each the sum over a side's blocks; tensors, so that
    nothing waits for the device. With ``distribution``, histograms of NFE too."""
    every = [record for side in SIDES for record in records[side]]

    def total(name, of=every):
        return _total([getattr(record, name) for record in of], logging_output)

    result = {"nfe_backward": lambda: total("nfe_backward").sum()}
    for side in SIDES:
        nfe = total("nfe", records[side])
        result[f"nfe_{side}"] = nfe.sum()
        result[f"arclength_{side}"] = total("arclength", records[side]).sum()
        if distribution:
            result[_counts_of(side)] = histogram(nfe)
    result["steps_rejected"] = total("rejected").sum()
    result["node_unfinished"] = total("unfinished").sum()
    return result


@dataclass
class LabelSmoothedCrossEntropyWithPathConfig(PathPenaltyConfig, LabelSmoothedCrossEntropyCriterionConfig):
    """Options of fairseq's label-smoothed cross-entropy and of the penalty."""


@register_criterion(
    "label_smoothed_cross_entropy_with_path", dataclass=LabelSmoothedCrossEntropyWithPathConfig
)
class LabelSmoothedCrossEntropyWithPath(_WithPath, LabelSmoothedCrossEntropyCriterion):
    """fairseq's label-smoothed cross-entropy with a penalty on the path."""

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        path_penalty,
        path_weight,
        path_scope,
        path_norm,
        path_warmup_updates,
        ignore_prefix_size=0,
        report_accuracy=False,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self._init_path(path_penalty, path_weight, path_scope, path_norm, path_warmup_updates)


@dataclass
class CrossEntropyWithPathConfig(PathPenaltyConfig, CrossEntropyCriterionConfig):
    """Options of fairseq's cross-entropy and of the penalty."""


@register_criterion("cross_entropy_with_path", dataclass=CrossEntropyWithPathConfig)
class CrossEntropyWithPath(_WithPath, CrossEntropyCriterion):
    """fairseq's cross-entropy with a penalty on the path."""

    def __init__(
        self,
        task,
        sentence_avg,
        path_penalty,
        path_weight,
        path_scope,
        path_norm,
        path_warmup_updates,
    ):
        super().__init__(task, sentence_avg)
        self._init_path(path_penalty, path_weight, path_scope, path_norm, path_warmup_updates)

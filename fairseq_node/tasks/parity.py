"""The parity task: is the number of ones in a string of bits odd or even?

The source is the bits and ``</s>``, the target one token, ``odd`` or ``even``: every fairseq architecture
runs on it. Strings are made on the fly (:mod:`fairseq_node.tasks.parity_strings`).
"""

import argparse
import contextlib
import dataclasses
import logging
import re
from dataclasses import dataclass, field
from typing import Dict, List, Optional

import numpy as np
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.scoring import BaseScorer, register_scorer
from fairseq.tasks import FairseqTask, register_task
from torch import Tensor

from fairseq_node.models.node_transformer import OptionError
from fairseq_node.tasks.parity_strings import SHARED_LENGTH, SPLITS, AllStrings, ParityStrings, parity

logger = logging.getLogger(__name__)

CLASSES = ("even", "odd")


@dataclass(frozen=True)
class Strings:
    """What strings there are; the fields are options, ``--parity-...``."""

    min_length: int = 1
    max_length: int = 16
    train_size: int = 10000
    valid_size: int = 1000
    test_size: int = 1000
    seed: int = 1


def _option(name, text):
    # None for what was not given: a checkpoint's own value, then, or the default.
    default = getattr(Strings, name)
    return field(
        default=None, metadata={"help": f"{text}. Default: {default}; at test time that of training"}
    )


@dataclass
class ParityConfig(FairseqDataclass):
    """Options of the parity task."""

    parity_min_length: Optional[int] = _option("min_length", "bits of the shortest strings")
    parity_max_length: Optional[int] = _option("max_length", "bits of the longest strings")
    parity_train_size: Optional[int] = _option("train_size", "strings in an epoch; every epoch has new ones")
    parity_valid_size: Optional[int] = _option("valid_size", "strings to validate on, for each subset")
    parity_test_size: Optional[int] = _option("test_size", "held-out strings, for each subset")
    parity_seed: Optional[int] = _option("seed", "seed of the strings, whatever the --seed of the model")


def strings_config(cfg, saved=None) -> Strings:
    """What strings to make.

    Args:
        cfg: the task's options.
        saved: those that a checkpoint was trained with; they hold where ``cfg`` has None.

    Raises:
        OptionError: naming the option and what to use.
    """
    given = {}
    for options in (saved, cfg):
        for item in dataclasses.fields(Strings):
            value = getattr(options, f"parity_{item.name}", None)
            if value is not None:
                given[item.name] = value
    config = Strings(**given)
    if config.min_length < 1:
        raise OptionError(
            f"--parity-min-length is {config.min_length}, but no string of no bits is odd; use 1 or more"
        )
    if config.min_length > config.max_length:
        raise OptionError(
            f"--parity-min-length {config.min_length} is more than --parity-max-length "
            f"{config.max_length}; use at most that"
        )
    for split in SPLITS:
        size = getattr(config, f"{split}_size")
        if size < 2:
            what = "an empty split" if size < 1 else "a split without an odd string"
            raise OptionError(f"--parity-{split}-size is {size}, {what}; use 2 or more")
    return config


class ParityDataset(LanguagePairDataset):
    """Bits and their parity, as fairseq's pairs of sentences.

    Args:
        strings: a sequence of strings of bits with a ``length(index)``; a dataclass with an ``epoch`` has
            other strings in every epoch.
        dictionary: the tokens.
        train: new strings in every epoch, in batches of mixed lengths.
    """

    def __init__(self, strings, dictionary: Dictionary, train: bool = False):
        self.train = train
        self.classes = [torch.tensor([dictionary.index(name)]) for name in CLASSES]
        sizes = self._sizes(strings)
        super().__init__(
            strings,
            sizes,
            dictionary,
            strings,
            np.ones_like(sizes),
            dictionary,
            shuffle=train,
            eos=dictionary.eos(),
        )

    @staticmethod
    def _sizes(strings) -> np.ndarray:
        return np.array([strings.length(index) + 1 for index in range(len(strings))])

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return not self.train

    def set_epoch(self, epoch: int) -> None:
        """Another epoch has other strings (those of validation and test stay)."""
        if self.train and epoch != self.src.epoch:
            self.src = self.tgt = dataclasses.replace(self.src, epoch=epoch)
            self.src_sizes = self._sizes(self.src)
            self.sizes = np.vstack((self.src_sizes, self.tgt_sizes)).T

    def __getitem__(self, index: int) -> dict:
        bits = self.src[int(index)]
        return {
            "id": index,
            "source": encode(bits, self.src_dict),
            "target": self.classes[parity(bits)],
        }

    def ordered_indices(self) -> np.ndarray:
        # Sorted by length, as translation is, every update would see a single length.
        return np.random.permutation(len(self)) if self.train else super().ordered_indices()


def encode(bits: str, dictionary: Dictionary) -> Tensor:
    """The tokens of a string such as ``"0110"`` and ``</s>``, ``(bits + 1,)``."""
    return torch.tensor([*map(dictionary.index, bits), dictionary.eos()])


class _Answers:
    """Reads the most probable answers off the first position: all that fairseq-generate needs of a
    search. A search for a longer target would add the score of an ``</s>`` that nobody learned."""

    def __init__(self, dictionary: Dictionary, beam: int):
        self.eos = dictionary.eos()
        self.beam = min(beam, len(dictionary))

    def generate(self, models, sample, **unused) -> List[List[Dict[str, Tensor]]]:
        """fairseq's hypotheses of every source, the best first, from the mean of the models."""
        source = {name: sample["net_input"][name] for name in ("src_tokens", "src_lengths")}
        begin = source["src_tokens"].new_full((len(source["src_tokens"]), 1), self.eos)
        lprobs = []
        for model in models:
            model.eval()
            output = model(**source, prev_output_tokens=begin)
            lprobs.append(model.get_normalized_probs(output, log_probs=True)[:, 0].float())
        scores, tokens = (torch.stack(lprobs).logsumexp(0) - np.log(len(models))).topk(self.beam)
        return [
            [
                {
                    "tokens": token.view(1),
                    "score": score,
                    "attention": None,
                    "alignment": torch.empty(0),
                    "positional_scores": score.view(1).clone(),
                }
                for token, score in zip(*best)
            ]
            for best in zip(tokens, scores)
        ]


@dataclass
class AccuracyConfig(FairseqDataclass):
    """fairseq-generate's ``--scoring accuracy`` has no options."""


@register_scorer("accuracy", dataclass=AccuracyConfig)
class AccuracyScorer(BaseScorer):
    """Hypotheses that equal their reference, in per cent: the default of the parity task."""

    def score(self) -> float:
        return 100 * sum(map(str.__eq__, self.ref, self.pred)) / max(len(self.ref), 1)

    def result_string(self) -> str:
        return f"accuracy = {self.score():.2f} % of {len(self.ref)} strings"


def _refuse(data: str):
    raise argparse.ArgumentTypeError(
        f"--task parity makes its own strings and reads no data; leave out {data}"
    )


@register_task("parity", dataclass=ParityConfig)
class ParityTask(FairseqTask):
    """Strings of bits, to be called odd or even; logs accuracy, in validation by length too.

    Subsets are ``train``, ``valid`` and ``test``, with lengths as in training, and ``valid@16`` and the
    like for a single length, which may be longer.
    """

    def __init__(self, cfg: ParityConfig, **unused):
        super().__init__(cfg)
        self.strings = strings_config(cfg)
        self.dictionary = Dictionary()
        for symbol in ("0", "1", *CLASSES):
            self.dictionary.add_symbol(symbol)
        self.positions = float("inf")

    @classmethod
    def add_args(cls, parser):
        """Add task-specific arguments to the parser."""
        super().add_args(parser)
        parser.add_argument("data", nargs="?", type=_refuse, help=argparse.SUPPRESS)
        parser.set_defaults(scoring="accuracy")  # BLEU of one word is 0

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def build_model(self, cfg, from_checkpoint=False):
        """Builds the model; refuses one that the strings do not fit into."""
        model = super().build_model(cfg, from_checkpoint)
        positions = model.max_positions()
        self.positions = min(self.positions, positions if isinstance(positions, int) else positions[0])
        if not from_checkpoint:  # whose own options hold; load_dataset looks at these
            self._check_positions(self.strings.max_length, "--parity-max-length")
        return model

    def _check_positions(self, length: int, option: str) -> None:
        if length + 1 > self.positions:
            raise OptionError(
                f"{option} asks for {length} bits, but with </s> the model has positions for "
                f"{self.positions - 1}; use at most that, or a larger --max-source-positions"
            )

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, task_cfg=None, **unused
    ) -> None:
        """Makes the strings of a subset.

        Args:
            split: ``train``, ``valid``, ``test``, or one with a length, such as ``valid@16``.
            task_cfg: options of the task that a checkpoint was trained with.

        Raises:
            OptionError: there is no such subset, or the model cannot read it.
        """
        match = re.fullmatch(rf"({'|'.join(SPLITS)})(?:@([1-9]\d*))?", split)
        if match is None:
            raise OptionError(
                f"there is no subset {split!r} of --task parity; use {', '.join(SPLITS)}, or one length of "
                f"them such as valid@16"
            )
        config = strings_config(self.cfg, task_cfg)
        name, train = match[1], match[1] == "train"
        shortest, longest = config.min_length, config.max_length
        if match[2]:
            shortest = longest = int(match[2])
        self._check_positions(longest, split if match[2] else "--parity-max-length")
        if match[2] and longest <= SHARED_LENGTH and not train:
            strings = AllStrings(longest)
        else:
            size = getattr(config, f"{name}_size")
            strings = ParityStrings(name, shortest, longest, size, config.seed, epoch if train else 1)
        if shortest <= SHARED_LENGTH:
            shared = "1 bit" if longest == 1 else f"up to {min(longest, SHARED_LENGTH)} bits"
            logger.info(
                "%s: strings of %s are too few to be divided: train, valid and test draw from all of them%s",
                *(split, shared),
                f", and {split} is all {len(strings)}" if isinstance(strings, AllStrings) else "",
            )
        self.datasets[split] = ParityDataset(strings, self.dictionary, train)

    def build_dataset_for_inference(self, src_tokens, src_lengths, **unused) -> LanguagePairDataset:
        """Sources from fairseq-interactive."""
        return LanguagePairDataset(src_tokens, src_lengths, self.dictionary)

    def get_interactive_tokens_and_lengths(self, lines, encode_fn):
        """Reads ``0110`` or ``0 1 1 0``."""
        tokens = [encode("".join(encode_fn(line).split()), self.dictionary) for line in lines]
        return tokens, [len(line) for line in tokens]

    def build_generator(self, models, args, **options):
        """What fairseq-generate calls for answers: no search, for a target of one token needs none."""
        if getattr(args, "score_reference", False):
            return super().build_generator(models, args, **options)
        return _Answers(self.dictionary, getattr(args, "beam", 1))

    def train_step(self, sample, model, criterion, *args, **kwargs):
        """See fairseq's; counts right answers, whatever the criterion."""
        with _outputs(model) as outputs:
            loss, sample_size, log = super().train_step(sample, model, criterion, *args, **kwargs)
        log["parity_correct"] = _correct(outputs[-1], sample).sum()
        return loss, sample_size, log

    def valid_step(self, sample, model, criterion):
        """See fairseq's; counts right answers by length."""
        with _outputs(model) as outputs:
            loss, sample_size, log = super().valid_step(sample, model, criterion)
        correct = _correct(outputs[-1], sample)
        lengths = sample["net_input"]["src_lengths"] - 1
        # A place for every length there is: fairseq adds these up over batches and workers.
        longest = max(dataset.src.max_length for dataset in self.datasets.values())
        counts = correct.new_zeros(2, longest + 1)
        counts.index_add_(1, lengths, torch.stack([correct, torch.ones_like(correct)]))
        log["parity_correct"] = correct.sum()
        log["parity_by_length"] = counts
        return loss, sample_size, log

    def reduce_metrics(self, logging_outputs, criterion):
        """Aggregate logging outputs from data parallel training."""
        super().reduce_metrics(logging_outputs, criterion)
        strings = sum(log.get("nsentences", 0) for log in logging_outputs)
        # --report-accuracy is fairseq's own, of the same name and meaning.
        if strings and not any("total" in log for log in logging_outputs):
            correct = sum(log.get("parity_correct", 0) for log in logging_outputs)
            metrics.log_scalar("accuracy", 100 * correct / strings, strings, round=2)
        by_length = [log["parity_by_length"] for log in logging_outputs if "parity_by_length" in log]
        if by_length:
            for length, (correct, strings) in enumerate(sum(by_length).t().tolist()):
                if strings:
                    metrics.log_scalar(f"accuracy@{length}", 100 * correct / strings, strings, round=2)


@contextlib.contextmanager
def _outputs(model):
    """Collects what the model returns to the criterion."""
    outputs = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _correct(output, sample) -> Tensor:
    """1 for each string whose most probable answer is right, else 0, ``(batch,)``, float32."""
    return output[0].detach()[:, 0].argmax(-1).eq(sample["target"][:, 0]).float()

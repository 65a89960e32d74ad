"""The strings of the parity task, and the task in fairseq's hands."""

import argparse
from collections import Counter

import pytest
import torch
from fairseq import options
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.logging import metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_node.models.node_transformer import OptionError
from fairseq_node.tasks.parity import AccuracyScorer, ParityConfig, ParityTask, encode
from fairseq_node.tasks.parity_strings import SHARED_LENGTH, SPLITS, AllStrings, ParityStrings, split_of


def task(**options):
    return ParityTask(ParityConfig(**{f"parity_{name}": value for name, value in options.items()}))


def tiny(task, arch="node_encoder_parity", from_checkpoint=False, **options):
    sizes = {
        f"{side}_{name}": 8 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")
    }
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, node_solver="euler", criterion=None)
    torch.manual_seed(0)
    return task.build_model(argparse.Namespace(arch=arch, **{**sizes, **heads, **options}), from_checkpoint)


def iterator(task, split, epoch=1, **options):
    task.load_dataset(split, epoch=epoch)
    return task.get_batch_iterator(task.dataset(split), epoch=epoch, max_sentences=16, **options)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SPLITS), st.integers(1, 40), st.integers(0, 30), st.integers(0, 10**6), st.integers(1, 99)
)
def test_strings_are_balanced_and_functions_of_their_place(split, shortest, more, seed, epoch):
    make = lambda: ParityStrings(split, shortest, shortest + more, 20, seed, epoch)  # noqa: E731
    strings, again = make(), make()
    for index in reversed(range(20)):  # the order of asking is nothing
        bits = strings[index]
        assert bits == again[index] and set(bits) <= set("01")
        assert len(bits) == strings.length(index) and shortest <= len(bits) <= shortest + more
        assert bits.count("1") % 2 == index % 2
        if len(bits) > SHARED_LENGTH:
            assert split_of(bits) == split


def test_lengths_are_uniform_and_so_are_bits():
    strings = list(ParityStrings("train", 1, 8, 8000))
    lengths = Counter(map(len, strings))
    assert set(lengths) == set(range(1, 9)) and all(abs(count - 1000) < 150 for count in lengths.values())
    long = [bits for bits in strings if len(bits) == 8]
    for place in range(8):
        assert abs(sum(bits[place] == "1" for bits in long) / len(long) - 0.5) < 0.06


def test_every_split_has_both_classes_of_every_length():
    for length in range(SHARED_LENGTH + 1, 13):
        classes = Counter((split_of(bits), bits.count("1") % 2) for bits in AllStrings(length))
        assert len(classes) == 2 * len(SPLITS), length


def test_seeds_and_epochs_differ_and_evaluation_stays():
    draws = [tuple(ParityStrings("train", 20, 20, 50, seed, epoch)) for seed in (1, 2) for epoch in (1, 2)]
    assert len(set(draws)) == 4
    data = {}
    for epoch in (1, 2):
        parity = task(valid_size=20, train_size=20)
        for split in ("train", "valid"):
            sources = [
                sample["net_input"]["src_tokens"]
                for sample in iterator(parity, split, epoch).next_epoch_itr()
            ]
            data[split, epoch] = sorted(tuple(row.tolist()) for batch in sources for row in batch)
    assert data["train", 1] != data["train", 2]
    assert data["valid", 1] == data["valid", 2]


def test_known_strings():
    """A change of these is a change of everybody's data."""
    known = ["110001001", "1100010", "01000101010", "1110"]
    assert list(ParityStrings("train", 1, 16, 4)) == known


def test_samples():
    parity = task(train_size=100)
    parity.load_dataset("train")
    data, words = parity.dataset("train"), parity.dictionary
    batch = data.collater([data[index] for index in range(64)])
    width = batch["net_input"]["src_tokens"].size(1)
    for row in range(64):
        bits = data.src[int(batch["id"][row])]
        source = batch["net_input"]["src_tokens"][row]
        assert words.string(source[width - len(bits) - 1 :]) == " ".join(bits)
        assert source[: width - len(bits) - 1].eq(words.pad()).all()
        assert words[int(batch["target"][row, 0])] == ("even", "odd")[bits.count("1") % 2]
    assert batch["target"].shape == (64, 1) and batch["ntokens"] == 64
    assert batch["net_input"]["prev_output_tokens"].eq(words.eos()).all()


@pytest.mark.parametrize("split", ["train", "valid"])
def test_workers_share_the_strings(split):
    """Each has a shard of its own; together they have what one has, in training for any epoch."""

    def seen(workers, loaders=0):
        ids = []
        for worker in range(workers):
            shard = iterator(
                task(train_size=100, valid_size=100),
                split,
                3,
                num_shards=workers,
                shard_id=worker,
                num_workers=loaders,
            )
            for sample in shard.next_epoch_itr():
                if sample:
                    rows = sample["net_input"]["src_tokens"].tolist()
                    ids += zip(sample["id"].tolist(), (tuple(t for t in row if t != 1) for row in rows))
        return sorted(ids)

    alone = seen(1)
    assert [index for index, _ in alone] == list(range(100))
    assert seen(3) == alone
    assert seen(1, loaders=2) == alone


def test_resumed_in_the_middle_of_an_epoch():
    whole = iterator(task(train_size=160), "train", epoch=2)
    batches = [sample["net_input"]["src_tokens"] for sample in whole.next_epoch_itr()]
    stopped = iterator(task(train_size=160), "train", epoch=2)
    running = stopped.next_epoch_itr()
    for _ in range(4):
        next(running)
    state = stopped.state_dict()
    resumed = iterator(task(train_size=160), "train", epoch=state["epoch"])
    resumed.load_state_dict(state)
    rest = [sample["net_input"]["src_tokens"] for sample in resumed.next_epoch_itr()]
    assert len(rest) == len(batches) - 4
    assert all(map(torch.equal, rest, batches[4:]))


@pytest.mark.parametrize(
    "bad,words",
    [
        (dict(min_length=9, max_length=8), "--parity-min-length 9 is more than --parity-max-length 8"),
        (dict(min_length=0), "--parity-min-length is 0, but no string of no bits is odd"),
        (dict(valid_size=0), "--parity-valid-size is 0, an empty split"),
        (dict(test_size=1), "--parity-test-size is 1, a split without an odd string"),
    ],
)
def test_bad_options(bad, words):
    with pytest.raises(OptionError, match=words):
        task(**bad)


def test_strings_longer_than_the_model():
    with pytest.raises(OptionError, match=r"--parity-max-length asks for 16 bits, but .* positions for 15"):
        tiny(task(), max_source_positions=16)
    parity = task()
    tiny(parity, from_checkpoint=True, max_source_positions=9)
    with pytest.raises(OptionError, match="--parity-max-length asks for 16 bits"):
        parity.load_dataset("test")
    parity.load_dataset("test", task_cfg=ParityConfig(parity_max_length=8))
    parity = task()
    tiny(parity, max_source_positions=17)
    with pytest.raises(OptionError, match="valid@17 asks for 17 bits"):
        parity.load_dataset("valid@17")


@pytest.mark.parametrize("split", ["dev", "valid1", "valid@0", "valid@", "test@1,2"])
def test_subsets_that_are_none(split):
    with pytest.raises(OptionError, match="there is no subset .* use train, valid, test, or one length"):
        task().load_dataset(split)


def test_short_lengths_are_exhaustive_and_said_to_be(caplog):
    parity = task()
    with caplog.at_level("INFO"):
        for split in ("valid@4", "valid", "valid@9"):
            parity.load_dataset(split)
    said = [record.message for record in caplog.records if "too few" in record.message]
    assert [line.split(":")[0] for line in said] == ["valid@4", "valid"]
    assert "valid@4 is all 16" in said[0] and "up to 6 bits" in said[1]
    assert sorted(parity.dataset("valid@4").src) == [format(n, "04b") for n in range(16)]


def test_options_of_training_hold_at_test_time():
    saved = ParityConfig(parity_max_length=24, parity_test_size=30)
    parity = task(test_size=20)
    parity.load_dataset("test", task_cfg=saved)
    assert len(parity.dataset("test")) == 20
    assert parity.dataset("test").src.max_length == 24


def test_accuracy_is_logged_for_any_architecture():
    for arch in ("lstm", "transformer", "node_transformer_parity", "node_encoder_parity"):
        parity = task(max_length=12, valid_size=90)
        small = dict(encoder_hidden_size=8, decoder_hidden_size=8, decoder_out_embed_dim=8)
        small.update(encoder_layers=1, decoder_layers=1)
        model = tiny(parity, arch, **small)
        criterion = CrossEntropyCriterion(parity, sentence_avg=False)
        right, strings = Counter(), Counter()
        with metrics.aggregate(new_root=True) as logged:
            for sample in iterator(parity, "valid").next_epoch_itr(shuffle=False):
                _, _, log = parity.valid_step(sample, model, criterion)
                parity.reduce_metrics([log], criterion)
                with torch.no_grad():
                    answers = model(**sample["net_input"])[0][:, 0].argmax(-1)
                for length, answer, target in zip(
                    (sample["net_input"]["src_lengths"] - 1).tolist(), answers, sample["target"][:, 0]
                ):
                    strings[length] += 1
                    right[length] += int(answer == target)
        values = logged.get_smoothed_values()
        assert sum(strings.values()) == 90
        assert values["accuracy"] == pytest.approx(100 * sum(right.values()) / 90, abs=0.01)
        for length in strings:
            expected = 100 * right[length] / strings[length]
            assert values[f"accuracy@{length}"] == pytest.approx(expected, abs=0.01)
        assert not model._forward_hooks


def test_answers_are_the_most_probable_ones():
    """Of an ensemble, by the mean of the probabilities."""
    parity = task(test_size=20)
    models = [tiny(parity).eval() for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(torch.randn_like(parameter))
    generator = parity.build_generator(models, argparse.Namespace(beam=3))
    for sample in iterator(parity, "test").next_epoch_itr(shuffle=False):
        with torch.no_grad():
            outputs = [
                model.get_normalized_probs(model(**sample["net_input"]), False)[:, 0] for model in models
            ]
        expected = (sum(outputs) / 2).topk(3)
        for row, hypotheses in enumerate(parity.inference_step(generator, models, sample)):
            assert [int(h["tokens"]) for h in hypotheses] == expected.indices[row].tolist()
            scores = torch.stack([h["score"] for h in hypotheses]).exp()
            torch.testing.assert_close(scores, expected.values[row])


def test_scorer():
    scorer = AccuracyScorer(None)
    for pair in (("odd", "odd"), ("even", "odd"), ("even", "even")):
        scorer.add_string(*pair)
    assert scorer.result_string() == "accuracy = 66.67 % of 3 strings"


def test_interactive_lines():
    parity = task()
    tokens, lengths = parity.get_interactive_tokens_and_lengths(["0110", "0 1"], lambda line: line)
    assert torch.equal(tokens[0], encode("0110", parity.dictionary)) and lengths == [5, 3]


def parse(*arguments):
    return options.parse_args_and_arch(
        options.get_training_parser(), input_args=["--task", "parity", *arguments]
    )


def test_a_data_directory_is_refused(capsys):
    for arguments in (("data-bin", "--arch", "lstm"), ("--arch", "lstm", "data-bin")):
        with pytest.raises(SystemExit):
            parse(*arguments)
        assert (
            "--task parity makes its own strings and reads no data; leave out data-bin"
            in capsys.readouterr().err
        )
    # BLEU of a word is no measure; another one can still be asked for.
    assert parse("--arch", "lstm").scoring == "accuracy"
    assert parse("--arch", "lstm", "--scoring", "chrf").scoring == "chrf"

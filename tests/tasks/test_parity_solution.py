"""A Transformer with weights set by hand solves the task at every length, so that the task, its labels
and fairseq's way of evaluating it are right."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.logging import metrics
from fairseq.models.transformer import TransformerEncoderBase
from lib.parity_solution import exact_model
from torch import nn

from fairseq_node.models.node_encoder import NodeEncoderConfig
from fairseq_node.tasks.parity import AccuracyScorer, ParityConfig, ParityTask

LONGEST = 200


@pytest.fixture(scope="module")
def task():
    return ParityTask(ParityConfig(parity_max_length=LONGEST, parity_valid_size=40, parity_test_size=1000))


@pytest.fixture(scope="module")
def model(task):
    return exact_model(task)


def batches(task, split, size=1000):
    task.load_dataset(split)
    return task.get_batch_iterator(task.dataset(split), max_sentences=size).next_epoch_itr(shuffle=False)


def test_every_length(task, model):
    """In fairseq's validation: 40 strings of each length, all of them for the short ones."""
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    for length in range(1, LONGEST + 1):
        with metrics.aggregate(new_root=True) as logged:
            for sample in batches(task, f"valid@{length}"):
                _, _, log = task.valid_step(sample, model, criterion)
                task.reduce_metrics([log], criterion)
        values = logged.get_smoothed_values()
        assert values["accuracy"] == values[f"accuracy@{length}"] == 100, length
        assert values["loss"] < 0.9, length


def test_mixed_lengths_as_fairseq_generate_answers(task, model):
    scorer = AccuracyScorer(None)
    generator = task.build_generator([model], None)
    for sample in batches(task, "test", 128):
        assert sample["net_input"]["src_tokens"].eq(task.dictionary.pad()).any()
        for hypotheses, target in zip(task.inference_step(generator, [model], sample), sample["target"]):
            scorer.add_string(task.dictionary.string(target), task.dictionary.string(hypotheses[0]["tokens"]))
    assert scorer.result_string() == "accuracy = 100.00 % of 1000 strings"


def test_in_stock_layers(task, model):
    """fairseq's own encoder, without its norms, computes the same from these weights."""
    stock = TransformerEncoderBase(
        NodeEncoderConfig.from_namespace(model.cfg), task.dictionary, model.encoder.embed_tokens
    )
    stock.embed_positions = model.encoder.embed_positions
    for layer in stock.layers:
        layer.self_attn_layer_norm = layer.final_layer_norm = nn.Identity()
    missing = stock.load_state_dict(model.encoder.state_dict(), strict=False)[0]
    assert all("in_proj" in name or "out_proj" in name or ".fc" in name for name in missing)
    stock.train()  # past the fused kernels of evaluation, which want norms; there is no dropout
    sample = next(iter(batches(task, "test@150", 50)))
    source = {name: sample["net_input"][name] for name in ("src_tokens", "src_lengths")}
    with torch.no_grad():
        expected = stock(**source)["encoder_out"][0]
        torch.testing.assert_close(model.encoder(**source)["encoder_out"][0], expected, rtol=1e-5, atol=1e-7)

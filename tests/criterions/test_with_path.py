"""The penalised criteria against fairseq's, and the units of the penalty."""

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics

from fairseq_node.criterions.with_path import CrossEntropyWithPath, LabelSmoothedCrossEntropyWithPath
from fairseq_node.models.node_transformer import OptionError

double = torch.float64


@pytest.fixture
def task(dictionary):
    class Task:
        target_dictionary = dictionary

    return Task()


def criterion(task, penalty="none", weight=0.0, scope="both", norm="token", warmup=0, sentence_avg=False):
    return LabelSmoothedCrossEntropyWithPath(task, sentence_avg, 0.1, penalty, weight, scope, norm, warmup)


def test_without_weight_it_is_fairseqs_criterion_to_the_last_bit(build, sample, task):
    model = build("node_transformer", node_solver="bosh3").train()
    reference, size, _ = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)(model, sample())
    for options in (dict(), dict(penalty="arclength", weight=0.0), dict(penalty="none", weight=3.0)):
        loss, sample_size, log = criterion(task, **options)(model, sample())
        assert torch.equal(loss, reference) and sample_size == size
        assert "path_loss" not in log


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("norm", ["token", "sentence"])
@pytest.mark.parametrize("penalty", ["arclength", "kinetic"])
def test_the_objective_does_not_depend_on_the_batching(build, sample, task, penalty, norm, sentence_avg):
    """One batch, or its sentences one by one with --update-freq: the same loss and gradient."""
    model = build("node_transformer", dtype=double, node_solver="bosh3").train()
    loss_function = criterion(task, penalty, 0.5, norm=norm, sentence_avg=sentence_avg)
    together, size, _ = loss_function(model, sample(extra_pad=2))
    gradient = torch.autograd.grad(together / size, list(model.parameters()))
    whole = sample()
    total, sizes = 0.0, 0
    for row, (length, tgt_length) in enumerate(zip((7, 5, 3, 6), (6, 4, 5, 2))):
        one = {
            "net_input": {
                "src_tokens": whole["net_input"]["src_tokens"][row : row + 1, -length:],
                "src_lengths": torch.tensor([length]),
                "prev_output_tokens": whole["net_input"]["prev_output_tokens"][row : row + 1, :tgt_length],
            },
            "target": whole["target"][row : row + 1, :tgt_length],
            "ntokens": tgt_length,
        }
        loss, sample_size, _ = loss_function(model, one)
        total, sizes = total + loss, sizes + sample_size
    assert sizes == size
    # fairseq takes its log-probabilities in float32, also of a float64 model.
    torch.testing.assert_close(total, together, rtol=1e-6, atol=1e-6)
    for one, other in zip(torch.autograd.grad(total / sizes, list(model.parameters())), gradient):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_scope_weight_and_warmup(build, sample, task):
    model = build("node_transformer", dtype=double, node_solver="rk4").train()
    plain, size, _ = criterion(task)(model, sample())

    def added(**options):
        return (criterion(task, "arclength", **options)(model, sample())[0] - plain) / size

    both = added(weight=1.0)
    torch.testing.assert_close(both, added(weight=1.0, scope="encoder") + added(weight=1.0, scope="decoder"))
    torch.testing.assert_close(2 * both, added(weight=2.0))
    model.set_num_updates(25)
    torch.testing.assert_close(both / 4, added(weight=1.0, warmup=100))
    model.set_num_updates(500)
    torch.testing.assert_close(both, added(weight=1.0, warmup=100))


def test_a_model_without_a_path_is_refused(build, sample, task):
    with pytest.raises(OptionError, match="--arch node_transformer"):
        criterion(task)(build("transformer"), sample())
    with pytest.raises(OptionError, match="--path-weight"):
        criterion(task, "arclength", -1.0)
    with pytest.raises(OptionError, match="--path-warmup-updates"):
        criterion(task, "arclength", 1.0, warmup=-1)


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint"])
def test_statistics_add_up_over_workers(build, sample, task, gradient):
    """Means per sentence, each the sum over a side's blocks; evaluations of backward counted too."""
    model = build("node_transformer", node_solver="rk4", node_steps=2, node_gradient=gradient).train()
    loss_function = CrossEntropyWithPath(task, False, "none", 0.0, "both", "token", 0)
    logs = []
    for seed in (0, 1):
        loss, _, log = loss_function(model, sample(seed=seed))
        loss.backward()
        logs.append(log)
    with metrics.aggregate() as aggregator:
        CrossEntropyWithPath.reduce_metrics(logs)
    values = aggregator.get_smoothed_values()
    assert values["nfe_encoder"] == values["nfe_decoder"] == 2 * 2 * 4
    assert values["nfe_backward"] == (0 if gradient == "backprop" else 2 * 16)
    assert values["node_unfinished"] == values["steps_rejected"] == 0
    assert values["arclength_encoder"] > 0

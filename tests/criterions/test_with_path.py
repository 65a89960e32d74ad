"""The penalised criteria against fairseq's, and the units of the penalty."""

import argparse
import pickle

import numpy as np
import pytest
import torch
from fairseq import models
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics, progress_bar
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_node.criterions import with_path
from fairseq_node.criterions.with_path import (
    CrossEntropyWithPath,
    CrossEntropyWithPathConfig,
    LabelSmoothedCrossEntropyWithPath,
)
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


def test_a_weight_of_no_penalty_is_noticed(build, sample, task, caplog):
    model = build("node_transformer")
    loss, *_ = criterion(task, "none", 0.1)(model, sample())
    assert "--path-penalty arclength" in caplog.text
    torch.testing.assert_close(loss, criterion(task)(model, sample())[0], rtol=0, atol=0)


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


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("prefix", [0, 2])
def test_fairseqs_own_options_to_the_last_bit(build, sample, task, sentence_avg, prefix):
    """--sentence-avg, --ignore-prefix-size, --report-accuracy, dropout; the gradient too."""
    model = build("node_transformer", node_solver="bosh3", dropout=0.1).train()
    fairseqs = LabelSmoothedCrossEntropyCriterion(task, sentence_avg, 0.1, prefix, True)
    ours = LabelSmoothedCrossEntropyWithPath(
        *(task, sentence_avg, 0.1, "arclength", 0.0, "both", "token", 0, prefix, True)
    )
    results = []
    for criterion_ in (fairseqs, ours):
        torch.manual_seed(7)
        loss, size, log = criterion_(model, sample())
        results.append((loss, size, log, torch.autograd.grad(loss, list(model.parameters()))))
    (loss, size, log, gradient), (other_loss, other_size, other_log, other_gradient) = results
    assert torch.equal(loss, other_loss) and size == other_size
    assert all(torch.equal(one, other) for one, other in zip(gradient, other_gradient))
    assert {name: other_log[name] for name in log} == log
    assert log["n_correct"] <= log["total"]


def test_fairseqs_cross_entropy_to_the_last_bit(build, sample, task):
    model = build("node_transformer", node_solver="bosh3").train()
    loss = CrossEntropyCriterion(task, False)(model, sample())[0]
    other = CrossEntropyWithPath(task, False, "none", 0.0, "both", "token", 0)(model, sample())[0]
    assert torch.equal(loss, other)


def test_a_model_without_a_path_is_refused_before_data_is_read(dictionary):
    """fairseq builds the criterion after the model and before it loads data."""

    class Task:
        source_dictionary = target_dictionary = dictionary

    def build_both(arch):
        task = Task()
        args = argparse.Namespace(arch=arch, encoder_layers=1, decoder_layers=1, sentence_avg=False)
        models.build_model(args, task)
        return CrossEntropyWithPath.build_criterion(CrossEntropyWithPathConfig(sentence_avg=False), task)

    with pytest.raises(OptionError, match="--arch node_transformer") as caught:
        build_both("transformer_tiny")
    assert "\n" not in str(caught.value)
    assert isinstance(build_both("node_transformer_tiny"), CrossEntropyWithPath)


@given(st.lists(st.integers(0, 140_000), min_size=1, max_size=200), st.sampled_from([5, 50, 95, 100]))
@settings(deadline=None)
def test_percentiles(values, percent):
    """Against NumPy: exact up to 127, within the width of a bin above; sums of batches and workers."""
    whole = torch.tensor(values)
    split = len(values) // 3
    counts = 0 + with_path.histogram(whole[:split]) + with_path.histogram(whole[split:])
    assert int(counts.sum()) == len(values)
    expected = int(np.percentile(values, percent, method="inverted_cdf"))
    found = with_path.percentile(counts, percent)
    if expected < with_path.EXACT_BINS:
        assert found == expected
    else:
        expected = min(expected, 2**17)
        assert abs(found - expected) <= 0.012 * expected


def test_statistics_in_every_format_of_the_log(build, sample, task, capsys, caplog):
    """Percentiles in validation only; what fairseq's progress bars make of it; meters that a checkpoint
    can hold and load."""
    model = build("node_transformer", node_solver="bosh3", node_rtol=0.05)
    loss_function = CrossEntropyWithPath(task, False, "arclength", 0.1, "both", "token", 0)
    values = {}
    for training in (True, False):
        model.train(training), loss_function.train(training)
        with torch.set_grad_enabled(training):
            logs = [loss_function(model, sample(seed=seed))[2] for seed in (0, 1)]
        with metrics.aggregate() as aggregator:
            for log in logs:
                CrossEntropyWithPath.reduce_metrics([log])
        values[training] = aggregator.get_smoothed_values()
    percentiles = {f"nfe_{side}_p{percent}" for side in ("encoder", "decoder") for percent in (50, 95)}
    assert not percentiles & values[True].keys()
    assert values[False].keys() - values[True].keys() == percentiles
    each = [model(**sample(seed=seed)["net_input"])[1]["node"]["decoder"] for seed in (0, 1)]
    nfe = torch.cat([sum(record.nfe for record in records) for records in each]).numpy()
    for percent in (50, 95):
        exact = np.percentile(nfe, percent, method="inverted_cdf")
        assert values[False][f"nfe_decoder_p{percent}"] == exact
    assert pickle.loads(pickle.dumps(logs[0]))["_nfe_encoder_counts"].sum() == 4  # to other workers
    states = [meter.state_dict() for key, meter in aggregator.items() if key == "_nfe_encoder_counts"]
    assert type(states[0]["sum"]) is torch.Tensor

    caplog.set_level("INFO")
    for name in ("simple", "json", "tqdm"):
        bar = getattr(progress_bar, f"{name.title()}ProgressBar")([1, 2], epoch=1, prefix="valid")
        list(bar)
        caplog.clear()
        bar.log(logs[0], step=1000)  # as fairseq-validate
        bar.print(values[False], tag="valid", step=1)
        for key in percentiles | set(with_path.STATISTICS):
            assert key in caplog.text
        assert "[0.0," not in caplog.text


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("control", ["sentence", "batch"])
def test_statistics_wait_for_nothing(build, sample, task, training, control):
    """No number leaves the device (which would be a wait on a GPU) but in the solver's own loop."""
    model = build("node_transformer", node_solver="bosh3", node_step_control=control).train(training)
    observed = with_path._Observed(model)
    observed(**sample()["net_input"])
    output = {"loss": torch.zeros(()), "nsentences": 4}
    waits = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                waits.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        torch.ones(1).item()
        assert waits.pop()  # it is seen
        log = with_path._statistics(observed.extra["node"], output, distribution=not training)
        log = with_path._LoggingOutput(log)
        assert all(isinstance(log[name], torch.Tensor) for name in log)
    assert not waits


def test_every_worker_reduces_the_same_things(build, sample, task):
    """All-reducing needs tensors of one shape under the same names: with a dummy batch, where LayerDrop
    has left no block, and while --path-warmup-updates starts from 0."""
    shapes = set()
    for drop in (0.0, 1.0):
        model = build("node_transformer", node_solver="rk4", encoder_layerdrop=drop).train()
        for updates, options in ((0, {}), (5, dict(src_lengths=(2,), tgt_lengths=(3,)))):
            model.set_num_updates(updates)
            loss, _, log = criterion(task, "arclength", 0.1, scope="encoder", warmup=10)(
                model, sample(**options)
            )
            loss.backward()
            shapes.add(
                tuple((key, torch.is_tensor(log[key]), tuple(getattr(log[key], "shape", ()))) for key in log)
            )
    assert len(shapes) == 1
    assert all(is_tensor for name, is_tensor, _ in shapes.pop() if name in with_path.STATISTICS)

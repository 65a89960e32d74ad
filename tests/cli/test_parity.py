"""fairseq's commands on the parity task, as they are typed."""

import json
import re
import signal
import time

import pytest
import torch

from fairseq_node.compat import load_checkpoint

TASK = ("--user-dir", "fairseq_node", "--task", "parity", "--cpu", "--batch-size", 64)
TRAIN = (*TASK, "--optimizer", "adam", "--lr", 1e-3, "--log-format", "json", "--log-interval", 10)
SMALL = ("--encoder-embed-dim", 16, "--decoder-embed-dim", 16, "--dropout", 0.1)


def logged(output, prefix):
    lines = [line[line.index("{") :] for line in output.splitlines() if f"| {prefix} | {{" in line]
    return [json.loads(line) for line in lines]


#: Epochs of 10 updates, with strings of their own; an update is two batches.
EPOCHS = (*TRAIN, "--arch", "node_transformer_parity", "--node-solver", "heun_euler", "--max-epoch", 2)
EPOCHS += ("--criterion", "label_smoothed_cross_entropy_with_path", "--label-smoothing", 0.1)
EPOCHS += ("--path-penalty", "arclength", "--path-weight", 0.01, "--path-scope", "encoder")
EPOCHS += ("--parity-max-length", 8, "--parity-train-size", 10 * 64, "--batch-size", 32)
EPOCHS += ("--parity-valid-size", 101, "--valid-subset", "valid,valid@16,valid@32")
EPOCHS += ("--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric")
EPOCHS += ("--save-interval-updates", 4)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """A training that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run("fairseq-train", *EPOCHS, "--update-freq", 2, "--save-dir", folder)


def weights(folder):
    return load_checkpoint(str(folder / "checkpoint_last.pt"))["model"]


def test_training(whole):
    folder, output = whole
    validations, longer = logged(output, "valid"), logged(output, "valid@32")[-1]
    valid = validations[-1]
    assert {f"valid_accuracy@{length}" for length in range(1, 9)} < set(valid)
    assert float(longer["valid@32_accuracy@32"]) == float(longer["valid@32_accuracy"])
    assert float(valid["valid_nfe_encoder"]) >= 2 and float(valid["valid_arclength_encoder"]) > 0
    assert 0 <= float(logged(output, "train_inner")[-1]["accuracy"]) <= 100
    best = load_checkpoint(str(folder / "checkpoint_best.pt"))
    accuracies = [float(record["valid_accuracy"]) for record in validations]
    assert best["extra_state"]["best"] == pytest.approx(max(accuracies), abs=0.01)


def test_generate_and_validate_agree(run, whole):
    """Both read the same strings and the same answers; lengths are those of training."""
    path = ("--path", whole[0] / "checkpoint_last.pt")
    generated = run("fairseq-generate", *TASK, *path, "--gen-subset", "test@9", "--parity-test-size", 50)
    pairs = re.findall(r"^[TH]-(\d+)\t(?:[-\d.]+\t)?(\w+)$", generated, re.MULTILINE)
    answers = {}
    for number, word in pairs:
        answers.setdefault(number, []).append(word)
    assert len(answers) == 50
    right = sum(truth == answer for truth, answer, *_ in answers.values())
    assert f"Generate test@9 with beam=5: accuracy = {2 * right:.2f} % of 50 strings" in generated
    sources = re.findall(r"^S-(\d+)\t([01 ]+)$", generated, re.MULTILINE)
    assert all(("odd" if bits.count("1") % 2 else "even") == answers[n][0] for n, bits in sources)
    # --valid-subset takes test as well; the options of the checkpoint hold where none are given.
    validated = run(
        *("fairseq-validate", *TASK, *path, "--valid-subset", "test@9,test", "--parity-test-size", 50),
        *("--log-format", "json"),
    )
    (record,) = logged(validated, "test@9")
    assert float(record["test@9_accuracy"]) == pytest.approx(2 * right)
    lengths = [int(key.split("@")[1]) for key in logged(validated, "test")[0] if "accuracy@" in key]
    assert lengths and max(lengths) <= 8


def test_another_architecture(run, tmp_path):
    """With fairseq's default criterion; and answers to what is typed to fairseq-interactive."""
    output = run(
        *("fairseq-train", *TRAIN, *SMALL, "--arch", "lstm", "--max-update", 3),
        *("--save-dir", tmp_path, "--parity-valid-size", 100),
    )
    assert 0 <= float(logged(output, "valid")[0]["valid_accuracy"]) <= 100
    answers = run(
        *("fairseq-interactive", *TASK[:4], "--cpu", "--path", tmp_path / "checkpoint_last.pt"),
        *("--beam", 2, "--nbest", 1),
        stdin="0110\n1 0\n",
    )
    assert re.search(r"^S-0\t0 1 1 0$", answers, re.MULTILINE)
    assert len(re.findall(r"^H-\d+\t", answers, re.MULTILINE)) == 2


def test_killed_in_the_middle_of_an_epoch(run, whole, tmp_path):
    """As if never killed, bit for bit."""
    arguments = (*EPOCHS, "--update-freq", 2, "--save-dir", tmp_path)
    with (tmp_path / "log").open("w") as log:
        process = run.start("fairseq-train", *arguments, stdout=log, stderr=log)
        while not (tmp_path / "checkpoint_2_16.pt").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "checkpoint2.pt").exists()
    assert "Loaded checkpoint" in run("fairseq-train", *arguments)
    expected, resumed = weights(whole[0]), weights(tmp_path)
    for name in expected:
        assert torch.equal(expected[name], resumed[name]), name


def test_two_workers_are_one(run, whole, tmp_path):
    """A batch each instead of two in turn: the same strings and the same model up to the order of sums."""
    arguments = (*EPOCHS, "--save-dir", tmp_path, "--distributed-world-size", 2, "--distributed-no-spawn")
    arguments += ("--distributed-init-method", f"file://{tmp_path}/rendezvous", "--ddp-backend", "legacy_ddp")
    arguments += ("--distributed-backend", "gloo", "--distributed-rank")
    with (tmp_path / "log").open("w") as log:
        second = run.start("fairseq-train", *arguments, 1, stdout=log, stderr=log)
        output = run("fairseq-train", *arguments, 0)
        assert second.wait() == 0, (tmp_path / "log").read_text()
    expected, together = weights(whole[0]), weights(tmp_path)
    for name in expected:
        torch.testing.assert_close(together[name], expected[name], rtol=1e-3, atol=1e-4)
    for one, two in zip(logged(whole[1], "valid"), logged(output, "valid")):
        for name in one:
            if "accuracy" in name or name.endswith("loss"):
                assert float(two[name]) == pytest.approx(float(one[name]), abs=0.02), name

"""fairseq's commands on ``node_transformer``: the ground that fairseq's own tests of its command line
cover for ``transformer``."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from fairseq_node.compat import load_checkpoint

ROOT = Path(__file__).parents[2]


def logged(output, key):
    """All values of a key in fairseq's json log."""
    records = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"epoch"' in line]
    return [float(record[key]) for record in records if key in record]


def weights(path):
    return load_checkpoint(str(path))["model"]


def test_statistics_are_in_the_log(checkpoint):
    log = (checkpoint.parent / "log").read_text()
    losses = logged(log, "loss")
    assert losses[-1] < losses[0]
    for side in ("encoder", "decoder"):
        for prefix in ("", "train_", "valid_"):
            values = logged(log, f"{prefix}nfe_{side}")
            assert values and all(5 <= value <= 100 for value in values)
            assert all(value > 0 for value in logged(log, f"{prefix}arclength_{side}"))
    assert set(logged(log, "train_node_unfinished")) == {0.0}


def test_killed_and_resumed_training_is_never_killed_training(run, training, tmp_path):
    """SIGKILL in the middle; dropout included, bit for bit on CPU; then generate, score and average."""
    options = ("--node-solver", "bosh3", "--node-gradient", "checkpoint", "--max-epoch", 4)
    options += ("--save-interval-updates", 3, "--keep-interval-updates", 2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("fairseq-train", *training(whole, *options))

    log = (tmp_path / "log").open("w")
    process = run.start("fairseq-train", *training(killed, *options), stdout=log, stderr=log)
    while not any(killed.glob("checkpoint_2_*.pt")):  # in the second epoch, whose batches are easily lost
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "checkpoint4.pt").exists()
    output = run("fairseq-train", *training(killed, *options))
    assert "Loaded checkpoint" in output
    expected, resumed = weights(whole / "checkpoint_last.pt"), weights(killed / "checkpoint_last.pt")
    for name in expected:
        assert torch.equal(expected[name], resumed[name]), name

    data = ("--user-dir", "fairseq_node", "--cpu", "--beam", 2, "--max-len-b", 10)
    corpus = training(whole)[0]
    hypotheses = run("fairseq-generate", corpus, *data, "--path", killed / "checkpoint_last.pt")
    assert "Generate test with beam=2: BLEU" in hypotheses
    for kind, name in (("T", "reference"), ("D", "system")):
        lines = re.findall(rf"^{kind}-(\d+)\t(?:[-\d.]+\t)?(.*)$", hypotheses, re.MULTILINE)
        assert len(lines) == 20
        (tmp_path / name).write_text(
            "".join(text + "\n" for _, text in sorted(lines, key=lambda line: int(line[0])))
        )
    score = run("fairseq-score", "--sys", tmp_path / "system", "--ref", tmp_path / "reference")
    assert "BLEU4 = " in score

    average = ("scripts/average_checkpoints.py", "--inputs", killed, "--num-epoch-checkpoints", 2)
    run("python", *average, "--output", tmp_path / "average.pt")
    mean = weights(tmp_path / "average.pt")
    last = [weights(killed / f"checkpoint{epoch}.pt") for epoch in (3, 4)]
    for name in mean:
        torch.testing.assert_close(mean[name], (last[0][name] + last[1][name]) / 2)
    assert "--overwrite" in run.fails("python", *average, "--output", tmp_path / "average.pt")
    assert "BLEU" in run("fairseq-generate", corpus, *data, "--path", tmp_path / "average.pt")


def test_generation_options(run, corpus, checkpoint):
    command = ("fairseq-generate", corpus, "--user-dir", "fairseq_node", "--path", checkpoint, "--cpu")
    command += ("--max-len-b", 8)
    grid = ("--model-overrides", "{'node_solver': 'rk4'}")  # quick
    for options in (
        ("--sampling", "--temperature", 2, "--beam", 2, "--nbest", 2, *grid),
        ("--sampling", "--sampling-topk", 3, "--beam", 2, "--nbest", 2, *grid),
        ("--diversity-rate", 0.5, "--beam", 4, *grid),
        ("--prefix-size", 2, "--beam", 2),
        ("--retain-dropout", "--beam", 2, *grid),
        ("--print-alignment", "--beam", 1),
        ("--score-reference", "--print-alignment"),
        ("--lenpen", 0.6, "--unkpen", 0.5, "--scoring", "sacrebleu", *grid),
    ):
        output = run(*command, *options)
        assert "Translated 20 sentences" in output and "BLEU" in output, options


def test_interactive_agrees_with_generate(run, corpus, checkpoint):
    common = (corpus, "--user-dir", "fairseq_node", "--path", checkpoint, "--cpu", "--beam", 3)
    common += ("--max-len-b", 8)
    generated = run("fairseq-generate", *common)
    lines = dict(re.findall(r"^S-(\d+)\t(.*)$", generated, re.MULTILINE))
    expected = dict(re.findall(r"^H-(\d+)\t(.*)$", generated, re.MULTILINE))
    stdin = "".join(lines[str(n)] + "\n" for n in range(20))
    for buffer in (1, 7):
        output = run(
            *("fairseq-interactive", *common, "--source-lang", "en", "--target-lang", "de"),
            *("--buffer-size", buffer),
            stdin=stdin,
        )
        interactive = dict(re.findall(r"^H-(\d+)\t(.*)$", output, re.MULTILINE))
        for number, hypothesis in expected.items():
            score, text = hypothesis.split("\t", 1)
            other_score, other_text = interactive[number].split("\t", 1)
            assert other_text == text and float(other_score) == pytest.approx(float(score), abs=1e-4)


def test_model_overrides_change_the_solver(run, corpus, checkpoint):
    """Another solver and tolerance at test time, seen in the statistics that validation logs."""
    for overrides, nfe in (
        ("{'node_solver': 'rk4', 'node_steps': 3}", 12),
        ("{'node_solver': 'euler'}", 1),
        ("{'node_solver': 'dopri5', 'node_rtol': 1e-3, 'node_atol': 1e-3}", None),
    ):
        output = run(
            *("fairseq-validate", corpus, "--user-dir", "fairseq_node", "--path", checkpoint, "--cpu"),
            *("--task", "translation", "--max-tokens", 500, "--model-overrides", overrides),
        )
        found = re.search(r"nfe_encoder ([\d.]+)", output)
        assert found, output
        value = float(found.group(1))
        assert value == nfe if nfe else value >= 14
    bad = ("--model-overrides", "{'node_rtol': -1}")
    output = run.fails(
        "fairseq-generate", corpus, "--user-dir", "fairseq_node", "--path", checkpoint, "--cpu", *bad
    )
    assert "--node-rtol is -1" in output and "Traceback" not in output


@pytest.fixture(scope="module")
def stock(run, training, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("stock")
    log = run("fairseq-train", *training(save_dir, "--max-epoch", 1, arch="transformer_tiny"))
    return save_dir / "checkpoint_last.pt", log


def test_a_stock_checkpoint_goes_on_as_a_node_model(run, training, stock, tmp_path):
    """--finetune-from-model: with one Euler step the first losses are those of the stock model."""
    path, _ = stock
    losses = []
    for arch, options in (("transformer_tiny", ()), ("node_transformer_tiny", ("--node-solver", "euler"))):
        tuned = ("--finetune-from-model", path, "--max-update", 2, "--dropout", 0.0, *options)
        log = run("fairseq-train", *training(tmp_path / arch, *tuned, arch=arch))
        losses.append(logged(log, "loss"))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    adaptive = ("--finetune-from-model", path, "--max-update", 2, "--node-solver", "heun_euler")
    run("fairseq-train", *training(tmp_path / "adaptive", *adaptive))


def test_the_stock_model_works_with_the_plugin(run, corpus, stock, training):
    """Its checkpoints load on every torch; our criterion refuses it in a sentence."""
    path, _ = stock
    output = run(
        "fairseq-generate", corpus, "--user-dir", "fairseq_node", "--path", path, "--cpu", "--max-len-b", 8
    )
    assert "BLEU" in output
    wrong = ("--criterion", "label_smoothed_cross_entropy_with_path")
    output = run.fails("fairseq-train", *training(path.parent / "wrong", *wrong, arch="transformer_tiny"))
    assert "--arch node_transformer" in output


def test_hub_style_loading(run, corpus, checkpoint):
    """from_pretrained, with the package imported first and --user-dir by another name after it."""
    script = f"""
import fairseq_node
from fairseq_node.models.node_transformer import NodeTransformerModel
model = NodeTransformerModel.from_pretrained(
    {str(checkpoint.parent)!r}, "checkpoint_last.pt", {str(corpus)!r},
    user_dir={str(ROOT / "tests" / ".." / "fairseq_node")!r}, node_rtol=0.01,
)
print("translation:", model.translate("alpha beta", beam=2, max_len_b=8))
print("rtol:", model.models[0].decoder.layers[0].solver_config.rtol)
"""
    output = run("python", "-c", script)
    assert re.search(r"translation: [A-Z]", output) and "rtol: 0.01" in output


def test_hydra(run, corpus, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "node.yaml").write_text(
        f"""# @package _group_
common: {{user_dir: {ROOT / "fairseq_node"}, cpu: true, log_interval: 1}}
task: {{_name: translation, data: {corpus}, source_lang: en, target_lang: de}}
model: {{_name: node_transformer_tiny, encoder: {{layers: 1}}, decoder_layers: 1, share_all_embeddings: true,
        node_solver: heun, node_steps: 2}}
criterion: {{_name: label_smoothed_cross_entropy_with_path, label_smoothing: 0.1}}
dataset: {{max_tokens: 500, num_workers: 0}}
optimizer: {{_name: adam, adam_betas: "(0.9, 0.98)"}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 10}}
optimization: {{max_update: 3, lr: [0.003]}}
checkpoint: {{save_dir: {tmp_path / "checkpoints"}}}
"""
    )
    command = ("fairseq-hydra-train", "--config-dir", tmp_path / "config", "--config-name", "node")
    command += (f"hydra.run.dir={tmp_path / 'out'}",)
    output = run(*command) + "".join(path.read_text() for path in (tmp_path / "out").glob("*.log"))
    assert "nfe_encoder" in output
    state = load_checkpoint(str(tmp_path / "checkpoints" / "checkpoint_last.pt"))
    assert state["cfg"]["model"]["node_steps"] == 2
    assert len({name for name in state["model"] if name.endswith("fc1.weight")}) == 2
    output = run(
        *("fairseq-validate", corpus, "--user-dir", "fairseq_node", "--cpu", "--task", "translation"),
        *("--path", tmp_path / "checkpoints" / "checkpoint_last.pt", "--max-tokens", 500),
        # an option that the configuration did not have
        *("--model-overrides", "{'node_solver': 'rk4', 'node_time': 2.0}"),
    )
    assert "nfe_encoder 8" in output


def test_eval_bleu_and_update_freq(run, training, tmp_path):
    """Meters hold NumPy arrays then, and training must go on from them."""
    options = ("--node-solver", "euler", "--update-freq", 2, "--eval-bleu", "--eval-bleu-detok", "space")
    options += ("--eval-bleu-args", '{"beam": 2, "max_len_b": 8}', "--best-checkpoint-metric", "bleu")
    options += ("--maximize-best-checkpoint-metric", "--tensorboard-logdir", tmp_path / "tb")
    output = run("fairseq-train", *training(tmp_path / "ck", *options, "--max-epoch", 1))
    assert logged(output, "valid_bleu")
    output = run("fairseq-train", *training(tmp_path / "ck", *options, "--max-epoch", 2))
    assert "Loaded checkpoint" in output and logged(output, "valid_bleu")


def test_max_positions(run, training, tmp_path):
    limited = training(tmp_path / "ck", "--max-source-positions", 4, "--max-target-positions", 4)
    output = run.fails("fairseq-train", *limited, "--max-update", 1)
    assert "--skip-invalid-size-inputs-valid-test" in output
    run("fairseq-train", *limited, "--skip-invalid-size-inputs-valid-test", "--max-update", 1)


@pytest.mark.parametrize(
    "options,message",
    [
        (("--node-rtol", -1), "--node-rtol is -1.0"),
        (("--node-solver", "rk4", "--node-steps", 0), "--node-steps is 0"),
        (("--node-solver", "dopri5", "--node-steps", 4), "--node-steps 4 is for fixed grids"),
        (("--node-solver", "rk45"), "argument --node-solver: invalid choice: 'rk45'"),
    ],
)
def test_bad_values_are_refused_before_data_is_read(run, options, message):
    output = run.fails(
        *(
            "fairseq-train",
            "/no/such/data",
            "--user-dir",
            "fairseq_node",
            "--arch",
            "node_transformer",
            *options,
        )
    )
    assert message in output
    assert "Traceback" not in output and "/no/such/data" not in output


def test_user_dir_by_any_name(run, tmp_path):
    """Relative, absolute, with a slash, through a link, and from another working directory."""
    link = tmp_path / "fairseq_node"
    link.symlink_to(ROOT / "fairseq_node")
    relative = os.path.relpath(ROOT / "fairseq_node", tmp_path)
    for name, cwd in (
        ("fairseq_node", ROOT),
        ("./fairseq_node/", ROOT),
        (ROOT / "fairseq_node", tmp_path),
        (relative, tmp_path),
        (link, ROOT),
    ):
        bad = ("--arch", "node_transformer", "--node-rtol", -1)
        output = run.fails("fairseq-train", "/no/such/data", "--user-dir", name, *bad, cwd=cwd)
        assert "--node-rtol is -1.0" in output


def test_user_dir_of_an_installed_package(run, tmp_path):
    """A copy next to fairseq, as pip would install it, found by its bare name from anywhere."""
    script = """
import argparse, sys
import fairseq_node
from fairseq import utils
import os
folder = os.path.dirname(fairseq_node.__file__)
for name in (folder, folder + "/../fairseq_node/"):
    utils.import_user_module(argparse.Namespace(user_dir=name))
print("registered once")
"""
    shutil.copytree(ROOT / "fairseq_node", tmp_path / "fairseq_node")
    assert "registered once" in run("python", "-c", script, cwd=tmp_path)


def test_malicious_and_broken_checkpoints_are_refused(run, training, checkpoint, corpus, tmp_path):
    """Nothing is run, nothing is overwritten, and a sentence says what to do."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    state = load_checkpoint(str(checkpoint))
    state["extra_state"]["evil"] = Evil()
    folder = tmp_path / "evil"
    folder.mkdir()
    torch.save(state, folder / "checkpoint_last.pt")
    generate = ("fairseq-generate", corpus, "--user-dir", "fairseq_node", "--cpu", "--path")
    for output in (
        run.fails(*generate, folder / "checkpoint_last.pt"),
        run.fails("fairseq-train", *training(folder, "--max-epoch", 4)),
    ):
        assert "nothing in it was run" in output and "system" in output
    assert not (tmp_path / "pwned").exists()

    folder = tmp_path / "broken"
    folder.mkdir()
    half = checkpoint.read_bytes()[: checkpoint.stat().st_size // 2]
    (folder / "checkpoint_last.pt").write_bytes(half)
    output = run.fails("fairseq-train", *training(folder, "--max-epoch", 4))
    assert "truncated or not a checkpoint" in output and "--restore-file" in output
    assert (folder / "checkpoint_last.pt").read_bytes() == half

"""Stock checkpoints as node models and back: exact, whole, and sentences where there is no counterpart."""

import argparse
import copy

import convert_checkpoint
import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from lib.conversion import ConversionError, convert, load
from omegaconf import OmegaConf

from fairseq_node import compat
from fairseq_node.compat import load_checkpoint

PRE_NORM = dict(encoder_normalize_before=True, decoder_normalize_before=True)
POST_NORM = dict(encoder_normalize_before=False, decoder_normalize_before=False)


@pytest.fixture
def save(build, tmp_path):
    """Saves a model as fairseq does: ``save("transformer", dropout=0.1)``; returns the path and the model."""

    def make(arch, nested=False, legacy=False, **options):
        model = build(arch, seed=3, **options)
        # As fairseq's trainer has them: model.args are complete, with every default of the preset.
        args = argparse.Namespace(**{"task": "translation", "arch": arch, "data": "none", **PRE_NORM})
        vars(args).update(encoder_embed_dim=32, encoder_ffn_embed_dim=64, encoder_layers=2, decoder_layers=2)
        vars(args).update(encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0)
        vars(args).update(criterion="label_smoothed_cross_entropy", label_smoothing=0.1, **options)
        cfg = OmegaConf.to_container(convert_namespace_to_omegaconf(args), resolve=True, enum_to_str=True)
        if nested:  # hydra's; the preset has added flat options, which do not count
            side = dict(embed_dim=32, ffn_embed_dim=64, layers=2, attention_heads=4, normalize_before=True)
            cfg["model"] = {"_name": arch, "encoder": side, "decoder": side, "decoder_ffn_embed_dim": 2048}
        state = {
            "args": args if legacy else None,
            "cfg": None if legacy else cfg,
            "model": model.state_dict(),
            "criterion": None,
            "optimizer_history": [
                {
                    "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                    "optimizer_name": "FairseqAdam",
                    "lr_scheduler_state": {"best": 1.0},
                    "num_updates": 7,
                }
            ],
            "task_state": {},
            "extra_state": {"train_iterator": {"epoch": 2, "iterations_in_epoch": 0}},
            "last_optimizer_state": {"state": {}, "param_groups": []},
        }
        path = tmp_path / f"{arch}.pt"
        torch.save(state, path)
        return str(path), model  # in training, without dropout: fairseq 0.12.2 infers by a broken kernel

    return make


@pytest.mark.parametrize(
    "arch,options",
    [
        ("transformer", PRE_NORM),
        ("transformer", POST_NORM),
        ("transformer_iwslt_de_en", dict(share_decoder_input_output_embed=True)),
        ("transformer", dict(nested=True)),
        ("transformer", dict(legacy=True)),
        ("transformer", dict(checkpoint_activations=True, offload_activations=False)),
    ],
)
def test_there_and_back(save, build, sample, arch, options):
    """The node model has the logits of the stock one; the way back gives the file that there was."""
    path, stock = save(arch, **options)
    before = load(path)
    there = convert(before)
    assert there.direction == "node" and there.difference < 1e-5
    shape = {name: value for name, value in options.items() if "norm" in name or "share" in name}
    node = build("node_" + arch, node_solver="euler", **shape).eval()
    node.load_state_dict(there.state["model"])
    batch = sample()["net_input"]
    valid = batch["prev_output_tokens"] != 1
    with torch.no_grad():
        torch.testing.assert_close(node(**batch)[0][valid], stock(**batch)[0][valid], rtol=1e-5, atol=1e-5)
    assert there.state["cfg"]["criterion"]["_name"] == "label_smoothed_cross_entropy_with_path"
    assert there.state["optimizer_history"][-1]["criterion_name"] == "LabelSmoothedCrossEntropyWithPath"
    assert there.state["optimizer_history"][-1]["num_updates"] == 7

    back = convert(there.state)
    assert back.direction == "stock"
    if "nested" not in options:  # which are flat now
        assert back.state["cfg"] == before["cfg"]
    assert back.state["optimizer_history"] == before["optimizer_history"]
    assert back.state["model"].keys() == before["model"].keys()
    for name, value in before["model"].items():
        # What fairseq 0.12.2 keeps besides weights: a tensor never written to, and copies for its kernel.
        if not name.endswith(("_float_tensor", *compat.FAST_PATH_COPIES)):
            assert torch.equal(back.state["model"][name], value), name


def test_half_precision_stays_as_it_is(save):
    path, _ = save("transformer")
    state = load(path)
    state["model"] = {name: value.half() for name, value in state["model"].items()}
    converted = convert(state).state["model"]
    assert "encoder.layers.1.fc1.weight" in converted
    for name, value in converted.items():
        assert value.dtype == torch.half and torch.equal(value, state["model"][name]), name


def test_another_solver_goes_back_with_a_note(save):
    path, _ = save("node_transformer", node_solver="bosh3")
    result = convert(load(path), "stock")
    assert any("its solver was bosh3" in note for note in result.notes)


@pytest.mark.parametrize(
    "options,named",
    [
        (dict(node_time_dependence="additive"), "--node-time-dependence additive"),
        (dict(node_time_dependence="concat"), "--node-time-dependence concat"),
        (dict(node_augment_dim=4), "--node-augment-dim 4"),
        (dict(node_field="composed"), "--node-field composed"),
        (dict(node_no_layer_norm=True), "--node-no-layer-norm,"),
    ],
)
def test_what_cannot_go_back(save, options, named):
    path, _ = save("node_transformer", **options)
    with pytest.raises(ConversionError, match="no counterpart in a stock layer") as error:
        convert(load(path))
    assert named in str(error.value)


def test_what_cannot_become_a_node_model(save):
    path, _ = save("transformer", quant_noise_pq=0.1)
    with pytest.raises(ConversionError, match="--quant-noise-pq does not work"):
        convert(load(path))
    path, _ = save("transformer")
    state = load(path)
    for arch in ("lstm", "transformer_align", "my_own"):
        other = copy.deepcopy(state)
        other["cfg"]["model"]._name = arch
        with pytest.raises(ConversionError, match=f"its architecture is {arch}, which is neither"):
            convert(other)
    with pytest.raises(ConversionError, match="a stock checkpoint already; use --to node"):
        convert(state, "stock")
    del state["model"]["encoder.layers.1.fc1.bias"]
    with pytest.raises(ConversionError, match="not those of its own options"):
        convert(state)


def test_the_command(save, tmp_path, monkeypatch, capsys):
    """Never overwrites unless told to; refuses in a sentence what is no checkpoint."""
    path, _ = save("transformer")
    output = tmp_path / "node.pt"

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["convert_checkpoint.py", *map(str, arguments)])
        try:
            convert_checkpoint.main()
        except SystemExit as stopped:
            return str(stopped.code) + capsys.readouterr().err
        return capsys.readouterr().out

    assert "node_transformer; by one Euler step" in run("--input", path, "--output", output)
    assert load_checkpoint(output)["cfg"]["model"].node_solver == "euler"
    written = output.read_bytes()
    assert "--overwrite" in run("--input", path, "--output", output)
    assert "is the input" in run("--input", path, "--output", path, "--overwrite")
    assert "make it first" in run("--input", path, "--output", tmp_path / "no" / "node.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "not a checkpoint" in run("--input", tmp_path / "text.pt", "--output", output, "--overwrite")
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    assert "not a checkpoint that" in run("--input", tmp_path / "other.pt", "--output", output, "--overwrite")
    assert "No such file" in run("--input", tmp_path / "none.pt", "--output", output, "--overwrite")
    assert output.read_bytes() == written
    assert not list(tmp_path.glob("*.part"))

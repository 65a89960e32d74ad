"""The encoder-only model: its read-outs, presets and refusals."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from fairseq_node.models.node_encoder import ARCHITECTURES
from fairseq_node.models.node_transformer import OptionError

double = torch.float64


def encoder(build, arch="node_encoder_parity_increment_layer_norm", **options):
    # The presets decide about the norms.
    return build(arch, **{"encoder_normalize_before": arch.endswith("layer_norm"), **options}).eval()


@pytest.mark.parametrize("read_out", ["last", "mean"])
@pytest.mark.parametrize("left_pad", [True, False])
def test_read_out_ignores_padding_and_the_target(build, sample, read_out, left_pad):
    model = encoder(build, read_out=read_out, dtype=double, node_solver="bosh3")
    batch = sample(left_pad=left_pad, extra_pad=2)["net_input"]
    logits, extra = model(**batch)
    assert logits.shape == (4, batch["prev_output_tokens"].size(1), len(model.decoder.dictionary))
    assert extra["node"]["decoder"] == [] and len(extra["node"]["encoder"]) == 2
    assert extra["node"]["encoder"][0].nfe.shape == (4,)
    states = model.encoder(batch["src_tokens"], batch["src_lengths"])["encoder_out"][0].transpose(0, 1)
    for row, length in enumerate(batch["src_lengths"].tolist()):
        tokens = batch["src_tokens"][row]
        valid = states[row, -length:] if left_pad else states[row, :length]
        features = valid[-1] if read_out == "last" else valid.mean(0)
        torch.testing.assert_close(logits[row, 0], model.decoder.output_projection(features))
        alone = tokens[-length:] if left_pad else tokens[:length]
        one, _ = model(alone[None], torch.tensor([length]), batch["prev_output_tokens"][row : row + 1, :1])
        torch.testing.assert_close(one[0], logits[row, :1])
        torch.testing.assert_close(logits[row], logits[row, :1].expand_as(logits[row]))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_presets(build, sample, arch):
    model = build(arch, encoder_normalize_before=arch.endswith("layer_norm"))
    norms = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert norms == arch.endswith("layer_norm")
    field = "increment" if "increment" in arch else "composed"
    assert {layer.config.form for layer in model.encoder.layers} == {field}
    logits, _ = model(**sample()["net_input"])
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        # A bias of the keys shifts all scores alike.
        assert name.endswith("k_proj.bias") or parameter.grad.abs().sum() > 0, name


def test_no_penalty_is_lost(build, sample):
    """The arclength of the encoder has a gradient when a criterion asks for it."""
    from fairseq_node.modules.path import PathConfig

    model = build("node_encoder_parity")
    model.integrate_path(PathConfig(gradient=True))
    _, extra = model(**sample()["net_input"])
    sum(record.arclength.sum() for record in extra["node"]["encoder"]).backward()
    assert model.encoder.layers[0].fc2.weight.grad.abs().sum() > 0


def test_fairseq_search_runs_on_it(build, sample, dictionary):
    """The read-out stands where a decoder stands: beam search of one token is its best answers."""
    model = encoder(build)
    batch = sample()
    search = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=1, min_len=1)
    hypotheses = search.generate([model], batch)
    lprobs = model.get_normalized_probs(model(**batch["net_input"]), log_probs=True)[:, 0]
    lprobs[:, [dictionary.eos(), dictionary.pad()]] = -float("inf")
    for row, best in zip(lprobs, hypotheses):
        assert {int(h["tokens"][0]) for h in best} <= set(row.topk(7).indices.tolist())
        assert int(best[0]["tokens"][0]) == int(row.argmax())


@pytest.mark.parametrize("option", ["share_all_embeddings", "share_decoder_input_output_embed"])
def test_options_of_a_decoder(build, option):
    with pytest.raises(OptionError, match=f"--{option.replace('_', '-')} needs a decoder"):
        build("node_encoder_parity", **{option: True})

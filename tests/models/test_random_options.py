"""The invariants for options drawn at random: what holds for each has to hold for any of them together."""

import random

import pytest
import torch

from fairseq_node.modules.runge_kutta import ADAPTIVE, FIXED


def draw(number):
    """Options of a model; the same for the same number."""
    choose = random.Random(number).choice
    solver = choose(FIXED + ADAPTIVE)
    options = dict(
        node_solver=solver,
        node_field=choose(["increment", "composed"]),
        node_time_dependence=choose(["none", "additive", "concat"]),
        node_time=choose([0.5, 1.0, 2.0]),
        node_augment_dim=choose([0, 8]),
        node_no_layer_norm=choose([False, False, True]),
        encoder_normalize_before=choose([True, False]),
        decoder_normalize_before=choose([True, False]),
        encoder_layers=choose([1, 2]),
        decoder_layers=choose([1, 2]),
        share_all_embeddings=choose([True, False]),
        layernorm_embedding=choose([True, False]),
        encoder_learned_pos=choose([True, False]),
        decoder_learned_pos=choose([True, False]),
        activation_fn=choose(["relu", "gelu"]),
    )
    if solver in FIXED:
        options["node_steps"] = choose([1, 2, 3])
    else:
        options["node_rtol"] = options["node_atol"] = choose([1e-1, 1e-2, 1e-3])
    return options


@pytest.fixture(params=range(12))
def make(request, build):
    """Builds the drawn model, with further options, and the same weights each time."""

    def make(**further):
        options = {**draw(request.param), **further}
        print(options)  # pytest shows it for a draw that fails
        model = build("node_transformer", dtype=torch.float64, seed=request.param, **options)
        for name, parameter in model.named_parameters():
            if "time_" in name:  # they start at zero, where the field is autonomous
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    return make


def decode(model, batch):
    """Logits of one position after another, and those of teacher forcing, each prefix on its own."""
    net_input = batch["net_input"]
    encoder_out = model.encoder(net_input["src_tokens"], src_lengths=net_input["src_lengths"])
    tokens, state, ours, forced = net_input["prev_output_tokens"], {}, [], []
    for length in range(1, tokens.size(1) + 1):
        prefix = tokens[:, :length]
        ours.append(model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)[0])
        forced.append(model.decoder(prefix, encoder_out=encoder_out)[0][:, -1:])
    return torch.cat(ours, 1), torch.cat(forced, 1)


@torch.no_grad()
def test_decoding_equals_teacher_forcing(make, sample):
    ours, forced = decode(make(node_decode="exact").eval(), sample(tgt_lengths=(6, 6, 6, 6), extra_pad=0))
    torch.testing.assert_close(ours, forced, rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_sentence_does_not_see_its_batch(make, sample):
    model, net_input = make().eval(), sample(extra_pad=2)["net_input"]
    output, extra = model(**net_input)
    for row, (length, tgt_length) in enumerate(zip((7, 5, 3, 6), (6, 4, 5, 2))):
        alone, alone_extra = model(
            net_input["src_tokens"][row : row + 1, -length:],
            torch.tensor([length]),
            net_input["prev_output_tokens"][row : row + 1, :tgt_length],
        )
        torch.testing.assert_close(alone[0], output[row, :tgt_length], rtol=0, atol=1e-9)
        for side in ("encoder", "decoder"):
            for ours, theirs in zip(alone_extra["node"][side], extra["node"][side]):
                assert ours.nfe[0] == theirs.nfe[row]


def test_checkpoint_gives_the_gradients_of_backprop(make, sample):
    """With dropout at every site, drawn once per solve and held."""
    batch, gradients = sample(), []
    for mode in ("backprop", "checkpoint"):
        model = make(node_gradient=mode, dropout=0.2, attention_dropout=0.2, activation_dropout=0.2).train()
        torch.manual_seed(1)
        model(**batch["net_input"])[0][batch["target"].ne(1)].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*reversed(gradients)):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)

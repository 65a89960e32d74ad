"""The model: equal to stock fairseq with one Euler step; invariants of the real field otherwise."""

import argparse
import copy

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from fairseq_node import compat
from fairseq_node.models.node_transformer import (
    ARCHITECTURES,
    NodeTransformerConfig,
    NodeTransformerModel,
    OptionError,
)
from fairseq_node.modules.node_layer import SolveError
from fairseq_node.modules.runge_kutta import ADAPTIVE, FIXED

double = torch.float64
NORMS = [dict(encoder_normalize_before=pre, decoder_normalize_before=pre) for pre in (True, False)]
DROPOUT = dict(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)


def pair(build, **options):
    """A stock model and a node model of one Euler step with the same weights."""
    stock = build("transformer", **options)
    node = build("node_transformer", node_solver="euler", **options)
    node.load_state_dict(stock.state_dict(), strict=True)
    return stock, node


def loss_of(model, sample, dictionary):
    output, extra = model(**sample["net_input"])
    logits = model.get_normalized_probs((output, extra), log_probs=True)
    target = sample["target"]
    mask = target.ne(dictionary.pad())
    return -logits[mask].gather(1, target[mask].unsqueeze(1)).sum(), output[mask], extra


@pytest.mark.parametrize("left_pad", [True, False])
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("dtype,tolerance", [(double, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "extra", [{}, dict(encoder_learned_pos=True, layernorm_embedding=True, share_all_embeddings=True)]
)
def test_one_euler_step_is_the_stock_transformer(
    build, sample, dictionary, dtype, tolerance, norms, left_pad, extra
):
    """Invariant 1: logits, loss and gradients, in training mode without dropout and in evaluation."""
    stock, node = pair(build, dtype=dtype, **norms, **extra)
    names = [name for name, _ in node.named_parameters()]
    copies = tuple("." + name for name in compat.FAST_PATH_COPIES)
    assert names == [n for n, _ in stock.named_parameters() if not n.endswith(copies)]
    batch = sample(left_pad=left_pad, extra_pad=1)
    for training in (True, False):
        stock.train(training), node.train(training)
        expected, logits, _ = loss_of(stock, batch, dictionary)
        loss, ours, extra_output = loss_of(node, batch, dictionary)
        torch.testing.assert_close(ours, logits, rtol=0, atol=tolerance)
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        assert all((r.nfe == 1).all() for side in extra_output["node"].values() for r in side)
        theirs = dict(stock.named_parameters())
        for gradient, reference in zip(
            torch.autograd.grad(loss, list(node.parameters())),
            torch.autograd.grad(expected, [theirs[name] for name in names]),
        ):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=30 * tolerance)


def beam(model, dictionary, batch, **options):
    model.eval()
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=12, **options)
    return [
        [(h["tokens"].tolist(), h["positional_scores"]) for h in hypotheses]
        for hypotheses in generator.generate([model], batch)
    ]


@pytest.mark.parametrize("norms", NORMS)
def test_beam_search_is_that_of_the_stock_transformer(build, sample, dictionary, norms):
    stock, node = pair(build, **norms)
    batch = sample()
    for theirs, ours in zip(beam(stock, dictionary, batch), beam(node, dictionary, batch)):
        assert [tokens for tokens, _ in theirs] == [tokens for tokens, _ in ours]
        for (_, expected), (_, scores) in zip(theirs, ours):
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


def test_alignment_is_that_of_the_stock_transformer(build, sample):
    stock, node = pair(build)
    stock.eval(), node.eval()
    batch = sample()
    valid = batch["target"].ne(1)
    expected = stock(**batch["net_input"])[1]["attn"][0]
    torch.testing.assert_close(node(**batch["net_input"])[1]["attn"][0][valid], expected[valid])


SOLVERS = [
    *(dict(node_solver=name, node_steps=2) for name in FIXED),
    *(dict(node_solver=name, node_rtol=1e-4, node_atol=1e-4) for name in ADAPTIVE),
]


@pytest.mark.parametrize("options", SOLVERS, ids=lambda o: o["node_solver"])
@pytest.mark.parametrize("left_pad", [True, False])
def test_a_sentence_does_not_see_its_batch(build, sample, options, left_pad):
    """Invariant 3: the same output and the same NFE alone and in a padded batch."""
    model = build("node_transformer", dtype=double, **options).eval()
    together = sample(left_pad=left_pad, extra_pad=3)
    output, extra = model(**together["net_input"])
    net_input = together["net_input"]
    for row, (length, tgt_length) in enumerate(zip((7, 5, 3, 6), (6, 4, 5, 2))):
        words = net_input["src_tokens"][row]
        words = words[-length:] if left_pad else words[:length]
        alone, alone_extra = model(
            words.unsqueeze(0),
            torch.tensor([length]),
            net_input["prev_output_tokens"][row : row + 1, :tgt_length],
        )
        torch.testing.assert_close(alone[0], output[row, :tgt_length], rtol=0, atol=1e-9)
        for side in ("encoder", "decoder"):
            for ours, theirs in zip(alone_extra["node"][side], extra["node"][side]):
                assert ours.nfe[0] == theirs.nfe[row]
                torch.testing.assert_close(ours.arclength[0], theirs.arclength[row])


@pytest.mark.parametrize("name", FIXED)
def test_fixed_grids_are_causal_exactly(build, sample, name):
    """Invariant 4."""
    model = build("node_transformer", node_solver=name, node_steps=2).eval()
    net_input = sample((5,), (6,))["net_input"]
    before, _ = model(**net_input)
    net_input["prev_output_tokens"] = net_input["prev_output_tokens"].clone()
    net_input["prev_output_tokens"][0, -1] = 5
    after, _ = model(**net_input)
    assert torch.equal(before[0, :-1], after[0, :-1])
    assert not torch.equal(before[0, -1], after[0, -1])


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_solves_converge_to_a_fine_grid(build, sample, name, norms):
    """Invariant 2, on the real field; and the future moves the past by about the tolerance only."""
    fine = build(
        "node_transformer", dtype=double, node_solver="rk4", node_steps=50, activation_fn="gelu", **norms
    ).eval()
    batch = sample()["net_input"]
    expected, _ = fine(**batch)
    errors = []
    for tolerance in (1e-2, 1e-3, 1e-5):
        model = build(
            "node_transformer",
            dtype=double,
            node_solver=name,
            node_rtol=tolerance,
            node_atol=tolerance,
            node_max_nfe=100_000,
            activation_fn="gelu",
            **norms,
        ).eval()
        errors.append(float((model(**batch)[0] - expected).detach().abs().max()))
        assert errors[-1] < 20 * tolerance
    assert errors[2] < errors[0] / 10


GRADIENTS = [
    dict(node_solver="rk4", node_steps=2, node_gradient="checkpoint"),
    *(
        dict(node_solver=name, node_step_control=control, node_gradient=gradient)
        for name in ADAPTIVE
        for control, gradient in (("sentence", "checkpoint"), ("batch", "checkpoint"))
    ),
    *(
        dict(node_solver=name, node_step_control="batch", node_gradient="adjoint")
        for name in ("bosh3", "dopri5")
    ),
]


@pytest.mark.parametrize("options", GRADIENTS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_gradient_mode_is_right_for_every_parameter(build, sample, dictionary, options):
    """Invariant 6: with held dropout, the encoder's parameters through the decoder's solve included."""
    tolerance = 1e-5 if options["node_gradient"] == "adjoint" else 1e-2
    # A smooth activation: at the kinks of relu the adjoint converges slowly.
    common = dict(
        dtype=double,
        activation_fn="gelu",
        node_rtol=tolerance,
        node_atol=tolerance,
        node_max_nfe=100_000,
        **DROPOUT,
    )
    gradients = []
    for gradient in ("backprop", options["node_gradient"]):
        model = build("node_transformer", **{**common, **options, "node_gradient": gradient}).train()
        torch.manual_seed(7)
        loss, _, extra = loss_of(model, sample(), dictionary)
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all((r.nfe_backward > 0).all() for side in extra["node"].values() for r in side)
    limit = 5e-3 if options["node_gradient"] == "adjoint" else 1e-10
    for name, expected in gradients[0].items():
        # (a key's bias has no gradient but rounding)
        assert (gradients[1][name] - expected).norm() <= limit * (expected.norm() + 1e-3), name
    for name in ("encoder.layers.0.self_attn.v_proj.weight", "encoder.layers.1.fc2.weight"):
        assert gradients[0][name].norm() > 1e-3


def test_gradient_of_the_encoder_output_in_float64(build):
    """gradcheck through a decoder block, its state and the encoder output."""
    model = build("node_transformer", dtype=double, node_solver="rk4", node_steps=2)
    layer = model.decoder.layers[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 32, dtype=double, generator=generator, requires_grad=True)
    source = torch.randn(4, 2, 32, dtype=double, generator=generator, requires_grad=True)
    mask = torch.full((3, 3), float("-inf"), dtype=double).triu(1)
    padding = torch.tensor([[False] * 4, [True, True, False, False]])

    def run(x, source):
        return layer(x, source, padding, self_attn_mask=mask)[0]

    assert torch.autograd.gradcheck(run, (x, source), fast_mode=True)


@pytest.mark.parametrize("options", SOLVERS, ids=lambda o: o["node_solver"])
def test_dropout_is_held_during_a_solve(build, sample, options):
    """Invariant 7: about the NFE of a solve without dropout; reproducible by seed; fresh every solve."""
    batch = sample()["net_input"]
    quiet = build("node_transformer", **options).train()
    noisy = build("node_transformer", **options, **DROPOUT).train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(noisy(**batch))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][0], outputs[2][0])
    without, with_dropout = (
        sum(r.nfe.float().mean() for side in extra["node"].values() for r in side)
        for extra in (quiet(**batch)[1], outputs[0][1])
    )
    assert 0.6 < with_dropout / without < 1.6

    block = noisy.encoder.layers[0]
    x = torch.randn(2, 5, 32)
    field = block.bind(x, None)
    t = torch.full((2,), 0.3)
    assert torch.equal(field(t, x), field(t, x))
    assert torch.equal(field(t, x)[1:], field.select(torch.tensor([1]))(t[1:], x[1:]))
    assert not torch.equal(field(t, x), block.bind(x, None)(t, x))


@pytest.mark.parametrize("site", ["dropout", "attention_dropout", "activation_dropout"])
def test_dropout_has_the_rate_it_is_asked_for(build, site):
    """Each site alone, against the same field without dropout: the mean over solves is unbiased where
    the site is linear, and no solve equals the field without it."""
    plain = build("node_transformer", encoder_layers=1).train().encoder.layers[0]
    model = build("node_transformer", encoder_layers=1, **{site: 0.2}).train()
    block = model.encoder.layers[0]
    x, t = torch.randn(1, 6, 32), torch.zeros(1)
    held = block.bind(x, None).dropout
    assert held and all(0 < (mask == 0).float().mean() < 1 for mask in held.values())
    for mask in held.values():
        assert torch.equal(mask.unique(), torch.tensor([0.0, 1.25]))
    assert not torch.equal(block.bind(x, None)(t, x), plain.bind(x, None)(t, x))
    model.eval()
    assert torch.equal(block.bind(x, None)(t, x), plain.bind(x, None)(t, x))


@pytest.mark.parametrize(
    "options",
    [
        dict(node_field="composed"),
        dict(node_no_layer_norm=True),
        dict(node_field="composed", node_no_layer_norm=True),
        dict(node_time_dependence="additive"),
        dict(node_time_dependence="concat"),
        dict(node_augment_dim=8),
        dict(node_augment_dim=8, node_time_dependence="concat", node_field="composed"),
        dict(node_time=2.0),
    ],
    ids=lambda o: "-".join(f"{k[5:]}={v}" for k, v in o.items()),
)
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("solver", [dict(node_solver="rk4"), dict(node_solver="bosh3")])
def test_fields_use_all_their_parameters(build, sample, dictionary, options, norms, solver):
    model = build("node_transformer", **options, **norms, **solver).train()
    if "node_time_dependence" in options:
        with torch.no_grad():  # they start at zero, where the autonomous field is
            for name, parameter in model.named_parameters():
                if "time_" in name:
                    parameter.normal_()
    loss, _, _ = loss_of(model, sample(), dictionary)
    loss.backward()
    for name, parameter in model.named_parameters():
        # A softmax does not see what is added to all scores of a row: the key's bias has no gradient.
        if "k_proj.bias" not in name and "self_key" not in name:
            assert parameter.grad is not None and parameter.grad.norm() > 0, name


def test_composed_field_is_the_reported_form(build):
    """F = FFN(x + Attn(x)) without norms (arXiv 2505.13499, appendix A), against fairseq's modules."""
    model = build("node_transformer", node_field="composed", node_no_layer_norm=True).eval()
    block = model.encoder.layers[0]
    x = torch.randn(2, 5, 32)
    y = x.transpose(0, 1)
    y = y + block.self_attn(y, y, y, need_weights=False)[0]
    expected = block.fc2(torch.relu(block.fc1(y))).transpose(0, 1)
    torch.testing.assert_close(block.bind(x, None)(torch.zeros(2), x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", SOLVERS[-3:], ids=lambda o: o["node_solver"])
def test_half_precision_fields_in_a_float32_solve(build, sample, dtype, options):
    """Invariant 10."""
    try:
        torch.nn.functional.layer_norm(torch.ones(2, dtype=dtype), (2,))
    except RuntimeError as error:  # torch 2.1 has no float16 kernels on CPU
        pytest.skip(str(error))
    options = {**options, "node_rtol": 1e-2, "node_atol": 1e-2}
    model = build("node_transformer", **options).eval()
    half = copy.deepcopy(model).to(dtype)
    batch = sample()["net_input"]
    expected, _ = model(**batch)
    output, extra = half(**batch)
    assert output.dtype == dtype and torch.isfinite(output).all()
    assert (output.float() - expected).abs().max() < 0.15 * expected.abs().max()
    assert all(r.arclength.dtype == torch.float32 for r in extra["node"]["decoder"])
    assert not any(r.unfinished.any() for r in extra["node"]["decoder"])


def test_failure_is_an_error_that_says_what_to_do_or_is_counted(build, sample):
    tight = dict(node_solver="bosh3", node_rtol=1e-9, node_atol=1e-9, node_max_nfe=20)
    batch = sample()["net_input"]
    _, extra = build("node_transformer", **tight).train()(**batch)
    assert all(r.unfinished.all() and (r.nfe <= 20).all() for r in extra["node"]["encoder"])
    with pytest.raises(SolveError, match="encoder block 1.*7 tokens.*t = .*--node-max-nfe"):
        build("node_transformer", node_on_failure="error", **tight)(**batch)


def test_not_finite_weights_do_not_hang_and_are_reported(build, sample):
    model = build("node_transformer", node_solver="dopri5").train()
    with torch.no_grad():
        model.encoder.layers[0].fc1.weight[0, 0] = float("nan")
    _, extra = model(**sample()["net_input"])
    assert extra["node"]["encoder"][0].unfinished.all()


def test_a_grid_says_which_block_is_not_finite_if_asked_to(build, sample):
    model = build("node_transformer", node_solver="rk4", node_steps=4, node_on_failure="error")
    batch = sample()["net_input"]
    model(**batch)
    with torch.no_grad():
        model.decoder.layers[1].fc1.weight.fill_(1e30)
    with pytest.raises(SolveError, match="decoder block 2.*t = 0 of 1.*not finite; lower --lr"):
        model(**batch)


def test_degenerate_sentences(build, dictionary):
    """One-token sentences, and a source that is nothing but padding."""
    model = build("node_transformer", node_solver="dopri5").train()
    eos, pad = dictionary.eos(), dictionary.pad()
    source = torch.tensor([[pad, eos], [5, eos], [pad, pad]])
    output, extra = model(source, torch.tensor([1, 2, 0]), torch.full((3, 1), eos))
    assert torch.isfinite(output).all()
    output.sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert extra["node"]["encoder"][0].arclength[2] == 0


def test_layer_drop_drops_whole_blocks(build, sample):
    """A block is dropped with its whole solve, as stock layers are: the same ones for the same seed."""
    stock, model = pair(build, encoder_layers=6, encoder_layerdrop=0.5)
    stock.train(), model.train()
    batch = sample()
    valid = batch["target"].ne(1)
    for seed in range(5):
        outputs = []
        for each in (stock, model):
            torch.manual_seed(seed)
            outputs.append(each(**batch["net_input"]))
        torch.testing.assert_close(outputs[1][0][valid], outputs[0][0][valid], rtol=0, atol=2e-5)
        ran = len(outputs[0][1]["inner_states"]) - 1  # of the decoder, which drops none
        assert len(outputs[1][1]["node"]["decoder"]) == ran == 2
        torch.manual_seed(seed)
        expected = sum(1 for _ in stock.encoder.layers)
        assert len(outputs[1][1]["node"]["encoder"]) == expected
    model.eval()
    assert len(model(**batch["net_input"])[1]["node"]["encoder"]) == 6


@pytest.mark.parametrize(
    "option,options",
    [
        ("--node-rtol", dict(node_rtol=-1.0)),
        ("--node-steps", dict(node_solver="rk4", node_steps=0)),
        ("--node-steps", dict(node_solver="dopri5", node_steps=4)),
        ("--node-solver", dict(node_solver="rk45")),
        ("--node-max-nfe", dict(node_max_nfe=1)),
        ("--node-augment-dim", dict(node_augment_dim=-1)),
        ("--node-augment-dim", dict(node_augment_dim=3)),
        ("--node-gradient", dict(node_gradient="adjoint")),
        ("--checkpoint-activations", dict(checkpoint_activations=True)),
        ("--quant-noise-pq", dict(quant_noise_pq=0.1)),
        ("--cross-self-attention", dict(cross_self_attention=True)),
    ],
)
def test_bad_options_are_named(build, option, options):
    with pytest.raises(OptionError) as caught:
        build("node_transformer", **options)
    assert option in str(caught.value) and "use" in str(caught.value)
    assert isinstance(caught.value, (ValueError, SystemExit))


def test_overrides_may_leave_the_grid_of_a_completed_checkpoint():
    """rk4 with 4 steps in training, dopri5 through --model-overrides: the grid is not used."""
    complete = _architecture("node_transformer")
    args = argparse.Namespace(node_solver="rk4", node_steps=4)
    complete(args)
    args.node_solver = "dopri5"
    complete(args)
    assert NodeTransformerConfig.from_namespace(args).node_solver == "dopri5"


def _architecture(name):
    from fairseq.models import ARCH_CONFIG_REGISTRY

    return ARCH_CONFIG_REGISTRY[name]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.endswith("parity")])
def test_presets_are_those_of_fairseq(name):
    assert ARCH_MODEL_REGISTRY[name] is NodeTransformerModel
    ours, theirs = argparse.Namespace(), argparse.Namespace()
    _architecture(name)(ours)
    _architecture(name[len("node_") :])(theirs)
    for option, value in vars(theirs).items():
        assert getattr(ours, option) == value


def test_options_of_hydra_nested_and_flat():
    """Each arrives; what is not given is filled in, so that it can be overridden later."""
    cfg = OmegaConf.create(
        {
            "_name": "node_transformer_tiny",
            "encoder": {"layers": 3},
            "decoder_layers": 1,
            "node_solver": "rk4",
        }
    )
    _architecture("node_transformer_tiny")(cfg)
    config = NodeTransformerConfig.from_namespace(cfg)
    assert (config.encoder.layers, config.decoder.layers, config.encoder.embed_dim) == (3, 1, 64)
    assert config.node_solver == "rk4" and cfg.node_rtol == config.node_rtol
    cfg.encoder_layers = 5  # an override, flat as fairseq's are
    assert NodeTransformerConfig.from_namespace(cfg).encoder.layers == 5

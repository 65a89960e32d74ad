"""Generation equals teacher forcing (invariant 5), for every solver and way to decode."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_node.modules.runge_kutta import ADAPTIVE, FIXED

double = torch.float64
NORMS = [dict(encoder_normalize_before=pre, decoder_normalize_before=pre) for pre in (True, False)]
GRIDS = [dict(node_solver=name, node_steps=2) for name in FIXED]
EXACT = [dict(node_solver=name, node_rtol=1e-2, node_atol=1e-2, node_decode="exact") for name in ADAPTIVE]
CACHED = [dict(node_solver=name, node_rtol=1e-2, node_atol=1e-2) for name in ADAPTIVE]
#: So tight that what is left of a difference is an error of ours.
TIGHT = dict(node_solver="dopri5", node_rtol=1e-8, node_atol=1e-8, node_max_nfe=5000, node_decode_nodes=24)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def name_of(options):
    return "-".join(str(value) for value in options.values())


def encode(model, batch):
    net_input = batch["net_input"]
    return model.encoder(net_input["src_tokens"], src_lengths=net_input["src_lengths"])


def decode(model, encoder_out, tokens, state=None):
    """Logits of what follows each position, one position after another."""
    state = {} if state is None else state
    steps = []
    for length in range(1, tokens.size(1) + 1):
        output = model.decoder(tokens[:, :length], encoder_out=encoder_out, incremental_state=state)
        assert output[0].size(1) == 1
        steps.append(output[0])
    return torch.cat(steps, dim=1)


def force(model, encoder_out, tokens):
    """The same under teacher forcing, each prefix on its own: an adaptive solve of a longer target may
    take other steps."""
    steps = []
    for length in range(1, tokens.size(1) + 1):
        steps.append(model.decoder(tokens[:, :length], encoder_out=encoder_out)[0][:, -1:])
    return torch.cat(steps, dim=1)


def randomise_time(model):
    """Time features start at zero, where the field is autonomous."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "time_" in name:
                parameter.normal_(std=0.3)


@pytest.mark.parametrize("options", GRIDS + EXACT, ids=name_of)
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("left_pad", [True, False])
def test_fixed_grids_and_exact_decoding_equal_teacher_forcing(build, sample, options, norms, left_pad):
    model = build("node_transformer", dtype=double, **options, **norms).eval()
    batch = sample(tgt_lengths=(6, 6, 6, 6), left_pad=left_pad, extra_pad=1)
    tokens = batch["net_input"]["prev_output_tokens"][:, :6]
    encoder_out = encode(model, batch)
    torch.testing.assert_close(
        decode(model, encoder_out, tokens), force(model, encoder_out, tokens), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("options", CACHED, ids=name_of)
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
def test_cached_decoding_is_within_a_multiple_of_the_tolerance(build, sample, options, norms, tolerance):
    options = {**options, "node_rtol": tolerance, "node_atol": tolerance}
    model = build("node_transformer", **options, **norms).eval()
    batch = sample(tgt_lengths=(6, 6, 6, 6))
    tokens = batch["net_input"]["prev_output_tokens"]
    encoder_out = encode(model, batch)
    difference = decode(model, encoder_out, tokens) - force(model, encoder_out, tokens)
    assert 0 < difference.abs().max() < 10 * tolerance


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(encoder_normalize_before=False, decoder_normalize_before=False),
        dict(node_field="composed"),
        dict(node_time_dependence="additive", node_decode_nodes=40),  # it has fast features of t
        dict(node_time_dependence="concat", node_time=2.0),
        dict(node_augment_dim=8),
        dict(node_no_layer_norm=True),
        dict(node_step_control="batch"),
    ],
    ids=name_of,
)
def test_cached_decoding_converges_to_teacher_forcing(build, sample, options):
    """With padded sources and, since hypotheses of a batch end apart, with padded targets."""
    model = build("node_transformer", dtype=double, decoder_layers=1, **{**TIGHT, **options}).eval()
    randomise_time(model)
    batch = sample((6, 3), (4, 3))
    tokens = batch["net_input"]["prev_output_tokens"]
    encoder_out = encode(model, batch)
    ours, expected = decode(model, encoder_out, tokens), force(model, encoder_out, tokens)
    valid = tokens.ne(model.decoder.padding_idx)
    assert not valid.all()
    torch.testing.assert_close(ours[valid], expected[valid], rtol=0, atol=1e-4)


def test_more_nodes_are_closer(build, sample):
    """The interpolation is what is left: its error falls geometrically with the nodes."""
    errors = []
    for nodes in (2, 4, 6):
        options = {**TIGHT, "node_decode_nodes": nodes}
        model = build("node_transformer", dtype=double, decoder_layers=1, **options).eval()
        batch = sample((6,), (4,))
        tokens, encoder_out = batch["net_input"]["prev_output_tokens"], encode(model, batch)
        difference = decode(model, encoder_out, tokens) - force(model, encoder_out, tokens)
        errors.append(float(difference.abs().max()))
    assert errors[0] > 10 * errors[1] > 100 * errors[2] > 0


@pytest.mark.parametrize("options", [GRIDS[-1], EXACT[1], *CACHED], ids=name_of)
def test_caches_move_with_the_beam(build, sample, options):
    """Reordered, dropped and repeated hypotheses continue as if they had been decoded on their own."""
    model = build("node_transformer", dtype=double, **options).eval()
    batch = sample((5, 5, 5), (6, 6, 6))
    tokens, encoder_out = batch["net_input"]["prev_output_tokens"], encode(model, batch)
    state = {}
    decode(model, encoder_out, tokens[:, :3], state)
    order = torch.tensor([2, 0, 2, 1])
    model.decoder.reorder_incremental_state_scripting(state, order)
    moved = model.encoder.reorder_encoder_out(encoder_out, order)
    output = model.decoder(tokens[order][:, :4], encoder_out=moved, incremental_state=state)
    expected = decode(model, moved, tokens[order][:, :4])[:, -1:]
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [GRIDS[1], EXACT[1], CACHED[1]], ids=name_of)
def test_hypotheses_of_a_sentence_share_its_source(build, sample, options):
    """And different sentences do not, even where a search has left its beam in the model."""
    model = build("node_transformer", dtype=double, **options).eval()
    batch = sample((6, 4, 5, 3), (4, 4, 4, 4))
    tokens, encoder_out = batch["net_input"]["prev_output_tokens"], encode(model, batch)
    expected = decode(model, encoder_out, tokens)
    for layer in model.decoder.layers:
        layer.encoder_attn.beam_size = 2  # what fairseq's search does
    torch.testing.assert_close(decode(model, encoder_out, tokens), expected, rtol=0, atol=1e-9)

    twice = torch.arange(4).repeat_interleave(2)
    copies = model.encoder.reorder_encoder_out(encoder_out, twice)
    state = {}
    together = decode(model, copies, tokens[twice][:, :3], state)
    torch.testing.assert_close(together, expected[twice][:, :3], rtol=0, atol=1e-9)
    assert {len(cache["cross_key"]) for cache in state.values() if cache} == {4}
    fewer = torch.tensor([3, 2, 7, 6])  # two sentences are finished, and hypotheses change places
    model.decoder.reorder_incremental_state_scripting(state, fewer)
    assert {len(cache["cross_key"]) for cache in state.values() if cache} == {2}
    rest = model.encoder.reorder_encoder_out(copies, fewer)
    output, _ = model.decoder(tokens[twice][fewer], encoder_out=rest, incremental_state=state)
    torch.testing.assert_close(output, expected[twice][fewer][:, -1:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [GRIDS[1], EXACT[1], CACHED[1]], ids=name_of)
def test_the_source_is_projected_once(build, sample, options):
    model = build("node_transformer", **options).eval()
    batch = sample(tgt_lengths=(5, 5, 5, 5))
    encoder_out = encode(model, batch)
    counts = []
    for layer in model.decoder.layers:
        for projection in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj):
            projection.register_forward_hook(lambda *_: counts.append(1))
    decode(model, encoder_out, batch["net_input"]["prev_output_tokens"])
    assert len(counts) == 2 * len(model.decoder.layers)


@pytest.mark.parametrize("options", [GRIDS[-1], CACHED[1], CACHED[2]], ids=name_of)
def test_the_cache_does_not_grow_with_the_evaluations(build, sample, options):
    """One row per position for every evaluation or node; public implementations append every one."""
    model = build("node_transformer", **options).eval()
    batch = sample(tgt_lengths=(6, 6, 6, 6))
    state = {}
    decode(model, encode(model, batch), batch["net_input"]["prev_output_tokens"], state)
    assert len(state) == len(model.decoder.layers)
    for cache in state.values():
        lengths = {kept.size(-2) for name, kept in cache.items() if name.startswith(("key", "value", "past"))}
        assert lengths == {6}
    if options in CACHED:
        assert cache["past"].size(1) == model.decoder.layers[0].decode_config.decode_nodes


@pytest.mark.parametrize("options", [GRIDS[-1], *CACHED], ids=name_of)
def test_a_hypothesis_does_not_see_its_batch(build, sample, options):
    model = build("node_transformer", dtype=double, **options).eval()
    batch = sample((7, 4, 2), (5, 5, 5))
    tokens = batch["net_input"]["prev_output_tokens"]
    together = decode(model, encode(model, batch), tokens)
    for row, length in enumerate((7, 4, 2)):
        words = batch["net_input"]["src_tokens"][row : row + 1, -length:]
        encoder_out = model.encoder(words, src_lengths=torch.tensor([length]))
        alone = decode(model, encoder_out, tokens[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [GRIDS[2], EXACT[1], CACHED[1]], ids=name_of)
def test_beam_search_scores_are_those_of_teacher_forcing(build, sample, dictionary, options):
    model = build("node_transformer", **options).eval()
    batch = sample(left_pad=True)
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=8)
    for row, hypotheses in enumerate(generator.generate([model], batch)):
        length = batch["net_input"]["src_lengths"][row]
        source = batch["net_input"]["src_tokens"][row : row + 1, -length:]
        encoder_out = model.encoder(source, src_lengths=length.view(1))
        for hypothesis in hypotheses[:2]:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens.new_tensor([dictionary.eos()]), tokens[:-1]]).unsqueeze(0)
            scores = force(model, encoder_out, previous)[0].log_softmax(-1)
            scores = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
            tolerance = 2e-2 if options in CACHED else 2e-4
            torch.testing.assert_close(scores, hypothesis["positional_scores"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [GRIDS[2], EXACT[1], CACHED[1]], ids=name_of)
def test_prefix_tokens(build, sample, dictionary, options):
    model = build("node_transformer", **options).eval()
    batch = sample()
    generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=10)
    prefix = batch["target"][:, :2]
    for row, hypotheses in enumerate(generator.generate([model], batch, prefix_tokens=prefix)):
        for hypothesis in hypotheses:
            assert hypothesis["tokens"][:2].tolist() == prefix[row].tolist()


@pytest.mark.parametrize("options", [GRIDS[-1], CACHED[1]], ids=name_of)
def test_a_budget_that_is_spent_does_not_stop_decoding(build, sample, options):
    """A position that was cut short leaves the straight line of its last step in the cache."""
    model = build("node_transformer", **{**options, "node_rtol": 0.0, "node_max_nfe": 12}).eval()
    batch = sample(tgt_lengths=(5, 5, 5, 5))
    assert torch.isfinite(decode(model, encode(model, batch), batch["net_input"]["prev_output_tokens"])).all()


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_future_moves_adaptive_logits_by_about_the_tolerance(build, sample, name):
    """Invariant 4: under teacher forcing a sentence's steps depend on all of its tokens."""
    for tolerance in (1e-2, 1e-4):
        model = build("node_transformer", node_solver=name, node_rtol=tolerance, node_atol=tolerance).eval()
        net_input = sample((5,), (8,))["net_input"]
        before, _ = model(**net_input)
        net_input["prev_output_tokens"] = net_input["prev_output_tokens"].clone()
        net_input["prev_output_tokens"][0, 4:] = torch.tensor([5, 6, 7, 8])
        after, _ = model(**net_input)
        assert (before - after)[0, :4].abs().max() < 2 * tolerance
        assert (before - after)[0, 4:].abs().max() > 0.1


@pytest.mark.parametrize("options", [GRIDS[-1], EXACT[1], CACHED[1]], ids=name_of)
def test_decoding_in_half_precision(build, sample, options):
    batch = sample(tgt_lengths=(5, 5, 5, 5))
    tokens = batch["net_input"]["prev_output_tokens"]
    reference = build("node_transformer", **options).eval()
    half = build("node_transformer", dtype=torch.bfloat16, **options).eval()
    expected = decode(reference, encode(reference, batch), tokens)
    logits = decode(half, encode(half, batch), tokens)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.25)


@pytest.mark.parametrize("options", [GRIDS[-1], EXACT[1], CACHED[1]], ids=name_of)
def test_dropout_that_is_retained_reaches_every_position(build, sample, options):
    """Attention dropout too, whose mask is as long as the cache (fairseq's --retain-dropout)."""
    dropout = dict(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)
    model = build("node_transformer", **options, **dropout).eval()
    batch = sample(tgt_lengths=(5, 5, 5, 5))
    tokens, encoder_out = batch["net_input"]["prev_output_tokens"], encode(model, batch)
    plain = decode(model, encoder_out, tokens)
    for module in model.decoder.modules():
        if hasattr(module, "apply_during_inference"):
            module.apply_during_inference = True
    one, other = (decode(model, encoder_out, tokens) for _ in range(2))
    assert torch.isfinite(one).all()
    for position in range(5):
        assert not torch.equal(one[:, position], other[:, position])
        assert not torch.equal(one[:, position], plain[:, position])

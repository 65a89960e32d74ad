"""Training in half precision as ``--bf16``, ``--memory-efficient-bf16`` and ``--amp`` do it.

Those options themselves need a GPU in fairseq: on CPU its trainer asks for a device of XLA.
"""

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim.fp16_optimizer import FP16Optimizer, MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf

SOLVES = [
    dict(node_solver="rk4", node_gradient="checkpoint"),
    dict(node_solver="bosh3"),
    dict(node_solver="bosh3", node_step_control="batch", node_gradient="adjoint"),
]


def loss_of(model, sample, dictionary):
    output = model(**sample["net_input"])
    lprobs = model.get_normalized_probs(output, log_probs=True)  # float32, as in fairseq's criteria
    target = sample["target"]
    mask = target.ne(dictionary.pad())
    return -lprobs[mask].gather(1, target[mask].unsqueeze(1)).mean(), output[1]["node"]


def config(memory_efficient):
    cfg = OmegaConf.create(
        {
            "common": {
                **{
                    name: getattr(FairseqConfig().common, name)
                    for name in ("fp16_init_scale", "min_loss_scale")
                },
                **dict(bf16=True, fp16=False, fp16_scale_tolerance=0.0, threshold_loss_scale=None),
                **dict(fp16_scale_window=128, tpu=False, fp16_no_flatten_grads=False),
                **dict(memory_efficient_bf16=memory_efficient, memory_efficient_fp16=False),
            },
            "distributed_training": {
                **dict(pipeline_model_parallel=False, ddp_backend="legacy_ddp", distributed_world_size=1),
            },
            "optimization": {"update_freq": [1], "lr": [3e-3]},
            "optimizer": {
                **{"_name": "adam", "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0},
                **{"use_old_adam": True, "fp16_adam_stats": False, "tpu": False, "lr": [3e-3]},
            },
        }
    )
    return cfg


@pytest.mark.parametrize("options", SOLVES, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("optimizer_class", [FP16Optimizer, MemoryEfficientFP16Optimizer])
def test_bfloat16_parameters_under_fairseqs_optimizers(build, sample, dictionary, options, optimizer_class):
    model = build("node_transformer", dtype=torch.bfloat16, dropout=0.1, **options).train()
    optimizer = optimizer_class.build_optimizer(
        config(optimizer_class is MemoryEfficientFP16Optimizer), [p for p in model.parameters()]
    )
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss, records = loss_of(model, sample(), dictionary)
        optimizer.backward(loss)
        norm = optimizer.clip_grad_norm(1.0)
        assert torch.isfinite(norm) and norm > 0
        optimizer.step()
        losses.append(float(loss))
        assert all(record.arclength.dtype == torch.float32 for side in records.values() for record in side)
        assert not any(record.unfinished.any() for side in records.values() for record in side)
    assert losses[-1] < 0.9 * losses[0]
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


@pytest.mark.parametrize("options", SOLVES, ids=lambda o: "-".join(o.values()))
def test_automatic_mixed_precision(build, sample, dictionary, options):
    """``--amp``: float32 parameters and state, bfloat16 matrix products."""
    model = build("node_transformer", **options).train()
    reference, _ = loss_of(model, sample(), dictionary)
    expected = torch.autograd.grad(reference, list(model.parameters()), allow_unused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = loss_of(model, sample(), dictionary)
    loss.backward()
    assert abs(float(loss - reference)) < 0.05
    ours, theirs = (
        torch.cat(
            [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(model.parameters(), grads)]
        )
        for grads in ([p.grad for p in model.parameters()], expected)
    )
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.99

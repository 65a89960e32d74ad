"""What cannot train on several workers is refused; what can, agrees with one worker."""

import argparse
import types

import pytest
import torch

from fairseq_node import distributed
from fairseq_node.criterions.with_path import LabelSmoothedCrossEntropyWithPath


def arguments(**changed):
    defaults = dict(
        cpu=True,
        distributed_world_size=2,
        distributed_init_method="tcp://127.0.0.1:1",
        distributed_no_spawn=True,
        distributed_backend="gloo",
        ddp_backend="legacy_ddp",
        zero_sharding="none",
    )
    return argparse.Namespace(**{**defaults, **changed})


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "changed,message",
    [
        (dict(ddp_backend="pytorch_ddp"), "--ddp-backend legacy_ddp"),
        (dict(ddp_backend="c10d"), "--ddp-backend legacy_ddp"),
        (dict(ddp_backend="slowmo"), "pip install fairscale"),
        (dict(ddp_backend="fully_sharded"), "--ddp-backend pytorch_ddp"),
        (dict(zero_sharding="os"), "pip install fairscale"),
        (dict(distributed_backend="nccl"), "--distributed-backend gloo"),
        (dict(distributed_no_spawn=False), "--distributed-no-spawn"),
        (dict(distributed_init_method=None), "--distributed-world-size 1"),
    ],
)
def test_refusals_name_what_to_use(monkeypatch, changed, message):
    monkeypatch.setattr(distributed, "_has_fairscale", lambda: False)
    with pytest.raises(distributed.OptionError, match=message) as caught:
        distributed.check(arguments(**changed))
    assert "\n" not in str(caught.value)


def test_what_runs_is_not_refused(monkeypatch):
    distributed.check(arguments())
    distributed.check(
        arguments(distributed_world_size=1, ddp_backend="pytorch_ddp", distributed_init_method=None)
    )
    distributed.check(argparse.Namespace())  # the options of a model alone
    monkeypatch.setattr(distributed, "_has_fairscale", lambda: True)
    distributed.check(arguments(zero_sharding="os"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("pytorch_ddp", "c10d", "legacy_ddp"):
        distributed.check(arguments(cpu=False, distributed_backend="nccl", ddp_backend=backend))


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_separate_models_are_refused(monkeypatch, launcher):
    if launcher == "torchrun":
        for name, value in dict(WORLD_SIZE="2", RANK="0", MASTER_ADDR="x", MASTER_PORT="1").items():
            monkeypatch.setenv(name, value)
    else:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    alone = arguments(distributed_world_size=1, distributed_init_method=None)
    with pytest.raises(distributed.OptionError, match=f"{launcher} started 2 workers"):
        distributed.check(alone)
    distributed.check(arguments())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    alone.cpu = False
    with pytest.raises(distributed.OptionError, match="--distributed-world-size 2"):
        distributed.check(alone)
    alone.distributed_world_size = 2
    distributed.check(alone)


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
def test_pytorch_ddp_gives_the_same_gradients(build, sample, dictionary, tmp_path, gradient):
    """Its hooks see every parameter exactly once, through recomputation and the adjoint."""
    task = types.SimpleNamespace(target_dictionary=dictionary)
    criterion = LabelSmoothedCrossEntropyWithPath(task, False, 0.1, "arclength", 0.1, "both", "token", 0)
    options = dict(node_solver="bosh3", node_gradient=gradient)
    if gradient == "adjoint":
        options["node_step_control"] = "batch"
    plain, wrapped = (build("node_transformer", **options).train() for _ in range(2))
    criterion(plain, sample())[0].backward()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        from fairseq.distributed import ModuleProxyWrapper

        model = ModuleProxyWrapper(torch.nn.parallel.DistributedDataParallel(wrapped))
        for _ in range(2):
            wrapped.zero_grad()
            criterion(model, sample())[0].backward()
    finally:
        torch.distributed.destroy_process_group()
    for one, other in zip(plain.parameters(), wrapped.parameters()):
        torch.testing.assert_close(other.grad, one.grad)

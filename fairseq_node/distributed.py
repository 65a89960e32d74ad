"""Refuses, before anything is read, ways to train on several workers that cannot work."""

import importlib.util
import os

import torch

_RECIPE = "bash scripts/train_distributed.sh --workers N -- ... does it for you"


class OptionError(SystemExit, ValueError):
    """An option that cannot be used, in one sentence.

    On a command line it ends the program with its sentence and no traceback; as a library, catch
    ``ValueError``.
    """


def check(args) -> None:
    """Refuses options that would fail late, hang, or train separate models without a word.

    Args:
        args: the command line of ``fairseq-train``, complete, or the options of a model alone; then
            there are only the environment and the state of ``torch.distributed`` to go by.

    Raises:
        OptionError: naming the option and what to use.
    """
    use_cuda = torch.cuda.is_available() and not getattr(args, "cpu", False)
    workers = getattr(args, "distributed_world_size", 1)
    joined = getattr(args, "distributed_init_method", None) or (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if not joined:
        _check_launcher(workers, use_cuda)
    if hasattr(args, "ddp_backend"):
        _check_memory_savers(args)
        if workers > 1:
            _check_workers(args, workers, use_cuda)


def _launched():
    """What started several processes, and how many: ("torchrun", 2); ("", 1) if nothing did."""
    if all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")):
        return "torchrun", int(os.environ["WORLD_SIZE"])
    return "srun", int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))


def _check_launcher(workers: int, use_cuda: bool) -> None:
    """fairseq joins the processes that torchrun or srun started if it sees more than one GPU, or is
    told their number; otherwise each of them trains a model of its own and overwrites the others'
    checkpoints."""
    launcher, processes = _launched()
    if processes < 2:
        return
    if not use_cuda:
        raise OptionError(
            f"{launcher} started {processes} workers, but without GPUs fairseq does not join them and "
            f"each would train a model of its own; use --distributed-init-method, or: {_RECIPE}"
        )
    # A task per node spawns the node's workers itself.
    if workers == 1:
        raise OptionError(
            f"{launcher} started {processes} workers that see one GPU each, which fairseq does not join, "
            f"so that each would train a model of its own; use --distributed-world-size {processes}"
        )


def _has_fairscale() -> bool:
    return importlib.util.find_spec("fairscale") is not None


def _check_memory_savers(args) -> None:
    backend = str(args.ddp_backend)
    if backend == "fully_sharded":
        raise OptionError(
            "--ddp-backend fully_sharded gathers a layer's weights for one evaluation, and a block is "
            "evaluated many times, in backward too; use --ddp-backend pytorch_ddp, and --zero-sharding "
            "os or --node-gradient checkpoint to save memory"
        )
    if backend == "slowmo" and not _has_fairscale():
        raise OptionError(
            "--ddp-backend slowmo needs the package fairscale, which is not installed; pip install "
            "fairscale, or use --ddp-backend pytorch_ddp"
        )
    if str(getattr(args, "zero_sharding", "none")) != "none" and not _has_fairscale():
        raise OptionError(
            "--zero-sharding os needs the package fairscale, which is not installed; pip install "
            "fairscale, or use --zero-sharding none"
        )


def _check_workers(args, workers: int, use_cuda: bool) -> None:
    if use_cuda:
        return
    if args.distributed_init_method is None:
        raise OptionError(
            f"--distributed-world-size is {workers}, but there is no GPU for a worker to use; use "
            f"--distributed-world-size 1, or train on CPU: {_RECIPE}"
        )
    if not args.distributed_no_spawn:
        raise OptionError(
            "without GPUs fairseq spawns no workers at all; start them yourself with "
            f"--distributed-no-spawn and --distributed-rank 0, 1, ..., or: {_RECIPE}"
        )
    if str(args.distributed_backend) != "gloo":
        raise OptionError(
            f"--distributed-backend {args.distributed_backend} needs GPUs; use --distributed-backend gloo"
        )
    if str(args.ddp_backend) not in ("legacy_ddp", "no_c10d"):
        raise OptionError(
            f"--ddp-backend {args.ddp_backend} does not run without GPUs in fairseq, which names it a "
            "device; use --ddp-backend legacy_ddp"
        )

"""The few lines that differ between builds of fairseq and versions of torch; safe checkpoint loading.

A checkpoint is a pickle, and a pickle can call anything. torch loads them as data only
(``weights_only``, the default since torch 2.6), but then refuses what fairseq stores next to the
weights: its command line in a ``Namespace``, its meters in NumPy arrays. Both builds of fairseq
therefore fail to load their own checkpoints. :func:`install` allows exactly these inert types and has
fairseq load data only, on every version of torch and whatever its build asks for. ``torch.load``
itself stays as it is for everybody else.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import functools
import importlib
import os
import pickle
import re
import types
import typing
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq.file_io import PathManager
from torch import _weights_only_unpickler

#: torch takes a name next to an object it allows, and so names of older pickles, since 2.6.
_TORCH_HAS_WEIGHTS_ONLY = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 6)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be loaded, and what to do."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint that would run code, or holds a type that fairseq's checkpoints do not."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint that is truncated or no checkpoint at all."""


def _safe_globals() -> Dict[str, Any]:
    """What fairseq's checkpoints contain besides tensors and plain containers, by its pickled name.

    None of these can run code of the checkpoint's choosing: they are containers of data, or rebuild
    one from its bytes.
    """
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import DictConfig, ListConfig
    from omegaconf import nodes as omegaconf_nodes
    from omegaconf.base import ContainerMetadata, Metadata

    allowed: List[Any] = [
        argparse.Namespace,  # the command line: args, cfg.model
        _TensorPlaceholder,  # what one worker sends to the others when training goes on
        DictConfig,  # hydra's configuration
        ListConfig,
        ContainerMetadata,
        Metadata,
        *(
            getattr(omegaconf_nodes, name)
            for name in ("AnyNode", "BooleanNode", "FloatNode", "IntegerNode", "StringNode")
        ),
    ]
    by_name = {f"{thing.__module__}.{thing.__qualname__}": thing for thing in allowed}
    # Types that the above refer to, under their names of Python 2 (pickle protocol 2) and 3.
    by_name["typing.Any"] = typing.Any
    by_name["collections.defaultdict"] = collections.defaultdict
    for name in ("dict", "list", "tuple", "set", "int", "float", "complex", "bool", "str"):
        by_name[f"builtins.{name}"] = by_name[f"__builtin__.{name}"] = getattr(builtins, name)
    by_name["__builtin__.long"] = int
    by_name["__builtin__.unicode"] = str
    # Meters: NumPy scalars, and arrays such as the counts of --eval-bleu.
    import numpy

    by_name["numpy.ndarray"], by_name["numpy.dtype"] = numpy.ndarray, numpy.dtype
    by_name["_codecs.encode"] = importlib.import_module("_codecs").encode
    for package in ("numpy.core", "numpy._core"):  # NumPy 1, NumPy 2
        for name in ("scalar", "_reconstruct"):
            multiarray = importlib.import_module(f"{_numpy_core()}.multiarray")
            by_name[f"{package}.multiarray.{name}"] = getattr(multiarray, name)
    for kind in ("Float64", "Float32", "Int64", "Int32", "Bool"):
        dtype = getattr(getattr(numpy, "dtypes", None), f"{kind}DType", None)
        if dtype is not None:
            by_name[f"numpy.dtypes.{kind}DType"] = dtype
    return by_name


def _numpy_core() -> str:
    import numpy

    return "numpy._core" if hasattr(numpy, "_core") else "numpy.core"


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles tensors and the safe types: what ``weights_only`` is in later versions of torch."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {**_weights_only_unpickler._get_allowed_globals(), **_safe_globals()}
        full_name = f"{module}.{name}"
        if full_name not in allowed:
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full_name}")
        return allowed[full_name]


def _restricted_load(file, **options):
    return _RestrictedUnpickler(file, **options).load()


#: What torch wants of a ``pickle_module``.
_RESTRICTED_PICKLE = types.SimpleNamespace(
    __name__="pickle", Unpickler=_RestrictedUnpickler, load=_restricted_load
)


def load_checkpoint(file, map_location="cpu", **_) -> Dict[str, Any]:
    """Loads a checkpoint as data; nothing in it is ever run.

    Args:
        file: a path or an open binary file.
        map_location: as for ``torch.load``.

    Raises:
        UnsafeCheckpointError: it refers to anything that fairseq's checkpoints do not contain.
        CorruptCheckpointError: it cannot be read to its end.
    """
    name = getattr(file, "name", file if isinstance(file, str) else "the checkpoint")
    try:
        if _TORCH_HAS_WEIGHTS_ONLY:
            return torch.load(file, map_location=map_location, weights_only=True)
        return torch.load(file, map_location=map_location, pickle_module=_RESTRICTED_PICKLE)
    except OSError:
        raise  # no such file, no permission: the message is good as it is
    except Exception as error:
        refused = _refused(error)
        if refused is not None:
            raise UnsafeCheckpointError(
                f"{name} was not loaded and nothing in it was run: it contains {refused}, which does "
                "not belong into a fairseq checkpoint; get it from a source that you trust"
            ) from None
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CorruptCheckpointError(
            f"{name} is truncated or not a checkpoint ({reason}); it is left as it is: continue from "
            "an earlier one with --restore-file, for example checkpoint1.pt"
        ) from error


def _refused(error: Exception) -> Optional[str]:
    """What the unpickler refused, or None if it could not read the file."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found:
        return found.group(1)
    # An allowed type used in a way that is not (called, or given a state).
    return "a forbidden call" if re.search("Trying to|Can only", str(error)) else None


class _TorchForFairseq(types.ModuleType):
    """torch, as some modules of fairseq see it: with a ``load`` that loads data only."""

    load = staticmethod(load_checkpoint)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install() -> None:
    """Makes fairseq load its checkpoints, safely. May be called any number of times."""
    from fairseq import checkpoint_utils
    from fairseq.data import data_utils
    from fairseq.distributed import utils as distributed_utils

    if _TORCH_HAS_WEIGHTS_ONLY:
        torch.serialization.add_safe_globals(_named(_safe_globals()))
    safe_torch = _TorchForFairseq("torch")
    checkpoint_utils.torch = distributed_utils.torch = safe_torch
    checkpoint_utils.PathManager = _AtomicPathManager
    if data_utils.batch_by_size.__module__ != __name__:
        data_utils.batch_by_size = _keep_last_batch(data_utils.batch_by_size)


def _keep_last_batch(batch_by_size):
    """fairseq after 0.12.2 drops the last batch of a data set where its size is no multiple of
    ``--required-batch-size-multiple`` (default 8): up to 7 sentences of a test set are never
    translated, and missing in its BLEU. Puts them back, as in 0.12.2."""

    @functools.wraps(batch_by_size)
    def complete(indices, *args, **kwargs):
        batches = batch_by_size(indices, *args, **kwargs)
        covered = sum(len(batch) for batch in batches)
        # Batches are consecutive parts of the indices, unless they have fixed shapes.
        if kwargs.get("fixed_shapes") is None and covered < len(indices):
            batches = [*batches, indices[covered:]]
        return batches

    complete.__module__ = __name__
    return complete


class _AtomicPathManager(PathManager):
    """fairseq's, for writing checkpoints: a copy is whole or absent.

    fairseq writes ``checkpoint1.pt`` and copies it to ``checkpoint_last.pt``; a run that is killed
    within that copy would leave half a checkpoint behind and could not go on from it.
    """

    @staticmethod
    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if not PathManager.supports_rename(dst_path):
            return PathManager.copy(src_path, dst_path, overwrite=overwrite)
        if not overwrite and os.path.exists(dst_path):
            return False
        PathManager.copy(src_path, dst_path + ".tmp", overwrite=True)
        os.replace(dst_path + ".tmp", dst_path)
        return True


def _named(by_name: Dict[str, Any]) -> List[Tuple[Any, str]]:
    return [(thing, name) for name, thing in by_name.items()]


#: Copies of an encoder layer's weights that fairseq 0.12.2 keeps as parameters of their own, for an
#: inference kernel that computes a whole stock layer.
FAST_PATH_COPIES = tuple(
    f"{projection}_{kind}"
    for projection in ("in_proj", "out_proj", "fc1", "fc2")
    for kind in ("weight", "bias")
)


def remove_fast_path(layer: torch.nn.Module) -> None:
    """Takes these copies out of a layer that computes something else; they would have no gradient."""
    for name in FAST_PATH_COPIES:
        if name in layer._parameters:
            delattr(layer, name)

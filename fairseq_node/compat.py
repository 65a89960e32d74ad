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
import contextlib
import errno
import functools
import importlib
import os
import pickle
import re
import struct
import tarfile
import types
import typing
import warnings
from typing import Any, BinaryIO, Dict, List, Optional, Tuple, Union

import torch
from fairseq.file_io import PathManager
from torch import _weights_only_unpickler
from torch.utils import _pytree

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
    # Sent along with tensors to other workers; torch allows it by itself in later versions only.
    by_name["torch.device"] = torch.device
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


class _Refused(pickle.UnpicklingError):
    """What a checkpoint contains and may not; the text is that alone."""


class _RestrictedUnpickler(pickle._Unpickler):
    """Unpickles tensors and the safe types: what ``weights_only`` is in later versions of torch.

    The one written in Python, since what an allowed type is used for must be checked as well: without
    that, BUILD sets any attribute of any class or function that may be named.
    """

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._allowed = {**_weights_only_unpickler._get_allowed_globals(), **_safe_globals()}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in self._allowed:
            raise _Refused(full_name.replace("__builtin__.", "builtins."))
        return self._allowed[full_name]

    def _check(self, thing: Any, use: str) -> None:
        # By identity: comparing NumPy's types with others' is not always possible.
        if not any(thing is allowed for allowed in self._allowed.values()):
            raise _Refused(f"{use} {thing!r:.80}")

    def load_build(self) -> None:
        self._check(type(self.stack[-2]), "a state for an object of")
        super().load_build()

    def load_reduce(self) -> None:
        self._check(self.stack[-2], "a call of")
        super().load_reduce()

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce


def _restricted_unpickle(file: BinaryIO, **options: Any) -> Any:
    return _RestrictedUnpickler(file, **options).load()


#: What torch wants of a ``pickle_module``.
_RESTRICTED_PICKLE = types.SimpleNamespace(
    __name__="pickle", Unpickler=_RestrictedUnpickler, load=_restricted_unpickle
)


def _load_restricted(file: BinaryIO, map_location: Any) -> Any:
    """Loads data only on versions of torch whose ``weights_only`` is missing or not tight.

    Raises:
        pickle.UnpicklingError: see :func:`_refused`.
    """
    # These two formats torch (before 2.6) does not give to our unpickler, or not before it has unpacked
    # files: a TorchScript archive brings code of its own (CVE-2025-32434).
    start = file.tell()
    if torch.serialization._is_zipfile(file):
        with torch.serialization._open_zipfile_reader(file) as archive:
            if torch.serialization._is_torchscript_zip(archive):
                raise _Refused("a TorchScript program")
    else:
        with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=file, mode="r:"):
            raise _Refused("a tar archive")
    file.seek(start)
    options = {"weights_only": False, "pickle_module": _RESTRICTED_PICKLE}
    return torch.load(file, map_location=map_location, **options)


def load_checkpoint(
    file: Union[str, os.PathLike[str], BinaryIO], map_location: Any = "cpu", **_: Any
) -> Dict[str, Any]:
    """Loads a checkpoint as data; nothing in it is ever run.

    Args:
        file: a path or an open binary file.
        map_location: as for ``torch.load``. Further options, such as ``weights_only``, are ignored.

    Raises:
        UnsafeCheckpointError: it refers to anything that fairseq's checkpoints do not contain.
        CorruptCheckpointError: it cannot be read to its end.
        OSError: there is no such file, or it cannot be read.
    """
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as opened:
            return load_checkpoint(opened, map_location)
    name = getattr(file, "name", "the checkpoint")
    start = file.tell()
    try:
        if not _TORCH_HAS_WEIGHTS_ONLY:
            return _load_restricted(file, map_location)
        with warnings.catch_warnings():
            # torch tells to report pickles that it does not expect: of a bad file, that is noise.
            warnings.filterwarnings("ignore", r"Detected pickle protocol \d+ in the checkpoint")
            return torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        refused = _refused(error, file, start)
        if refused is not None:
            raise UnsafeCheckpointError(
                f"{name} was not loaded and nothing in it was run: it contains {refused}, which does "
                "not belong into a fairseq checkpoint; get it from a source that you trust"
            ) from None
        if not _means_corrupt(error):
            raise
        raise CorruptCheckpointError(
            f"{name} is truncated or not a checkpoint; it is left as it is: continue from an earlier "
            "one with --restore-file, for example checkpoint1.pt"
        ) from error


def _refused(error: Exception, file: BinaryIO, start: int) -> Optional[str]:
    """What the unpickler refused, or None if it could not read the file."""
    if isinstance(error, _Refused):
        return str(error)
    if isinstance(error, RuntimeError):
        # torch refuses both of itself.
        if "``weights_only=True`` with TorchScript" in str(error):
            return "a TorchScript program"
        if "``weights_only=True`` with files saved in the legacy .tar" in str(error):
            return "a tar archive"
        return None
    if not isinstance(error, pickle.UnpicklingError):
        return None
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found:
        return found.group(1)
    found = re.search(r"(?:Trying to|Can only) [^\n]*", str(error))
    if found:
        return f"a forbidden use of an allowed type ({found.group()})"
    if _TORCH_HAS_WEIGHTS_ONLY:
        # Another pickle protocol than torch writes. weights_only reads no further and so cannot tell
        # a broken file from one that calls something; ours reads them all.
        file.seek(start)
        try:
            _load_restricted(file, "cpu")
        except _Refused as refused:
            return str(refused)
        except Exception:
            return None
        return "a pickle of another protocol than torch's"
    return None


#: What unpicklers raise on bytes that are no pickle.
_UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, EOFError, AssertionError, AttributeError, LookupError),
    *(OverflowError, TypeError, ValueError),
)


def _means_corrupt(error: Exception) -> bool:
    """Whether this is about the file's contents, not about memory, devices or the disk."""
    if isinstance(error, OSError):
        return error.errno == errno.EINVAL  # torch seeks to before the start of half an archive
    if isinstance(error, RuntimeError):
        words = "PytorchStreamReader|corrupt|unexpected EOF|storage has wrong|Invalid protocol"
        return re.search(words, str(error)) is not None
    return isinstance(error, _UNREADABLE)


class _TorchForFairseq(types.ModuleType):
    """torch, as some modules of fairseq see it: with a ``load`` that loads data only."""

    load = staticmethod(load_checkpoint)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


#: Calls of fairseq's that hydra and torch have deprecated: (module, start of the message). Nothing that
#: a user could act on; they work as they always did. What fairseq says before a plugin is imported
#: cannot be quieted from one.
_FAIRSEQ_OUT_OF_DATE = (
    ("hydra.experimental.initialize", "hydra.experimental.initialize() is no longer experimental."),
    ("hydra.experimental.initialize", "\nThe version_base parameter is not specified."),
    ("hydra.experimental.compose", "hydra.experimental.compose() is no longer experimental."),
    ("hydra.compose", "\nThe strict flag in the compose API is deprecated."),
    ("hydra.core.default_element", "In 'config': Usage of deprecated keyword in package header"),
    # Said about whoever called main(): sys, or the command.
    ("", "\n'config' is validated against ConfigStore schema with the same name."),
    ("fairseq.tasks.fairseq_task", "`torch.cuda.amp.autocast(args...)` is deprecated."),
)


def _quiet() -> None:
    for module, start in _FAIRSEQ_OUT_OF_DATE:
        kind = FutureWarning if module.startswith("fairseq") else UserWarning
        whole = rf"{re.escape(module)}\Z" if module else ""
        warnings.filterwarnings("ignore", re.escape(start), kind, whole)


def install() -> None:
    """Makes fairseq load its checkpoints, safely; the repairs below. May be called any number of times."""
    from fairseq import checkpoint_utils, models, nan_detector
    from fairseq.data import data_utils
    from fairseq.distributed import utils as distributed_utils
    from fairseq.tasks import FairseqTask

    _quiet()
    if _TORCH_HAS_WEIGHTS_ONLY:
        torch.serialization.add_safe_globals(_named(_safe_globals()))
    safe_torch = _TorchForFairseq("torch")
    checkpoint_utils.torch = distributed_utils.torch = safe_torch
    checkpoint_utils.PathManager = _AtomicPathManager
    if data_utils.batch_by_size.__module__ != __name__:
        data_utils.batch_by_size = _keep_last_batch(data_utils.batch_by_size)
    if FairseqTask.get_batch_iterator.__module__ != __name__:
        FairseqTask.get_batch_iterator = _same_batches_when_resumed(FairseqTask.get_batch_iterator)
    if models.build_model.__module__ != __name__:
        models.build_model = _remember_class(models.build_model)
    nan_detector.NanDetector.add_hooks = _watch_for_nan


def _remember_class(build_model):
    """For :func:`built_model_class`: fairseq shows a criterion the model first in its forward, when
    the data has been read."""

    @functools.wraps(build_model)
    def remember(cfg, task, *args, **kwargs):
        model = build_model(cfg, task, *args, **kwargs)
        with contextlib.suppress(AttributeError):  # a task that takes no attributes
            task.node_model_class = type(model)
        return model

    remember.__module__ = __name__
    return remember


def built_model_class(task) -> Optional[type]:
    """The class of the model that was last built for a task, or None if that is not known."""
    return getattr(task, "node_model_class", None)


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


def _same_batches_when_resumed(get_batch_iterator):
    """fairseq after 0.12.2 makes its batches from ``seed + epoch`` of the moment when it makes them:
    once, in the first epoch, in a run that is never stopped, and differently in one that is resumed in
    a later epoch. Makes them as in the first epoch then, too."""

    @functools.wraps(get_batch_iterator)
    def resumable(self, dataset, *args, epoch=1, **kwargs):
        kept = self.can_reuse_epoch_itr(dataset) and not (
            kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
        )
        if not kept or epoch <= 1 or dataset in self.dataset_to_epoch_iter:
            return get_batch_iterator(self, dataset, *args, epoch=epoch, **kwargs)
        iterator = get_batch_iterator(self, dataset, *args, epoch=1, **kwargs)
        dataset.set_epoch(epoch)
        iterator.epoch = epoch
        return iterator

    resumable.__module__ = __name__
    return resumable


def _watch_for_nan(detector, module: torch.nn.Module) -> None:
    """fairseq looks for the origin of non-finite gradients by module hooks that cannot take the output
    of its own encoders: the training dies of a ``StopIteration`` without a text, and "gradients are
    Nan/Inf" is never read. These hook the tensors instead."""

    def forward_hook(module, inputs, output):
        detector.fhook_fn(module, inputs, output)
        if detector.backward:
            for tensor in _pytree.tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(functools.partial(detector.bhook_fn, module, ()))

    detector.fhooks.append(module.register_forward_hook(forward_hook))


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

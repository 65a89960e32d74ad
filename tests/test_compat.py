"""Checkpoints load on every torch, as data only; test sets are complete."""

import argparse
import builtins
import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import data_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models.transformer import TransformerModel
from fairseq.nan_detector import NanDetector
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq_cli import generate, interactive, preprocess, train, validate
from omegaconf import OmegaConf

from fairseq_node import compat
from fairseq_node.compat import CorruptCheckpointError, UnsafeCheckpointError, load_checkpoint


@pytest.fixture(params=["torch", "restricted"], autouse=True)
def unpickler(request, monkeypatch):
    """torch's weights_only where it will do, and the unpickler that stands in for it before 2.6."""
    if request.param == "restricted":
        monkeypatch.setattr(compat, "_TORCH_HAS_WEIGHTS_ONLY", False)
    return request.param


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def save(request, tmp_path):
    def write(state, name="checkpoint.pt"):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=request.param)
        return str(tmp_path / name)

    return write


def test_all_that_fairseq_stores_is_loaded(save):
    state = {
        "args": argparse.Namespace(arch="node_transformer", lr=[1e-3], data=None),
        "cfg": OmegaConf.create({"model": {"layers": 2, "dims": [1, 2.5, "x", None, True]}}),
        "model": {
            "weight": torch.arange(3.0),
            "half": torch.ones(2).half(),
            "parameter": torch.nn.Parameter(torch.ones(1)),
        },
        "extra_state": {
            "val_loss": np.float64(3.5),
            "count": np.int64(4),
            "metrics": {"_bleu_counts": np.array([1, 2, 3]), "sum": np.arange(2.0)},
            "epochs": {1, 2},
        },
    }
    loaded = load_checkpoint(save(state))
    assert vars(loaded["args"]) == vars(state["args"])
    assert loaded["cfg"] == state["cfg"]
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["extra_state"]["val_loss"] == 3.5 and loaded["extra_state"]["epochs"] == {1, 2}
    assert loaded["extra_state"]["metrics"]["_bleu_counts"].tolist() == [1, 2, 3]


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["args", "model", "optimizer"])
@pytest.mark.parametrize(
    "function,arguments",
    [
        (os.system, ("touch {}",)),
        (subprocess.Popen, (["touch", "{}"],)),
        (builtins.eval, ("open('{}', 'w')",)),
        (builtins.exec, ("open('{}', 'w')",)),
        (builtins.open, ("{}", "w")),
        (builtins.getattr, ("text", "upper")),
        (builtins.__import__, ("antigravity",)),
        (np.load, ("{}",)),
        (torch.load, ("{}",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_smuggled_call_is_refused_and_not_run(save, tmp_path, function, arguments, place):
    marker = str(tmp_path / "ran")

    def fill(argument):
        return [fill(a) for a in argument] if isinstance(argument, list) else argument.format(marker)

    evil = Call(function, *map(fill, arguments))
    state = {
        "args": argparse.Namespace(x=evil if place == "args" else 1),
        "model": {"weight": evil if place == "model" else torch.ones(1)},
        "last_optimizer_state": [{"state": evil if place == "optimizer" else {}}],
    }
    path = save(state)
    for load in (load_checkpoint, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(UnsafeCheckpointError, match="nothing in it was run") as caught:
            load(path)
        assert function.__name__ in str(caught.value) and path in str(caught.value)
    assert not os.path.exists(marker)


def test_a_class_of_ones_own_is_refused(save):
    with pytest.raises(UnsafeCheckpointError, match="Fraction"):
        load_checkpoint(save({"model": __import__("fractions").Fraction(1, 2)}))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.98])
def test_a_truncated_checkpoint_is_not_called_malicious(save, tmp_path, part):
    path = save({"model": {"weight": torch.ones(100)}})
    whole = open(path, "rb").read()
    with open(path, "wb") as file:
        file.write(whole[: int(part * len(whole))])
    with pytest.raises(CorruptCheckpointError, match="--restore-file"):
        load_checkpoint(path)
    assert open(path, "rb").read() == whole[: int(part * len(whole))]


def test_a_missing_checkpoint_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(str(tmp_path / "none.pt"))


def test_torch_is_left_as_it_is():
    """For everybody else: the function, its default, and what it refuses."""
    assert torch.load.__module__ == "torch.serialization"
    assert checkpoint_utils.torch.load is not torch.load
    for module in (checkpoint_utils, distributed_utils):
        assert module.torch.nn is torch.nn and module.torch.load is load_checkpoint
    before = checkpoint_utils.torch, data_utils.batch_by_size
    compat.install()
    assert data_utils.batch_by_size is before[1]


def test_a_copy_is_whole_or_absent(tmp_path, monkeypatch):
    """fairseq copies a finished checkpoint to checkpoint_last.pt; a kill in between must not hurt."""
    manager = checkpoint_utils.PathManager
    source, target = str(tmp_path / "checkpoint1.pt"), str(tmp_path / "checkpoint_last.pt")
    open(source, "w").write("new")
    open(target, "w").write("old")
    assert not manager.copy(source, target)
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        manager.copy(source, target, overwrite=True)
    assert open(target).read() == "old"
    monkeypatch.undo()
    assert manager.copy(source, target, overwrite=True) and open(target).read() == "new"


@pytest.mark.parametrize("sentences", [5, 20, 24])
@pytest.mark.parametrize("max_tokens", [50, 1000])
def test_no_sentence_is_left_out_of_the_batches(sentences, max_tokens):
    """Later builds of fairseq drop a last batch whose size is no multiple of 8."""
    lengths = np.full(sentences, 5)
    batches = data_utils.batch_by_size(
        np.arange(sentences),
        num_tokens_fn=lambda index: 5,
        num_tokens_vec=lengths,
        max_tokens=max_tokens,
        required_batch_size_multiple=8,
    )
    assert np.concatenate(batches).tolist() == list(range(sentences))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_of_any_protocol_is_refused_by_name(tmp_path, protocol):
    """Not as a truncated file: torch's weights_only reads protocol 2 alone."""
    path = tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps({"x": Call(os.system, f"touch {tmp_path / 'ran'}")}, protocol))
    with pytest.raises(UnsafeCheckpointError, match=r"contains posix\.system"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def with_pickle(data):
    """A checkpoint in torch's format with these bytes for its pickle."""
    whole, result = io.BytesIO(), io.BytesIO()
    torch.save({}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            target.writestr(name, data if name.endswith("/data.pkl") else source.read(name))
    return result.getvalue()


@pytest.mark.parametrize(
    "owner,data",
    [
        # GLOBAL, MARK, None, {"changed": 1}, TUPLE, BUILD: setattr(Namespace, "changed", 1)
        (argparse.Namespace, b"\x80\x02cargparse\nNamespace\n(N}X\x07\x00\x00\x00changedK\x01stb."),
        # the same in the __dict__ of a function
        (
            torch._utils._rebuild_tensor_v2,
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x07\x00\x00\x00changedK\x01sb.",
        ),
    ],
)
def test_an_allowed_type_cannot_be_changed(tmp_path, owner, data):
    path = tmp_path / "evil.pt"
    path.write_bytes(with_pickle(data))
    with pytest.raises(UnsafeCheckpointError):
        load_checkpoint(path)
    assert not hasattr(owner, "changed")


def test_the_result_of_a_call_cannot_be_called(tmp_path):
    """REDUCE on an object (here a Namespace) instead of on a name that was looked up."""
    path = tmp_path / "evil.pt"
    path.write_bytes(with_pickle(b"\x80\x02cargparse\nNamespace\n)R)R."))
    with pytest.raises(UnsafeCheckpointError):
        load_checkpoint(path)


def test_programs_and_tar_archives_are_refused(tmp_path):
    """torch before 2.6 runs the one and unpacks the other before any unpickler is asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tmp_path / "program.pt"))
        with pytest.raises(UnsafeCheckpointError, match="TorchScript"):
            load_checkpoint(tmp_path / "program.pt")
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(UnsafeCheckpointError, match="tar archive"):
        load_checkpoint(tmp_path / "tar.pt")


@pytest.mark.parametrize(
    "text", [b"<html>404 Not Found</html>", b"version https://git-lfs.github.com/spec/v1"]
)
def test_what_is_no_checkpoint_is_not_called_malicious(tmp_path, text):
    (tmp_path / "page.pt").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"page\.pt is truncated or not a checkpoint"):
        load_checkpoint(tmp_path / "page.pt")


@pytest.mark.parametrize("kept", range(-30, 0, 5))
def test_an_archive_without_its_end_is_truncated(tmp_path, kept):
    torch.save({"model": {"weight": torch.ones(1000)}}, tmp_path / "whole.pt")
    (tmp_path / "part.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:kept])
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(tmp_path / "part.pt")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA error: out of memory"), NameError("x"), OSError(5, "I/O error")],
)
def test_other_errors_are_not_called_a_broken_file(save, monkeypatch, error):
    path = save({})

    def load(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(type(error)) as caught:
        load_checkpoint(path)
    assert caught.value is error


def test_importing_leaves_torch_load_alone(unpickler):
    """The same function with the same defaults."""
    if unpickler == "restricted":
        pytest.skip("the import is the same")
    script = """
import inspect, torch
function, signature = torch.load, inspect.signature(torch.load)
import fairseq_node
assert torch.load is function and inspect.signature(torch.load) == signature
"""
    root = Path(compat.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=300)


# What fairseq itself does with the checkpoints of a stock model.


def cli(main, parser, *arguments):
    """A command of fairseq's in this process."""
    package = ("--user-dir", str(Path(compat.__file__).parent))
    args = options.parse_args_and_arch(parser, [*map(str, arguments), *package])
    if main in (train.main, validate.main):
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        args = convert_namespace_to_omegaconf(args)
    return main(args)


def training(corpus, save_dir, *more):
    arguments = [corpus, "--task", "translation", "--arch", "transformer", "--encoder-layers", 1]
    arguments += ["--decoder-layers", 1, "--encoder-embed-dim", 16, "--decoder-embed-dim", 16]
    arguments += ["--encoder-ffn-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--cpu", "--num-workers", 0]
    arguments += ["--encoder-attention-heads", 2, "--decoder-attention-heads", 2, "--optimizer", "adam"]
    # Post-norm encoders of fairseq 0.12.2 do not translate on recent versions of torch: they call its
    # fast path without the type of their mask.
    arguments += ["--lr", 1e-3, "--max-tokens", 200, "--store-ema", "--encoder-normalize-before"]
    arguments += ["--eval-bleu", "--eval-bleu-detok", "space"]
    arguments += ["--eval-bleu-args", '{"beam": 1, "max_len_b": 5}', "--best-checkpoint-metric", "bleu"]
    arguments += ["--maximize-best-checkpoint-metric", "--no-progress-bar", "--save-dir", save_dir, *more]
    # Otherwise the best value of another training in this process.
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    return cli(train.main, options.get_training_parser(), *arguments)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split, size in (("train", 40), ("valid", 8), ("test", 8)):
        for language in ("en", "de"):
            lines = [" ".join("abcd"[(i + j) % 4] for j in range(1 + i % 4)) for i in range(size)]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    pairs = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", str(folder / split))]
    parser = options.get_preprocessing_parser()
    where = ["-s", "en", "-t", "de", "--destdir", str(folder / "bin"), "--workers", "1"]
    preprocess.main(parser.parse_args([*where, *pairs]))
    return folder / "bin"


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("stock")
    training(corpus, save_dir, "--max-epoch", 1)
    return save_dir / "checkpoint_last.pt"


def test_training_goes_on(corpus, checkpoint, tmp_path, caplog):
    shutil.copy(checkpoint, tmp_path)
    with caplog.at_level("INFO"):
        training(corpus, tmp_path, "--max-epoch", 2)
    assert "Loaded checkpoint" in caplog.text
    state = load_checkpoint(tmp_path / "checkpoint2.pt")
    updates = load_checkpoint(checkpoint)["optimizer_history"][-1]["num_updates"]
    assert state["optimizer_history"][-1]["num_updates"] == 2 * updates


def test_a_model_is_tuned(corpus, checkpoint, tmp_path, caplog):
    with caplog.at_level("INFO"):
        training(corpus, tmp_path, "--max-update", 1, "--finetune-from-model", checkpoint)
    assert "loading pretrained model from" in caplog.text and "Loaded checkpoint" in caplog.text


def test_generate_interactive_and_validate(corpus, checkpoint, tmp_path, capsys, caplog):
    common = (corpus, "--path", checkpoint, "--cpu", "--max-len-b", 5, "--beam", 2, "--num-workers", 0)
    cli(generate.main, options.get_generation_parser(), *common)
    assert "H-7" in capsys.readouterr().out
    (tmp_path / "input").write_text("a b c\n")
    parser = options.get_generation_parser(interactive=True)
    languages = ("-s", "en", "-t", "de")
    cli(interactive.main, parser, *common, *languages, "--input", tmp_path / "input")
    assert "H-0" in capsys.readouterr().out
    with caplog.at_level("INFO"):
        cli(
            validate.main,
            options.get_validation_parser(),
            *common[:4],
            "--task",
            "translation",
            "--max-tokens",
            200,
            "--num-workers",
            0,
        )
    assert "loss" in caplog.text + capsys.readouterr().out


def test_hub_and_ema(corpus, checkpoint):
    model = TransformerModel.from_pretrained(str(checkpoint.parent), checkpoint.name, str(corpus))
    assert isinstance(model.translate("a b", beam=1, max_len_b=5), str)
    ema = checkpoint_utils.load_ema_from_checkpoint(str(checkpoint))
    assert ema["model"].keys() == load_checkpoint(checkpoint)["extra_state"]["ema"].keys()


def test_a_state_goes_from_one_worker_to_the_others(checkpoint):
    """What broadcast_object sends: the configuration as OmegaConf's, tensors as placeholders."""
    tensors = []
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    sent, buffer = distributed_utils._split_tensors_from_obj(state, tensors), io.BytesIO()
    about = [{"size": t.size(), "dtype": t.dtype, "device": t.device} for t in tensors]
    torch.save([sent, about], buffer)
    buffer.seek(0)
    received, received_about = distributed_utils.torch.load(buffer, map_location="cpu")
    assert received_about == about
    received = distributed_utils._put_tensors_in_obj(received, tensors)
    assert OmegaConf.to_container(received["cfg"]) == OmegaConf.to_container(state["cfg"])
    assert received["model"].keys() == state["model"].keys()


@pytest.mark.parametrize("place", ["cfg", "extra_state", "last_optimizer_state"])
def test_fairseq_passes_the_refusal_on(corpus, checkpoint, tmp_path, place):
    """And the run stops before it has written a checkpoint over the bad one."""
    state = load_checkpoint(checkpoint)
    state[place]["x"] = Call(os.system, f"touch {tmp_path / 'ran'}")
    torch.save(state, tmp_path / "checkpoint_last.pt")
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    with pytest.raises(UnsafeCheckpointError, match=r"checkpoint_last\.pt was not .* posix\.system"):
        training(corpus, tmp_path, "--max-epoch", 2)
    with pytest.raises(UnsafeCheckpointError):
        checkpoint_utils.load_model_ensemble([str(tmp_path / "checkpoint_last.pt")])
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    assert not (tmp_path / "ran").exists()


def test_a_run_stops_at_a_broken_checkpoint(corpus, checkpoint, tmp_path):
    half = checkpoint.read_bytes()[: checkpoint.stat().st_size // 2]
    (tmp_path / "checkpoint_last.pt").write_bytes(half)
    with pytest.raises(CorruptCheckpointError, match="checkpoint1.pt"):
        training(corpus, tmp_path, "--max-epoch", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == half


def test_a_run_resumed_in_a_later_epoch_sees_the_batches_that_it_would_have_seen(corpus):
    """fairseq after 0.12.2 would make others; for stock models too."""

    def second_epoch(start):
        task = TranslationTask.setup_task(TranslationConfig(data=str(corpus)))
        task.cfg.dataset_impl, task.cfg.required_seq_len_multiple = None, 1
        task.load_dataset("train")
        iterator = task.get_batch_iterator(task.dataset("train"), max_tokens=40, seed=1, epoch=start)
        for _ in range(start, 2):
            list(iterator.next_epoch_itr())
        batches = [batch["id"].tolist() for batch in iterator.next_epoch_itr()]
        assert iterator.epoch == 2
        return batches

    never_stopped = second_epoch(1)
    assert len(never_stopped) > 3 and second_epoch(2) == never_stopped


def test_a_run_whose_gradients_are_not_finite_says_so(corpus, tmp_path, caplog):
    """fairseq alone ends it in a StopIteration, while it looks for the origin."""
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        training(corpus, tmp_path, "--max-epoch", 1, "--max-tokens", 40, "--lr", 1e30, "--disable-validation")
    assert "detected in output of encoder" in caplog.text
    assert (tmp_path / "crash.pt").exists()


@pytest.mark.parametrize("output", [lambda x: {"out": [x], "none": [], "no": None}, lambda x: (x, None)])
def test_the_origin_of_gradients_that_are_not_finite_is_found(output, caplog):
    class Part(torch.nn.Linear):
        def forward(self, x):
            return output(super().forward(x))

    part = Part(2, 2)
    model = torch.nn.ModuleDict({"part": part})
    with NanDetector(model):
        first = torch.utils._pytree.tree_flatten(part(torch.ones(3, 2)))[0][0]
        (first * float("inf")).sum().backward()
    assert "Inf detected in output of part, shape: torch.Size([3, 2]), backward" in caplog.text
    caplog.clear()
    part.zero_grad()
    torch.utils._pytree.tree_flatten(part(torch.ones(3, 2)))[0][0].mul(float("inf")).sum().backward()
    assert not caplog.text, "the hooks stay where they have been"

"""The parallel corpora of WMT14, and the steps from there to fairseq's binary data.

Every step makes one folder (or file) under another name first, so that it is whole or absent: a second call
passes it over, and repeats at most the step that was interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from tqdm import tqdm

from lib import cleaning, pieces
from lib.cleaning import CorpusError
from lib.download import download

GB = 1e9
#: Disk is full, or is as far as this user may fill it.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Pairs a second on one core: measured on Multi30k, and halved, since sentences are twice as long here. Of
#: learning, lines a second. Bytes a second are an assumption about the network.
CLEANING, LEARNING, ENCODING, BINARIZING, NETWORK = 17_000, 10_000, 6_500, 10_000, 10e6
#: Lines of each language from which pieces are learnt.
SAMPLE = 2_500_000


@dataclass(frozen=True)
class Corpus:
    """A training corpus of WMT14.

    Attributes:
        id: of mtdata; it is looked up there if ``url`` is None.
        url, members: the archive and the files in it, source language first, of what mtdata does not list.
        size, sha256: of the archive, where they have been published.
        pairs, text: sentence pairs, and their bytes, about; for the plan.
    """

    id: str
    pairs: int
    text: float
    size: float
    sha256: Optional[str] = None
    url: Optional[str] = None
    members: Tuple[str, ...] = ()


# Sizes and checksums of the archives: those with which TensorFlow Datasets verifies its wmt14_translate.
_EUROPARL = dict(size=657_632_379, sha256="0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7")
_CRAWL = dict(size=918_311_367, sha256="c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5")
_NEWS = dict(
    url="http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    size=80_418_416,
    sha256="cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
)
CORPORA: Dict[str, Tuple[Corpus, ...]] = {
    "en-de": (
        Corpus("Statmt-europarl_wmt13-7-deu-eng", 1_920_000, 6.2e8, **_EUROPARL),
        Corpus("Statmt-commoncrawl_wmt13-1-deu-eng", 2_400_000, 6.0e8, **_CRAWL),
        Corpus(
            "Statmt-news_commentary_wmt14-9-deu-eng",
            201_000,
            6e7,
            members=("training/news-commentary-v9.de-en.en", "training/news-commentary-v9.de-en.de"),
            **_NEWS,
        ),
    ),
    "en-fr": (
        Corpus("Statmt-europarl_wmt13-7-fra-eng", 2_010_000, 6.5e8, **_EUROPARL),
        Corpus("Statmt-commoncrawl_wmt13-1-fra-eng", 3_240_000, 8.5e8, **_CRAWL),
        Corpus(
            "Statmt-un_wmt13-2000-fra-eng",
            12_900_000,
            3.8e9,
            2.4e9,
            url="http://www.statmt.org/wmt13/training-parallel-un.tgz",
            members=("un/undoc.2000.fr-en.en", "un/undoc.2000.fr-en.fr"),
        ),
        Corpus(
            "Statmt-news_commentary_wmt14-9-fra-eng",
            183_000,
            6e7,
            members=("training/news-commentary-v9.fr-en.en", "training/news-commentary-v9.fr-en.fr"),
            **_NEWS,
        ),
        Corpus(
            "Statmt-giga_fren-2-fra-eng",
            22_500_000,
            8.7e9,
            2_595_102_720,
            url="http://www.statmt.org/wmt10/training-giga-fren.tar",
            members=("giga-fren.release2.fixed.en.gz", "giga-fren.release2.fixed.fr.gz"),
        ),
    ),
}
#: sacrebleu's names of the validation and the test set; the full one of 3,003 sentences.
VALID, TEST = "wmt13", "wmt14/full"


@dataclass(frozen=True)
class Settings:
    """What is to be made.

    Attributes:
        pair: source and target language, such as "en-de".
        out: folder for everything.
        train: prefixes of local corpora, instead of those of WMT14.
        valid, test: prefixes of local sets, instead of sacrebleu's.
        vocab_size: pieces of both languages together.
        rules: of the cleaning.
        workers: processes of fairseq-preprocess.
        cache: folder for downloads.
    """

    pair: str
    out: Path
    train: Tuple[Path, ...] = ()
    valid: Optional[Path] = None
    test: Optional[Path] = None
    vocab_size: int = 32_000
    rules: cleaning.Rules = cleaning.Rules()
    workers: int = 1
    cache: Optional[Path] = None

    @property
    def languages(self) -> List[str]:
        return self.pair.split("-")

    def identity(self) -> Dict[str, Any]:
        """What the result depends on."""
        return {
            "pair": self.pair,
            "train": [str(path.resolve()) for path in self.train] or [each.id for each in CORPORA[self.pair]],
            "valid": str(self.valid.resolve()) if self.valid else VALID,
            "test": str(self.test.resolve()) if self.test else TEST,
            "vocab_size": self.vocab_size,
            **asdict(self.rules),
        }


@dataclass
class Step:
    """One step of the preparation.

    Attributes:
        name: what it makes under the output folder.
        what: in words.
        disk: bytes that it needs, about.
        seconds: that it takes, about.
        make: makes it at the path that it is given.
        cached: bytes that it needs in the folder for downloads.
        done: whether it is there already.
    """

    name: str
    what: str
    disk: float
    seconds: float
    make: Callable[[Path], None]
    cached: float = 0.0
    done: bool = False


class Preparation:
    """Plans and runs the steps for some settings.

    Raises:
        CorpusError: the output folder was begun with other settings, or local files are missing.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.out = settings.out
        self.cache = settings.cache or settings.out / "downloads"
        self._check_settings()
        self.steps = self._plan()

    def _check_settings(self) -> None:
        for prefix in (*self.settings.train, self.settings.valid, self.settings.test):
            if prefix is not None:
                for language in self.settings.languages:
                    cleaning.find(prefix, language)
        path = self.out / "settings.json"
        if path.exists():
            had, now = json.loads(path.read_text()), self.settings.identity()
            for name, value in now.items():
                if had.get(name) != value:
                    raise CorpusError(
                        f"{self.out} was begun with {name} {had.get(name)}, not {value}; use the former, "
                        "another --out, or remove the folder"
                    )

    def _plan(self) -> List[Step]:
        if self.settings.train:
            files = [cleaning.find(p, lang) for p in self.settings.train for lang in self.settings.languages]
            # Text of ordinary corpora: gzip makes it three times smaller, a pair has 250 bytes.
            text = sum(path.stat().st_size * (3 if path.suffix == ".gz" else 1) for path in files)
            pairs, archives, missing = text / 250, 0.0, 0.0
        else:
            corpora = CORPORA[self.settings.pair]
            text, pairs = sum(each.text for each in corpora), sum(each.pairs for each in corpora)
            archives = sum(each.size for each in corpora)
            missing = sum(each.size for each in corpora if not self._archived(each))
        sampled = min(pairs, SAMPLE) / max(pairs, 1)
        steps = [
            Step("corpus/heldout", "validation and test sets", 1e7, 5, self._make_held_out),
            Step("corpus/train", "cleaned training corpus", text, pairs / CLEANING, self._make_train),
            Step(
                "pieces/pieces.model",
                "joint pieces",
                text * sampled,
                2 * pairs * sampled / LEARNING,
                self._make_pieces,
            ),
            Step("pieces/encoded", "corpus in pieces", 1.4 * text, pairs / ENCODING, self._make_encoded),
            Step(
                "data-bin",
                "fairseq's binary data",
                0.5 * text,
                pairs / BINARIZING / self.settings.workers,
                self._make_data_bin,
            ),
        ]
        if not self.settings.train:
            took = archives / NETWORK
            steps.insert(1, Step("corpus/raw.json", "downloads", 0.0, took, self._make_raw, missing + text))
        for step in steps:
            step.done = (self.out / step.name).exists()
        return steps

    def _archived(self, corpus: Corpus) -> bool:
        return corpus.url is not None and any(self.cache.glob(f"**/{corpus.url.rpartition('/')[2]}"))

    @property
    def missing(self) -> List[Step]:
        return [step for step in self.steps if not step.done]

    def table(self) -> str:
        """The plan, for people."""
        rows = [("step", "makes", "disk", "time")]
        for step in self.steps:
            cost = (
                ("there already", "")
                if step.done
                else (size(step.disk + step.cached), duration(step.seconds))
            )
            rows.append((step.what, step.name, *cost))
        disk = sum(step.disk + step.cached for step in self.missing)
        rows.append(("in all, about", "", size(disk), duration(sum(step.seconds for step in self.missing))))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
        )

    def check_disk(self, steps: Sequence[Step]) -> None:
        """
        Raises:
            CorpusError: there is too little room for these steps.
        """
        needs: Dict[int, float] = Counter()
        for wanted, need in (
            (self.out, sum(step.disk for step in steps)),
            (self.cache, sum(step.cached for step in steps)),
        ):
            folder = wanted
            while not folder.exists():
                folder = folder.parent
            disk = folder.stat().st_dev  # both may be on one
            needs[disk] += need
            free = shutil.disk_usage(folder).free
            if free < needs[disk]:
                raise CorpusError(
                    f"about {size(needs[disk])} are needed in {wanted}, but only {size(free)} are free: make "
                    "room, or use --out or --cache on another disk, or --ignore-disk if you know better"
                )

    def run(self, ignore_disk: bool = False) -> None:
        """Makes what is missing.

        Raises:
            CorpusError, lib.download.DownloadError: naming what to do; a second call goes on.
        """
        if not ignore_disk:
            self.check_disk(self.missing)
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / "settings.json", self.settings.identity())
        for step in self.steps:
            target = self.out / step.name
            if target.exists():
                print(f"{target} is there already.")
                continue
            print(f"{target}: {step.what}", flush=True)
            if not ignore_disk:
                self.check_disk([step])  # others may have filled it in the meantime
            part = target.with_name(target.name + ".part")
            remove(part)
            part.parent.mkdir(parents=True, exist_ok=True)
            try:
                step.make(part)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                remove(part)
                raise CorpusError(
                    f"the disk of {self.out} is full; what is complete is kept: make room for about "
                    f"{size(step.disk + step.cached)} and call this again"
                ) from None
            os.replace(part, target)

    # The steps, each given the path to make.

    def _make_held_out(self, part: Path) -> None:
        part.mkdir()
        for split, prefix, name in (
            ("valid", self.settings.valid, VALID),
            ("test", self.settings.test, TEST),
        ):
            if prefix is None:
                files = sacrebleu_files(name, self.settings.pair)
            else:
                files = [cleaning.find(prefix, language) for language in self.settings.languages]
            pairs = [tuple(map(cleaning.normal, pair)) for pair in cleaning.read_pairs(*files)]
            for side, language in enumerate(self.settings.languages):
                lines = "".join(pair[side] + "\n" for pair in pairs)
                (part / f"{split}.{language}").write_text(lines, encoding="utf-8")

    def _make_raw(self, part: Path) -> None:
        files = {}
        for corpus in CORPORA[self.settings.pair]:
            paths = fetch(corpus, self.cache, self.settings.languages)
            files[corpus.id] = [str(path.resolve()) for path in paths]
        write_json(part, files)

    def _raw(self) -> Iterator[Tuple[str, Path, Path]]:
        if self.settings.train:
            for prefix in self.settings.train:
                yield (str(prefix), *(cleaning.find(prefix, each) for each in self.settings.languages))
        else:
            for name, paths in json.loads((self.out / "corpus/raw.json").read_text()).items():
                yield (name, *map(Path, paths))

    def _make_train(self, part: Path) -> None:
        part.mkdir()
        held_out = cleaning.HeldOut()
        for split in ("valid", "test"):
            held_out.add(cleaning.read_pairs(*self._files("corpus/heldout", split)))
        cleaner = cleaning.Cleaner(self.settings.rules, held_out)
        counts = {}
        paths = [part / f"train.{language}" for language in self.settings.languages]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "w", encoding="utf-8")) for path in paths]
            for name, source, target in self._raw():
                before = cleaner.counts.copy()
                pairs = tqdm(cleaning.read_pairs(source, target), desc=name, unit=" pairs", mininterval=1)
                for pair in cleaner.clean(pairs):
                    for file, line in zip(files, pair):
                        file.write(line + "\n")
                counts[name] = {k: cleaner.counts[k] - before[k] for k in ("read", "kept", *cleaning.REASONS)}
        if not cleaner.counts["kept"]:
            raise CorpusError("no pair of the training corpus was kept; look at its files and at --max-ratio")
        counts["all"] = {k: cleaner.counts[k] for k in ("read", "kept", *cleaning.REASONS)}
        write_json(part / "counts.json", counts)
        print(counts_table(counts))

    def _files(self, folder: str, split: str) -> List[Path]:
        return [self.out / folder / f"{split}.{language}" for language in self.settings.languages]

    def _make_pieces(self, part: Path) -> None:
        # The model is the target; what it is learnt from, and its list of pieces, lie beside it.
        samples = []
        total = json.loads((self.out / "corpus/train/counts.json").read_text())["all"]["kept"]
        for path in self._files("corpus/train", "train"):
            samples.append(part.with_name(path.name + ".sample"))
            sample(path, samples[-1], total, SAMPLE)
        model = part.with_name("learnt.model")
        # The rarest characters are those of other scripts on web pages: 32,000 pieces are not for them.
        pieces.learn(samples, model, self.settings.vocab_size, coverage=0.9998)
        for path in samples:
            path.unlink()
        os.replace(model.with_suffix(".vocab"), part.with_name("pieces.vocab"))
        os.replace(model, part)

    def _make_encoded(self, part: Path) -> None:
        part.mkdir()
        for split in ("valid", "test", "train"):
            folder = "corpus/train" if split == "train" else "corpus/heldout"
            for path in self._files(folder, split):
                pieces.encode(
                    self.out / "pieces/pieces.model",
                    path,
                    part / path.name,
                    lambda lines, name=path.name: tqdm(lines, desc=name, unit=" lines", mininterval=1),
                )

    def _make_data_bin(self, part: Path) -> None:
        source, target = self.settings.languages
        encoded = self.out / "pieces/encoded"
        command = [sys.executable, "-m", "fairseq_cli.preprocess", "--source-lang", source]
        command += ["--target-lang", target, "--joined-dictionary", "--destdir", str(part)]
        command += ["--workers", str(self.settings.workers)]
        for split in ("train", "valid", "test"):
            command += [f"--{split}pref", str(encoded / split)]
        log = self.out / "preprocess.log"
        with open(log, "w") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT)
        if done.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            if any(os.strerror(each) in log.read_text(errors="replace") for each in FULL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise CorpusError(f"fairseq-preprocess failed ({''.join(last)}); {log} has all that it said")


def fetch(corpus: Corpus, cache: Path, languages: Sequence[str]) -> List[Path]:
    """Downloads a corpus and unpacks the files that are needed; source language first."""
    url, members = corpus.url, corpus.members
    if url is None:
        url, members = mtdata_entry(corpus.id, languages)
    archive = cache / url.rpartition("/")[2]
    with tqdm(desc=archive.name, unit="B", unit_scale=True, mininterval=1) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total or None
            bar.update(done - bar.n)

        size = int(corpus.size) if corpus.sha256 else None  # of the others it is not certain
        download(url, archive, size=size, sha256=corpus.sha256, progress=progress)
    return [unpack(archive, member) for member in members]


def mtdata_entry(name: str, languages: Sequence[str]) -> Tuple[str, List[str]]:
    """The archive's address and the files in it, source language first, from mtdata's index.

    Raises:
        CorpusError: mtdata is not installed, or does not have it.
    """
    try:
        from mtdata.entry import DatasetId
        from mtdata.index import Index, statmt
    except ImportError:
        raise CorpusError("mtdata is not installed: pip install -e '.[data]'") from None
    index = Index()  # of its own: the common one lists all of mtdata, in the user's home
    statmt.load_all(index)
    entry = index.entries.get(DatasetId.parse(name))
    if entry is None:
        raise CorpusError(f"this version of mtdata has no {name}; update it: pip install -U mtdata")
    # "training/europarl-v7.de-en.de": the language is the ending.
    members = [path for each in languages for path in entry.in_paths if path.endswith(f".{each}")]
    return entry.url, members


def unpack(archive: Path, member: str) -> Path:
    """One file of a tar archive, into a folder beside it; whole or absent.

    Raises:
        CorpusError: the archive is broken, or has no such file.
    """
    target = archive.parent / "unpacked" / Path(member).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:
                if entry.isfile() and fnmatch.fnmatch(entry.name.lstrip("./"), member):
                    with open(part, "wb") as out:
                        shutil.copyfileobj(tar.extractfile(entry), out, 1 << 20)
                    os.replace(part, target)
                    return target
    except (tarfile.TarError, EOFError) as error:
        raise CorpusError(f"{archive} is broken ({error}); remove it and call this again") from None
    raise CorpusError(f"{archive} has no {member}: it is not the published archive; remove it")


def sacrebleu_files(name: str, pair: str) -> List[Path]:
    """Source and reference of a test set, which sacrebleu downloads and verifies.

    Raises:
        CorpusError: it cannot be got.
    """
    from sacrebleu.utils import get_reference_files, get_source_file

    try:
        return [Path(get_source_file(name, pair)), Path(get_reference_files(name, pair)[0])]
    except (OSError, SystemExit) as error:
        raise CorpusError(
            f"sacrebleu could not get {name} ({error}); call this again, or give local files by "
            "--valid-files and --test-files"
        ) from None


def sample(path: Path, target: Path, total: int, most: int) -> None:
    """At most ``most`` of ``total`` lines, evenly spread: the same on every machine."""
    most = min(most, total)
    with open(path, encoding="utf-8", newline="\n") as lines, open(target, "w", encoding="utf-8") as out:
        for number, line in enumerate(lines):
            if (number + 1) * most // total > number * most // total:
                out.write(line)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".writing")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def counts_table(counts: Dict[str, Dict[str, int]]) -> str:
    columns = ["read", "kept", *cleaning.REASONS]
    rows = [["corpus", *columns]]
    rows += [[name, *(f"{each[column]:,}" for column in columns)] for name, each in counts.items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def size(number: float) -> str:
    return f"{number / GB:.1f} GB" if number >= 0.1 * GB else f"{number / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"

"""WMT14 from a server on this machine: broken downloads, full disks, interrupted steps, what is dropped."""

import gzip
import hashlib
import http.server
import io
import json
import resource
import shutil
import tarfile
import threading
from collections import namedtuple
from pathlib import Path

import prepare_wmt14
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib import cleaning, wmt
from lib.cleaning import Cleaner, CorpusError, HeldOut, Rules
from lib.download import CHUNK, DownloadError, download

BODY = bytes(range(256)) * 4000  # 1 MB


class Server(http.server.BaseHTTPRequestHandler):
    """Breaks connections off, ignores or honours ranges, as it is told."""

    files: dict = {}
    break_after: list = []  # for the next connections, how many bytes they get
    ranges = True
    asked: list = []

    def do_GET(self):
        body = self.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        self.asked.append(asked)
        first = int(asked[len("bytes=") : -1]) if asked and self.ranges else 0
        if first >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        most = self.break_after.pop(0) if self.break_after else len(body)
        self.wfile.write(body[first : first + most])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), dict(files={"/file": BODY}, break_after=[], asked=[]))
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{running.server_port}"
    yield handler
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on(server, tmp_path, ranges):
    server.ranges, server.break_after = ranges, [5 * CHUNK, 0, 3 * CHUNK + 100]
    path = download(
        *(f"{server.url}/file", tmp_path / "a" / "file"),
        size=len(BODY),
        sha256=hashlib.sha256(BODY).hexdigest(),
        wait=0,
    )
    assert path.read_bytes() == BODY and not list(path.parent.glob("*.part"))
    assert path.with_name("file.sha256").read_text() == f"{hashlib.sha256(BODY).hexdigest()}  file\n"
    assert server.asked[0] is None and server.asked[1] == f"bytes={5 * CHUNK}-"
    if ranges:
        assert server.asked[3] == f"bytes={8 * CHUNK}-"
    connections = len(server.asked)
    download(f"{server.url}/file", path)
    assert len(server.asked) == connections  # what is there is not asked for again


def test_a_download_that_stays_broken_keeps_its_bytes(server, tmp_path):
    server.break_after = [5 * CHUNK, 0, 0]
    with pytest.raises(DownloadError, match="327,680 bytes are kept: call this again"):
        download(f"{server.url}/file", tmp_path / "file", attempts=2, wait=0)
    assert not (tmp_path / "file").exists()
    server.asked.clear()
    assert download(f"{server.url}/file", tmp_path / "file").read_bytes() == BODY
    assert server.asked == [f"bytes={5 * CHUNK}-"]


def test_what_is_not_the_published_file_is_refused(server, tmp_path):
    path = tmp_path / "file"
    with pytest.raises(DownloadError, match="not the published file, its SHA-256 is"):
        download(f"{server.url}/file", path, sha256="0" * 64)
    with pytest.raises(DownloadError, match="has 1,024,000 bytes instead of 7"):
        download(f"{server.url}/file", path, size=7)
    with pytest.raises(DownloadError, match="is not there \\(404"):
        download(f"{server.url}/none", path)
    (tmp_path / "file.part").write_bytes(BODY + b"of another file")
    assert download(f"{server.url}/file", path, wait=0).read_bytes() == BODY


def test_what_is_dropped_and_counted():
    held_out = HeldOut()
    held_out.add([("How are you?", "Wie geht's?")])
    cleaner = Cleaner(Rules(max_words=5, max_ratio=2), held_out)
    pairs = [
        ("  one\u2028two\r three ", "eins zwei\tdrei"),  # kept, with single spaces
        ("", "leer"),
        ("blank", " \u00a0 "),
        ("a b c d e f", "a b c"),
        ("a b c", "a"),
        ("how are you", "was ist"),  # a test source, without case and punctuation
        ("what?", "WIE GEHTS"),
        ("one two three", "eins zwei drei"),
        ("one two three", "eins zwei vier"),  # another translation is no duplicate
    ]
    kept = list(cleaner.clean(pairs))
    assert kept == [("one two three", "eins zwei drei"), ("one two three", "eins zwei vier")]
    assert cleaner.counts == {
        **{"read": 9, "kept": 2, "empty": 2, "too long": 1, "ratio": 1, "in a test set": 2},
        "duplicate": 1,
    }
    assert list(cleaner.clean(pairs)) == []  # a second corpus with the same pairs


@given(st.lists(st.tuples(st.text(), st.text())))
def test_cleaning_counts_every_pair_and_changes_nothing_twice(pairs):
    cleaner = Cleaner(Rules(), HeldOut())
    kept = list(cleaner.clean(pairs))
    counts = cleaner.counts
    assert counts["read"] == len(pairs) and counts["kept"] == len(kept)
    assert counts["read"] == counts["kept"] + sum(counts[reason] for reason in cleaning.REASONS)
    assert list(Cleaner(Rules(), HeldOut()).clean(kept)) == kept
    assert all("\n" not in line and "\r" not in line for pair in kept for line in pair)


def test_lines_end_at_newlines_only(tmp_path):
    lines = ["a\u2028b", "c\rd", "e\x85f", "g\x1ch"]
    data = "".join(line + "\n" for line in lines).encode()
    (tmp_path / "x.en").write_bytes(data)
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(data))
    files = [cleaning.find(tmp_path / "x", language) for language in ("en", "de")]
    assert list(cleaning.read_pairs(*files)) == list(zip(lines, lines))
    (tmp_path / "x.en").write_bytes(data + b"one more\n")
    with pytest.raises(CorpusError, match=r"x.de.gz ends after 4 lines"):
        list(cleaning.read_pairs(*files))
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(data * 1000)[:-20])
    with pytest.raises(CorpusError, match="broken or not complete"):
        list(cleaning.read_lines(files[1]))


WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


def text(first, count, end="."):
    """Sentences that differ, and their translation."""
    pairs = []
    for number in range(first, first + count):
        words = [WORDS[int(digit)] for digit in f"{number:05d}"]
        pairs.append((" ".join(words) + end, " ".join(reversed(words)).upper() + end))
    return pairs


def write(prefix, pairs):
    for side, language in enumerate(("en", "de")):
        Path(f"{prefix}.{language}").write_text("".join(pair[side] + "\n" for pair in pairs))


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    """Two archives on the server in the format of the real ones, and test sets; returns the options."""
    corpora = []
    for name, pairs in (
        # 5 pairs of the test set, 10 pairs twice
        ("news", text(0, 300) + text(90_000, 5) + text(0, 10)),
        ("crawl", text(300, 300) + text(300, 7)),
    ):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for side, language in enumerate(("de", "en")):
                data = "".join(pair[1 - side] + "\n" for pair in pairs).encode()
                if name == "crawl":  # compressed in the archive, as the French giga corpus
                    data, language = gzip.compress(data), language + ".gz"
                for member in (f"training/{name}.{language}", f"training/{name}-other.{language}"):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        body = server.files[f"/{name}.tgz"] = buffer.getvalue()
        ending = ".gz" if name == "crawl" else ""
        corpora.append(
            wmt.Corpus(
                f"Statmt-{name}-1-deu-eng",
                *(len(pairs), 20_000, len(body), hashlib.sha256(body).hexdigest()),
                url=f"{server.url}/{name}.tgz",
                members=(f"training/{name}.en{ending}", f"training/{name}.de{ending}"),
            )
        )
    monkeypatch.setitem(wmt.CORPORA, "en-de", tuple(corpora))
    for split, first in (("valid", 80_000), ("test", 90_000)):
        write(tmp_path / split, text(first, 20, end="!"))
    return [
        *("--valid-files", tmp_path / "valid", "--test-files", tmp_path / "test"),
        *("--vocab-size", 120, "--out", tmp_path / "out"),
    ]


@pytest.fixture
def prepare(monkeypatch, capsys):
    def run(*arguments):
        """The script in this process: what it said, and the sentence that it ended with, None at its end."""
        monkeypatch.setattr("sys.argv", ["prepare_wmt14.py", *map(str, arguments)])
        end = None
        try:
            prepare_wmt14.main()
        except SystemExit as stopped:
            end = str(stopped.code)
        return capsys.readouterr().out, end

    return run


def test_from_the_archives_to_binary_data(published, prepare, server, tmp_path):
    out = tmp_path / "out"
    said, end = prepare(*published, "--dry-run")
    assert end is None and "in all, about" in said and not out.exists() and server.asked == []

    server.break_after = [100]
    said, end = prepare(*published)
    assert end is None, end
    assert len(server.asked) == 3
    counts = json.loads((out / "corpus/train/counts.json").read_text())
    assert counts["all"] == {
        **{"read": 622, "kept": 600, "empty": 0, "too long": 0, "ratio": 0, "in a test set": 5},
        "duplicate": 17,
    }
    lines = (out / "corpus/train/train.en").read_text().splitlines()
    assert lines == [source for source, _ in text(0, 600)]
    assert (out / "corpus/heldout/test.de").read_text().splitlines()[0] == text(90_000, 1, "!")[0][1]
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            assert (out / f"data-bin/{split}.en-de.{language}.idx").exists()
            encoded = (out / f"pieces/encoded/{split}.{language}").read_text()
            assert encoded.count("\n") == {"train": 600}.get(split, 20)
    assert not [path for path in out.rglob("*") if path.suffix in (".part", ".sample", ".writing")]

    connections = len(server.asked)
    said, end = prepare(*published)
    assert end is None and said.count("there already.") == 6 and len(server.asked) == connections
    _, end = prepare(*published, "--vocab-size", 121)
    assert "begun with vocab_size 120, not 121" in end


def test_an_interrupted_step_is_repeated_and_others_are_not(published, prepare, monkeypatch, tmp_path):
    out = tmp_path / "out"
    clean, encode = Cleaner.clean, wmt.pieces.encode

    def interrupted(self, pairs):
        for number, pair in enumerate(clean(self, pairs)):
            if number == 50:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(Cleaner, "clean", interrupted)
    _, end = prepare(*published)
    assert "interrupted; what is complete is kept" in end
    assert (out / "corpus/raw.json").exists() and not (out / "corpus/train").exists()
    monkeypatch.setattr(Cleaner, "clean", clean)

    def dying(model, source, target, progress):
        encode(model, source, target, progress)
        if source.name == "train.en":
            raise RuntimeError("out of memory")

    monkeypatch.setattr(wmt.pieces, "encode", dying)
    _, end = prepare(*published)
    assert "out of memory" in end and not (out / "pieces/encoded").exists()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("corpus/**/*")}
    assert len((out / "corpus/train/train.en").read_text().splitlines()) == 600
    monkeypatch.setattr(wmt.pieces, "encode", encode)

    _, end = prepare(*published)
    assert end is None and (out / "data-bin/train.en-de.en.idx").exists()
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("corpus/**/*")}


def test_a_full_disk(published, prepare, monkeypatch, tmp_path):
    """Refused before anything is downloaded; and, when others fill it, where it happens."""
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
        _, end = prepare(*published)
        assert "are needed in" in end and "only 0.0 MB are free" in end and "--out" in end
        assert not (tmp_path / "out").exists()
        assert prepare(*published, "--dry-run")[1] is None

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the kernel refuses to write more than this to one file
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
        _, end = prepare(*published)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "is full; what is complete is kept: make room for about" in end
    assert (tmp_path / "out/corpus/raw.json").exists() and not (tmp_path / "out/corpus/train").exists()
    assert not list((tmp_path / "out").rglob("*.part"))


def test_broken_archives_and_missing_files(published, prepare, server, monkeypatch, tmp_path):
    body = server.files["/news.tgz"]
    server.files["/news.tgz"] = body[:-50]
    _, end = prepare(*published)
    assert "instead of" in end and "not the published file" in end
    corpora = [
        wmt.Corpus(each.id, each.pairs, each.text, each.size, None, each.url, each.members)
        for each in wmt.CORPORA["en-de"]
    ]
    monkeypatch.setitem(wmt.CORPORA, "en-de", tuple(corpora))
    server.files["/news.tgz"] = body[: len(body) // 2]
    _, end = prepare(*published)
    assert "news.tgz is broken" in end and "remove it" in end
    _, end = prepare("--train-files", tmp_path / "none", *published)
    assert "there is no" in end and "none.en" in end
    _, end = prepare("--vocab-size", 3)
    assert end == "2"  # argparse's


def test_the_real_archives_are_in_mtdata():
    """mtdata's index knows the corpora that have no address here, and their files."""
    pytest.importorskip("mtdata")
    for pair, corpora in wmt.CORPORA.items():
        languages = pair.split("-")
        for corpus in corpora:
            url, members = corpus.url, corpus.members
            if url is None:
                url, members = wmt.mtdata_entry(corpus.id, languages)
            assert url.endswith((".tgz", ".tar"))
            endings = [member.replace(".gz", "").rpartition(".")[2] for member in members]
            assert endings == languages, corpus

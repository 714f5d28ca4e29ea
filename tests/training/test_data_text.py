"""Texts: loading, the held-out part, windows, lanes, and masked sentences."""

from __future__ import annotations

import ast
import hashlib
import math
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.training.data import (
    CLASS,
    IGNORE_INDEX,
    MASK,
    SEPARATOR,
    Batch,
    ByteLanes,
    ByteWindows,
    Corpus,
    LaneDataset,
    MaskedSentences,
    Tokens,
    TokenWindows,
    bytes_of,
    corpus_from_bytes,
    load_corpus,
    standard_library_text,
    train_tokens,
)
from transformer_kernels.training.data.text import mask_tokens

CORPUS = corpus_from_bytes(standard_library_text(50_000), "sources")
TOKENS = train_tokens(bytes_of(CORPUS.train), 500)
CONTEXT = 7


@pytest.fixture
def counting() -> Corpus:
    """A byte equals its index: 180 for training, 20 held out."""
    return corpus_from_bytes(bytes(range(200)), "counting")


def test_the_last_tenth_is_held_out() -> None:
    text = bytes(range(256)) * 2
    corpus = corpus_from_bytes(text, "bytes")
    assert len(corpus.validation) == 51
    assert bytes(corpus.train.tolist() + corpus.validation.tolist()) == text
    assert corpus.digest == hashlib.sha256(text).hexdigest()
    assert corpus.source is None
    assert bytes_of(corpus.train) + bytes_of(corpus.validation) == text
    assert bytes_of(torch.empty(0, dtype=torch.uint8)) == b""


def test_file_is_read_as_raw_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"\x00\xff\r\n<text>\xc3\xa9</text>" * 3
    (tmp_path / "enwik8").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus("enwik8")
    assert bytes(corpus.train.tolist() + corpus.validation.tolist()) == content
    assert (corpus.name, corpus.source) == ("enwik8", str(tmp_path / "enwik8"))


def test_unreadable_or_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "enwik8").touch()
    with pytest.raises(ValueError, match="enwik8 is empty: expected a text to train on"):
        load_corpus(tmp_path / "enwik8")
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        load_corpus(tmp_path / "nothing-here")
    with pytest.raises(IsADirectoryError):
        load_corpus(tmp_path)


def test_default_corpus_is_the_standard_library() -> None:
    corpus = load_corpus()
    assert len(corpus.train) + len(corpus.validation) == 8_000_000
    assert corpus.name == "the Python standard library"
    text = standard_library_text(300_000)
    assert len(text) == 300_000
    assert text == bytes(corpus.train[:300_000].tolist())
    # The text begins with whole modules of the library.
    first = (Path(sysconfig.get_path("stdlib")) / "__future__.py").read_bytes()
    assert text.startswith(first)
    ast.parse(first)


def test_tests_and_installed_packages_are_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a/z.py", "a/tests/t.py", "site-packages/torch.py", "a.txt", "c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name};")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="specify a text file instead"):
        standard_library_text()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert standard_library_text() == b"a/z.py;b.py;c.py;"
    assert standard_library_text(9) == b"a/z.py;b."


def test_windows_are_consecutive_bytes_of_the_right_part(counting: Corpus) -> None:
    windows = ByteWindows(counting, 18)
    tokens = windows.draw(5000, torch.Generator())["tokens"]
    assert (tokens.diff(dim=1) == 1).all()
    assert set(tokens[:, 0].tolist()) == set(range(180 - 18))
    assert windows.held_out(50)["tokens"].tolist() == [list(range(s, s + 19)) for s in (180, 181)]
    assert ByteWindows(counting, 10).held_out(4)["tokens"][:, 0].tolist() == [180, 183, 186, 189]


def test_draws_are_stable_across_versions() -> None:
    """Recorded window starts of a fixed seed, in a training part of 200 bytes."""
    windows = ByteWindows(corpus_from_bytes(bytes(range(222)), "counting"), 7)
    tokens = windows.draw(6, torch.Generator().manual_seed(3))["tokens"]
    assert tokens[:, 0].tolist() == [86, 85, 177, 176, 137, 157]


@pytest.mark.parametrize("tokens", [None, Tokens()])
def test_too_short_text_is_refused(tokens: Tokens | None) -> None:
    def windows(text: bytes, context: int) -> ByteWindows | TokenWindows:
        corpus = corpus_from_bytes(text, "notes.txt")
        if tokens is None:
            return ByteWindows(corpus, context)
        return TokenWindows(corpus, tokens, context)

    unit = "bytes" if tokens is None else "tokens"
    refused = f"notes.txt is too short: a context of 15 needs 16 {unit} .* validation part has 15"
    with pytest.raises(ValueError, match=refused):
        windows(bytes(150), 15)
    windows(bytes(150), 14)
    with pytest.raises(ValueError, match="the training part has 0"):
        windows(b"", 1)
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        windows(bytes(150), 0)


@pytest.fixture
def lanes(counting: Corpus) -> ByteLanes:
    return ByteLanes(counting, CONTEXT)


def test_segments_of_a_lane_are_consecutive(lanes: ByteLanes) -> None:
    """Lanes of (180 - 1) // 3 = 59 bytes, of which eight segments of seven are read."""
    assert lanes.segments(3) == 8
    tokens = [lanes.segment(n, 3)["tokens"] for n in range(8)]
    assert {x.dtype for x in tokens} == {torch.int64}
    assert tokens[0].tolist() == [list(range(start, start + 8)) for start in (0, 59, 118)]
    inputs = torch.cat([x[:, :-1] for x in tokens], dim=1)
    assert inputs.tolist() == [list(range(start, start + 56)) for start in (0, 59, 118)]
    targets = torch.cat([x[:, 1:] for x in tokens], dim=1)
    assert torch.equal(targets, inputs + 1)


def test_last_target_may_be_the_first_byte_of_the_next_lane(counting: Corpus) -> None:
    lanes = ByteLanes(counting, 19)
    assert lanes.segments(9) == 1
    assert lanes.segment(0, 9)["tokens"][:, -1].tolist() == list(range(19, 180, 19))


def test_held_out_lanes_are_of_the_held_out_part(lanes: ByteLanes) -> None:
    (only,) = lanes.held_out_segments(2)
    assert only["tokens"].tolist() == [list(range(180, 188)), list(range(189, 197))]
    first, second = lanes.held_out_segments(1)
    assert first["tokens"].tolist() == [list(range(180, 188))]
    assert second["tokens"].tolist() == [list(range(187, 195))]


def test_held_out_part_has_fewer_lanes_if_it_is_short(lanes: ByteLanes) -> None:
    (only,) = lanes.held_out_segments(50)
    assert len(only["tokens"]) == 2


def test_windows_are_those_of_byte_windows(lanes: ByteLanes, counting: Corpus) -> None:
    windows = ByteWindows(counting, CONTEXT)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    drawn = [one.draw(4, g)["tokens"] for one, g in zip((lanes, windows), generators, strict=True)]
    assert torch.equal(*drawn)
    assert torch.equal(lanes.held_out(3)["tokens"], windows.held_out(3)["tokens"])
    assert lanes.digest != windows.digest
    assert isinstance(lanes, LaneDataset)
    assert not isinstance(windows, LaneDataset)


def test_text_too_short_for_its_lanes_is_refused(lanes: ByteLanes) -> None:
    assert lanes.segments(25) == 1
    with pytest.raises(ValueError, match="too short: 26 lanes with a context of 7 need 183 bytes"):
        lanes.segments(26)
    with pytest.raises(ValueError, match="lanes must be a whole number of at least 1, got 0"):
        lanes.segments(0)
    with pytest.raises(ValueError, match="lanes must be a whole number of at least 1, got 0"):
        lanes.held_out_segments(0)


def test_draw_returns_windows_of_the_training_part() -> None:
    windows = TokenWindows(CORPUS, TOKENS, 16)
    drawn = windows.draw(50, torch.Generator())["tokens"]
    assert drawn.shape == (50, 17)
    for row in drawn:
        assert TOKENS.decode(row) in bytes_of(CORPUS.train)


def test_held_out_windows_include_both_ends() -> None:
    held_out = TokenWindows(CORPUS, TOKENS, 16).held_out(20)["tokens"]
    text = bytes_of(CORPUS.validation)
    assert held_out.shape == (20, 17)
    assert text.startswith(TOKENS.decode(held_out[0]))
    assert text.endswith(TOKENS.decode(held_out[-1]))


def test_bytes_per_token_is_that_of_the_held_out_text() -> None:
    windows = TokenWindows(CORPUS, TOKENS, 16)
    count = len(TOKENS.encode(bytes_of(CORPUS.validation)))
    assert windows.bytes_per_token == len(CORPUS.validation) / count > 1.5
    assert TokenWindows(CORPUS, Tokens(), 16).bytes_per_token == 1


def test_windows_of_byte_tokens_equal_byte_windows() -> None:
    ours, theirs = TokenWindows(CORPUS, Tokens(), 16), ByteWindows(CORPUS, 16)
    first, second = (d.draw(5, torch.Generator().manual_seed(1)) for d in (ours, theirs))
    assert torch.equal(first["tokens"], second["tokens"])
    assert torch.equal(ours.held_out(5)["tokens"], theirs.held_out(5)["tokens"])


LINES = corpus_from_bytes(
    b"".join(b"%d: %s\n" % (i, b"so " * (i * i % 7)) + b"\n" * (i % 2) for i in range(2000)),
    "lines",
)
LINE_TOKENS = train_tokens(bytes_of(LINES.train), 400, special=True)


def within(count: int, total: int, share: float) -> bool:
    """True if a binomial count is within four standard deviations of its mean."""
    return abs(count - share * total) < 4 * math.sqrt(share * (1 - share) * total)


@pytest.fixture(scope="module")
def dataset() -> MaskedSentences:
    return MaskedSentences(LINES, LINE_TOKENS, 40)


@pytest.fixture(scope="module")
def batch(dataset: MaskedSentences) -> Batch:
    return dataset.draw(1000, torch.Generator().manual_seed(0))


def segments(batch: Batch, row: int) -> tuple[bytes, bytes]:
    """The two segments of an example before masking."""
    length = batch["lengths"][row]
    tokens, labels = batch["tokens"][row, :length], batch["labels"][row, :length]
    whole = tokens.where(labels == IGNORE_INDEX, labels)
    first, second = ((whole == SEPARATOR).nonzero().flatten()).tolist()
    return LINE_TOKENS.decode(whole[1:first]), LINE_TOKENS.decode(whole[first + 1 : second])


def test_example_layout_is_class_segment_separator_segment_separator(batch: Batch) -> None:
    assert (batch["tokens"][:, 0] == CLASS).all()
    assert ((batch["tokens"] == SEPARATOR).sum(1) == 2).all()
    for row, length in enumerate(batch["lengths"].tolist()):
        first, second = (batch["tokens"][row] == SEPARATOR).nonzero().flatten().tolist()
        assert second == length - 1 <= 39
        assert 1 < first < second - 1
        padding = batch["tokens"].shape[1] - length
        kinds = [0] * (first + 1) + [1] * (second - first) + [0] * padding
        assert batch["segments"][row].tolist() == kinds


def test_half_of_the_second_segments_follow_the_first(batch: Batch) -> None:
    assert within(int(batch["is_next"].sum()), 1000, 0.5)
    lines = [line for line in bytes_of(LINES.train).splitlines(keepends=True) if line.strip()]
    following = dict(pairwise(lines))
    starts = {line.split(b":")[0]: line for line in lines}
    for row, is_next in enumerate(batch["is_next"].tolist()):
        first, second = segments(batch, row)
        last = starts[first.splitlines()[-1].split(b":")[0]]
        follows = second.splitlines()[0].split(b":")[0] == following[last].split(b":")[0]
        assert follows == bool(is_next)
        assert not set(first.splitlines()) & set(second.splitlines())


def test_segments_are_lines_of_the_right_part_of_the_corpus(
    dataset: MaskedSentences, batch: Batch
) -> None:
    def without_empty_lines(text: bytes) -> bytes:
        return b"".join(line for line in text.splitlines(keepends=True) if line.strip())

    for examples, text in (
        (batch, without_empty_lines(bytes_of(LINES.train))),
        (dataset.held_out(100), b"\n" + without_empty_lines(bytes_of(LINES.validation))),
    ):
        for row in range(100):
            first, second = segments(examples, row)
            assert first in text
            assert b"\n" + second in b"\n" + text


def test_masking_probabilities_match_the_paper(batch: Batch) -> None:
    tokens, labels = batch["tokens"], batch["labels"]
    selected = labels != IGNORE_INDEX
    special = (tokens == CLASS) | (tokens == SEPARATOR)
    valid = torch.arange(tokens.shape[1]) < batch["lengths"][:, None]
    assert not (selected & (special | ~valid)).any()
    ordinary = int((valid & ~special).sum())
    chosen = int(selected.sum())
    assert within(chosen, ordinary, 0.15)
    assert within(int((tokens[selected] == MASK).sum()), chosen, 0.8)
    same = int((tokens[selected] == labels[selected]).sum())
    assert within(same, chosen, 0.1 + 0.1 / (LINE_TOKENS.vocabulary - 6))
    others = tokens[selected][(tokens[selected] != MASK) & (tokens[selected] != labels[selected])]
    assert others.min() >= 6
    assert len(others.unique()) > 100
    assert (tokens[~selected] != MASK).all()


def test_every_example_has_a_selected_token() -> None:
    short = MaskedSentences(corpus_from_bytes(b"a\nb\nc\n" * 100, "abc"), Tokens(special=True), 8)
    labels = short.draw(300, torch.Generator())["labels"]
    assert ((labels != IGNORE_INDEX).sum(1) >= 1).all()


def test_special_tokens_are_never_selected() -> None:
    tokens = torch.tensor([[CLASS, SEPARATOR], [CLASS, 9]])
    ordinary = torch.tensor([[False, False], [False, True]])
    masked, labels = mask_tokens(tokens, ordinary, LINE_TOKENS, torch.Generator())
    assert labels.tolist() == [[IGNORE_INDEX] * 2, [IGNORE_INDEX, 9]]
    assert masked[0].tolist() == [CLASS, SEPARATOR]
    assert masked[1, 0] == CLASS


def test_line_longer_than_a_segment_is_cut() -> None:
    text = b"".join(b"%d" % (i % 10) * 50 + b"\n" for i in range(400))
    dataset = MaskedSentences(corpus_from_bytes(text, "long"), Tokens(special=True), 30)
    batch = dataset.draw(50, torch.Generator())
    assert (batch["lengths"] == 30).all()


def test_random_second_segment_does_not_overlap_the_first() -> None:
    """The first segment has six of 40 lines."""
    text = b"".join(b"%c\n" % (40 + i % 40) for i in range(400))
    dataset = MaskedSentences(corpus_from_bytes(text, "signs"), Tokens(special=True), 27)
    batch = dataset.held_out(39)
    elsewhere = 0
    for row, is_next in enumerate(batch["is_next"].tolist()):
        first, second = (segment.split(b"\n")[:-1] for segment in segments(batch, row))
        assert second[0] not in first
        elsewhere += not is_next
    assert elsewhere > 10


def test_random_second_segment_differs_from_the_next_line() -> None:
    """Nine of ten lines are equal."""
    text = b"".join(b"same\n" * 9 + b"%d\n" % i for i in range(100))
    tokens = Tokens(special=True)
    batch = MaskedSentences(corpus_from_bytes(text, "x"), tokens, 14).draw(200, torch.Generator())
    followed = 0
    for row, is_next in enumerate(batch["is_next"].tolist()):
        first, second = segments(batch, row)
        if not first.endswith(b"same\n") and not is_next:
            followed += 1
            assert not second.startswith(b"same")
    assert followed > 2


def test_text_of_equal_lines_is_refused() -> None:
    corpus = corpus_from_bytes(b"same\n" * 1000, "same")
    with pytest.raises(ValueError, match="the text must have different lines"):
        MaskedSentences(corpus, Tokens(special=True), 16).draw(20, torch.Generator())


@each(
    ("tokens", "context", "message"),
    [
        (LINE_TOKENS, 7, "at least 8 for two segments and three special tokens, got 7"),
        (LINE_TOKENS, 0, "context must be a whole number of at least 1, got 0"),
        (LINE_TOKENS, 201, "lines is too short: a context of 201 needs .* validation part has 192"),
        (Tokens(), 20, "tokens must have special tokens"),
    ],
)
def test_invalid_settings_are_refused(tokens: Tokens, context: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedSentences(LINES, tokens, context)

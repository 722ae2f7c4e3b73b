"""Built-in data: what is read, how it is cut into batches, and that a resumed run sees the same batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pipefit.data import (
    ArrayBatches,
    SyntheticBatches,
    TextBatches,
    digits,
    sample,
    split_corpus,
    text,
    unigram_entropy,
)
from pipefit.errors import DataError, PipefitError

CORPUS = bytes(range(256)) * 8


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_built_in_text_is_english_prose_of_several_hundred_kilobytes():
    corpus = text()
    assert len(corpus) > 300_000
    assert corpus.count(b" the ") > 2000
    assert not any(line and set(line) <= set(b"*=-+") for line in corpus.split(b"\n") if len(line) > 3)
    assert 2.5 < unigram_entropy(corpus) < 3.8


def test_own_files_are_read_in_the_order_given(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"one")
    second.write_bytes("zwölf".encode())
    assert text([second, str(first)]) == "zwölf".encode() + b"\n\none"
    assert text(first) == text(str(first)) == b"one"


def test_a_path_that_holds_no_text_is_refused_by_name(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b" \n")
    with pytest.raises(PipefitError, match=r"missing\.txt does not exist"):
        text(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="is a directory"):
        text([tmp_path])
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        text(empty)
    with pytest.raises(DataError, match="empty list"):
        text([])


def test_unigram_entropy_is_that_of_the_byte_frequencies():
    assert unigram_entropy(CORPUS) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aaab") == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy(b"zzz") == 0.0


def test_the_split_keeps_every_byte_once_and_in_order():
    train, validation = split_corpus(CORPUS)
    assert train + validation == CORPUS and len(validation) == pytest.approx(len(CORPUS) / 10, abs=1)
    with pytest.raises(DataError, match="too few"):
        split_corpus(b"a")


def test_targets_are_the_next_bytes_of_windows_of_the_corpus():
    x, y = next(iter(TextBatches(CORPUS, batch=4, context=10, seed=3)))
    assert x.shape == y.shape == (4, 10) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    for window in torch.cat((x, y[:, -1:]), dim=1).tolist():
        assert bytes(window) in CORPUS


def test_text_batches_depend_on_seed_and_number_alone():
    first, second = TextBatches(CORPUS, 4, 10, seed=1), TextBatches(CORPUS, 4, 10, seed=1)
    other = TextBatches(CORPUS, 4, 10, seed=2)
    taken = list(itertools.islice(first, 5))
    assert all(same(batch, second.batch_at(index)) for index, batch in enumerate(taken))
    assert not same(taken[0], other.batch_at(0)) and not same(taken[0], taken[1])


def test_resumed_text_batches_continue_where_they_were():
    run = TextBatches(CORPUS, 4, 10, num_batches=6)
    list(itertools.islice(run, 2))
    state = run.state_dict()
    rest = list(run)
    resumed = TextBatches(CORPUS, 4, 10, num_batches=6)
    resumed.load_state_dict(state)
    again = list(resumed)
    assert len(run) == 6 and len(rest) == 4
    assert all(same(a, b) for a, b in zip(rest, again, strict=True))


def test_a_state_of_other_batches_is_refused():
    state = TextBatches(CORPUS, 4, 10, seed=1).state_dict()
    with pytest.raises(DataError, match="seed was 1, is 2"):
        TextBatches(CORPUS, 4, 10, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="lacks position"):
        TextBatches(CORPUS, 4, 10).load_state_dict({"seed": 0, "batch": 4, "context": 10, "corpus_bytes": 2048})


def test_text_shorter_than_a_window_is_refused():
    assert len(next(iter(TextBatches(b"abcd", 2, 3)))[0]) == 2
    with pytest.raises(DataError, match=r"has 3 bytes, but one window needs context \+ 1 = 4"):
        TextBatches(b"abc", 2, 3)
    with pytest.raises(DataError, match="batch=0"):
        TextBatches(CORPUS, 0, 3)


def test_an_endless_stream_has_no_length():
    with pytest.raises(TypeError, match="endless"):
        len(TextBatches(CORPUS, 2, 3))


def test_digits_are_standardised_images_split_without_overlap():
    data = digits()
    assert data.train_x.shape[1:] == (1, 8, 8) and data.train_x.dtype == torch.float32
    assert len(data.train_x) + len(data.test_x) == 1797 and len(data.test_x) == 359
    assert data.train_y.dtype == torch.int64 and set(data.train_y.tolist()) == set(range(10))
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-4)
    assert data.train_x.std().item() == pytest.approx(1, abs=1e-4)
    assert same(data, digits()) and not torch.equal(data.train_y, digits(seed=1).train_y)


def numbered(count):
    return torch.arange(count).float()[:, None], torch.arange(count)


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    batches = ArrayBatches(*numbered(10), batch=4, seed=0, ragged=True)
    epochs = [torch.cat([y for _, y in batches]).tolist() for _ in range(2)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(10))
    assert batches.epoch == 2 and len(batches) == 3


def test_inputs_and_targets_stay_together():
    for x, y in ArrayBatches(*numbered(10), batch=3):
        assert x[:, 0].tolist() == y.tolist()


def test_the_ragged_last_batch_is_kept_only_on_request():
    sizes = [[len(y) for _, y in ArrayBatches(*numbered(10), batch=4, ragged=ragged)] for ragged in (True, False)]
    assert sizes == [[4, 4, 2], [4, 4]]


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_resumed_array_batches_go_on_within_the_epoch(taken):
    run = ArrayBatches(*numbered(10), batch=3, seed=4, ragged=True)
    list(run)
    list(itertools.islice(run, taken))
    resumed = ArrayBatches(*numbered(10), batch=3, seed=4, ragged=True)
    resumed.load_state_dict(run.state_dict())
    rest = [y.tolist() for _, y in run]
    assert [y.tolist() for _, y in resumed] == rest
    assert len(rest) == 4 - taken and resumed.epoch == 2


@pytest.mark.parametrize(
    ("x", "y", "batch", "message"),
    [
        (4, 3, 1, "4 samples but 3 targets"),
        (0, 0, 1, "no samples"),
        (4, 4, 5, "between 1 and the 4 samples"),
        (4, 4, 0, "between 1 and the 4 samples"),
    ],
)
def test_arrays_that_make_no_batch_are_refused(x, y, batch, message):
    with pytest.raises(DataError, match=message):
        ArrayBatches(torch.zeros(x), torch.zeros(y), batch)


def test_synthetic_batches_come_from_the_models_own_example():
    def example(batch, seed):
        return torch.full((batch,), float(seed)), torch.zeros(batch)

    seeds = [int(x[0]) for x, _ in itertools.islice(SyntheticBatches(example, batch=2, seed=7), 6)]
    assert seeds == [7, 8, 9, 10, 7, 8]
    assert len(SyntheticBatches(example, batch=3).batch_at(0)[0]) == 3
    with pytest.raises(DataError, match="batch must be at least 1"):
        SyntheticBatches(example, batch=0)


def successor(ids):
    """A model that is sure of the next letter: the one after the last."""
    logits = torch.full((1, ids.shape[1], 256), -50.0)
    return logits.scatter(2, (ids[:, :, None] + 1) % 256, 50.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sample_continues_the_prompt_by_the_models_choice(temperature):
    assert sample(successor, b"ab", 4, temperature) == "abcdef"


def test_a_sample_is_decided_by_its_seed_and_sees_at_most_the_context():
    seen = []

    def uniform(ids):
        seen.append(ids.shape[1])
        return torch.zeros(1, ids.shape[1], 256)

    first, again, other = (sample(uniform, b"start", 12, 1.0, seed, context=8) for seed in (0, 0, 1))
    assert first == again != other
    assert max(seen) == 8


def test_a_sample_may_end_inside_a_character():
    assert sample(lambda ids: successor(ids), b"\xc2", 0) == "\\xc2"


def test_a_sample_that_cannot_be_drawn_is_refused():
    with pytest.raises(DataError, match="at least one byte"):
        sample(successor, b"", 3)
    with pytest.raises(DataError, match="not be negative"):
        sample(successor, b"a", 3, temperature=-1)
    with pytest.raises(DataError, match="not finite"):
        sample(lambda ids: torch.full((1, 1, 256), math.nan), b"a", 3)

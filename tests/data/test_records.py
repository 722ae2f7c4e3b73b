"""Records of files as token ids with labels, padded or packed."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import CHAT, save_tokenizer

from pipefit.data import corpus
from pipefit.data.records import TokenBatches, token_samples
from pipefit.data.token_table import IGNORED, Tokens, TokenTable, TokenWriter
from pipefit.errors import DataError

END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def written(tmp_path, *records, name="records.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [path]


def test_a_text_ends_with_the_end_token_and_is_learned_whole(tmp_path, tokenizer):
    (sample,) = token_samples(written(tmp_path, {"text": "one two"}), tokenizer, 64)
    assert sample.ids == [*tokenizer("one two")["input_ids"], END]
    assert sample.labels == sample.ids


def test_of_a_prompt_and_its_completion_only_the_completion_is_learned(tmp_path, tokenizer):
    (sample,) = token_samples(written(tmp_path, {"prompt": "2 plus 2 is", "completion": " 4"}), tokenizer, 64)
    prompt = len(tokenizer("2 plus 2 is")["input_ids"])
    assert sample.labels == [IGNORED] * prompt + sample.ids[prompt:]
    assert tokenizer.decode(sample.ids) == "2 plus 2 is 4<end>"


def test_messages_go_through_the_tokenizers_own_template(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (sample,) = token_samples(written(tmp_path, {"messages": messages}), tokenizer, 64)
    assert tokenizer.decode(sample.ids) == "user: hi<end>assistant: ho<end>"


TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "ho?"},
    {"role": "assistant", "content": "ho!"},
]
ASKING = CHAT + "{% if add_generation_prompt %}assistant: {% endif %}"
MARKING = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}"
    "{{ m.content if m.role != 'assistant' }}<end>{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else '…' }}<end>{% endfor %}"


def learned(sample, tokenizer):
    """The parts of a sequence that are learned, as text."""
    text, is_learned = [""], False
    for one, label in zip(sample.ids, sample.labels, strict=True):
        if is_learned and label == IGNORED:
            text.append("")
        is_learned = label != IGNORED
        text[-1] += tokenizer.decode([one]) if is_learned else ""
    return [part for part in text if part]


@pytest.mark.parametrize(
    ("template", "answers"),
    [(CHAT, ["ho<end>", "ho!<end>"]), (ASKING, ["ho<end>", "ho!<end>"]), (MARKING, ["ho", "ho!"])],
    ids=["words", "prompt", "marks"],
)
def test_of_a_conversation_the_answers_are_learned(template, answers, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    paths = written(tmp_path, {"messages": TURNS})
    (sample,) = token_samples(paths, tokenizer, 64)
    assert tokenizer.decode(sample.ids) == "user: hi<end>assistant: ho<end>user: ho?<end>assistant: ho!<end>"
    assert learned(sample, tokenizer) == answers
    (whole,) = token_samples(paths, tokenizer, 64, learns_all=True)
    assert whole.ids == whole.labels == sample.ids


def test_turns_of_sharegpt_are_those_of_a_conversation(tmp_path, tokenizer):
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in TURNS]
    found = token_samples(written(tmp_path, {"conversations": turns}), tokenizer, 64)
    assert list(found) == list(token_samples(written(tmp_path, {"messages": TURNS}), tokenizer, 64))


def test_a_record_of_alpaca_is_a_conversation_or_a_prompt(tmp_path, tokenizer, monkeypatch):
    record = {"instruction": "add", "input": "1 2", "output": "3"}
    paths = written(tmp_path, record, {**record, "input": ""})
    of_chat = token_samples(paths, tokenizer, 64)
    assert [tokenizer.decode(sample.ids) for sample in of_chat] == [
        "user: add\n\n1 2<end>assistant: 3<end>", "user: add<end>assistant: 3<end>",
    ]  # fmt: skip
    monkeypatch.setattr(tokenizer, "chat_template", None)
    plain = token_samples(paths, tokenizer, 128)
    assert [tokenizer.decode(sample.ids) for sample in plain] == [
        "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n3<end>",
        "### Instruction:\nadd\n\n### Response:\n3<end>",
    ]
    assert [learned(sample, tokenizer) for sample in (*of_chat, *plain)] == [["3<end>"]] * 4


def test_a_template_that_hides_where_an_answer_is_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", FORGETFUL)
    paths = written(tmp_path, {"messages": TURNS})
    with pytest.raises(DataError, match=r"changes message 2 when others follow.*--learn all"):
        token_samples(paths, tokenizer, 64)
    assert len(token_samples(paths, tokenizer, 64, learns_all=True)) == 1


def test_packed_records_follow_each_other_and_none_is_lost(tmp_path, tokenizer):
    paths = written(tmp_path, *({"prompt": f"{n} is", "completion": f" {n}"} for n in range(20)))
    apart, packed = (token_samples(paths, tokenizer, 16, packed) for packed in (False, True))
    for part in ("ids", "labels"):
        joined = [[one for sample in samples for one in getattr(sample, part)] for samples in (apart, packed)]
        assert joined[0] == joined[1]
    assert {len(sample.ids) for sample in packed[:-1]} == {16}


def test_a_file_of_text_is_packed(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    path.write_text("word " * 100)
    samples = token_samples([path], tokenizer, 8)
    ids = [one for sample in samples for one in sample.ids]
    assert tokenizer.decode(ids) in ("word " * 100 + "<end>", "word " * 100)  # a rest of one token predicts nothing


def test_parquet_has_the_same_records(tmp_path, tokenizer):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    records = [{"text": "one"}, {"text": "two"}]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "records.parquet")
    found = token_samples([tmp_path / "records.parquet"], tokenizer, 64)
    assert list(found) == list(token_samples(written(tmp_path, *records), tokenizer, 64))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "x"}', r"line 2 of .*: expected 'text', .* got question"),
        ('{"prompt": "x"}', "got prompt"),
        ('"words"', "got str"),
        ("{", "line 2 of .* is not JSON"),
        ('{"messages": [{"role": 3}]}', "the chat template cannot use"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2 of .* has nothing to learn"),
        ('{"conversations": [{"from": "cat", "value": "x"}]}', "from 'cat'; expected one of human"),
        ('{"instruction": "x"}', "got instruction"),
        (json.dumps({"text": "long " * 99}), r"record 2 of .* tokens, more than the context of 64; .*--pack"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(line, told, tmp_path, tokenizer):
    (path,) = written(tmp_path, {"text": "one"})
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=told):
        token_samples([path], tokenizer, 64)


def test_files_without_records_are_refused(tmp_path, tokenizer):
    for content, told in (("", "is empty"), ("\n \n", "is empty")):
        path = tmp_path / "none.jsonl"
        path.write_text(content)
        with pytest.raises(DataError, match=told):
            token_samples([path], tokenizer, 64)


def test_batches_are_padded_and_what_fills_counts_in_no_loss():
    samples = TokenTable.of(Tokens([n] * n, [n] * n) for n in (3, 5, 40, 4))
    batches = TokenBatches(samples, 2, padding=9, context=48, ragged=True)
    for index in range(len(batches)):
        batch = batches.batch_at(index)
        for ids, seen, labels in zip(*batch.values(), strict=True):
            n = int(ids[0])
            assert seen.sum() == n and ids[n:].eq(9).all() and labels[n:].eq(IGNORED).all()
            assert torch.equal(ids[:n], labels[:n])
        assert batch["input_ids"].shape[1] in (32, 48)
    assert samples[batches.longest_at(0)].ids == max((samples[n].ids for n in batches.rows_at(0)), key=len)


def test_an_epoch_has_every_sample_once_and_a_resumed_one_the_rest():
    samples = TokenTable.of(Tokens([n, n], [n, n]) for n in range(6))
    batches = TokenBatches(samples, 2, padding=9, context=8)
    seen = [batch["input_ids"][:, 0] for batch in batches]
    assert sorted(torch.cat(seen).tolist()) == list(range(6))
    again = TokenBatches(samples, 2, padding=9, context=8)
    again.load_state_dict({**batches.state_dict(), "position": 1})
    assert [batch["input_ids"][:, 0].tolist() for batch in again] == [rows.tolist() for rows in seen[1:]]


def test_a_token_takes_five_bytes_and_no_memory_of_python(tmp_path, tokenizer):
    paths = written(tmp_path, *({"prompt": "one two", "completion": "three " * 50} for _ in range(200)))
    tracemalloc.start()
    samples = token_samples(paths, tokenizer, 512)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100 * len(samples)  # bounds, not tokens
    assert samples._ids.itemsize + samples._learned.itemsize == 5
    assert isinstance(samples._ids, np.memmap)


@pytest.mark.parametrize("packed", [False, True])
def test_pieces_of_a_file_have_the_records_of_the_whole_file(tmp_path, tokenizer, packed, monkeypatch):
    records = [{"prompt": f"{n} is", "completion": "\u2028 é" * (n % 7)} for n in range(50)]
    paths = [tmp_path / "records.jsonl"]
    paths[0].write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    whole = token_samples(paths, tokenizer, 64, packed)
    monkeypatch.setattr(corpus, "_PIECE", 7)
    assert list(token_samples(paths, tokenizer, 64, packed)) == list(whole)


def test_pieces_of_a_text_begin_and_end_it_once(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_text("one two three\n" * 30)
    whole = token_samples([path], tokenizer, 8)
    monkeypatch.setattr(corpus, "_PIECE", 40)
    assert list(token_samples([path], tokenizer, 8)) == list(whole)


def test_a_full_folder_for_temporary_files_is_named(tmp_path, tokenizer, monkeypatch):
    def full(*_: object, **__: object):
        raise OSError(28, "No space left on device")

    paths = written(tmp_path, {"text": "one"})
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(DataError, match="No space left on device; set TMPDIR"):
        token_samples(paths, tokenizer, 64)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 5))
def test_packing_keeps_every_token_in_order(records, context):
    with TokenWriter() as writer:
        for ids in records:
            writer.add(Tokens(ids, ids))
        writer.pack(0, 0, context)
        packed = writer.table()
    flat = [one for ids in records for one in ids]
    found = [one for sample in packed for one in sample.ids]
    is_lone = len(flat) > 1 and len(flat) % context == 1 % context and context > 1
    assert found == (flat[:-1] if is_lone else flat[: len(flat) - (context == 1 and len(flat) > 1)])
    assert all(0 < len(sample.ids) <= context for sample in packed)

"""Messages through memory that ranks share: what arrives, in which order, and what happens when nobody listens yet."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipefit.errors import CommunicationError
from pipefit.runtime.shared import SharedLinks

Pair = tuple[SharedLinks, SharedLinks]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    links = SharedLinks(tmp_path, 0), SharedLinks(tmp_path, 1)
    yield links
    for end in links:
        end.close()


def taken(links: SharedLinks, like: Tensor, peer: int, tag: int) -> Tensor:
    buffer = torch.empty_like(like)
    links.recv([buffer], peer, tag).wait()
    return buffer


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(7).bfloat16(),
        torch.tensor([True, False, True]),
        torch.arange(9),
        torch.tensor(2.5),
        torch.empty(0),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_of_any_kind_arrives_to_the_bit(pair: Pair, tensor: Tensor) -> None:
    pair[0].send([tensor], 1, 7)
    assert torch.equal(taken(pair[1], tensor, 0, 7), tensor)


def test_the_sender_may_overwrite_its_tensor_at_once(pair: Pair) -> None:
    tensor = torch.ones(4)
    pair[0].send([tensor], 1, 0)
    tensor.zero_()
    assert taken(pair[1], tensor, 0, 0).tolist() == [1, 1, 1, 1]


def test_tags_find_their_message_in_any_order_of_posting_and_waiting(pair: Pair) -> None:
    posted = {tag: torch.empty(2) for tag in (4, 2)}
    arrivals = {tag: pair[1].recv([buffer], 0, tag) for tag, buffer in posted.items()}
    for tag in (1, 2, 3, 4):
        pair[0].send([torch.full((2,), float(tag))], 1, tag)
    for tag in (2, 4):
        arrivals[tag].wait()
        assert posted[tag].tolist() == [tag, tag]
    assert taken(pair[1], torch.empty(2), 0, 3).tolist() == [3, 3]
    assert taken(pair[1], torch.empty(2), 0, 1).tolist() == [1, 1]


def test_messages_with_the_same_tag_keep_their_order(pair: Pair) -> None:
    for value in range(5):
        pair[0].send([torch.tensor(value)], 1, 0)
    assert [int(taken(pair[1], torch.tensor(0), 0, 0)) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_many_messages_of_growing_and_shrinking_sizes_go_round_the_ring(pair: Pair) -> None:
    choose = random.Random(0)
    sizes = [choose.choice((1, 1000, 30_000, 60_000, 200_000)) for _ in range(150)] + [900_000, 3, 2_000_000, 5]
    sent = [torch.randn(size) for size in sizes]

    def send() -> None:
        for number, tensor in enumerate(sent):
            pair[0].send([tensor], 1, number)

    sender = threading.Thread(target=send)
    sender.start()
    for number, tensor in enumerate(sent):
        assert torch.equal(taken(pair[1], tensor, 0, number), tensor)
    sender.join()


def test_two_ranks_that_send_more_than_fits_before_they_receive_do_not_wait_for_each_other(pair: Pair) -> None:
    counts = [0, 0]

    def work(rank: int) -> None:
        big = torch.full((100_000,), float(rank))
        for number in range(40):
            pair[rank].send([big], 1 - rank, number)
        for number in range(40):
            counts[rank] += int(taken(pair[rank], big, 1 - rank, number)[-1] == 1 - rank)

    ranks = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert counts == [40, 40]


def test_no_file_in_memory_outlives_the_first_message(pair: Pair) -> None:
    pair[0].send([torch.ones(3)], 1, 0)
    named = pair[0]._places(0, 1, 0)
    assert any(path.exists() for path in named)
    taken(pair[1], torch.ones(3), 0, 0)
    assert not any(path.exists() for path in named)


def test_a_message_of_another_size_than_expected_is_refused(pair: Pair) -> None:
    pair[0].send([torch.ones(3)], 1, 0)
    with pytest.raises(CommunicationError, match="12 bytes, its receiver expected 16"):
        taken(pair[1], torch.ones(4), 0, 0)

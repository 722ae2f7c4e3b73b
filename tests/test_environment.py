"""The state of torch that every test starts from."""

import torch


def test_a_test_starts_with_one_thread():
    assert torch.get_num_threads() == 1


def test_what_one_test_leaves_behind_in_torch():
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.rand(3)


def test_is_gone_when_the_next_one_starts():
    assert torch.get_num_threads() == 1
    assert torch.get_default_dtype() == torch.float32
    assert torch.initial_seed() == 0
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))

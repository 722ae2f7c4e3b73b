"""Adapters of a model of transformers train on a GPU as in one process: the CPU's test, where a GPU is the default."""

import pytest
from tests.cutting.test_cut import (  # noqa: F401
    test_adapters_train_as_in_one_process_and_are_saved_as_peft_reads_them,
)

pytestmark = pytest.mark.gpu

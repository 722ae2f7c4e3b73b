"""Collectives of single tensors by their names of torch 2.13; earlier versions have them under other names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

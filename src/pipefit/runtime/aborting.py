"""The end of kernels in which GPUs wait for others that are gone.

Gloo's waits end when sockets are shut down (`pipefit.runtime.sockets`). A kernel of NCCL does not notice the death of a
process. It ends when its communicator is aborted, without an error, and what it was to receive has not come.
"""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

_aborting = threading.Lock()
_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def abort_groups() -> None:
    """Aborts every process group of this process, once; afterwards it can only be destroyed.

    Each abort has a thread of its own. It may wait until the GPU has done everything, and so for kernels of groups that
    have yet to be aborted.
    """
    with _aborting:
        groups = [group for group in list(_world.pg_map) if group not in _aborted]
        _aborted.update(groups)
        threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

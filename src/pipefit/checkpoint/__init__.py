"""Checkpoints: committed whole or not at all, named by the user's own parameter names, read by any number of ranks."""

from pipefit.checkpoint.commit import save
from pipefit.checkpoint.manifest import Manifest
from pipefit.checkpoint.restore import Checkpoint, load
from pipefit.checkpoint.whole import export

"""Partitioners: the choice of the layers of each stage."""

from pipefit.partition.balance import gpipe, minmax, uniform
from pipefit.partition.capacity import hydra, smallest_capacity
from pipefit.partition.pipedream import LevelStage, PipeDreamResult, pipedream
from pipefit.partition.registry import partition, partitioner_names

"""The data types that modules exchange, and their files."""

from pipefit.spec.plan import Candidate, Partition, Placement, Plan, Prediction, SpillSpec, StageSpec
from pipefit.spec.profile import Layer, Profile
from pipefit.spec.topology import Device, Level, Tier, Topology

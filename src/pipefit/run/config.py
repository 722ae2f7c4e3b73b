"""What a training run is asked to do; the fields are the options of `pipefit train`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RunConfig"]


@dataclass(frozen=True)
class RunConfig:
    """A training run.

    Attributes:
        model: built-in name or pkg.mod:factory.
        options: of the model, as "layers=8,hidden=256".
        data: "text", "digits" or "synthetic"; or text files of the user's; (): what the model is made for.
        ranks: processes to start: data × pipeline × tensor.
        schedule: its name.
        microbatches: per weight update.
        chunks: stages per rank.
        replicas: copies of each stage; one number stands for all.
        stages: layer counts; (): balanced by a profile.
        recompute: replay forwards before backwards.
        data_parallel: copies of the whole pipeline; another way to say one number of replicas.
        tensor: processes that share each rank by tensor parallelism.
        sequence_parallel: they also divide the sequence.
        whole_messages: without that, each of them sends all of a message between ranks, and not its part.
        shard_optimizer: divide the optimizer's states over the replicas of each stage.
        precision: "fp32", "bf16" or "fp16".
        loss_scale: its first value; 0: the usual one where the precision needs it.
        device_memory: most that training may take on the device, like "1.5 GiB"; the model is then spilled.
        host_memory: most that the host tier may take; stages live there unless there is a disk.
        disk: folder in which stages live.
        commit_every: steps between commits to `disk`, which `resume` goes on from; 0: none; None: 1 where
            all records lie there, else 10.
        activations: what enters a spilled stage waits with the stages, from its forward to its replay.
        step_on: where stages that live in the host's memory step: "device", "host", or "auto", as the plan says.
        keep: which spilled stages keep their activations on the device instead of replaying forwards: "all", "none", or
            "auto", those that the plan for `device_memory` has room for.
        plan: a plan's path; it then says schedule, stages and the rest.
        batch: samples per step.
        steps: weight updates.
        optimizer: "adamw", "adam" or "sgd".
        lr: peak learning rate.
        warmup: steps of linear warm-up; then a cosine down to 5 %.
        clip: largest global gradient norm; 0: none.
        seed: of weights, data order and dropout.
        output: folder of the run.
        resume: a run's folder to go on from; or that of `disk`, with what a run that was cut off has left there.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        sample: bytes to generate at the end, for language models.
        device: "cpu", "cuda"; "": what is there.
    """

    model: str = "gpt"
    options: str = ""
    data: tuple[str, ...] = ()
    ranks: int = 2
    schedule: str = "1f1b"
    microbatches: int = 4
    chunks: int = 1
    replicas: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    recompute: bool = False
    data_parallel: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    whole_messages: bool = False
    shard_optimizer: bool = False
    precision: str = "fp32"
    loss_scale: float = 0.0
    device_memory: str = ""
    host_memory: str = ""
    disk: str = ""
    commit_every: int | None = None
    activations: bool = False
    step_on: str = "auto"
    keep: str = "auto"
    plan: str = ""
    batch: int = 16
    steps: int = 100
    optimizer: str = "adamw"
    lr: float = 2e-3
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0
    output: str = ""
    resume: str = ""
    checkpoint_every: int = 0
    sample: int = 200
    device: str = ""

    @property
    def spills(self) -> bool:
        """Whether stages live on another tier."""
        return bool(self.device_memory or self.host_memory or self.disk)

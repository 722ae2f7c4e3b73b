"""Models of other people, and models written to fool a cut: each trained by pipefit and by a plain loop of torch.

    make zoo                all of them; make zoo ZOO="timm hand/state": those whose name begins so
    python -m tests.zoo     the same, without making the environment

The results are lines of JSON, so that a run resumes; `python -m tests.zoo.table` makes `docs/zoo.md` of them.
"""

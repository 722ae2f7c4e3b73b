"""What a run will take: the overhead of the executor, the speed of the machine, the prediction of a step."""

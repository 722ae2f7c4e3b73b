"""Running programs: the executor, its handlers, and the transports."""

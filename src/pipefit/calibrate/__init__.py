"""The cost of a plan on the ranks at hand: overhead of the executor, layers split over processes."""

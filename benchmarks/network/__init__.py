"""Training on a network as slow as PipeDream's was: namespaces, shaped links, real processes."""

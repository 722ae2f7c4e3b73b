"""Every figure, table and number of the lectures, made again by pipefit's own verbs."""

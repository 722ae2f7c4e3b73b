"""The user's object: a pipeline over a model."""

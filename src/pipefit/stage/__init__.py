"""Splitting a model into stages, and running one."""

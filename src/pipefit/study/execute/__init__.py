"""Trials on devices: records between turns, one turn, a worker's process, and the study that assigns turns."""

"""Checks of a machine with a GPU, stage by stage: `make gpu`."""

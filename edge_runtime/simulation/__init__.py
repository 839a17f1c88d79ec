"""The schedule on a virtual clock, recorded runs, and the costs of devices that are modelled or were measured."""

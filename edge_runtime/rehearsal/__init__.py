"""The schedule without a box: the virtual clock, recorded runs, modelled and measured devices."""

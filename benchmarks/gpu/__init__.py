"""What a machine with a GPU is asked, stage by stage: `make gpu`."""

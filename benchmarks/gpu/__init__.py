"""What a machine with a card is asked, stage by stage: `make gpu`."""

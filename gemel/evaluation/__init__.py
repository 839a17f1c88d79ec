"""What a bundle is worth: accuracy offline and over time, against the originals."""

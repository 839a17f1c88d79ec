"""Cameras: what is connected, lost and tried again is decided in `reconnection`; the other files carry it out."""

"""Cameras: sources decode frames, readers pace them, cameras connect and reconnect."""

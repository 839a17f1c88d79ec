"""Serving: frames from the mailboxes, by the schedule, through the device, to the sinks."""

"""On the box: cameras, frames, schedule, memory, engines, results."""

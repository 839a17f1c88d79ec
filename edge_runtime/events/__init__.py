"""What happens in answers: zones, filters, tracks, events, hours and motion, between the results and the sinks."""

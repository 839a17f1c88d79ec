"""What a workload, a bundle or the zoo holds, as tables."""

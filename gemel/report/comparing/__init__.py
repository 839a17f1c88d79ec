"""Several evaluations of one workload beside each other: `gemel report`."""

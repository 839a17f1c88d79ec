"""The vocabulary: workloads, architectures, tasks, layers, sharing plans, bundles."""

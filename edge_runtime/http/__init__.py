"""HTTP of a box: status, metrics, snapshots and the dashboard, served by a thread of their own."""

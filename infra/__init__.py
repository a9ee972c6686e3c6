"""The outside world: launching, tracking, progress, checkpoints, watchdog."""

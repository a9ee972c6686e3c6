"""Lists for ranks whose communication stands in one queue: start with `serial`."""

"""One rank of a run: its modules, optimizer and state, its inputs, and what it does in a step."""

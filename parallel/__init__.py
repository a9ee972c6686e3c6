"""Where things live, how tensors move and what it costs."""

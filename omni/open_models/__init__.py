"""Published weights: how their tensors and keys become ours, and ours theirs again."""

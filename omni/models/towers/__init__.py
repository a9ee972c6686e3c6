"""Published towers of transformers, run as they are, as encoders."""

"""Components: the LLM, the encoders and the registry they are found in."""

"""Encoder work placed where the LLM's pipeline idles: start with `order`."""

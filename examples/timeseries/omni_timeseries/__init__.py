"""Multivariate time series for omni: an encoder, and a synthetic dataset to try it on."""

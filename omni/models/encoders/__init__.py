"""Encoders that ship with the platform."""

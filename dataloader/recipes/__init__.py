"""Recipes: where a dataset's samples come from."""

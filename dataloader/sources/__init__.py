"""Samples where they lie: recipes find them, an index says where, a reader reads them there."""

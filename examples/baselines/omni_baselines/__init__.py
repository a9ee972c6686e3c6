"""Policies of other systems, registered by entry points as any package registers its own."""

"""What a package with a published tower of its own imports beside `omni.encoders`: kinds to derive from.

It imports torch, and transformers as a tower is opened. What stands here is kept stable; docs/extending.md
has an example.
"""

from omni.models.towers.batch import BatchTower
from omni.models.towers.encoder import TowerConfig
from omni.models.towers.grid import GridTower

__all__ = ["BatchTower", "GridTower", "TowerConfig"]

"""The models and the program: components, planner, trainer, the `omni` command.

Third parties import only this package.
"""

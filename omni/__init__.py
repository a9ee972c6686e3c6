"""The models and the program: components, planner, trainer and the `omni` command. Third parties import only this."""

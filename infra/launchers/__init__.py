"""Starting jobs: here, as scripts for Slurm, on Slurm, on Ray. A job is a run with a folder of its own."""

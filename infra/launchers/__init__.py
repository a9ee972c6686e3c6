"""Starting jobs: on this machine, as scripts for Slurm, on Slurm. A job is a run with a folder of its own."""

"""What starts ranks: this machine, Slurm."""

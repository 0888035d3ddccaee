"""What several tests share: running programs on MPI ranks."""

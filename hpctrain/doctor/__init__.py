"""What is installed, what is wrong, how to fix it. Works without any framework and without MPI."""

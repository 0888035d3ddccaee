-- Loaded (by Lmod 8.6.19: load, unload, help, whatis; the tests use stand-ins of its functions): a module file.
-- Make the environment first, in the root of a checkout:  VENV=/apps/hpctrain/0.4.0 env/setup.sh
--   /apps/hpctrain/0.4.0/bin/pip install --no-deps --no-build-isolation .     (setup.sh only links the checkout)
-- then copy this file to modulefiles/hpctrain/0.4.0.lua. Load the MPI that the environment was made with before it:
-- replace the depends_on line by your site's modules.
local version = "0.4.0"
local root = pathJoin("/apps/hpctrain", version)

help([[Train PyTorch and Keras models on HPC clusters in batch.
hpctrain --help lists the commands, hpctrain doctor checks this machine.]])
whatis("Name: hpctrain")
whatis("Version: " .. version)
whatis("Description: batch training of neural networks: MPI ranks, Horovod, HDF5, Slurm")

-- depends_on("openmpi")
conflict("hpctrain")
prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
unsetenv("PYTHONHOME")

# Linted (by the tests; names and versions looked up in Spack's package repository), not built: a Spack package.
#   spack repo create hpctrain-repo && mkdir -p hpctrain-repo/packages/py_hpctrain
#   cp env/recipes/package.py hpctrain-repo/packages/py_hpctrain && spack repo add hpctrain-repo
#   cd dist && spack install --no-checksum py-hpctrain +torch +mpi      (the folder of make dist's sdist)
# The compiler and MPI are Spack's. Horovod: run hpctrain install-horovod in a Python environment that has the package.
# py-isal is left out, since Spack has no version from 1.7 on: zlib then computes checksums, more slowly.
# ruff: noqa: F403, F405, I001

import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpctrain(PythonPackage):
    """Train PyTorch and Keras models on HPC clusters in batch: MPI ranks, Horovod, HDF5, Slurm."""

    manual_download = True
    url = f"file://{os.getcwd()}/hpctrain-0.4.0.tar.gz"

    license("Apache-2.0")

    version("0.4.0")

    variant("torch", default=True, description="PyTorch models")
    variant("mpi", default=True, description="Several ranks")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-wheel", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-pyyaml@6:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-torch@2.6:", when="+torch", type=("build", "run"))
    depends_on("py-mpi4py@4:", when="+mpi", type=("build", "run"))

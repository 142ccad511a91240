import pathlib

from setuptools import find_packages
from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent
VERSION = {}
exec((ROOT / "keras_tp" / "version.py").read_text(), VERSION)

BACKENDS = {
    "jax": ["jax>=0.7", "jaxlib>=0.7"],
    "tensorflow": ["tensorflow>=2.20"],
    "torch": ["torch>=2.13,<2.16"],
    "torch-xla": ["torch==2.9.*", "torch_xla>=2.9,<2.10"],
}


SUITE = "keras_tp.testing"
PLUGIN = "keras_tp.testing.pytest_plugin"


class BuildWithoutTests(build_py):
    """Leaves the tests, which stand beside the code, out of a wheel.

    It keeps those that any backend has to pass.
    """

    def find_package_modules(self, package, package_dir):
        return [
            found
            for found in super().find_package_modules(package, package_dir)
            if package == SUITE
            or not found[1].endswith("_test")
            and found[1] != "conftest"
        ]


setup(
    name="keras_tp",
    version=VERSION["__version__"],
    description="Tensor parallelism for Keras 3 on every distributed backend.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    cmdclass={"build_py": BuildWithoutTests},
    packages=[
        *find_packages(include=["keras_tp", "keras_tp.*"], exclude=[PLUGIN]),
        # pytest imports it in each of its runs: a package of its own, for
        # which Keras is not imported.
        "keras_tp_pytest",
    ],
    package_dir={"keras_tp_pytest": PLUGIN.replace(".", "/")},
    package_data={"keras_tp.distribution.pages": ["*.css", "*.js"]},
    python_requires=">=3.11",
    entry_points={
        "console_scripts": ["keras-tp = keras_tp.__main__:main"],
        "pytest11": ["keras_tp = keras_tp_pytest"],
    },
    install_requires=["keras>=3.15,<3.16", "numpy", "rich", "safetensors"],
    extras_require={
        **BACKENDS,
        "hub": ["keras-hub>=0.32"],
        # XLA's compilers for GPUs and TPUs, for `compile_for`; jax's extras
        # have the versions that fit it.
        "ahead": ["jax[cuda12-local,tpu]>=0.7"],
        # Keras's own distribution tests import TensorFlow for `tf.data`.
        "test": [
            "pytest",
            "ruff",
            "tensorflow>=2.20",
            "orbax-checkpoint>=0.11",
            "tensorboard",
            # For the notebooks in examples/.
            "ipykernel",
            "jupytext",
            "nbclient",
        ],
        "docs": ["sphinx>=9", "myst-parser>=5", "furo"],
    },
)

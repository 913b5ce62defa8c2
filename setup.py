"""The packages of the distribution; everything else stands in pyproject.toml.

The folders of recipes and Accelerate configurations stand beside the package in a checkout, and
inside the package in an installation.
"""

from setuptools import find_packages, setup

BESIDE = {f"pipeline.{name}": name for name in ("recipes", "accelerate_configs")}

setup(packages=[*find_packages(include=["pipeline*"]), *BESIDE], package_dir=BESIDE)

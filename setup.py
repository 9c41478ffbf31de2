"""Build entry point; everything static is in pyproject.toml. The extension's build steps belong here."""

from setuptools import setup

setup()

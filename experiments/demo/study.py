"""The study that `make demo` trains; see msa_lab.demo for its arms."""

from msa_lab.demo import runs

__all__ = ["runs"]

"""Kernels written for this project. Imported only where they can run: they need Triton."""

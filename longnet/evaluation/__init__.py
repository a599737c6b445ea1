"""Measuring a model, beside things that are not a model."""

from __future__ import annotations

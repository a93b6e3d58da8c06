"""Configs of the published model, for tests and benchmarks that build it with random weights."""

from __future__ import annotations

import torch

from ...ltx25.instrument.models import published

PUBLISHED_DIT = published(torch.device("cpu")).dit
PUBLISHED_TOWER = published(torch.device("cpu")).tower

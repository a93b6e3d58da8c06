"""The text parts of a file, loaded on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from ...ltx25.checkpoint import Header, read_header
from ...ltx25.config.connector import AUDIO, VIDEO, ConnectorConfig, connector_prefix
from ...ltx25.config.keys import Keys
from ...ltx25.config.text import FeatureConfig, TowerConfig
from ...ltx25.config.text_layout import PROJECTION, TextLayout
from ...ltx25.connector import Connector, Connectors
from ...ltx25.text import FeatureProjection, Tokenizer, Tower
from .loading import load


def load_tower(path: Path, dtype: torch.dtype = torch.float32) -> Tower:
    header = read_header(path)
    config, layout = TowerConfig.read(header), TextLayout.read(header)
    return load(lambda: Tower(config), header, layout.tower, layout.unused, dtype)


def load_projection(path: Path, dtype: torch.dtype = torch.float32) -> FeatureProjection:
    header = read_header(path)
    config = FeatureConfig.read(header, TowerConfig.read(header))
    return load(lambda: FeatureProjection(config), header, PROJECTION, (), dtype)


def load_tokenizer(path: Path) -> Tokenizer:
    header = read_header(path)
    config = TowerConfig.read(header)
    return Tokenizer.read(header, config.bos, config.pad, config.vocabulary)


def connector_config(header: Header) -> ConnectorConfig:
    return ConnectorConfig.take(Keys(header.metadata_json("config")["transformer"], f"{header.name}: config.transformer"))


def load_connectors(path: Path, dtype: torch.dtype = torch.float32) -> Connectors:
    header = read_header(path)
    config, prefix = connector_config(header), connector_prefix(header)
    return Connectors(
        load(lambda: Connector(config.video), header, prefix + VIDEO, (), dtype),
        load(lambda: Connector(config.audio), header, prefix + AUDIO, (), dtype),
        None,
    )

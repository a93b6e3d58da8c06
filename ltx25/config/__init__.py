"""One frozen config dataclass per part, without defaults, read from checkpoint metadata."""

"""Which rank is late, dead or different; reports; traces."""

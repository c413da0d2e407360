"""Who is late, dead or different; reports; traces."""

"""Find ranks that are late, dead or in another call; write reports and traces."""
